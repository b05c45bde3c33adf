"""Integer programs as `.tflite` files, of the public schema.

file.py       a file in the making: tensors, operators, the signature
values.py     what nodes hold, in the layouts in which tensors of the file have it
operators.py  what each family of operators becomes
model.py      programs as files
"""

from hop.export.targets.tflite.model import TfliteModel as TfliteModel
from hop.export.targets.tflite.model import to_tflite as to_tflite

__all__ = ["TfliteModel", "to_tflite"]
