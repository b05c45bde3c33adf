"""The block types of GGUF: elements and bytes per block, the quantizer, and the reader of a block's parts.

A reader splits blocks, (n, bytes) uint8, into codes, (n, elements), and scales and offsets, (n, count), in the form of
a QuantizedTensor with n consecutive blocks. Source: the block formats of ggml, which the package gguf describes in its
quants.py; names and numbers are ggml's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hop.numerics import formats
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.stored_scales import E2M1_DOUBLED, E8M0_HALF, UE4M3_HALF, StoredScales

Parts = dict[str, Tensor]


class BlockType(NamedTuple):
    """A type of quantized tensors."""

    name: str
    elements: int
    bytes: int
    quantizer: Quantizer
    read: Callable[[Tensor], Parts]


# ---- fields of bytes


def _fields(x: Tensor, width: int, shifts: Sequence[int]) -> Tensor:
    """Unpack (n, m · width) bytes into (n, m · len(shifts) · width) fields, as wide as the distance between shifts.

    For every `width` bytes, the fields at the first shift come first.
    """
    mask = 2 ** (shifts[1] - shifts[0]) - 1
    cut = x.unflatten(1, (-1, width))
    return torch.stack([(cut >> shift) & mask for shift in shifts], 2).flatten(1)


_HALVES, _QUARTERS, _EIGHTHS = (0, 4), (0, 2, 4, 6), tuple(range(8))


def _half(x: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block."""
    return x[:, at : at + 2].contiguous().view(torch.float16)


def _bits(x: Tensor) -> Tensor:
    """Unpack (n, m) bytes into (n, 8 m) bits, the lowest first."""
    return torch.stack([(x >> shift) & 1 for shift in _EIGHTHS], 2).flatten(1)


def _signed(x: Tensor, zero: int) -> Tensor:
    """Fields below 128 minus `zero`, as int8."""
    return x.to(torch.int8) - zero


# ---- blocks of 32 elements


def _q4_0(b: Tensor) -> Parts:
    return {"codes": _signed(_fields(b[:, 2:], 16, _HALVES), 8), "scale": _half(b, 0)}


def _q4_1(b: Tensor) -> Parts:
    return {"codes": _fields(b[:, 4:], 16, _HALVES), "scale": _half(b, 0), "offset": -_half(b, 2)}


def _q5_0(b: Tensor) -> Parts:
    codes = _fields(b[:, 6:], 16, _HALVES) | (_bits(b[:, 2:6]) << 4)
    return {"codes": _signed(codes, 16), "scale": _half(b, 0)}


def _q5_1(b: Tensor) -> Parts:
    codes = _fields(b[:, 8:], 16, _HALVES) | (_bits(b[:, 4:8]) << 4)
    return {"codes": codes, "scale": _half(b, 0), "offset": -_half(b, 2)}


def _q8_0(b: Tensor) -> Parts:
    return {"codes": b[:, 2:].contiguous().view(torch.int8), "scale": _half(b, 0)}


def _iq4_nl(b: Tensor) -> Parts:
    return {"codes": _fields(b[:, 2:], 16, _HALVES), "scale": _half(b, 0)}


def _mxfp4(b: Tensor) -> Parts:
    return {"codes": _one_zero(_fields(b[:, 1:], 16, _HALVES)), "scale": b[:, :1]}


def _nvfp4(b: Tensor) -> Parts:
    """Blocks of 64 with four scales; a scale of 0x7F means 0, and the high bit is ignored."""
    scale = torch.where(b[:, :4] == 0x7F, 0, b[:, :4] & 0x7F)
    return {"codes": _one_zero(_fields(b[:, 4:], 8, _HALVES)), "scale": scale}


def _one_zero(codes: Tensor) -> Tensor:
    """Codes of e2m1 with 8, -0, replaced by 0."""
    return torch.where(codes == 8, 0, codes)


# ---- superblocks of 256 elements


def _q2_k(b: Tensor) -> Parts:
    codes = _fields(b[:, 16:80], 32, _QUARTERS)
    low, high = b[:, :16] & 15, b[:, :16] >> 4
    return {"codes": codes, "scale": low, "offset": high, "outer_scale": _half(b, 80), "outer_offset": _half(b, 82)}


def _q3_k(b: Tensor) -> Parts:
    high = _fields(b[:, :32], 32, _EIGHTHS)
    codes = _fields(b[:, 32:96], 32, _QUARTERS) | (high << 2)
    scale = _fields(b[:, 96:104], 8, _HALVES) | (_fields(b[:, 104:108], 4, _QUARTERS) << 4)
    return {"codes": _signed(codes, 4), "scale": _signed(scale, 32), "outer_scale": _half(b, 108)}


def _six_bits(b: Tensor) -> Parts:
    """The scales and offsets of Q4_K and Q5_K: eight of 6 bits each in 12 bytes, after the two outer floats."""
    low, middle, high = (b[:, at : at + 4] for at in (4, 8, 12))
    scale = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    offset = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return {"scale": scale, "offset": offset, "outer_scale": _half(b, 0), "outer_offset": _half(b, 2)}


