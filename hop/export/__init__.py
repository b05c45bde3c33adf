"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.dtypes import follow_dtype as follow_dtype
from hop.export.executorch import to_executorch as to_executorch
from hop.export.lowering import lower as lower
