"""Functional collectives of quantized tensors: they send codes and scales, with 8-bit floats as bytes.

Gathers, scatters and broadcasts give the same values in every process. Concatenated parts that each have one scale for
a whole dimension keep their scales: each part is a block of the result. Reductions send codes too; each process adds
the dequantized values in float32, in the order of the ranks, so all get the same sum, which is a plain tensor.

A gather that would split a block raises on all processes before anything is sent.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hop.compat import memory, process_groups
from hop.compat.eager import OpOverload
from hop.compat.process_groups import Group
from hop.compat.pytree import tree_leaves
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.tensor import views
from hop.tensor.buffers.operators import dequantize_buffers
from hop.tensor.quantized import QuantizedTensor
from hop.tensor.table import IndivisibleError, implements, is_moving

P = ParamSpec("P")
R = TypeVar("R")
ops = process_groups.functional

REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda parts: functools.reduce(operator.add, parts),
    "avg": lambda parts: functools.reduce(operator.add, parts) / len(parts),
    "max": lambda parts: functools.reduce(torch.maximum, parts),
    "min": lambda parts: functools.reduce(torch.minimum, parts),
}


def collective(*operators: OpOverload) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a rule that raises where it would split a block.

    Falling back to a plain tensor would make this process run another program than those that have codes.
    """

    def enter(rule: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(rule)
        def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, QuantizedTensor):
                    x.check()
                elif isinstance(x, Tensor):
                    memory.check((x,))
            try:
                return rule(*args, **kwargs)
            except IndivisibleError as cut:
                raise RuntimeError(
                    f"{args[0]} of a QuantizedTensor: {cut}. Use parts that are multiples of the block, in the plain "
                    "row-wise form (hop.unpack, usages='rowwise'), or hop.dequantize them first"
                ) from cut

        return implements(*operators)(refusing)

    return enter


# ---- the rules


@collective(ops.all_gather_into_tensor.default)
def all_gather(op: OpOverload, t: QuantizedTensor, size: int, group: Group) -> QuantizedTensor:
    """codes and scales of all processes; a scale of the whole first dimension applies to its process's part"""
    t = rows(t, size)
    shape = (t.shape[0] * size, *t.shape[1:])
    quantizer = views.joined(t, [t.shape[0]] * size, 0, shape)
    return moved(t, lambda b: op(b, size, group), quantizer=quantizer, shape=shape)


@collective(ops.all_gather_into_tensor_coalesced.default)
def all_gather_coalesced(op: OpOverload, tensors: Sequence[Tensor], size: int, group: Group) -> list[Tensor]:
    """as all_gather_into_tensor, for each tensor"""
    return [ops.all_gather_into_tensor(t, size, group) for t in tensors]


@collective(ops.broadcast.default)
def broadcast(op: OpOverload, t: QuantizedTensor, source: int, group: Group) -> QuantizedTensor:
    """codes and scales of one process"""
    return moved(t, lambda b: op(b, source, group))


