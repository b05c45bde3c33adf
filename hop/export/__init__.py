# pyright: strict, reportUnnecessaryIsInstance=false, reportUnknownMemberType=false, reportPrivateImportUsage=false
"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.checking import check as check
from hop.export.dtypes import follow_dtype as follow_dtype
from hop.export.executorch import to_executorch as to_executorch
from hop.export.integer import to_integer as to_integer
from hop.export.lowering import lower as lower
from hop.export.lowering import native_library as native_library
from hop.export.onnx import to_onnx as to_onnx
from hop.export.qdq import to_qdq as to_qdq
from hop.export.ranges import Ranges as Ranges
from hop.export.ranges import ranges as ranges
from hop.export.scheme import to_scheme as to_scheme
from hop.export.stock import from_torch as from_torch
from hop.export.stock import to_torch as to_torch
from hop.export.verify import Comparison as Comparison
from hop.export.verify import verify as verify
