"""Integer functions as integer runtimes compute them: from codes to codes, without floats.

Every runtime has a different softmax, GELU and norm. Such a convention is a frozen value, like the conventions for
products in hop.requantization, and is used in the same way, as a field of hop.scale_rules.Static:

  TfliteSoftmax         TFLite's reference kernels: 8 bits in gemmlowp's fixed point, 16 bits by two tables
  TfliteLogSoftmax      log_softmax of int8 in TFLite's reference kernel
  TosaSoftmax           TensorFlow's legalization to TOSA, 8 bits
  IBertSoftmax          I-BERT: a polynomial of degree two and shifts
  TfliteTable           any function by TFLite's tables: 256 codes of 8 bits, 513 entries of 16 bits
  TfliteSigmoid         sigmoid and tanh of 16 bits by TFLite's table of 256 entries
  TfliteHardSwish, TfliteLeakyRelu, TflitePrelu   piecewise activations in TFLite's reference kernels
  TfliteRsqrt           1 / √x of 16 bits by TFLite's table of 513 entries
  TfliteAdd             a sum or difference in TFLite's reference kernels
  TfliteMean            a mean in TFLite's reference kernels, divided before it is multiplied
  TfliteAveragePool     an average pool in TFLite's reference kernels, rounded in the units of its input
  TfliteConcatenation   a concatenation whose operands TFLite's converter requantizes one by one
  TfliteResizeBilinear  a bilinear resize in TFLite's reference kernels, in 1024 parts of a pixel
  TosaAdd, TosaMean, TosaAveragePool, TosaConcatenation, TosaResizeBilinear   the same by TOSA's operators
  Pt2eMean, Pt2eAveragePool, Pt2eResizeBilinear   PyTorch's float operators between quantize and dequantize nodes,
                        with sums in PyTorch's order
  OrtAdd, OrtMultiply, OrtMean, OrtAveragePool, OrtSoftmax   onnxruntime's integer operators, computed in float32
  IBertLayerNorm        I-BERT: sums of codes and an integer square root

Values that a runtime computes in floats while it prepares, such as multipliers or tables, are computed from the scales
in the same dtype; everything else is exact in int64. `codes` takes codes of int8, uint8 or int16 (int32 too for
I-BERT), with one scale and zero point per tensor, and returns codes of `format`: a format of hop.formats, or
torch.int16 for its full range.
"""

from hop.numerics.integer.activations import TfliteHardSwish, TfliteLeakyRelu, TflitePrelu
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.integer.norms import IBertLayerNorm
from hop.numerics.integer.onnxruntime import OrtAdd, OrtAveragePool, OrtMean, OrtMultiply, OrtSoftmax
from hop.numerics.integer.pt2e import Pt2eAveragePool, Pt2eMean
from hop.numerics.integer.resize import Pt2eResizeBilinear, TfliteResizeBilinear, TosaResizeBilinear
from hop.numerics.integer.softmax import IBertSoftmax, TfliteLogSoftmax, TfliteSoftmax, TosaSoftmax
from hop.numerics.integer.tables import TfliteRsqrt, TfliteSigmoid, TfliteTable
from hop.numerics.integer.tflite import TfliteAdd, TfliteAveragePool, TfliteConcatenation, TfliteMean
from hop.numerics.integer.tosa import TosaAdd, TosaAveragePool, TosaConcatenation, TosaMean

__all__ = [
    "IBertLayerNorm",
    "IBertSoftmax",
    "IntegerFunction",
    "OrtAdd",
    "OrtAveragePool",
    "OrtMean",
    "OrtMultiply",
    "OrtSoftmax",
    "Pt2eAveragePool",
    "Pt2eMean",
    "Pt2eResizeBilinear",
    "TfliteAdd",
    "TfliteAveragePool",
    "TfliteConcatenation",
    "TfliteHardSwish",
    "TfliteLeakyRelu",
    "TfliteLogSoftmax",
    "TfliteMean",
    "TflitePrelu",
    "TfliteResizeBilinear",
    "TfliteRsqrt",
    "TfliteSigmoid",
    "TfliteSoftmax",
    "TfliteTable",
    "TosaAdd",
    "TosaAveragePool",
    "TosaConcatenation",
    "TosaMean",
    "TosaResizeBilinear",
    "TosaSoftmax",
]
