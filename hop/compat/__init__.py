"""Everything that depends on private or version-dependent parts of PyTorch, a file for each part of it.

No other module of the package names a private attribute of torch.
When a release moves one, these files are what changes.
What is changed inside PyTorch is in `patches` alone.
What depends on the system, writing files, is in `files`.

Importing it costs nothing beyond `import torch`: what needs Dynamo, Inductor, DTensor or the FLOP counter registers
itself when that module is imported by somebody else (`imports.when_imported`).
"""

from hop.compat import control_flow as control_flow
from hop.compat import cpp_code as cpp_code
from hop.compat import patches as patches
from hop.compat import profiling as profiling
