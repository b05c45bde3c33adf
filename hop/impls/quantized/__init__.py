"""quantized: an operator on floats that computes in low precision, and trains through it.

calls.py      a call, taken apart, and what may be asked
operands.py   its operands as codes
noisy.py      operands with noise in the place of rounding
gradient.py   its gradient, in three ways

    hop_quantized(op, scheme, dtype, seed, *scales, *args) -> tensor, quantized or not

`scheme` is the spelling of one, `scales` the fields of Scales. The meaning is hop.scaled of what hop.quantize makes of
the operands.
"""

from hop.impls.quantized.operator import Scales as Scales
from hop.impls.quantized.operator import quantized as quantized
from hop.impls.quantized.operator import quantized_operator as quantized_operator
