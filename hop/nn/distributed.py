"""hop.distributed: layers of hop.nn on several processes. `import hop` does not import this module, which imports
torch.distributed.

PyTorch's own styles of parallelize_module take layers of hop.nn whose scales are found anew in each call. A layer that
keeps scales (those of the rules hop.scale_rules.Static and Delayed) has a submodule for them, which those styles do not
expect; the styles here do, and take any layer of hop.nn or PyTorch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, parallel

from hop.compat.process_groups import gloo_of_one_thread
from hop.compat.tensor_parallel import PlacesLayers
from hop.nn.layer import Layer

__all__ = ["ColwiseParallel", "RowwiseParallel", "gloo"]


class _Style(PlacesLayers):
    def is_placed(self, module: nn.Module, mesh: Any, placements: Mapping[str, Placement]) -> bool:
        """Whether `module` is a layer of hop.nn, whose parameters are then placed, or a submodule with its scales,
        which distribute_module then puts on every process."""
        if isinstance(module, Layer):
            style: Any = self
            for name, placement in placements.items():
                parameter = getattr(module, name, None)
                if parameter is not None:
                    spread = distribute_tensor(parameter, mesh, [placement], src_data_rank=style.src_data_rank)
                    setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
            return True
        return not isinstance(module, nn.Linear | nn.Embedding)


class ColwiseParallel(_Style, parallel.ColwiseParallel):
    """torch.distributed.tensor.parallel.ColwiseParallel for layers of hop.nn too: each process has some of the output
    features of a Linear, or some of the columns of an Embedding; the scales that it keeps are on every process.
    Arguments are PyTorch's."""

    linear = MappingProxyType({"weight": Shard(0), "bias": Shard(0)})
    embedding = MappingProxyType({"weight": Shard(1)})


class RowwiseParallel(_Style, parallel.RowwiseParallel):
    """torch.distributed.tensor.parallel.RowwiseParallel for layers of hop.nn too: each process has some of the input
    features of a Linear, or some of the rows of an Embedding; the scales that it keeps are on every process. Arguments
    are PyTorch's."""

    linear = MappingProxyType({"weight": Shard(1), "bias": Replicate()})
    embedding = MappingProxyType({"weight": Shard(0)})


_BACKEND = "hop_gloo"


def gloo() -> str:
    """The name of a backend for `init_process_group` and `new_group`: Gloo with one thread for each group.

    PyTorch 2.13's own has two, which note the name of the collective that they completed in one string without a lock.
    Where two of them end together, as codes and scales do, that string's memory is freed twice, and the process may
    crash. Collectives of one group run one after the other here; the environment variable GLOO_SOCKET_IFNAME is read as
    PyTorch reads it.

    Raises:
        RuntimeError: PyTorch was built without Gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("gloo: this build of PyTorch has no Gloo; take another backend")
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, gloo_of_one_thread, devices=["cpu"])
    return f"cpu:{_BACKEND}"
