"""Distributed checkpoints of quantized tensors, on torch.distributed.checkpoint (DCP).

    hop.checkpoint.save(state_dict, folder, step=10)      write each step to its own folder, atomically
    hop.checkpoint.load(state_dict, folder)               read the last step into the tensors of state_dict

Both pass a `SavePlanner` or a `LoadPlanner` to DCP; dcp.save and dcp.load accept them directly too. `import hop` does
not import this package, because importing DCP takes about as long as importing torch.
"""

from hop.checkpoint.folders import load as load
from hop.checkpoint.folders import save as save
from hop.checkpoint.folders import steps as steps
from hop.checkpoint.loading import LoadPlanner as LoadPlanner
from hop.checkpoint.saving import SavePlanner as SavePlanner

__all__ = ["LoadPlanner", "SavePlanner", "load", "save", "steps"]
