"""Grid: the numbers that each element of a tensor can become, once its scales are fixed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hop.numerics.formats import Format
from hop.numerics.quantizer import Quantizer


@dataclass(frozen=True)
class Grid:
    """The scale, and where there is one the zero point, of each element of a tensor.

    What chooses codes one by one, as GPTQ does, asks it for the nearest; `Quantizer.with_codes` takes what it chose."""

    format: Format
    scale: Tensor  # float32, of the tensor's shape
    zero_point: Tensor | None

    @staticmethod
    def of(q: Quantizer, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> "Grid":
        """That of a tensor of `shape` whose `buffers` q reads."""
        return Grid(q.format, *q.scales_of_elements(buffers, shape))

    def map(self, change: Any) -> "Grid":
        """The grid of a tensor that `change`, a function such as a transpose or a choice of columns, makes."""
        zero_point = None if self.zero_point is None else change(self.zero_point)
        return Grid(self.format, change(self.scale), zero_point)

    def __getitem__(self, index: Any) -> "Grid":
        return self.map(lambda t: t[index])

    def encode(self, x: Tensor) -> Tensor:
        """The codes of the nearest numbers; of 0 where the scale is 0."""
        y = torch.where(self.scale == 0, 0.0, x / self.scale).to(torch.float32)
        return self.format.encode(y, None, *self._zero())

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers that codes stand for, in float32."""
        return self.format.decode(codes, *self._zero()) * self.scale

    def _zero(self) -> tuple[Any, ...]:
        if self.zero_point is not None:
            return (self.zero_point,)
        return (self.format.zero,) if self.format.is_integer else ()
