"""Integer programs as `.tosa` files, of the public schema of TOSA 1.0.

file.py       a file in the making: tensors, shapes, operators
scales.py     RESCALE: from what a convention says to multipliers and shifts
views.py      what views and padding become
operators.py  what products, sums, means and pools become
functions.py  what functions of single codes and softmax become
model.py      programs as files
"""

from hop.export.targets.tosa.model import TosaModel as TosaModel
from hop.export.targets.tosa.model import to_tosa as to_tosa

__all__ = ["TosaModel", "to_tosa"]
