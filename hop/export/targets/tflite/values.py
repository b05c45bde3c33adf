"""What nodes hold: codes with one scale, in one layout or several.

PyTorch's convolutions and pools have channels second, TFLite's last. A value is transposed where an operator wants
another layout than it has, once; operators that take any layout take the one that is there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Order = tuple[int, ...]
"""Which dimension of the program each dimension of the file's tensor is."""

LAST: Order = (0, 2, 3, 1)  # channels last, of pictures
ROWS: Order = (0, 2, 1)  # channels last, of rows


@dataclass
class Codes:
    """A tensor of the program, int8 or int16 with one scale."""

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
        """Whether codes mean the same numbers."""
        return (self.scale, self.zero) == (other.scale, other.zero)


def common_order(values: Sequence[Codes]) -> Order:
    """The layout in which values are taken together: channels last if one has it, and all have as many dimensions."""
    for order in (LAST, ROWS):
        if all(len(v.shape) == len(order) for v in values) and any(order in v.tensors for v in values):
            return order
    return values[0].plain


def new(file: Any, codes: Codes, order: Order, suffix: str = "") -> Any:
    """A tensor of the file for `codes`, which something is about to write."""
    shape = [codes.shape[d] for d in order]
    return file.tensor(codes.name + suffix, shape, codes.dtype, ([codes.scale], [codes.zero], 0))


def tensor(file: Any, codes: Codes, order: Order | None = None) -> Any:
    """The tensor that holds codes in a layout; it is transposed where there is none yet."""
    order = codes.plain if order is None else order
    if order not in codes.tensors:
        have, index = next(iter(codes.tensors.items()))
        by = [have.index(d) for d in order]
        transposed = new(file, codes, order, "_plain" if order == codes.plain else "_last")
        codes.tensors[order] = file.transposed(index, by, transposed)
    return codes.tensors[order]
