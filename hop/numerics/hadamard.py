"""The random Hadamard transform, which spreads an outlier over its block."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hop.compat import dtensor, tracing
from hop.numerics import blocks, spelling
from hop.numerics.spelling import Value
from hop.numerics.tables import tensor

__all__ = ["Hadamard"]

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

SIZES = (4, 8, 16, 32, 64, 128, 256)
"""The supported block sizes."""


def largest_size(width: int) -> int | None:
    """The largest of SIZES that divides `width`; None if there is none."""
    fitting = [size for size in SIZES if width % size == 0]
    return fitting[-1] if fitting else None


def check_size(size: int, shape: Sequence[int], which: str) -> None:
    """Raise ValueError unless blocks of `size` elements fill the last dimension of a tensor of `shape`.

    `which` names the argument in the message.
    """
    if size not in SIZES or not shape or shape[-1] % size:
        raise ValueError(
            f"{which} must be one of {SIZES} that divides the last dimension, got {size} for a tensor of "
            f"{tuple(shape)}; give such a size"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Hadamard(Value):
    """y = x · diag(signs) · H / √n over blocks of n = len(signs) along the last dimension, H in Sylvester's order.

    The matrix is orthogonal: x = y · (diag(signs) · H / √n)ᵀ. Its elements are exact if n is a power of four; for 8, 32
    and 128 they are rounded to float32. The default signs are those of NVIDIA Transformer Engine.
    """

    signs: tuple[int, ...] = SIGNS

    def __post_init__(self) -> None:
        signs = tuple(self.signs) if isinstance(self.signs, list | tuple) else ()
        if len(signs) not in SIZES or any(s not in (1, -1) for s in signs):
            raise ValueError(
                f"Hadamard: signs must be 4, 8, 16, 32, 64, 128 or 256 numbers 1 and -1, got "
                f"{spelling.shown(self.signs)}; give so many"
            )
        object.__setattr__(self, "signs", signs)

    def apply(self, x: Tensor) -> Tensor:
        """Transform (..., K) in float32; the result has x's dtype.

        Elements after the last whole block are unchanged, so that the transform is orthogonal for every K.
        """
        return self._product(x, self._rows)

    def invert(self, y: Tensor) -> Tensor:
        """The inverse of `apply`."""
        return self._product(y, tuple(zip(*self._rows, strict=True)))

    @property
    def matrix(self) -> Tensor:
        """diag(signs) · H / √n, (n, n) in float32."""
        return torch.tensor(self._rows)

    @functools.cached_property
    def _rows(self) -> tuple[tuple[float, ...], ...]:
        """diag(signs) · H / √n."""
        n = len(self.signs)
        size = n**0.5
        return tuple(tuple(self.signs[i] * (-1) ** bin(i & j).count("1") / size for j in range(n)) for i in range(n))

    def _product(self, x: Tensor, rows: tuple[tuple[float, ...], ...]) -> Tensor:
        n = len(rows)
        matrix = tensor(rows, x.device)
        if dtensor.is_dtensor(x):
            matrix = dtensor.as_dtensor(matrix, x.device_mesh)  # type: ignore[attr-defined]
        wide, length = x.to(torch.float32), x.shape[-1]
        if tracing.known_equal(length % n, 0):
            return (wide.reshape(-1, n) @ matrix).reshape(x.shape).to(x.dtype)
        count = -(-length // n)  # sizes as multiples of it avoid guards
        padded = torch.nn.functional.pad(wide, (0, count * n - length)).reshape(*x.shape[:-1], count, n)
        transposed = (padded.flatten(0, -2) @ matrix).reshape(padded.shape)
        transposed = blocks.merge(transposed.flatten(-2), x.shape)
        inside = torch.arange(length, device=x.device) < length - length % n
        if dtensor.is_dtensor(x):
            inside = dtensor.as_dtensor(inside, x.device_mesh)  # type: ignore[attr-defined]
        return torch.where(inside, transposed, wide).to(x.dtype)
