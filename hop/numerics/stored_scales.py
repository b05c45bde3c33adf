"""StoredScales: scales, and offsets, as files of quantized models hold them: in 16 bits, or as codes under a float.

    x ≈ codes · s - m        in float32, the product and the difference each rounded by itself

    s = scale                                       one for each block, a float of 16 bits
    s = decode(scale)                               or the code of a format
    s = outer_scale · decode(scale)                 or such a code under a float that several blocks share
    s = decode(scale) / outer_scale                 or over it
    m                                               likewise, of offset and outer_offset; 0 without offsets

Source: the block formats of ggml, as the package gguf dequantizes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from hop.numerics import blocks, spelling
from hop.numerics.blocks import Block
from hop.numerics.formats import Codebook, Float, Format
from hop.numerics.rule import LARGEST, Blocks, Found, Rule, nan_beyond

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Half of e8m0, whose last code is a number too; half of e4m3 without a sign; e2m1 twice as large. As ggml has them:
# its scales are halves so that elements are integers.
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
    """Scales in a float dtype or in a format, with offsets if `offset` says so; what quantizing stores is

        s = amax / max                          without offsets, of the format's largest number above its zero
        s = (max(x, 0) - min(x, 0)) / high      with offsets, of a format of integers from 0 to high
        m = -min(x, 0)

    each rounded to how it is stored, and at most the largest number there. Under a float of several blocks the largest
    of their s becomes the largest code; what divides codes is the reciprocal of such a float, 1 where s is 0. Elements
    are then encoded by what is stored; where that is 0, as code 0. The scale of a block with a NaN or an infinity is
    NaN, or the float of several blocks is; a format of scales without a NaN, and without such a float, takes the number
    nearest to 0.

    Args:
        scale: how a scale is stored: torch.float16, torch.bfloat16, torch.float32, or a format of numbers from 0 up.
        outer: the elements that share the float by which codes of scales are multiplied, as a block: whole multiples of
            the quantizer's, or -1. None if there is no such float.
        outer_dtype: of that float.
        offset: whether offsets are stored, in the same way as scales.
        divided: whether codes are divided by that float.

    It takes no scale from a caller. Products of floats by such tensors with an outer scale, or with offsets, are those
    of their dequantized numbers; products of integers by matrices of such integers sum codes exactly (docs/scaled.md).
    """

    scale: Format | torch.dtype = torch.float16
    outer: Block | None = None
    outer_dtype: torch.dtype = torch.float16
    offset: bool = False
    divided: bool = False

    def __post_init__(self) -> None:
        if _format_of(self.scale) is None and self.scale not in _DTYPES:
            raise TypeError(
                f"StoredScales: scale must be a format or one of {_DTYPES}, got {spelling.shown(self.scale)}; give one "
                "such as torch.float16"
            )
        if self.outer_dtype not in _DTYPES:
            raise TypeError(
                f"StoredScales: outer_dtype must be one of {_DTYPES}, got {spelling.shown(self.outer_dtype)}; take one"
            )
        spelling.flag(self.offset, "StoredScales: offset")
        spelling.flag(self.divided, "StoredScales: divided")
        if self.outer is None:
            if self.divided:
                raise ValueError(
                    "StoredScales: divided=True is for codes under an outer float, and outer is None; give outer"
                )
            return
        object.__setattr__(self, "outer", blocks.checked(self.outer, "StoredScales: outer"))
        if _format_of(self.scale) is None:
            raise ValueError(
                f"StoredScales: outer={self.outer} is for scales that are codes, and scale is {self.scale}; give a "
                "format such as hop.formats.INT8, or leave outer out"
            )

    # ---- what it stores

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
        return f"{prefix}scale must be None, as this quantizer's rule finds and rounds it; leave it out"

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
                f"scale={self}: offsets are for integers from 0 up, and {format.name} starts at {format.min:g}; take "
                "one such as hop.formats.UINT4, or offset=False"
            )
        if self.outer is None:
            return
        ndim = max(len(block), len(self.outer))
        sizes = zip(blocks.per_dimension(block, ndim), blocks.per_dimension(self.outer, ndim), strict=True)
        if any(o != -1 and (b == -1 or o % b) for b, o in sizes):
            raise ValueError(
                f"scale=StoredScales(outer={self.outer}): each size must be -1 or a multiple of that of the block, "
                f"{block}; give such sizes"
            )

    # ---- the meaning

    def scale_of(self, tensors: Sequence[Tensor], format: Format) -> Tensor:
        return self._number(tensors, 0)

    def offset_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        return self._number(tensors, 1) if self.offset else None

    def _number(self, tensors: Sequence[Tensor], which: int) -> Tensor:
        stored = tensors[which]
        codes = _format_of(self.scale)
        number = stored.to(torch.float32) if codes is None else codes.decode(stored)
        if self.outer is None:
            return number
        outer = tensors[1 + self.offset + which].to(torch.float32)
        return number / outer if self.divided else outer * number

    def find(self, parts: Blocks, format: Format) -> Found:
        if not self.offset:
            values = [_over(nan_beyond(parts.amax_for(format)), format.max - format.zero)]
        else:
            above, below = (nan_beyond(end) for end in parts.range())
            values = [_over((above + below).clamp(max=LARGEST), format.max), below]
        pairs = [self._rounded(parts, number) for number in values]
        inner, outer = ([pair[i] for pair in pairs if pair[i] is not None] for i in (0, 1))
        tensors: tuple[Any, ...] = (*inner, *outer)
        served = blocks.served(tensors, list(self.stored(format, parts.block).values()), parts.block, parts.places)
        s, m = parts.once(self.scale_of(served, format)), self.offset_of(served)
        x = parts.x if m is None else parts.x + parts.once(m)
        return Found(tensors, torch.where(s == 0, 0.0, x / torch.where(s == 0, 1.0, s)))

    def given(self, parts: Blocks, scale: Tensor, zero_point: Tensor | None, format: Format) -> Found:
        raise ValueError(self.refuses_scale())

    def _rounded(self, parts: Blocks, number: Tensor) -> tuple[Tensor, Tensor | None]:
        """A number of each block as it is stored, and the float of several blocks."""
        format, dtype = _format_of(self.scale), cast(torch.dtype, self.scale)
        if format is None:
            return _as(number, dtype, parts), None
        if self.outer is None:
            return format.encode(number), None
        largest, ndim = number, len(parts.places)
        sizes = (blocks.per_dimension(b, ndim) for b in (parts.block, self.outer))
        for place, own, of_outer in zip(parts.places, *sizes, strict=True):
            largest = _largest(largest, place, of_outer if of_outer == -1 else of_outer // own)
        largest = parts.combined(largest, "max", self.outer)
        outer = _over(largest, format.max)
        if self.divided:
            outer = torch.where(outer == 0, 1.0, 1 / outer).clamp(min=torch.finfo(self.outer_dtype).tiny)
        outer = _as(outer, self.outer_dtype, parts)
        (unit,) = blocks.served([outer], [(self.outer_dtype, self.outer)], parts.block, parts.places, number.shape)
        unit = 1 / unit.to(torch.float32) if self.divided else unit.to(torch.float32)
        return format.encode(torch.where(unit == 0, 0.0, number / torch.where(unit == 0, 1.0, unit))), outer


def _format_of(scale: Any) -> Format | None:
    """Of scales that are codes. A function, since Dynamo reads no property of a value that it has made."""
    return scale if isinstance(scale, Format) else None


def _largest(x: Tensor, place: int, count: int) -> Tensor:
    """The largest of each `count` in a row along a dimension, -1 for all; of numbers from 0 up."""
    if count == -1:
        return x.amax(place, keepdim=True) if x.shape[place] != 0 else x.sum(place, keepdim=True)
    if count == 1:
        return x
    groups = -(-x.shape[place] // count)
    behind = [0, 0] * (x.dim() - 1 - place) + [0, groups * count - x.shape[place]]
    return torch.nn.functional.pad(x, behind).unflatten(place, (groups, count)).amax(place + 1)


def _as(number: Tensor, dtype: torch.dtype, parts: Blocks) -> Tensor:
    """A number from 0 up in a float dtype, at most its largest; rounded although it becomes float32 again."""
    return parts.once(number.clamp(max=torch.finfo(dtype).max).to(dtype))


def _over(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded."""
    return x / torch.full_like(x, number)


def has_whole_numbers(q: Any) -> bool:
    """Whether the elements of a quantizer are integers times stored scales, by codes that are others, as IQ4_NL's."""
    is_stored = type(q.scale) is StoredScales and not q.flat and q.layout is None
    return is_stored and q.format.is_whole and not q.format.is_integer
