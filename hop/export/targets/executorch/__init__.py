"""to_executorch: convert programs to files for ExecuTorch's runtime.

model.py   to_executorch
runner.py  ExecuTorch
"""

from hop.export.targets.executorch.model import to_executorch as to_executorch

__all__ = ["to_executorch"]
