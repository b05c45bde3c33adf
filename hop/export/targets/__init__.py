"""Other runtimes: their arithmetic (Target), and conversion of programs to their file formats."""

from hop.export.rewrite.pt2e import PT2E as PT2E
from hop.export.rewrite.target import Limits as Limits
from hop.export.rewrite.target import Row as Row
from hop.export.rewrite.target import Target as Target
from hop.export.targets.onnx.arithmetic import ONNX_INTEGER as ONNX_INTEGER
from hop.export.targets.onnx.arithmetic import ONNX_QDQ as ONNX_QDQ
from hop.export.targets.tflite.arithmetic import TFLITE as TFLITE
from hop.export.targets.tflite.arithmetic import TFLITE_16X8 as TFLITE_16X8
from hop.export.targets.tflite.arithmetic import TFLITE_MICRO as TFLITE_MICRO
from hop.export.targets.tflite.arithmetic import TFLITE_MICRO_16X8 as TFLITE_MICRO_16X8
from hop.export.targets.tosa.arithmetic import TOSA_1_0 as TOSA_1_0
from hop.export.targets.tosa.arithmetic import TOSA_1_0_INT16 as TOSA_1_0_INT16

__all__ = [
    "ONNX_INTEGER",
    "ONNX_QDQ",
    "PT2E",
    "TFLITE",
    "TFLITE_16X8",
    "TFLITE_MICRO",
    "TFLITE_MICRO_16X8",
    "TOSA_1_0",
    "TOSA_1_0_INT16",
    "Limits",
    "Row",
    "Target",
]
