"""Grid: the values that each element of a tensor can take, given its scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hop.numerics.formats import Format
from hop.numerics.quantizer import Quantizer


@dataclass(frozen=True)
class Grid:
    """The scale and, if any, the zero point of each element of a tensor.

    Algorithms that choose codes one by one, such as GPTQ, encode elements with it and pass the codes to
    `Quantizer.with_codes`.
    """

    format: Format
    scale: Tensor  # float32, of the tensor's shape
    zero_point: Tensor | None

    @staticmethod
    def of(q: Quantizer, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> "Grid":
        """The grid of a tensor of `shape` with these `buffers` of quantizer `q`."""
        return Grid(q.format, *q.scales_of_elements(buffers, shape))

    def map(self, change: Any) -> "Grid":
        """The grid of the tensor after `change`, such as a transpose or a choice of columns."""
        zero_point = None if self.zero_point is None else change(self.zero_point)
        return Grid(self.format, change(self.scale), zero_point)

    def __getitem__(self, index: object) -> "Grid":
        return self.map(lambda t: t[index])

    def encode(self, x: Tensor) -> Tensor:
        """The codes of the nearest values; the code of 0 where the scale is 0."""
        y = torch.where(self.scale == 0, 0.0, x / self.scale).to(torch.float32)
        return self.format.encode(y, None, *self._zero())

    def decode(self, codes: Tensor) -> Tensor:
        """The values of codes, in float32."""
        return self.format.decode(codes, *self._zero()) * self.scale

    def _zero(self) -> tuple[Any, ...]:
        if self.zero_point is not None:
            return (self.zero_point,)
        return (self.format.zero,) if self.format.is_integer else ()
