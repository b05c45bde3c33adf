"""out_dtype: run an ATen operator in the common dtype of its operands and a given output dtype.

meaning.py    the reference          promotion.py, arguments.py   the common dtype, and the inner operator's schema
gradient.py   the gradient           batching.py                  the vmap rule
sharding.py   the DTensor rule       kernels.py, forms.py         fast implementations
"""

from hop.impls.out_dtype.operator import explain as explain
from hop.impls.out_dtype.operator import out_dtype as out_dtype
from hop.impls.out_dtype.operator import out_dtype_operator as out_dtype_operator
