"""Encode GGUF blocks as bytes from codes and scales, the inverse of the readers in hop.interchange.gguf_types.

An encoder takes codes, (n, elements), and scales, (n, count), in the form of a QuantizedTensor with the type's
quantizer, and returns blocks, (n, bytes) uint8, from which the reader restores the same parts. If several bytes encode
the same value, one of them is written:

    MXFP4, NVFP4    the code 8 of e2m1, -0, is read as 0; NVFP4's scale 0x7F too, and others without the high bit
    TQ1_0           the byte that ggml writes for five digits; some of the 13 unused bytes are read as the same digits
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hop.interchange.gguf_types import Parts

# ---- bytes of fields


def _joined(fields: Tensor, width: int, shifts: Sequence[int]) -> Tensor:
    """Pack (n, m · len(shifts) · width) fields into (n, m · width) bytes, inverse of gguf_types._fields.

    For every `width` bytes, the fields at the first shift come first.
    """
    cut = fields.view(torch.uint8).unflatten(1, (-1, len(shifts), width))
    out = cut[:, :, 0] << shifts[0]
    for i, shift in enumerate(shifts[1:], 1):
        out = out | (cut[:, :, i] << shift)
    return out.flatten(1)


_HALVES, _QUARTERS, _EIGHTHS = (0, 4), (0, 2, 4, 6), tuple(range(8))


def _unsigned(codes: Tensor, zero: int) -> Tensor:
    """int8 plus `zero`, as uint8."""
    return (codes + zero).view(torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of (n, count) floats or bytes."""
    return x.contiguous().view(torch.uint8)


def _negated(x: Tensor) -> Tensor:
    """The bytes of -x for float16, by flipping the sign bit, which also works for NaN."""
    return _bytes(x.contiguous().view(torch.int16) ^ -(2**15))


def _cat(*parts: Tensor) -> Tensor:
    """Concatenate (n, count) bytes. Copies two bytes at a time if counts are even, in a tenth of torch.cat's time."""
    sizes = [part.shape[1] for part in parts]
    out = torch.empty((len(parts[0]), sum(sizes)), dtype=torch.uint8)
    unit = torch.int16 if not any(n % 2 for n in sizes) else torch.uint8
    for to, part in zip(
        out.view(unit).split([n * out.itemsize // unit.itemsize for n in sizes], 1), parts, strict=True
    ):
        to.copy_(part.contiguous().view(unit))
    return out


# ---- blocks of 32 elements


def _q4_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _joined(_unsigned(p["codes"], 8), 16, _HALVES))


def _q4_1(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _negated(p["offset"]), _joined(p["codes"], 16, _HALVES))


def _five(codes: Tensor) -> Tensor:
    return _cat(_joined(codes >> 4, 1, _EIGHTHS), _joined(codes & 15, 16, _HALVES))


def _q5_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _five(_unsigned(p["codes"], 16)))


def _q5_1(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _negated(p["offset"]), _five(p["codes"]))


def _q8_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _bytes(p["codes"]))


def _nibbles(p: Parts) -> Tensor:
    """Scales, then codes of 4 bits, the first half of a block in the low bits."""
    return _cat(_bytes(p["scale"]), _joined(p["codes"], 16, _HALVES))


def _nvfp4(p: Parts) -> Tensor:
    scale = torch.where(p["scale"] == 0x7F, 0xFF, p["scale"])  # 0x7F would be read as 0
    return _cat(scale, _joined(p["codes"], 8, _HALVES))


# ---- superblocks of 256 elements


def _q2_k(p: Parts) -> Tensor:
    scales = p["scale"] | (p["offset"] << 4)
    return _cat(scales, _joined(p["codes"], 32, _QUARTERS), _bytes(p["outer_scale"]), _bytes(p["outer_offset"]))


def _q3_k(p: Parts) -> Tensor:
    codes, scale = _unsigned(p["codes"], 4), _unsigned(p["scale"], 32)
    low, high = _joined(scale & 15, 8, _HALVES), _joined(scale >> 4, 4, _QUARTERS)
    bits = _joined(codes >> 2, 32, _EIGHTHS)
    return _cat(bits, _joined(codes & 3, 32, _QUARTERS), low, high, _bytes(p["outer_scale"]))


def _six_bits(p: Parts) -> Tensor:
    """The scales and offsets of Q4_K and Q5_K: eight of 6 bits each in 12 bytes, after the two outer floats."""
    (scale, scale_4), (offset, offset_4) = (p[name].unflatten(1, (2, 4)).unbind(1) for name in ("scale", "offset"))
    low, middle = scale | ((scale_4 & 48) << 2), offset | ((offset_4 & 48) << 2)
    high = (scale_4 & 15) | ((offset_4 & 15) << 4)
    return _cat(_bytes(p["outer_scale"]), _bytes(p["outer_offset"]), low, middle, high)


def _q4_k(p: Parts) -> Tensor:
    return _cat(_six_bits(p), _joined(p["codes"], 32, _HALVES))


def _q5_k(p: Parts) -> Tensor:
    codes = p["codes"]
    return _cat(_six_bits(p), _joined(codes >> 4, 32, _EIGHTHS), _joined(codes & 15, 32, _HALVES))


def _q6_k(p: Parts) -> Tensor:
    codes = _unsigned(p["codes"], 32)
    low, high = _joined(codes & 15, 64, _HALVES), _joined(codes >> 4, 32, _QUARTERS)
    return _cat(low, high, _bytes(p["scale"]), _bytes(p["outer_scale"]))


def _iq4_xs(p: Parts) -> Tensor:
    scale = _unsigned(p["scale"], 32)
    high = _joined(scale >> 4, 1, _QUARTERS)
    low = _joined(scale & 15, 1, _HALVES)
    return _cat(_bytes(p["outer_scale"]), high, low, _joined(p["codes"], 16, _HALVES))


def _tq1_0(p: Parts) -> Tensor:
    """Digits d in base 3 as ceil(256/243 · Σ d[k] 3^(4 - k)); the bytes of the last four digits have a fifth digit of
    0.
    """
    digits, parts = p["codes"].to(torch.int32), list[Tensor]()
    for start, stop, width, count in ((0, 160, 32, 5), (160, 240, 16, 5), (240, 256, 4, 4)):
        cut = digits[:, start:stop].unflatten(1, (count, width))
        total = sum(cut[:, k] * 3 ** (4 - k) for k in range(count))
        parts.append(((total * 256 + 242) // 243).to(torch.uint8))  # type: ignore[operator]
    return _cat(*parts, _bytes(p["scale"]))


def _tq2_0(p: Parts) -> Tensor:
    return _cat(_joined(p["codes"], 32, _QUARTERS), _bytes(p["scale"]))


ENCODERS: dict[int, Callable[[Parts], Tensor]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    10: _q2_k,
    11: _q3_k,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    20: _nibbles,
    23: _iq4_xs,
    34: _tq1_0,
    35: _tq2_0,
    39: _nibbles,
    40: _nvfp4,
}
"""Encoders by ggml's type number, as in TYPES."""