@collective(ops.all_to_all_single.default)
def all_to_all(
    op: OpOverload, t: QuantizedTensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> QuantizedTensor:
    """codes and scales; a scale of the whole first dimension is sent with each part"""
    t = rows(t, len(sent))
    shape, quantizer = received_shape(t, received)
    parts = cut(t, sent)
    incoming = [grid_rows(t, n) for n in received]

    def exchange(name: str) -> Tensor:
        grids = [bits(part.buffers()[name][: grid_rows(t, n)[name]]) for part, n in zip(parts, sent, strict=True)]
        return op(torch.cat(grids), [n[name] for n in incoming], [g.shape[0] for g in grids], group)

    return t.rebuilt(
        {name: exchange(name).view(b.dtype) for name, b in t.buffers().items()}, quantizer=quantizer, shape=shape
    )


@collective(ops.all_reduce.default)
def all_reduce(op: OpOverload, t: QuantizedTensor, reduction: str, group: Group) -> Tensor:
    """a plain tensor with the sum, mean, maximum or minimum, equal on all processes; codes are sent"""
    reduce = reduction_of(op, reduction)
    return reduce(_gathered(t, process_groups.group_size(group), group)).to(t.dtype)


@collective(ops.reduce_scatter_tensor.default)
def reduce_scatter(op: OpOverload, t: QuantizedTensor, reduction: str, size: int, group: Group) -> Tensor:
    """as all_reduce, for this process's rows"""
    reduce, n = reduction_of(op, reduction), part_size(op, t, size)
    try:
        parts = cut(t, [n] * size)
    except IndivisibleError:  # send whole tensors; each process takes its rows
        rank = process_groups.group_rank(group)
        return reduce([x.narrow(0, rank * n, n) for x in _gathered(t, size, group)]).to(t.dtype)
    received = {}
    for name in t.buffers():
        grids = [bits(part.buffers()[name]) for part in parts]
        split = [grids[0].shape[0]] * size
        received[name] = ops.wait_tensor(ops.all_to_all_single(torch.cat(grids), split, split, group))
    shape = (n, *t.shape[1:])
    return reduce(numbers_of(t, received, size, shape)).to(t.dtype)


@collective(ops.all_reduce_coalesced.default)
def all_reduce_coalesced(op: OpOverload, tensors: Sequence[object], reduction: str, group: Group) -> Any:
    """as all_reduce, for each tensor"""
    return [ops.all_reduce(t, reduction, group) for t in tensors]


@collective(ops.reduce_scatter_tensor_coalesced.default)
def reduce_scatter_coalesced(op: OpOverload, tensors: Sequence[object], reduction: str, size: int, group: Group) -> Any:
    """as reduce_scatter_tensor, for each tensor"""
    return [ops.reduce_scatter_tensor(t, reduction, size, group) for t in tensors]


@implements(ops.wait_tensor.default)
def wait(op: OpOverload, t: QuantizedTensor) -> Any:
    """the same tensor, once its buffers have arrived"""
    return t.rebuilt({name: op(bits(b)).view(b.dtype) for name, b in t.buffers().items()})


def _register_wrapping() -> None:
    @implements(ops._wrap_tensor_autograd.default)
    def wrapped(op: OpOverload, t: QuantizedTensor) -> Tensor:
        """waited for: a wrapper that waits on first use hides the QuantizedTensor"""
        return ops.wait_tensor(t)


process_groups.when_functional(_register_wrapping)


# ---- helpers


def bits(b: Tensor) -> Tensor:
    """A buffer in the form in which it is sent."""
    b = b.contiguous()
    return b.view(torch.uint8) if b.is_floating_point() and b.itemsize == 1 else b


def moved(t: QuantizedTensor, move: Callable[[Tensor], Tensor], **changes: Any) -> QuantizedTensor:
    """t with each buffer moved by `move`."""
    return t.rebuilt({name: move(bits(b)).view(b.dtype) for name, b in t.buffers().items()}, **changes)


def rows(t: QuantizedTensor, size: int) -> QuantizedTensor:
    """t with a first dimension that can be split over `size` processes."""
    t = t if t.dim() else views.unsqueeze(t, 0)
    if size == 1:
        return t
    if is_moving() and not t.quantizer.flat:  # DTensor gathers along other dimensions by way of the first
        t = views.refined(t, 0)
    return views.separable(t, 0)


def cut(t: QuantizedTensor, sizes: Sequence[int]) -> list[QuantizedTensor]:
    """Split t along its first dimension."""
    if sum(sizes) != t.shape[0] or any(n < 0 for n in sizes):
        raise IndivisibleError(f"parts of {list(sizes)} do not make its first dimension of {t.shape[0]}")
    offsets = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [views.narrow(t, 0, end - n, end) for n, end in zip(sizes, offsets, strict=True)]


def grid_rows(t: QuantizedTensor, n: int) -> dict[str, int]:
    """The first size of each buffer for a part of n rows; 0 for an empty part, which has no scale."""
    described = copies.describe(t.quantizer, (n, *t.shape[1:]), t.usages)
    return {b.name: b.shape[0] if n else 0 for b in described}


def received_shape(t: QuantizedTensor, sizes: Sequence[int]) -> tuple[tuple[int, ...], Quantizer]:
    """The shape and quantizer of concatenated parts like t, with `sizes` rows."""
    shape = (sum(sizes), *t.shape[1:])
    return shape, views.joined(t, [n for n in sizes if n] or [0], 0, shape)


def reduction_of(op: OpOverload, name: str) -> Callable[[list[Tensor]], Tensor]:
    result = REDUCTIONS.get(name)
    if result is None:
        raise NotImplementedError(
            f"{op} of a QuantizedTensor: the reduction must be one of {[*REDUCTIONS]}, got {name}"
        )
    return result


def part_size(op: OpOverload, t: Tensor, size: int) -> int:
    if t.dim() == 0 or t.shape[0] % size:
        raise ValueError(f"{op}: the first dimension must be a multiple of the {size} processes, got {tuple(t.shape)}")
    return t.shape[0] // size


def numbers_of(t: QuantizedTensor, gathered: dict[str, Tensor], size: int, shape: Sequence[int]) -> list[Tensor]:
    """Dequantize tensors of `shape` whose buffers are stacked, to float32."""
    described = copies.describe(t.quantizer, shape, t.usages)
    stacks = [gathered[b.name].view(b.dtype).view(size, *b.shape) for b in described]
    spelled, usages = str(t.quantizer), list(t.usages)
    return [
        dequantize_buffers(spelled, [s[i] for s in stacks], usages, list(shape), torch.float32) for i in range(size)
    ]


def _gathered(t: QuantizedTensor, size: int, group: Group) -> list[Tensor]:
    """The dequantized values of all processes, in float32."""
    gathered = {}
    for name, b in t.buffers().items():
        sent = bits(b).reshape(-1)
        gathered[name] = ops.wait_tensor(ops.all_gather_into_tensor(sent, size, group))
    return numbers_of(t, gathered, size, t.shape)
