"""Styles of torch.distributed.tensor.parallel that also place our modules.

Importing this module imports torch.distributed.tensor.
"""

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import Placement


class PlacesLayers:
    """A mixin that precedes one of PyTorch's styles among the bases of a class, and gets each module first."""

    linear: Mapping[str, Placement]
    """The placements of the parameters of a Linear."""
    embedding: Mapping[str, Placement]

    def is_placed(self, module: nn.Module, mesh: object, placements: Mapping[str, Placement]) -> bool:
        """Place the parameters of `module`, unless PyTorch's style should. Returns whether it placed them."""
        raise NotImplementedError

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: object) -> None:
        if not self.is_placed(module, device_mesh, self.linear):
            super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[misc]

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: object) -> None:
        if not self.is_placed(module, device_mesh, self.embedding):
            super()._partition_embedding_fn(name, module, device_mesh)  # type: ignore[misc]
