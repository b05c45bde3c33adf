"""Programs of integers as ONNX files of onnxruntime's operators of integers: QLinearConv, QGemm and their like."""

from hop.export.targets.qoperator.model import QOperatorModel as QOperatorModel
from hop.export.targets.qoperator.model import to_qoperator as to_qoperator
