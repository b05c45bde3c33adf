"""Other runtimes: what they compute (Target), and programs in their files."""

from hop.export.targets.known import ONNX_QDQ as ONNX_QDQ
from hop.export.targets.known import PT2E as PT2E
from hop.export.targets.known import TFLITE as TFLITE
from hop.export.targets.target import Row as Row
from hop.export.targets.target import Target as Target

__all__ = ["ONNX_QDQ", "PT2E", "TFLITE", "Row", "Target"]
