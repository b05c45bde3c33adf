"""Integer programs as `.tflite` files, of the public schema, and such files as programs.

file.py       a file in the making: tensors, operators, the signature
values.py     what nodes hold, in the layouts in which tensors of the file have it
steps.py      a call that is being written
views.py      what views and padding become
operators.py  what each family of operators becomes
model.py      programs as files
reading.py    what a file says, checked
calls.py      an operator of a file where it runs
inputs.py     what each operator of a file is
importing.py  files as programs
"""

from hop.export.targets.tflite.importing import from_tflite as from_tflite
from hop.export.targets.tflite.model import TfliteModel as TfliteModel
from hop.export.targets.tflite.model import to_tflite as to_tflite

__all__ = ["TfliteModel", "from_tflite", "to_tflite"]
