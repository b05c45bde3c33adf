"""to_tosa: convert integer programs to `.tosa` files, of the public schema of TOSA 1.0.

arithmetic.py  the targets TOSA_1_0 and TOSA_1_0_INT16
file.py       a file under construction: tensors, shapes, operators
scales.py     RESCALE: multipliers and shifts of conventions
views.py      conversion of views and padding
operators.py  conversion of products, sums, means and pools
functions.py  conversion of functions of single codes and softmax
resizes.py    conversion of resizing
model.py      to_tosa
reference_model.py  the program of TOSA's reference model
runner.py     a file that runs in it
"""

from hop.export.targets.tosa.model import TosaModel as TosaModel
from hop.export.targets.tosa.model import to_tosa as to_tosa

__all__ = ["TosaModel", "to_tosa"]
