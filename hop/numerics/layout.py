"""Layout: base class of the storage forms of codes; and Tiled, which native kernels read.

A layout is a frozen value, a field of the quantizer. Code elsewhere only uses its properties and methods, so new
layouts need no changes there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import spelling
from hop.numerics.blocks import Block
from hop.numerics.formats import Format
from hop.numerics.packing import PACKED
from hop.numerics.rule import Rule
from hop.numerics.spelling import Value


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Value):
    """Base class of layouts: how the codes of a tensor are stored."""

    tiled: ClassVar[bool] = False
    """Whether the stored tensor has other dimensions than the tensor, or sums over them, so that it has no matching
    views.
    """

    has_plain_codes: ClassVar[bool] = False
    """Whether the codes are stored as in the plain layout, so that readers of that can read them."""

    panel: ClassVar[int] = 1
    """The number of rows of a matrix that are stored together."""

    is_decoded: ClassVar[bool] = False
    """Whether decoded values are stored, which cannot be turned into codes again."""

    is_dense: ClassVar[bool] = False
    """Whether it is smaller than the plain layout, so that files store it too."""

    @property
    def tiles(self) -> "Tiled | None":
        """The tiles that native kernels read; None for other layouts."""
        return None

    @property
    def of_matrix(self) -> "Tiled | None":
        """The layout of each matrix of a stack; None if it is not for stacks."""
        return None

    def transposed(self) -> "Layout | None":
        """The layout that reads W's packed buffer as W.T, or None."""
        return None

    def of_transposed(self, held: Tensor) -> Tensor:
        """The buffer of the transposed matrix in that layout, in the same memory."""
        return held

    def check(self, format: Format, rule: Rule) -> None:
        """Raise ValueError if tensors of `format` cannot be stored in this layout."""

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if a tensor of `shape` cannot be stored in this layout."""

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of the stored codes of a tensor of `shape`."""
        raise NotImplementedError

    def pack(self, codes: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """The stored element for each of `codes`; `tensors` are scales and the like, in shapes that broadcast."""
        return codes

    def arrange(self, packed: Tensor, format: Format) -> Tensor:
        """Arrange the stored elements, one per element of the tensor, in the layout's order."""
        return packed

    def restore(
        self, packed: Tensor, shape: Sequence[int], format: Format, additional: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The inverse of `arrange`, for a tensor of `shape`; `additional` are the additional buffers."""
        return packed

    def numbers(self, packed: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """The float32 values of the codes, for a decoded layout: the inverse of `pack`."""
        raise NotImplementedError

    def stored(self, format: Format) -> dict[str, tuple[torch.dtype, Block]]:
        """The name, dtype and block of additional buffers, besides codes and those of the rule."""
        return {}

    def additional(self, codes: Tensor, format: Format) -> dict[str, Tensor]:
        """The additional buffers for a tensor's codes, one per element."""
        return {}

    def per_byte(self, format: Format) -> int:
        """The number of codes in an element of the buffer, along the last dimension."""
        return 1

    def suits(self, device: torch.device) -> bool:
        """Whether kernels of a device read it; a tensor moved to another device is converted to the plain layout."""
        return True


ROWS, SLICE, QUAD = 32, 64, 4  # rows of a panel, summed elements of a tile, successive codes per row


@dataclass(frozen=True, eq=False, repr=False)
class Tiled(Layout):
    """Codes in the order in which CPU matrix units read them, for the native kernels.

    A matrix of rows that are summed along, (R, K), becomes

        [R / 32][K / 64][2][16][64] bytes        32 rows as two tiles of 16; each tile has 16 quads of 16 rows · 4 codes

    padded with zeros. For 4-bit codes, the bytes of quads 2i and 2i + 1 share one, [R / 32][K / 64][2][8][64]. The
    weight of a convolution, (O, I, *kernel), is stored as the matrix (O, kernel · I), channels last.

    Args:
        columns: whether a matrix is summed along its first dimension, like the second factor of mm: (K, R).
        sums: whether code_sums are stored for a matrix of integers: Σ codes of each row, int32. The other factor's zero
            point is multiplied by them, so a product need not compute them in each call. In-place operators on the
            tensor update them; code that writes to the codes directly must do so, too.
    """

    columns: bool = False
    sums: bool = False

    tiled: ClassVar[bool] = True
    panel: ClassVar[int] = ROWS

    def __post_init__(self) -> None:
        spelling.flag(self.columns, "Tiled: columns")
        spelling.flag(self.sums, "Tiled: sums")

    def stored(self, format: Format) -> dict[str, tuple[torch.dtype, Block]]:
        return sums_described(self.columns) if self.sums else {}

    def additional(self, codes: Tensor, format: Format) -> dict[str, Tensor]:
        return sums_of(codes, self.columns) if self.sums else {}

    @property
    def tiles(self) -> "Tiled":
        return self

    def transposed(self) -> "Tiled":
        return replace(self, columns=not self.columns)

    def check(self, format: Format, rule: Rule) -> None:
        if format.bits not in (4, 8):
            raise ValueError(
                f"layout={self} is for codes of 4 or 8 bits, but {format.name} has {format.bits}; use another layout, "
                "or None"
            )
        if self.sums and not format.is_integer:
            raise ValueError(f"layout={self} keeps sums of integers, but {format.name} has none; use sums=False")

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 2 or ((self.columns or self.sums) and len(shape) != 2):
            of = "matrices" if self.columns or self.sums else "matrices and weights of convolutions"
            raise ValueError(
                f"layout={self} is for {of}; got shape {tuple(shape)}; give such a tensor, or use layout=None"
            )

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """The number of rows R and columns K of the matrix that a tensor of this shape is stored as."""
        rows, *rest = reversed(shape) if self.columns else shape
        return rows, math.prod(rest)

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        rows, size = self.matrix(shape)
        narrow = format.bits in PACKED
        panels = (-(-rows // ROWS), -(-size // SLICE), 2)
        return (*panels, 8 if narrow else 16, SLICE), torch.uint8 if narrow else format.dtype

    def suits(self, device: torch.device) -> bool:
        return device.type in ("cpu", "meta")

    def arrange(self, packed: Tensor, format: Format) -> Tensor:
        rows, size = self.matrix(packed.shape)
        matrix = packed.t() if self.columns else packed.movedim(1, -1).reshape(rows, size)
        matrix = torch.nn.functional.pad(matrix, (0, -size % SLICE, 0, -rows % ROWS))
        tiles = matrix.reshape(-(-rows // ROWS), 2, 16, -(-size // SLICE), 16, QUAD).permute(0, 3, 1, 4, 2, 5)
        tiles = tiles.reshape(-(-rows // ROWS), -(-size // SLICE), 2, 16, SLICE)
        if format.bits not in PACKED:
            return tiles
        low, high = (tiles & 15).to(torch.int16).unflatten(3, (8, 2)).unbind(4)
        return (low + high * 16).to(torch.uint8)

    def rows(self, packed: Tensor, at: Tensor, size: int) -> Tensor:
        """Read the codes of some rows of a matrix with `size` columns, in the plain form.

        8-bit codes take one byte each, two 4-bit codes share one. Only the bytes of these rows are read.

        Args:
            packed: the packed codes.
            at: the indices of existing rows, an integer tensor.
            size: the number of columns.
        """
        panel, row = torch.div(at, ROWS, rounding_mode="floor"), at.remainder(ROWS)
        tile, lane = torch.div(row, 16, rounding_mode="floor"), row.remainder(16)
        codes = packed.unflatten(4, (16, QUAD))[panel, :, tile, :, lane]  # (rows, slices, quads or pairs of them, 4)
        if codes.shape[2] == 16:
            return codes.flatten(1)[:, :size]
        quads = torch.stack([codes.remainder(16), torch.div(codes, 16, rounding_mode="floor")], 3).flatten(1)
        return (quads[:, 0::2] + quads[:, 1::2] * 16)[:, : -(-size // 2)]

    def restore(
        self, packed: Tensor, shape: Sequence[int], format: Format, additional: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        tiles = packed
        if format.bits in PACKED:
            tiles = torch.stack([tiles & 15, torch.div(tiles, 16, rounding_mode="floor")], 4).flatten(3, 4)
            tiles = tiles.to(torch.int8)
            if format.dtype.is_signed:
                tiles = (tiles ^ 8) - 8
            tiles = tiles.to(format.dtype)
        rows, size = self.matrix(shape)
        panels, slices = packed.shape[:2]
        matrix = tiles.reshape(panels, slices, 2, 16, 16, QUAD).permute(0, 2, 4, 1, 3, 5)
        matrix = matrix.reshape(panels * ROWS, slices * SLICE)[:rows, :size]
        if self.columns:
            return matrix.t().contiguous()
        first, second, *kernel = shape
        return matrix.reshape(first, *kernel, second).movedim(-1, 1).contiguous()


def sums_described(columns: bool) -> dict[str, tuple[torch.dtype, Block]]:
    """The buffer of sums, described as in Layout.stored."""
    return {"code_sums": (torch.int32, (-1, 1) if columns else (1, -1))}


def sums_of(codes: Tensor, columns: bool) -> dict[str, Tensor]:
    """The sums of the codes of each row of a matrix, (R, 1), or of its columns, (1, R).

    Computed a part at a time, because PyTorch first converts the codes to int32, into one result, because small results
    between the parts' memory would keep it from being reused.
    """
    summed = 0 if columns else 1
    if not isinstance(codes.numel(), int) or codes.numel() <= _AT_ONCE:
        return {"code_sums": codes.sum(summed, keepdim=True, dtype=torch.int32)}
    sums = torch.empty((1, codes.shape[1]) if columns else (codes.shape[0], 1), dtype=torch.int32, device=codes.device)
    count = max(_AT_ONCE // codes.shape[summed], 1)
    for part, out in zip(codes.split(count, 1 - summed), sums.split(count, 1 - summed), strict=True):
        torch.sum(part, summed, keepdim=True, dtype=torch.int32, out=out)
    return {"code_sums": sums}


_AT_ONCE = 2**18  # codes that are summed at a time
