"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.lowering import lower as lower
from hop.export.ranges import Ranges as Ranges
from hop.export.ranges import ranges as ranges
from hop.export.verify import Comparison as Comparison
from hop.export.verify import verify as verify
