"""Distributed checkpoints of quantized tensors, on torch.distributed.checkpoint (DCP).

    hop.checkpoint.save(state_dict, folder, step=10)      each step a folder of its own, whole or not there
    hop.checkpoint.load(state_dict, folder)               the last step, into the tensors of state_dict

`SavePlanner` and `LoadPlanner` are what they give to DCP; dcp.save and dcp.load take them too. `import hop` does not
import this package: DCP costs about as much as torch itself does.
"""

from hop.checkpoint.folders import latest as latest
from hop.checkpoint.folders import load as load
from hop.checkpoint.folders import save as save
from hop.checkpoint.folders import steps as steps
from hop.checkpoint.loading import LoadPlanner as LoadPlanner
from hop.checkpoint.saving import SavePlanner as SavePlanner

__all__ = ["LoadPlanner", "SavePlanner", "latest", "load", "save", "steps"]
