"""Pack codes of less than a byte, several to a byte along the last dimension, the first in the lowest bits.

    byte[j] = Σ_i code[j · n + i] · 2^(i · bits)            n = 8 / bits codes per byte, i < n

Codes beyond the last are 0. Signed codes are written in two's complement of `bits` bits. Only core ATen is used: a
shift is a product or quotient with a power of two.
"""

import torch
from torch import Tensor

from hop.numerics import blocks

PACKED = (1, 2, 4)
"""Code sizes that are packed; other codes have a byte each."""


def packed_size(size: int, bits: int) -> int:
    """The number of bytes for `size` codes."""
    return -(-size // _per_byte(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack (..., K) integers of `bits` bits, signed or not, to (..., ceil(K · bits / 8)) uint8."""
    n = _per_byte(bits)
    if codes.dim() == 0 or codes.dtype.is_floating_point:
        raise ValueError(
            "pack: codes must be integers with at least one dimension, along which they are packed; got "
            f"{codes.dtype} of {tuple(codes.shape)}"
        )
    size, count = codes.shape[-1], packed_size(codes.shape[-1], bits)  # sizes as multiples of it avoid guards
    masked = torch.bitwise_and(codes, 2**bits - 1)  # DTensor's & does nothing inside a rule (torch 2.13)
    fields = torch.nn.functional.pad(masked, (0, count * n - size)).unflatten(-1, (count, n)).unbind(-1)
    packed = fields[0].to(torch.int16)
    for i, part in enumerate(fields[1:], start=1):
        packed = packed + part.to(torch.int16) * 2 ** (i * bits)
    return packed.to(torch.uint8)


def unpack(packed: Tensor, bits: int, size: int, dtype: torch.dtype) -> Tensor:
    """Unpack (..., ceil(size · bits / 8)) uint8 to (..., size) codes of `dtype`: int8 if signed, else uint8."""
    n = _per_byte(bits)
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise ValueError(
            f"unpack: packed must be torch.uint8 with at least one dimension, got {packed.dtype} of "
            f"{tuple(packed.shape)}"
        )
    if packed.shape[-1] != packed_size(size, bits):
        raise ValueError(
            f"unpack: {size} codes of {bits} bits take {packed_size(size, bits)} bytes, but packed has "
            f"{packed.shape[-1]} in its last dimension"
        )
    wide = packed.to(torch.int16)
    fields = [torch.div(wide, 2 ** (i * bits), rounding_mode="floor") % 2**bits for i in range(n)]
    codes = torch.stack(fields, -1).flatten(-2)
    codes = blocks.merge(codes, (*packed.shape[:-1], size))
    if dtype.is_signed:
        codes = torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    return codes.to(dtype)


def _per_byte(bits: int) -> int:
    if bits not in PACKED:
        raise ValueError(f"bits must be one of {PACKED}, to fill a byte; got {bits}: give each code a byte")
    return 8 // bits
