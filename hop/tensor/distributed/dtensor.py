"""Rewrite DTensor(QuantizedTensor) as QuantizedTensor(DTensor buffers), which operators compute with.

A scale that serves a whole dimension of each part becomes one per index, so that the parts keep their scales and
nothing is moved.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import dtensor, subclasses
from hop.dispatch.composite import Composite
from hop.numerics import copies
from hop.tensor import units
from hop.tensor.quantized import QuantizedTensor
from hop.tensor.table import IndivisibleError


def of_dtensors(x: Any) -> QuantizedTensor:
    """The quantized tensor with DTensor buffers, for a DTensor x whose parts are quantized tensors."""
    t, placements = dtensor.own_part(x), x.placements
    if any(p.is_partial() for p in placements):
        raise ValueError(
            f"an operator got a DTensor of QuantizedTensors placed as {tuple(placements)}, whose values are sums that "
            "no process has; redistribute it first, or hop.dequantize it"
        )
    part = list(x.shape)
    for axis, p in enumerate(placements):
        if p.is_shard():
            part[p.dim] = -(-part[p.dim] // x.device_mesh.size(axis))
    try:
        buffers, quantizer = _parts(t, part, [p.dim for p in placements if p.is_shard()], x.shape)
    except IndivisibleError as cut:
        raise ValueError(f"a DTensor of QuantizedTensors placed as {tuple(placements)}: {cut}") from cut
    placed = {}
    for b in copies.describe(quantizer, x.shape, t.usages):
        sharding = dtensor.Sharding(
            [], x.device_mesh, placements, torch.Size(b.shape), subclasses.contiguous_strides(b.shape)
        )
        placed[b.name] = dtensor.make_dtensor(buffers[b.name].contiguous(), sharding)
    return QuantizedTensor.fitting(placed, quantizer, x.shape, x.dtype)


def _parts(t: Any, part: Sequence[int], dims: Sequence[int], shape: Sequence[int]) -> tuple[dict[str, Tensor], Any]:
    """The buffers of this process's part with scales that split into parts of `part` along `dims`, and the new
    quantizer.
    """
    q, buffers = t.quantizer, t.buffers()
    if not dims:
        return buffers, q
    if q.flat:
        size, block = math.prod(part), q.block[0]
        if set(dims) != {0} or block == -1 or size % block or size % q.per_byte():
            raise IndivisibleError(f"its blocks run over the flattened tensor, and parts of {tuple(part)} cut them")
        return buffers, q
    units_of = units.of_buffers(q, t.usages, t.dim())
    for d in set(dims):
        if part[d] % units_of["codes"][d]:
            raise IndivisibleError(
                f"{units_of['codes'][d]} codes along dimension {d} share a byte, and parts of {part[d]} cut it"
            )
        inner = _unit(units_of["scale"][d], part[d])
        for name in q.stored():
            unit = inner if name == "global_amax" else _unit(units_of[name][d], part[d])
            buffers[name] = _finer(buffers[name], units_of[name][d], unit, d, t.shape[d])
            units_of[name] = (*units_of[name][:d], unit, *units_of[name][d + 1 :])
    return buffers, units.with_units(q, units_of, shape)


def _unit(unit: int, part: int) -> int:
    """The largest unit along a dimension that serves no two parts."""
    return 1 if unit == -1 or unit >= part else math.gcd(unit, part)


def _finer(grid: Tensor, unit: int, finer: int, dim: int, size: int) -> Tensor:
    """Repeat a grid with unit `unit` along a dimension of `size` so that it has one element per `finer` elements."""
    count = -(-size // finer)
    times = count if grid.shape[dim] <= 1 or unit == -1 else unit // finer
    return grid if times == 1 and grid.shape[dim] == count else grid.repeat_interleave(times, dim).narrow(dim, 0, count)


Composite.of_dtensors[QuantizedTensor] = of_dtensors
