"""hop.distributed: tensor parallelism for layers of hop.nn. `import hop` does not import this module.

PyTorch's parallelize_module styles accept layers of hop.nn whose scales are found in each call. Layers with scale state
(the rules hop.scale_rules.Static and Delayed) have a submodule for it that those styles do not expect. The styles of
this module accept both, and PyTorch's layers.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, parallel

from hop.compat.process_groups import gloo_of_one_thread
from hop.compat.tensor_parallel import PlacesLayers
from hop.nn.layers.base import Layer

__all__ = ["ColwiseParallel", "RowwiseParallel", "gloo"]


class _Style(PlacesLayers):
    src_data_rank: int | None  # of PyTorch's style, the next base class

    def is_placed(self, module: nn.Module, mesh: object, placements: Mapping[str, Placement]) -> bool:
        """Shard the parameters of a hop.nn layer and return True, also for its submodules of scales.

        distribute_module then replicates the parameters of those submodules.
        """
        if isinstance(module, Layer):
            assert isinstance(mesh, DeviceMesh)
            for name, placement in placements.items():
                parameter = getattr(module, name, None)
                if parameter is not None:
                    spread = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
                    setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
            return True
        return not isinstance(module, nn.Linear | nn.Embedding)


class ColwiseParallel(_Style, parallel.ColwiseParallel):
    """torch.distributed.tensor.parallel.ColwiseParallel that also accepts layers of hop.nn.

    Each process gets some output features of a Linear, or some columns of an Embedding; stored scales are replicated.
    Arguments are PyTorch's.
    """

    linear = MappingProxyType({"weight": Shard(0), "bias": Shard(0)})
    embedding = MappingProxyType({"weight": Shard(1)})


class RowwiseParallel(_Style, parallel.RowwiseParallel):
    """torch.distributed.tensor.parallel.RowwiseParallel that also accepts layers of hop.nn.

    Each process gets some input features of a Linear, or some rows of an Embedding; stored scales are replicated.
    Arguments are PyTorch's.
    """

    linear = MappingProxyType({"weight": Shard(1), "bias": Replicate()})
    embedding = MappingProxyType({"weight": Shard(0)})


_BACKEND = "hop_gloo"


def gloo() -> str:
    """Register a Gloo backend with one thread per group, and return its name for `init_process_group` and `new_group`.

    PyTorch 2.13's Gloo backend has two threads per group. Both write the name of the last completed collective to one
    string without a lock. If two collectives end together, as those of codes and scales do, the string's memory is
    freed twice and the process may crash. With one thread, collectives of a group run one after another. The
    environment variable GLOO_SOCKET_IFNAME is read as in PyTorch.

    Raises:
        RuntimeError: PyTorch was built without Gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("gloo: this build of PyTorch has no Gloo; use another backend")
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, gloo_of_one_thread, devices=["cpu"])
    return f"cpu:{_BACKEND}"
