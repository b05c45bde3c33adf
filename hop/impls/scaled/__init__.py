"""scaled: an ATen operator on operands with scales, as one operator.

calls.py     a call in parts          arguments.py  argument checks
meaning.py   the reference, by families of operators: a file of families/ for each, with a Meaning (family.py)
products.py  sums of products         outputs.py    the result, cast or quantized
gradient.py  its gradient             batching.py   its vmap rule
sharding.py  its DTensor rule         kernels.py    fast matrix products

    hop_scaled(op, output, output_scale, output_zero_point, *args)            -> tensor, quantized or not
    hop_scaled_buffers(op, output, output_scale, output_zero_point, *encoded) -> tensor, or list of buffers

`output` is a dtype or a quantizer as text.
"""

from hop.impls.scaled.operator import activated as activated
from hop.impls.scaled.operator import explain as explain
from hop.impls.scaled.operator import scaled as scaled
from hop.impls.scaled.operator import scaled_buffers as scaled_buffers
from hop.impls.scaled.operator import scaled_operator as scaled_operator
from hop.impls.scaled.operator import through_activation as through_activation
