"""The fastest integer product by CPU level and size: a table written by `python -m benchmarks tune`.

product_choices.json has a row per level (hop.kernels.cpu.native.LEVELS, and "off" where only PyTorch's operators may
run): where it was measured, and for each kind of operands a list of [rows, multiply_adds, way]. The first entry whose
limits a product does not exceed applies; null means unlimited.
"""

import functools
import json
from pathlib import Path

import torch
from torch import Tensor

from hop.numerics.spelling import JsonObject

FILE = Path(__file__).with_name("product_choices.json")
KINDS = ("mm", "linear", "bmm", "int16")
"""Matrices of bytes; the same with contiguous columns of the right factor; batches of bytes; and any with int16."""
_ROW_OF = {"avx512": "avx2", "avx_vnni": "avx2"}  # these two have not been measured


@functools.cache
def table() -> JsonObject:
    """The rows of the table, by level."""
    return json.loads(FILE.read_text("utf-8"))


def kind(a: Tensor, b: Tensor) -> str:
    """The kind of the operands, one of KINDS."""
    if torch.int16 in (a.dtype, b.dtype):
        return "int16"
    if a.dim() == 3:
        return "bmm"
    return "mm" if b.stride(-1) == 1 else "linear"


def fastest(level: str, a: Tensor, b: Tensor) -> str:
    """The fastest way to multiply two operands at a level, one of those of hop.kernels.aten.integer.

    "native" if a size is symbolic or the level has not been measured.
    """
    row, (*lead, m, k), n = table().get(_ROW_OF.get(level, level)), a.shape, b.shape[-1]
    if row is None or not all(isinstance(size, int) for size in (*lead, m, k, n)):
        return "native"
    multiply_adds = m * k * n
    for rows, most, way in row[kind(a, b)]:
        if (rows is None or m <= rows) and (most is None or multiply_adds <= most):
            return way
    return "native"
