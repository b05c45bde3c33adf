"""Blocks of GGUF as bytes, from codes and what is stored beside them: the inverse of what the readers of
hop.interchange.gguf_types do.

An encoder takes codes, (n, elements), and scales, (n, count), as a QuantizedTensor by the type's quantizer holds them,
and gives blocks, (n, bytes) uint8. A reader of the type gives the same parts again. Where several bytes stand for one
number, a block has one of them:

    MXFP4, NVFP4    the code 8 of e2m1, -0, is read as 0; NVFP4's scale 0x7F too, and others without the highest bit
    TQ1_0           the byte that ggml writes for five digits; of the 13 others some are read as the same digits
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hop.interchange.gguf_types import Parts

# ---- bytes of fields


def _joined(fields: Tensor, width: int, shifts: Sequence[int]) -> Tensor:
    """(n, m · len(shifts) · width) fields -> (n, m · width) bytes: of `width` bytes first the fields at the first
    shift."""
    cut = fields.view(torch.uint8).unflatten(1, (-1, len(shifts), width))
    out = cut[:, :, 0] << shifts[0]
    for i, shift in enumerate(shifts[1:], 1):
        out = out | (cut[:, :, i] << shift)
    return out.flatten(1)


_HALVES, _QUARTERS, _EIGHTHS = (0, 4), (0, 2, 4, 6), tuple(range(8))


def _of_bits(bits: Tensor) -> Tensor:
    """(n, 8 m) bits -> (n, m) bytes, the first the lowest."""
    return _joined(bits, 1, _EIGHTHS)


def _unsigned(codes: Tensor, zero: int) -> Tensor:
    """int8 plus `zero`, uint8."""
    return (codes + zero).view(torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    """(n, count) floats or bytes -> (n, bytes)."""
    return x.contiguous().view(torch.uint8)


def _negated(x: Tensor) -> Tensor:
    """The bytes of -x, of float16, without a look at the number."""
    return _bytes(x.contiguous().view(torch.int16) ^ -(2**15))


def _cat(*parts: Tensor) -> Tensor:
    """(n, count) bytes, one after the other; two at once where counts are even, which takes a tenth of torch.cat's
    time."""
    sizes = [part.shape[1] for part in parts]
    out = torch.empty((len(parts[0]), sum(sizes)), dtype=torch.uint8)
    wide = torch.int16 if not any(n % 2 for n in sizes) else torch.uint8
    for to, part in zip(
        out.view(wide).split([n * out.itemsize // wide.itemsize for n in sizes], 1), parts, strict=True
    ):
        to.copy_(part.contiguous().view(wide))
    return out


# ---- blocks of 32 elements


def _q4_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _joined(_unsigned(p["codes"], 8), 16, _HALVES))


def _q4_1(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _negated(p["offset"]), _joined(p["codes"], 16, _HALVES))


def _five(codes: Tensor) -> Tensor:
    return _cat(_of_bits(codes >> 4), _joined(codes & 15, 16, _HALVES))


def _q5_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _five(_unsigned(p["codes"], 16)))


def _q5_1(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _negated(p["offset"]), _five(p["codes"]))


def _q8_0(p: Parts) -> Tensor:
    return _cat(_bytes(p["scale"]), _bytes(p["codes"]))


def _nibbles(p: Parts) -> Tensor:
    """Scales, then codes of 4 bits, the first half in the lower ones."""
    return _cat(_bytes(p["scale"]), _joined(p["codes"], 16, _HALVES))


def _nvfp4(p: Parts) -> Tensor:
    scale = torch.where(p["scale"] == 0x7F, 0xFF, p["scale"])  # as 0x7F it would be read as 0
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
    """The scales and offsets of Q4_K and Q5_K: eight of 6 bits each in 12 bytes, under two floats."""
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
    """Digits d of base 3 as ceil(256/243 · Σ d[k] 3^(4 - k)), the last four ones with a fifth of 0."""
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
"""By ggml's numbers, as TYPES."""
