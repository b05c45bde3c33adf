"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.integer import to_integer as to_integer
from hop.export.lowering import lower as lower
