"""quantized: run an operator on floats in low precision, and train through it.

calls.py      a call in parts, and its argument checks
operands.py   its operands as codes
noisy.py      operands with noise instead of rounding
gradient.py   its gradient, in three ways

    hop_quantized(op, scheme, dtype, seed, *scales, *args) -> tensor, quantized or not

`scheme` is a scheme as text, `scales` the fields of Scales. The meaning is hop.scaled, applied to the operands that
hop.quantize returns.
"""

from hop.impls.quantized.operator import Scales as Scales
from hop.impls.quantized.operator import quantized as quantized
from hop.impls.quantized.operator import quantized_operator as quantized_operator
