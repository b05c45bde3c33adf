"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.integer import to_integer as to_integer
from hop.export.lowering import lower as lower
from hop.export.stock import from_torch as from_torch
from hop.export.stock import to_torch as to_torch
