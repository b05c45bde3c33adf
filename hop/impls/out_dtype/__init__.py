"""out_dtype: run an ATen operator in the common dtype of its operands and a given output dtype.

meaning.py    what it means          promotion.py, arguments.py   what "common dtype" means
gradient.py   its gradient           batching.py                  its rule under vmap
sharding.py   its rule for DTensor   kernels.py, forms.py         its fast implementations
"""

from hop.impls.out_dtype.operator import explain as explain
from hop.impls.out_dtype.operator import out_dtype as out_dtype
from hop.impls.out_dtype.operator import out_dtype_operator as out_dtype_operator
