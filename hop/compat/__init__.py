"""Everything that depends on private or version-dependent parts of PyTorch, one file for each part.

No other module of the package uses a private attribute of torch. When a PyTorch release changes one, only these files
have to change.

Only `patches`, `cpp_code`, `control_flow` and `profiling` change PyTorch itself. `files` depends on the operating
system.

Importing the package costs nothing beyond `import torch`: code that needs Dynamo, Inductor, DTensor or the FLOP counter
runs when somebody else imports that module (`imports.when_imported`).
"""

from hop.compat import control_flow as control_flow
from hop.compat import cpp_code as cpp_code
from hop.compat import patches as patches
from hop.compat import profiling as profiling
