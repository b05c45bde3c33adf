"""Functions of integers, as integer runtimes compute them: from codes to codes, without floats.

Every runtime has another softmax, GELU and norm. A convention is a frozen value, beside those of products in
hop.requantization, and a field of hop.scale_rules.Static as they are:

    TfliteSoftmax       of TFLite's reference kernels: 8 bits in gemmlowp's fixed point, 16 bits by two tables
    TosaSoftmax         of TensorFlow's legalization to TOSA, 8 bits
    IBertSoftmax        of I-BERT: a polynomial of degree two and shifts
    TfliteTable         any function by TFLite's tables: 256 codes of 8 bits, 513 entries of 16 bits
    TfliteSigmoid       sigmoid and tanh of 16 bits by TFLite's table of 256 entries
    TfliteRsqrt         1 / √x of 16 bits by TFLite's table of 513 entries
    TfliteAdd           a sum or a difference of TFLite's reference kernels
    TfliteMean          a mean of theirs, divided before it is multiplied
    TfliteAveragePool   an average pool of theirs, rounded in the units of its input
    TfliteConcatenation of operands that its converter requantizes one by one
    TfliteResizeBilinear    a bilinear resize of theirs, in 1024 parts of a pixel
    TosaAdd, TosaMean, TosaAveragePool, TosaConcatenation, TosaResizeBilinear   the same by TOSA's operators
    Pt2eMean, Pt2eAveragePool, Pt2eResizeBilinear   of PyTorch's float operators between quantize and dequantize nodes,
                        sums in its order
    OrtAdd, OrtMultiply, OrtMean, OrtAveragePool, OrtSoftmax   of onnxruntime's operators of integers, by float32
    IBertLayerNorm      of I-BERT: sums of codes and an integer square root

What a runtime finds in floats while it prepares, such as a multiplier or a table, is found from the scales in the same
dtype; everything else is exact on int64. `codes` takes codes of int8, uint8 or int16 (I-BERT's int32, too), one scale
and one zero point of the whole tensor, and gives codes of `format`: a format of hop.formats, or torch.int16 for all its
codes.
"""

from hop.numerics.integer_arithmetic import TfliteAdd, TfliteAveragePool, TfliteConcatenation, TfliteMean
from hop.numerics.integer_convention import IntegerFunction
from hop.numerics.integer_norms import IBertLayerNorm
from hop.numerics.integer_resize import Pt2eResizeBilinear, TfliteResizeBilinear, TosaResizeBilinear
from hop.numerics.integer_softmax import IBertSoftmax, TfliteSoftmax, TosaSoftmax
from hop.numerics.integer_tables import TfliteRsqrt, TfliteSigmoid, TfliteTable
from hop.numerics.ort_arithmetic import OrtAdd, OrtAveragePool, OrtMean, OrtMultiply, OrtSoftmax
from hop.numerics.pt2e_arithmetic import Pt2eAveragePool, Pt2eMean
from hop.numerics.tosa_arithmetic import TosaAdd, TosaAveragePool, TosaConcatenation, TosaMean

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
    "TfliteMean",
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
