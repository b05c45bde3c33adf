"""scaled: an ATen operator on operands that carry scales, as one operator.

calls.py       a call, taken apart     arguments.py   what may be asked
meaning.py     what it means, by families of operators: a file for each in families/, of a Meaning (family.py)
products.py    sums of products        outputs.py     the result, cast or quantized
gradient.py    its gradient            batching.py    its rule under vmap
sharding.py    its rule for DTensor    kernels.py     fast implementations of products of matrices

    hop_scaled(op, output, output_scale, output_zero_point, *args)            -> tensor, quantized or not
    hop_scaled_buffers(op, output, output_scale, output_zero_point, *encoded) -> tensor, or list of buffers

`output` is a dtype or the spelling of a quantizer.
"""

from hop.impls.scaled.operator import activated as activated
from hop.impls.scaled.operator import explain as explain
from hop.impls.scaled.operator import scaled as scaled
from hop.impls.scaled.operator import scaled_buffers as scaled_buffers
from hop.impls.scaled.operator import scaled_operator as scaled_operator
from hop.impls.scaled.operator import through_activation as through_activation
