"""scaled on DTensors: each process computes its part of the result from resharded codes and scales.

A dimension of the result is sharded where that dimension of an operand is: rows with lhs, columns with rhs, examples of
a convolution, elements of operands with the result's shape. Scales of a sharded operand are sharded along, or
replicated if one serves the whole dimension. A summed dimension is sharded where a factor is and the result is not; the
partial sums are then reduced (hop.impls.scaled.summing). Operands whose blocks or bytes would be split are gathered
first.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import dtensor
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import calls, meaning, summing
from hop.impls.scaled.calls import Call, by_sum, tensors
from hop.impls.scaled.family import Places
from hop.impls.scaled.outputs import activated
from hop.numerics import blocks, copies
from hop.numerics.quantizer import Quantizer
from hop.tensor.buffers.operators import quantize_buffers
from hop.tensor.buffers.sharding import keeps_blocks


def shard(operator: Any, call: Call) -> Any:
    """Compute the result for operands of which some are DTensors. Returns a DTensor or a list of them."""
    every = [*_plain_tensors(call.args), call.output_scale, call.output_zero_point]
    mesh = next(t.device_mesh for t in every if dtensor.is_dtensor(t))  # type: ignore[union-attr]
    shape = calls.shape(call.op, call.args, call.kwargs)
    maps = meaning.of(call).places(call, len(shape))
    chosen: list[int | None] = []
    for axis in range(mesh.ndim):
        placement = None if maps is None else _choose(call, maps, axis, shape, mesh)
        chosen.append(None if placement in chosen else placement)
    # compute floats, and quantize the DTensor by its own rule, unless the output needs the sum
    quantized = isinstance(call.output, Quantizer)
    if quantized and by_sum(call.output):
        chosen = [None] * mesh.ndim
    output: Any = call.output if not quantized or by_sum(call.output) else torch.float32
    by_process = by_sum(output)
    scale, zero_point = (
        _everywhere(t, mesh) if by_process else None for t in (call.output_scale, call.output_zero_point)
    )
    summed = None if maps is None else _summed(call, chosen, mesh)
    args = _local(call, maps, chosen, summed, mesh)
    if summed is not None:
        local = Call(call.op, output, scale, zero_point, tuple(args), call.kwargs)
        out = summing.product(operator, call, local, mesh, summed)
        out = out if by_process else out.to(output)
    else:
        out = operator(call.op, str(output) if by_process else output, scale, zero_point, *encode(args), **call.kwargs)
    if by_process:
        sizes = [size for size, _ in output.buffers(shape).values()]
        return [_wrapped(t, mesh, chosen, size) for t, size in zip(out, sizes, strict=True)]
    y = _wrapped(out, mesh, chosen, shape)
    if not quantized:
        return y
    given = call._replace(args=(y,))
    y = activated(call, y)
    scale, zero_point = calls.fitted(given, y.shape)
    return quantize_buffers(str(call.output), y, scale, zero_point, None, [copies.ROWWISE])


def _plain_tensors(args: Sequence[object]) -> list[Tensor]:
    return [t for x in tensors(args) for t in (x.tensors if isinstance(x, Operand) else [x])]


def _choose(call: Call, maps: dict[int, Places], axis: int, shape: Sequence[int], mesh: Any) -> int | None:
    """The dimension of the result to shard over a mesh axis: the first of an operand that every argument can follow.

    None if there is none.
    """
    for i, own in maps.items():
        x = call.args[i]
        codes: Any = x.tensors[0] if isinstance(x, Operand) else x
        if not dtensor.is_dtensor(codes) or (isinstance(x, Operand) and x.quantizer.is_tiled()):
            continue
        dim = dtensor.sharded_dim(codes.placements[axis])
        if dim is None:
            continue
        for of_result, of_argument in own.items():
            fits = of_argument == dim and x.shape[of_argument] == shape[of_result]
            if fits and all(_follows(call.args[j], m.get(of_result), mesh.size(axis)) for j, m in maps.items()):
                return of_result
    return None


def _summed(call: Call, chosen: Sequence[int | None], mesh: object) -> int | None:
    """The mesh axis over which the summed dimension is sharded; None if there is none."""
    return next((a for a, own in enumerate(chosen) if own is None and summing.is_spread(call, a, mesh)), None)


def _follows(x: Any, dim: int | None, size: int) -> bool:
    """Whether an argument can be sharded along `dim` over `size` processes."""
    if dim is None or isinstance(x, Tensor) or x.shape[dim] == 1:
        return True
    return x.usages == (copies.ROWWISE,) and keeps_blocks(x.quantizer, x.shape, dim, size)


def _local(
    call: Call, maps: dict[int, Places] | None, chosen: Sequence[int | None], summed: int | None, mesh: object
) -> list[Any]:
    """This process's parts of the arguments.

    The result is sharded along the dimensions `chosen`, and the summed dimension over the mesh axis `summed`.
    """
    sums = summing.summed_dimensions(call)

    def local(x: object, i: int | None) -> Any:
        if isinstance(x, list | tuple) and not isinstance(x, Operand):
            return [local(v, None) for v in x]
        if not isinstance(x, Operand | Tensor):
            return x
        places = {} if maps is None or i is None else maps.get(i, {})
        wanted = [None if c is None else places.get(c) for c in chosen]
        if summed is not None and i in sums:
            wanted[summed] = sums[i]
        wanted = [d if d is not None and x.shape[d] != 1 else None for d in wanted]
        return _local_operand(x, wanted, mesh) if isinstance(x, Operand) else _part(x, wanted, mesh)

    return [local(x, i) for i, x in enumerate(call.args)]


def _local_operand(x: Operand, wanted: Sequence[int | None], mesh: object) -> Operand:
    codes, *stored = x.tensors
    parts = [_part(codes, wanted, mesh)]
    ndim, names = x.dim(), copies.names(x.quantizer, x.usages)[1:]
    for name, t in zip(names, stored, strict=True):
        block = x.quantizer.stored().get(name, (None, (-1,)))[1]
        along = blocks.per_dimension(block, ndim)
        parts.append(_part(t, [d if d is not None and along[d] != -1 else None for d in wanted], mesh))
    shape = list(x.shape)
    for d in {d for d in wanted if d is not None}:
        shape[d] = parts[0].shape[d] * (x.quantizer.per_byte() if d == ndim - 1 else 1)
    return x._replace(tensors=tuple(parts), shape=tuple(shape))


def _part(t: Tensor, wanted: Sequence[int | None], mesh: object) -> Tensor:
    """This process's part of t, sharded along the dimensions `wanted`, one per mesh axis."""
    placed = [dtensor.replicate() if d is None else dtensor.sharded(d) for d in wanted]
    return dtensor.local_part(dtensor.as_dtensor(t, mesh), placed)


def _everywhere(t: Tensor | None, mesh: Any) -> Tensor | None:
    return None if t is None else _part(t, [None] * mesh.ndim, mesh)


def _wrapped(t: Tensor, mesh: object, chosen: Sequence[int | None], shape: Sequence[int]) -> Tensor:
    placed = [dtensor.replicate() if d is None else dtensor.sharded(d) for d in chosen]
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return dtensor.make_dtensor(t.contiguous(), dtensor.Sharding([], mesh, placed, torch.Size(shape), strides))
