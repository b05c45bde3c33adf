"""Tables of numbers: rounding thresholds, and table lookup."""

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from hop.compat.export import is_lowering


def halfway(values: Sequence[float], tie_goes_up: Callable[[int], bool]) -> list[float]:
    """For each value, the least float32 that rounds to it or to a larger value."""
    result = [-math.inf]
    for lower, (a, b) in enumerate(itertools.pairwise(values)):
        middle: float | Fraction = (a + b) / 2
        if 2 * middle - a != b or 2 * middle - b != a:  # float64 cannot represent it
            middle = (Fraction(a) + Fraction(b)) / 2
        least, up = float32(float(middle)), tie_goes_up(lower)
        while least > middle or (least == middle and up):
            least = _before(least)
        while least < middle or (least == middle and not up):
            least = _after(least)
        result.append(least)
    return result


def float32(x: float) -> float:
    """x rounded to float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def dynamic_map(decades: int, *, signed: bool) -> tuple[float, ...]:
    """The values of a dynamic map: 0, 1, and the midpoints of equal intervals in each decade below 1.

    Each decade has twice as many intervals as the one below; with `signed` half as many, and also the negatives.
    Rounded to float32 at each step, as in checkpoints. Source: Dettmers 2016, "8-Bit Approximations for Parallelism in
    Deep Learning".
    """
    points = [0.0, 1.0]
    for i in range(decades):
        count = 2**i if signed else 2 ** (i + 1)
        low, high, unit = float32(0.1), 1.0, float32(10.0 ** (i - decades + 1))
        step = float32((high - low) / count)
        edges = [float32(low + step * k if 2 * k < count + 1 else high - step * (count - k)) for k in range(count + 1)]
        values = [float32(float32(float32(a + b) / 2) * unit) for a, b in itertools.pairwise(edges)]
        points += values + ([-v for v in values] if signed else [])
    return tuple(sorted(points))


def _after(x: float) -> float:
    """The next float32 above x."""
    if x == 0:
        return math.ldexp(1.0, -149)
    (bits,) = struct.unpack("i", struct.pack("f", x))
    return struct.unpack("f", struct.pack("i", bits + 1 if x > 0 else bits - 1))[0]


def _before(x: float) -> float:
    """The next float32 below x."""
    return -_after(-x)


def tensor(values: Any, device: torch.device) -> Tensor:
    """The numbers as a float32 tensor, also inside of a graph."""
    if not is_lowering():
        return torch.as_tensor(values, dtype=torch.float32, device=device)
    if not isinstance(values[0], float):
        return torch.stack([tensor(row, device) for row in values])
    return torch.cat([torch.full((1,), v, dtype=torch.float32, device=device) for v in values])


def lookup(table: Sequence[float], index: Tensor) -> Tensor:
    """table[index], float32."""
    return _take(tensor(table, index.device), index)


def search(x: Tensor, table: Sequence[float]) -> Tensor:
    """For each element, the position of the last entry of the ascending `table` that is at most it, else 0; int64."""
    size = 1 << (len(table) - 1).bit_length()
    entries = tensor([*table, *[math.nan] * (size - len(table))], x.device)
    result = torch.zeros_like(x, dtype=torch.int64)
    step = size // 2
    while step:
        result = torch.where(x >= _take(entries, result + step), result + step, result)
        step //= 2
    return result


def _take(table: Tensor, index: Tensor) -> Tensor:
    """table[index] without reading a 0-d index tensor."""
    return table.index_select(0, index.reshape(-1)).reshape(index.shape)