def _q4_k(b: Tensor) -> Parts:
    return {"codes": _fields(b[:, 16:], 32, _HALVES), **_six_bits(b)}


def _q5_k(b: Tensor) -> Parts:
    high = _fields(b[:, 16:48], 32, _EIGHTHS)
    return {"codes": _fields(b[:, 48:], 32, _HALVES) | (high << 4), **_six_bits(b)}


def _q6_k(b: Tensor) -> Parts:
    codes = _fields(b[:, :128], 64, _HALVES) | (_fields(b[:, 128:192], 32, _QUARTERS) << 4)
    scale = b[:, 192:208].contiguous().view(torch.int8)
    return {"codes": _signed(codes, 32), "scale": scale, "outer_scale": _half(b, 208)}


def _iq4_xs(b: Tensor) -> Parts:
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).flatten(1)
    high = torch.stack([(b[:, 2:4] >> shift) & 3 for shift in _QUARTERS], 2).flatten(1)
    scale = _signed(low | (high << 4), 32)
    return {"codes": _fields(b[:, 8:], 16, _HALVES), "scale": scale, "outer_scale": _half(b, 0)}


def _tq1_0(b: Tensor) -> Parts:
    """Five digits of base 3 per byte, four in the last ones: digit k is the integer part of 3 · (byte · 3^k mod 256) /
    256.
    """
    parts = []
    for start, stop, width, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        cut = b[:, start:stop].unflatten(1, (-1, width))
        parts.append(torch.stack([cut * 3**k for k in range(count)], 2).flatten(1))  # modulo 256
    digits = torch.cat(parts, 1).to(torch.int16) * 3 >> 8
    return {"codes": digits.to(torch.uint8), "scale": _half(b, 52)}


def _tq2_0(b: Tensor) -> Parts:
    return {"codes": _fields(b[:, :64], 32, _QUARTERS), "scale": _half(b, 64)}


# ---- the types


_FEW, _MANY = 3, 9  # scales tried for each block; more gain little
_SCALE, _OFFSET = StoredScales(search=_FEW), StoredScales(offset=True, search=_FEW)  # one float16 per block, or two


def _type(
    name: str,
    size: tuple[int, int],
    format: formats.Format,
    group: int,
    read: Callable[[Tensor], Parts],
    rule: StoredScales = _SCALE,
) -> BlockType:
    """A type with blocks of `size` = (elements, bytes), where `group` elements share a scale."""
    planes = Planes() if format.bits in (3, 5, 6) else None
    return BlockType(name, *size, Quantizer(format, (1, group), rule, layout=planes), read)


def _superblock_scales(scale: formats.Format, offset: bool = False) -> StoredScales:
    """Quantized scales with a float16 scale per superblock."""
    return StoredScales(scale, outer=(1, 256), offset=offset, search=_MANY)


TYPES: dict[int, BlockType] = {
    2: _type("Q4_0", (32, 18), formats.INT4, 32, _q4_0),
    3: _type("Q4_1", (32, 20), formats.UINT4, 32, _q4_1, _OFFSET),
    6: _type("Q5_0", (32, 22), formats.INT5, 32, _q5_0),
    7: _type("Q5_1", (32, 24), formats.UINT5, 32, _q5_1, _OFFSET),
    8: _type("Q8_0", (32, 34), formats.INT8, 32, _q8_0, StoredScales()),
    10: _type("Q2_K", (256, 84), formats.UINT2, 16, _q2_k, _superblock_scales(formats.UINT4, offset=True)),
    11: _type("Q3_K", (256, 110), formats.INT3, 16, _q3_k, _superblock_scales(formats.INT6)),
    12: _type("Q4_K", (256, 144), formats.UINT4, 32, _q4_k, _superblock_scales(formats.UINT6, offset=True)),
    13: _type("Q5_K", (256, 176), formats.UINT5, 32, _q5_k, _superblock_scales(formats.UINT6, offset=True)),
    14: _type("Q6_K", (256, 210), formats.INT6, 16, _q6_k, _superblock_scales(formats.INT8)),
    20: _type("IQ4_NL", (32, 18), formats.IQ4_NL, 32, _iq4_nl, StoredScales(search=_MANY)),
    23: _type("IQ4_XS", (256, 136), formats.IQ4_NL, 32, _iq4_xs, _superblock_scales(formats.INT6)),
    34: _type("TQ1_0", (256, 54), formats.UTERNARY, 256, _tq1_0),
    35: _type("TQ2_0", (256, 66), formats.UTERNARY, 256, _tq2_0),
    39: _type("MXFP4", (32, 17), E2M1_DOUBLED, 32, _mxfp4, StoredScales(E8M0_HALF, search=_FEW)),
    40: _type("NVFP4", (64, 36), E2M1_DOUBLED, 16, _nvfp4, StoredScales(UE4M3_HALF, search=_FEW)),
}
"""Block types by ggml's type number."""

PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
"""The dtypes of plain tensors, by ggml's type number."""

OTHERS = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
OTHERS |= {29: "IQ1_M", 41: "Q1_0"}
"""Types that are known by name only."""
