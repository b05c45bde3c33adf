"""StoredScales: scales and offsets as stored in files of quantized models: in 16 bits, or as codes times a float.

    x ≈ codes · s - m        in float32, the product and the difference rounded separately
    s = scale                                 one per block, a 16-bit float
    s = decode(scale)                         or a code of a format
    s = outer_scale · decode(scale)           or such a code times a float that several blocks share
    s = decode(scale) / outer_scale           or divided by it
    m                                         likewise, from offset and outer_offset; 0 without offsets

Source: the block formats of ggml, as the package gguf dequantizes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from hop.compat import inductor
from hop.numerics import blocks, scale_search, spelling
from hop.numerics.blocks import Block
from hop.numerics.formats import Codebook, Float, Format
from hop.numerics.rule import LARGEST, Blocks, Found, Rule, nan_beyond

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# As in ggml: half of e8m0, whose last code is a value too; half of unsigned e4m3; twice e2m1. The scales are halved so
# that elements are integers.
E8M0_HALF = Codebook("e8m0_half", 8, torch.uint8, tuple(2.0 ** (code - 128) for code in range(256)))
UE4M3_HALF = Codebook(
    "ue4m3_half",
    7,
    torch.uint8,
    tuple((code % 8 + 8 * (code > 7)) * 2.0 ** (max(code // 8, 1) - 11) for code in range(128)),
)
E2M1_DOUBLED = Float("e2m1_doubled", 4, torch.uint8, exponent_bits=2, mantissa_bits=1, bias=0, largest=0x7)
for _format in (E8M0_HALF, UE4M3_HALF, E2M1_DOUBLED):
    spelling.register_constant(_format.name, _format)


@dataclass(frozen=True, eq=False, repr=False)
class StoredScales(Rule):
    """Scales in a float dtype or a format, with offsets if `offset`. Quantizing stores

        s = amax / max                          without offsets; max is the format's largest value above its zero
        s = (max(x, 0) - min(x, 0)) / high      with offsets, for an integer format from 0 to high
        m = -min(x, 0)

    each rounded to its stored form, and at most the largest value there. With an outer scale, the largest s of its
    blocks becomes the largest code; with `divided`, the reciprocal of that scale is stored, 1 where s is 0. Elements
    are then encoded with the stored s, and as code 0 where it is 0. The scale of a block with a NaN or an infinity is
    NaN, or its outer scale is; a format of scales without a NaN, and without an outer scale, uses the value nearest to
    0.

    Args:
        scale: how a scale is stored: torch.float16, torch.bfloat16, torch.float32, or a format of non-negative values.
        outer: the block of elements that share an outer scale, the float that multiplies codes of scales: multiples of
            the quantizer's block sizes, or -1. None for no outer scale.
        outer_dtype: the dtype of the outer scale.
        offset: whether offsets are stored, in the same way as scales.
        divided: whether codes are divided by the outer scale.
        search: how many scales are tried for each block, an odd number up to 99, or 0 for the formulas above. The one
            with the least squared error is stored (hop.numerics.scale_search). Scales may then be negative where their
            stored form can, and offsets in a float dtype too: the range of such a block does not include 0. Zeros that
            fill up an incomplete block count as elements.

    It does not accept a scale from the caller. Products of floats with such tensors use dequantized values if there is
    an outer scale or an offset; products of integers with such integer matrices sum codes exactly (docs/scaled.md).
    """

    scale: Format | torch.dtype = torch.float16
    outer: Block | None = None
    outer_dtype: torch.dtype = torch.float16
    offset: bool = False
    divided: bool = False
    search: int = 0

    def __post_init__(self) -> None:
        if _format_of(self.scale) is None and self.scale not in _DTYPES:
            raise TypeError(
                f"StoredScales: scale must be a format or one of {_DTYPES}, got {spelling.shown(self.scale)}; give one "
                "such as torch.float16"
            )
        if self.outer_dtype not in _DTYPES:
            raise TypeError(
                f"StoredScales: outer_dtype must be one of {_DTYPES}, got {spelling.shown(self.outer_dtype)}; use one"
            )
        spelling.flag(self.offset, "StoredScales: offset")
        spelling.flag(self.divided, "StoredScales: divided")
        spelling.integer(self.search, "StoredScales: search")
        if not 0 <= self.search < 100 or (self.search and self.search % 2 == 0):
            raise ValueError(
                f"StoredScales: search must be 0 or an odd number up to 99, got {self.search}; give one such as 9"
            )
        if self.outer is None:
            if self.divided:
                raise ValueError(
                    "StoredScales: divided=True is for codes with an outer scale, but outer is None; give outer"
                )
            return
        object.__setattr__(self, "outer", blocks.checked(self.outer, "StoredScales: outer"))
        if _format_of(self.scale) is None:
            raise ValueError(
                f"StoredScales: outer={self.outer} is for scales that are codes, but scale is {self.scale}; give a "
                "format such as hop.formats.INT8, or leave outer out"
            )

    # ---- stored tensors

    @property
    def given_name(self) -> str:  # type: ignore[override]
        return "scale" if self.outer is None else "outer_scale"

    @property
    def is_compound(self) -> bool:
        return self.offset or self.outer is not None

    @property
    def scale_is_stored(self) -> bool:
        return False

    def has_offset(self) -> bool:
        return self.offset

    def zero(self, format: Format) -> int:
        return 0 if self.offset else super().zero(format)

    def clips(self) -> bool:
        return True

    def refuses_scale(self, prefix: str = "") -> str | None:
        return f"{prefix}scale must be None, because this quantizer's rule finds and rounds it; leave it out"

    def of_blocks(self, change: Callable[[Block], Block]) -> Rule:
        return self if self.outer is None else replace(self, outer=change(self.outer))

    def stored(self, format: Format, block: Block) -> dict[str, tuple[torch.dtype, Block]]:
        dtype: Any = self.scale if (codes := _format_of(self.scale)) is None else codes.dtype
        names = ["scale", "offset"] if self.offset else ["scale"]
        stored = dict.fromkeys(names, (dtype, block))
        if self.outer is None:
            return stored
        return stored | {f"outer_{name}": (self.outer_dtype, self.outer) for name in names}

    def check(self, format: Format, block: Block) -> None:
        if self.offset and not (format.is_integer and format.min == 0):
            raise ValueError(
                f"scale={self}: offsets are for integers from 0 up, but {format.name} starts at {format.min:g}; use "
                "one such as hop.formats.UINT4, or offset=False"
            )
        if self.search:
            scale_search.check(format, self.zero(format), block)
        if self.outer is None:
            return
        ndim = max(len(block), len(self.outer))
        sizes = zip(blocks.per_dimension(block, ndim), blocks.per_dimension(self.outer, ndim), strict=True)
        if any(o != -1 and (b == -1 or o % b) for b, o in sizes):
            raise ValueError(
                f"scale=StoredScales(outer={self.outer}): each size must be -1 or a multiple of that of the block, "
                f"{block}; give such sizes"
            )

    # ---- computation

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        return self._number(tensors, 0)

    def offset_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        return self._number(tensors, 1) if self.offset else None

    def _number(self, tensors: Sequence[Tensor], which: int) -> Tensor:
        outer = None if self.outer is None else tensors[1 + self.offset + which]
        return self._decoded(tensors[which], outer)

    def _decoded(self, stored: Tensor, outer: Tensor | None) -> Tensor:
        """The number that `stored` and its outer scale represent."""
        codes = _format_of(self.scale)
        number = stored.to(torch.float32) if codes is None else codes.decode(stored)
        if outer is None:
            return number
        outer = outer.to(torch.float32)
        return number / outer if self.divided else outer * number

    def find(self, parts: Blocks, format: Format) -> Found:
        s, m = self._by_search(parts, format) if self.search else self._by_range(parts, format)
        scale = self._rounded(parts, s)
        pairs = [scale]
        if m is not None:
            if self.search and self.outer is not None:
                known = self.stored(format, parts.block)
                pair = [t for t in scale if t is not None]
                served = blocks.served(pair, [known["scale"], known["outer_scale"]], parts.block, parts.places)
                m = scale_search.least_error_offset(parts, format, self._decoded(*served), m)
            pairs.append(self._rounded(parts, m))
        inner, outer = ([pair[i] for pair in pairs if pair[i] is not None] for i in (0, 1))
        tensors: tuple[Any, ...] = (*inner, *outer)
        served = blocks.served(tensors, list(self.stored(format, parts.block).values()), parts.block, parts.places)
        s, m = parts.once(self.scale_of(served, format)), self.offset_of(served)
        x = parts.x if m is None else parts.x + parts.once(m)
        return Found(tensors, torch.where(s == 0, 0.0, x / torch.where(s == 0, 1.0, s)))

    def _by_range(self, parts: Blocks, format: Format) -> tuple[Tensor, Tensor | None]:
        """s and m from the largest magnitude of each block, or its range."""
        if not self.offset:
            return _over(nan_beyond(parts.amax_for(format)), format.max - format.zero), None
        above, below = (nan_beyond(end) for end in parts.range())
        return _over((above + below).clamp(max=LARGEST), format.max), below

    def _by_search(self, parts: Blocks, format: Format) -> tuple[Tensor, Tensor | None]:
        """s and m of least squared error."""
        stored = _format_of(self.scale)
        if self.offset:
            s, m = parts.by_part(lambda p: scale_search.least_error_range(p, format, self.search, stored is not None))
            return s, m
        if stored is not None and self.outer is None:
            (s,) = parts.by_part(lambda p: (scale_search.least_error_code(p, format, self.search, stored),))
        else:
            signed = self._is_signed()
            (s,) = parts.by_part(lambda p: (scale_search.least_error_scale(p, format, self.search, signed),))
        return s, None

    def _is_signed(self) -> bool:
        """Whether a searched scale may be negative."""
        stored = _format_of(self.scale)
        return bool(self.search) and (stored is None or (stored.min < 0 and not self.divided))

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        raise ValueError(self.refuses_scale())

    def _rounded(self, parts: Blocks, number: Tensor) -> tuple[Tensor, Tensor | None]:
        """A per-block number in its stored form, and its outer scale."""
        format, dtype = _format_of(self.scale), cast(torch.dtype, self.scale)
        if format is None:
            return _as(number, dtype, parts), None
        if self.outer is None:
            return format.encode(number), None
        outer = self._outer(parts, number, format)
        (unit,) = blocks.served([outer], [(self.outer_dtype, self.outer)], parts.block, parts.places, number.shape)
        unit = 1 / unit.to(torch.float32) if self.divided else unit.to(torch.float32)
        return format.encode(torch.where(unit == 0, 0.0, number / torch.where(unit == 0, 1.0, unit))), outer

    def _outer(self, parts: Blocks, number: Tensor, format: Format) -> Tensor:
        """The outer scale with which the largest of its blocks' numbers becomes the last code of `format`."""
        assert self.outer is not None
        last = format.max
        largest = self._largest(parts, number.clamp(min=0.0) if self._is_signed() else number)
        if self._is_signed():
            below, last = self._largest(parts, (-number).clamp(min=0.0)), format.min
            largest = torch.where(below > largest, -below, largest)
        outer = _over(largest, last)
        if self.divided:
            outer = torch.where(outer == 0, 1.0, 1 / outer).clamp(min=torch.finfo(self.outer_dtype).tiny)
        return _as(outer, self.outer_dtype, parts)

    def _largest(self, parts: Blocks, number: Tensor) -> Tensor:
        """The largest of a per-block number, not negative, among the blocks of each outer scale."""
        assert self.outer is not None
        ndim = len(parts.places)
        sizes = (blocks.per_dimension(b, ndim) for b in (parts.block, self.outer))
        for place, own, of_outer in zip(parts.places, *sizes, strict=True):
            number = _largest(number, place, of_outer if of_outer == -1 else of_outer // own)
        return parts.combined(number, "max", self.outer)


def _format_of(scale: object) -> Format | None:
    """The format of scales that are codes. A function, because Dynamo cannot read a property of a value it created."""
    return scale if isinstance(scale, Format) else None


def _largest(x: Tensor, place: int, count: int) -> Tensor:
    """The largest of each `count` consecutive elements along a dimension, -1 for all; for non-negative values."""
    if count == -1:
        return x.amax(place, keepdim=True) if x.shape[place] != 0 else x.sum(place, keepdim=True)
    if count == 1:
        return x
    groups = -(-x.shape[place] // count)
    behind = [0, 0] * (x.dim() - 1 - place) + [0, groups * count - x.shape[place]]
    return torch.nn.functional.pad(x, behind).unflatten(place, (groups, count)).amax(place + 1)


def _as(number: Tensor, dtype: torch.dtype, parts: Blocks) -> Tensor:
    """A number in a float dtype, saturated; rounded even if it is converted back to float32."""
    largest = torch.finfo(dtype).max
    return parts.once(inductor.rounded(number.clamp(-largest, largest).to(dtype)))


def _over(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded."""
    return x / torch.full_like(x, number)


def has_whole_numbers(q: Any) -> bool:
    """Whether a quantizer's values are integers times stored scales, but its codes differ from these, as for IQ4_NL."""
    is_stored = type(q.scale) is StoredScales and not q.flat and q.layout is None
    return is_stored and q.format.is_whole and not q.format.is_integer
