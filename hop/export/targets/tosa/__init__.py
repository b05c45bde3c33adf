"""to_tosa: convert integer programs to `.tosa` files, of the public schema of TOSA 1.0.

file.py       a file under construction: tensors, shapes, operators
scales.py     RESCALE: multipliers and shifts of conventions
views.py      conversion of views and padding
operators.py  conversion of products, sums, means and pools
functions.py  conversion of functions of single codes and softmax
resizes.py    conversion of resizing
model.py      to_tosa
"""

from hop.export.targets.tosa.model import TosaModel as TosaModel
from hop.export.targets.tosa.model import to_tosa as to_tosa

__all__ = ["TosaModel", "to_tosa"]
