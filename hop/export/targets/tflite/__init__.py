"""to_tflite, from_tflite: convert integer programs to `.tflite` files of the public schema, and back.

file.py       a file under construction: tensors, operators, the signature
values.py     codes in the layouts of the file's tensors
steps.py      a call that is being converted
rows.py       one-dimensional convolutions and pools, as two-dimensional ones
views.py      conversion of views and padding
operators.py  conversion of operator families
model.py      to_tflite
reading.py    a file's content, validated
calls.py      an operator of a file while it is converted
inputs.py     conversion of a file's operators
importing.py  from_tflite
"""

from hop.export.targets.tflite.importing import from_tflite as from_tflite
from hop.export.targets.tflite.model import TfliteModel as TfliteModel
from hop.export.targets.tflite.model import to_tflite as to_tflite

__all__ = ["TfliteModel", "from_tflite", "to_tflite"]
