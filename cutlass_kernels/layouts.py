"""How factors and scales lie in memory for matrix units: padded, in rows or columns, or swizzled in tiles.

Everything works on the bytes of a tensor, so that it serves each dtype of 8 bits, two fp4 codes a byte among them.
"""

import torch
from torch import Tensor

TILE = (128, 4)  # scales of rows and of blocks along K that lie together


def up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """(..., R, C) of 8-bit elements -> (..., rows, columns), with zeros after the last ones."""
    below, beside = rows - x.shape[-2], columns - x.shape[-1]
    if below == 0 and beside == 0:
        return x
    # Codes 0 are zeros in every format, and bytes can be padded where a dtype has no arithmetic.
    return torch.nn.functional.pad(x.view(torch.uint8), (0, beside, 0, below)).view(x.dtype)


def rowwise(x: Tensor) -> Tensor:
    """x with exactly the strides (..., columns, 1), whatever its sizes, at an address of whole 16 bytes."""
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= size
    if x.stride() == tuple(strides) and x.data_ptr() % 16 == 0:
        return x
    return x.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(x.dtype)


def columnwise(x: Tensor) -> Tensor:
    """x with exactly the strides (..., 1, rows)."""
    return rowwise(x.mT).mT


def swizzled(scales: Tensor) -> Tensor:
    """(R, C) scales of 8 bits -> one dimension, up(R, 128) · up(C, 4): tiles of 128 x 4, row by row of tiles.

    In a tile, the scale of row r and block c has place 16 (r mod 32) + 4 (r div 32) + c; what is added is 0. The layout
    is that of the tcgen05 block-scaled instructions, and of cuBLAS."""
    rows, columns = (up(size, tile) for size, tile in zip(scales.shape, TILE, strict=True))
    tiles = padded(scales, rows, columns).view(torch.uint8).reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
