"""Batches of a DataLoader."""

from typing import Any

import torch

from hop.compat.imports import when_imported

_MODULE = "torch.utils.data._utils.collate"


def stack_in_batches(cls: type) -> None:
    """Let the workers of a DataLoader stack tensors of a class as its own process does, not into a plain tensor."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.stack(batch)

    def register() -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map[cls] = stack

    when_imported(_MODULE, register)
