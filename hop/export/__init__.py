"""Exported programs: to exact integers, to core ATen, and to other runtimes."""

from hop.export.lowering import lower as lower
from hop.export.onnx import to_onnx as to_onnx
