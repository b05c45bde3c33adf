"""Layouts: other storage forms of a quantized tensor's codes, which some kernels read faster. None is the plain layout.

hop.pack converts a tensor to one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hop.numerics import packing, spelling
from hop.numerics.blocks import Block
from hop.numerics.formats import Format
from hop.numerics.layout import Layout, Tiled, sums_described, sums_of
from hop.numerics.scale_rules import Rule

__all__ = ["Decoded", "Layout", "Planes", "Stacked", "Summed", "Tiled"]


@dataclass(frozen=True, eq=False, repr=False)
class Decoded(Layout):
    """decode(codes) · fold, in bfloat16: the values that a bfloat16 product multiplies.

    fold is the part of the scale that has few bits (hop.scale_rules.Rule.block_scale_of): the power of two of MX, the
    e4m3 scale of NVFP4. The product is exact, so division restores the values; but bfloat16 has less precision below
    2^-126.
    """

    dtype: torch.dtype = torch.bfloat16

    is_decoded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"Decoded: dtype must be torch.bfloat16, got {self.dtype!r}; give torch.bfloat16")

    def check(self, format: Format, rule: Rule) -> None:
        if not format.is_float or self.dtype != torch.bfloat16:
            raise ValueError(
                f"layout={self} is for float formats, in bfloat16; got {format.name}; use another layout, or None"
            )

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(shape), self.dtype

    def pack(self, codes: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        values = format.decode(codes)
        return (values * rule.block_scale_of(tensors) if rule.has_block_scale() else values).to(self.dtype)

    def numbers(self, packed: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        packed = packed.to(torch.float32)
        if not rule.has_block_scale():
            return packed
        block_scale = rule.block_scale_of(tensors)
        return torch.where(block_scale == 0, packed, packed / block_scale)


@dataclass(frozen=True, eq=False, repr=False)
class Summed(Layout):
    """8-bit integer codes in plain layout, with code_sums as in Tiled: Σ codes of each row of a matrix, int32.

    A product on a GPU multiplies the other factor's zero point by these sums. In-place operators on the tensor update
    them; code that writes to the codes directly must do so, too. Parts of a row have other sums, so all views except
    the transpose are plain, dequantized tensors.

    Args:
        columns: whether a matrix is summed along its first dimension, like the second factor of mm: (K, R).
    """

    columns: bool = False

    tiled: ClassVar[bool] = True
    has_plain_codes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        spelling.flag(self.columns, "Summed: columns")

    def stored(self, format: Format) -> dict[str, tuple[torch.dtype, Block]]:
        return sums_described(self.columns)

    def additional(self, codes: Tensor, format: Format) -> dict[str, Tensor]:
        return sums_of(codes, self.columns)

    def transposed(self) -> "Summed":
        return replace(self, columns=not self.columns)

    def of_transposed(self, held: Tensor) -> Tensor:
        return held.t()

    def check(self, format: Format, rule: Rule) -> None:
        if not format.is_integer or format.bits != 8:
            raise ValueError(
                f"layout={self} keeps sums of 8-bit integers, but {format.name} is another format; use layout=None"
            )

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 2:
            raise ValueError(
                f"layout={self} is for matrices; got shape {tuple(shape)}; give such a tensor, or use layout=None"
            )

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(shape), format.dtype

    def rows(self, packed: Tensor, at: Tensor, size: int) -> Tensor:
        """The codes of some rows of a matrix, as Tiled.rows."""
        return packed.index_select(0, at)

    def suits(self, device: torch.device) -> bool:
        return device.type in ("cuda", "meta")


@dataclass(frozen=True, eq=False, repr=False)
class Stacked(Layout):
    """A stack of matrices (E, R, K), each in tiles, one after another. Each matrix is a Tiled one in the same memory.

    Read by products with single matrices of a stack, such as those of experts.

    Args:
        columns: whether the matrices are summed along their first dimension: (E, K, R).
    """

    columns: bool = False

    tiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        spelling.flag(self.columns, "Stacked: columns")

    @property
    def of_matrix(self) -> Tiled:
        """The layout of each matrix."""
        return Tiled(self.columns)

    def check(self, format: Format, rule: Rule) -> None:
        self.of_matrix.check(format, rule)

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 3:
            raise ValueError(
                f"layout={self} is for stacks of matrices; got shape {tuple(shape)}; give a tensor of three "
                "dimensions, or use layout=None"
            )

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        count, *matrix = shape
        tiles, dtype = self.of_matrix.held(matrix, format)
        return (count, *tiles), dtype

    def suits(self, device: torch.device) -> bool:
        return self.of_matrix.suits(device)

    def arrange(self, packed: Tensor, format: Format) -> Tensor:
        if not len(packed):
            shape, dtype = self.held(packed.shape, format)
            return packed.new_empty(shape, dtype=dtype)
        return torch.stack([self.of_matrix.arrange(matrix, format) for matrix in packed])

    def restore(
        self, packed: Tensor, shape: Sequence[int], format: Format, additional: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        if not shape[0]:
            return packed.new_empty(tuple(shape), dtype=format.dtype)
        return torch.stack([self.of_matrix.restore(tiles, shape[1:], format) for tiles in packed])


@dataclass(frozen=True, eq=False, repr=False)
class Planes(Layout):
    """Codes of 3, 5 or 6 bits without unused bits, split into two planes.

    codes has the low bits of each code, high_codes the others. In both, several share a byte along the last dimension
    (hop.numerics.packing):

        bits    low: codes per byte     high: codes per byte
        3       2: 4                    1: 8
        5       4: 2                    1: 8
        6       4: 2                    2: 4
    """

    is_dense: ClassVar[bool] = True

    def check(self, format: Format, rule: Rule) -> None:
        if format.bits not in _LOW or format.dtype.is_floating_point:
            raise ValueError(
                f"layout={self} is for codes of 3, 5 or 6 bits, but {format.name} has {format.bits}; use layout=None"
            )

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) == 0:
            raise ValueError(f"layout={self} is for tensors with at least one dimension; got shape (); use layout=None")

    def per_byte(self, format: Format) -> int:
        return 8 // _LOW[format.bits]

    def stored(self, format: Format) -> dict[str, tuple[torch.dtype, Block]]:
        return {"high_codes": (torch.uint8, (1, 8 // (format.bits - _LOW[format.bits])))}

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        return (*shape[:-1], packing.packed_size(shape[-1], _LOW[format.bits])), torch.uint8

    def arrange(self, packed: Tensor, format: Format) -> Tensor:
        return packing.pack(packed, _LOW[format.bits])

    def additional(self, codes: Tensor, format: Format) -> dict[str, Tensor]:
        low = _LOW[format.bits]
        # floor division also handles signed codes
        high = torch.div(codes.to(torch.int16), 2**low, rounding_mode="floor")
        return {"high_codes": packing.pack(high, format.bits - low)}

    def restore(
        self, packed: Tensor, shape: Sequence[int], format: Format, additional: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        assert additional is not None
        low = _LOW[format.bits]
        codes = packing.unpack(packed, low, shape[-1], torch.uint8)
        high = packing.unpack(additional["high_codes"], format.bits - low, shape[-1], torch.uint8)
        codes = (codes + high * 2**low).to(torch.int8)
        if format.dtype.is_signed:
            codes = torch.where(codes >= 2 ** (format.bits - 1), codes - 2**format.bits, codes)
        return codes.to(format.dtype)


def check(layout: Layout, format: Format, scale: Rule, flat: bool) -> None:
    """Raise for a layout that a quantizer cannot have."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout must be one of hop.layouts, or None; got {spelling.shown(layout)}; give one such as "
            "hop.layouts.Tiled()"
        )
    layout.check(format, scale)
    if flat and (layout.tiled or layout.stored(format)):
        raise ValueError(f"flat=True: layout={layout} is for blocks of dimensions; use layout=None")


def has_plain_codes(layout: Layout | None) -> bool:
    """Whether codes are stored as in the plain layout, possibly with additional buffers."""
    return layout is None or layout.has_plain_codes


def dense(format: Format) -> Planes | None:
    """The layout that is smaller than the plain one; None if there is none."""
    return Planes() if format.bits in _LOW and not format.dtype.is_floating_point else None


_LOW = {3: 2, 5: 4, 6: 4}
"""Bits per code in the low plane."""


def sums_first(block: Block) -> bool:
    """Whether a matrix with this block shares scales along its first dimension, which products then sum over."""
    return len(block) >= 2 and block[-2] not in (1,) and block[-1] == 1
