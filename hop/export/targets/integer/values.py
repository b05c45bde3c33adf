"""Codes with one scale, in one or several layouts.

PyTorch's convolutions and pools have channels second, TFLite's last. A value is transposed, once, if an operator needs
another layout; operators that support any layout use an existing one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Order = tuple[int, ...]
"""The dimension of the program's tensor for each dimension of the file's tensor."""

LAST: Order = (0, 2, 3, 1)  # channels last, two spatial dimensions
ROWS: Order = (0, 2, 1)  # channels last, one spatial dimension


@dataclass
class Codes:
    """A tensor of the program: int8 or int16 codes with one scale."""

    name: str
    shape: tuple[int, ...]
    scale: float
    zero: int
    dtype: torch.dtype = torch.int8
    tensors: dict[Order, Any] = field(default_factory=dict[Order, Any])  # by layout

    @property
    def plain(self) -> Order:
        """The layout of the program."""
        return tuple(range(len(self.shape)))

    def is_alike(self, other: "Codes") -> bool:
        """Whether scale and zero point are equal."""
        return (self.scale, self.zero) == (other.scale, other.zero)


def common_order(values: Sequence[Codes]) -> Order:
    """A common layout for values: channels last if one of them has it and all have that many dimensions."""
    for order in (LAST, ROWS):
        if all(len(v.shape) == len(order) for v in values) and any(order in v.tensors for v in values):
            return order
    return values[0].plain


def new(file: Any, codes: Codes, order: Order, suffix: str = "") -> Any:
    """Add a tensor of the file for `codes`, which an operator is about to compute."""
    shape = [codes.shape[d] for d in order]
    return file.tensor(codes.name + suffix, shape, codes.dtype, ([codes.scale], [codes.zero], 0))


def tensor(file: Any, codes: Codes, order: Order | None = None) -> Any:
    """The file's tensor of codes in a layout, transposing another one if needed."""
    order = codes.plain if order is None else order
    if order not in codes.tensors:
        have, index = next(iter(codes.tensors.items()))
        by = [have.index(d) for d in order]
        transposed = new(file, codes, order, "_plain" if order == codes.plain else "_last")
        codes.tensors[order] = file.transposed(index, by, transposed)
    return codes.tensors[order]
