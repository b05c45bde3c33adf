"""to_tflite, from_tflite: convert integer programs to `.tflite` files of the public schema, and back.

arithmetic.py  the targets TFLITE and TFLITE_MICRO
file.py       a file under construction: tensors, operators, the signature
views.py      conversion of views and padding
operators.py  conversion of operator families
model.py      to_tflite
reading.py    a file's content, validated
calls.py      an operator of a file while it is converted
inputs.py     conversion of a file's operators
importing.py  from_tflite
runner.py     LiteRT and TFLM
"""

from hop.export.targets.tflite.importing import from_tflite as from_tflite
from hop.export.targets.tflite.model import TfliteModel as TfliteModel
from hop.export.targets.tflite.model import to_tflite as to_tflite

__all__ = ["TfliteModel", "from_tflite", "to_tflite"]
