"""Convert exported programs: to exact integers, to core ATen, and for other runtimes."""

from hop.export.analysis.checking import check as check
from hop.export.analysis.exactness import check_exact as check_exact
from hop.export.analysis.ranges import ranges as ranges
from hop.export.golden.vectors import vectors as vectors
from hop.export.rewrite.dtypes import follow_dtype as follow_dtype
from hop.export.rewrite.integer import to_integer as to_integer
from hop.export.rewrite.lowering import lower as lower
from hop.export.rewrite.lowering import native_library as native_library
from hop.export.rewrite.qdq import to_qdq as to_qdq
from hop.export.rewrite.scheme import to_scheme as to_scheme
from hop.export.rewrite.stock import from_torch as from_torch
from hop.export.rewrite.stock import to_torch as to_torch
from hop.export.targets.executorch import to_executorch as to_executorch
from hop.export.targets.onnx import to_onnx as to_onnx
from hop.export.targets.onnx_import import from_onnx as from_onnx
from hop.export.targets.qoperator import to_qoperator as to_qoperator
from hop.export.targets.tflite import from_tflite as from_tflite
from hop.export.targets.tflite import to_tflite as to_tflite
from hop.export.targets.tosa import to_tosa as to_tosa
from hop.export.verifying import verify as verify

__all__ = [
    "check",
    "check_exact",
    "follow_dtype",
    "from_onnx",
    "from_tflite",
    "from_torch",
    "lower",
    "native_library",
    "ranges",
    "to_executorch",
    "to_integer",
    "to_onnx",
    "to_qdq",
    "to_qoperator",
    "to_scheme",
    "to_tflite",
    "to_torch",
    "to_tosa",
    "vectors",
    "verify",
]
