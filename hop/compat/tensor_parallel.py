"""Styles of torch.distributed.tensor.parallel that place modules of others than torch.nn.

Importing it imports torch.distributed.tensor.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement


class PlacesLayers:
    """Comes before a style of PyTorch's among the bases of a class, and is asked of each module first."""

    linear: Mapping[str, Placement]
    """How the parameters of a Linear are placed."""
    embedding: Mapping[str, Placement]

    def is_placed(self, module: nn.Module, mesh: Any, placements: Mapping[str, Placement]) -> bool:
        """Place the parameters of `module`, if that is not to be done by PyTorch's style; whether it is not."""
        raise NotImplementedError

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        if not self.is_placed(module, device_mesh, self.linear):
            super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[misc]

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        if not self.is_placed(module, device_mesh, self.embedding):
            super()._partition_embedding_fn(name, module, device_mesh)  # type: ignore[misc]
