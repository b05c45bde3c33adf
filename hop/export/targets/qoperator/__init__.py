"""to_qoperator: convert integer programs to ONNX files with onnxruntime's integer operators, such as QLinearConv and
QGemm.
"""

from hop.export.targets.qoperator.model import QOperatorModel as QOperatorModel
from hop.export.targets.qoperator.model import to_qoperator as to_qoperator
