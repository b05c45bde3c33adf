"""quantize and fake_quantize: from a float tensor to codes and scales, and to the values these represent.

Quantizer defines the meaning. This package has the operators: their argument checks (arguments.py) and gradients.

    hop_quantize(quantizer, x, scale, zero_point, noise, usages, gradient)  -> QuantizedTensor
    hop_fake_quantize(quantizer, x, scale, zero_point, noise, gradient)     -> tensor
"""

from hop.impls.quantize.kernels import row_buffers as row_buffers
from hop.impls.quantize.operator import dequantize as dequantize
from hop.impls.quantize.operator import fake_quantize as fake_quantize
from hop.impls.quantize.operator import fake_quantize_operator as fake_quantize_operator
from hop.impls.quantize.operator import is_plain as is_plain
from hop.impls.quantize.operator import quantize as quantize
from hop.impls.quantize.operator import quantize_operator as quantize_operator
from hop.impls.quantize.operator import straight_through as straight_through
from hop.impls.quantize.weights import quantize_weight as quantize_weight
