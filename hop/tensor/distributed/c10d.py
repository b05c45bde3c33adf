"""Collectives of quantized tensors that write into tensors given to them, as torch.distributed has them.

Each is one plain collective for each buffer, with the same options. What is written into is a quantized tensor like the
parts, or a plain one, which gets the numbers. Operands that do not fit are refused before anything is sent.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import process_groups
from hop.compat.eager import OpOverload
from hop.tensor import views
from hop.tensor.distributed import collectives
from hop.tensor.distributed.collectives import bits, collective, grid_rows, numbers_of, reduction_of, rows
from hop.tensor.quantized import QuantizedTensor

c10d = torch.ops.c10d

# ---- parts that stay as they are


@collective(c10d.allgather_.default)
def allgather_(op: OpOverload, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True, *timeout: Any) -> Any:
    """codes and scales of all processes, into tensors of one quantizer and shape"""
    (into,), (t,) = outputs, inputs
    inbox = _Inbox(op, into, [t])
    for name in t._names:
        inbox.works.append(op([inbox.of(name)], [bits(getattr(t, name))], group, asynchronous, *timeout)[1])
    return outputs, inbox.work(asynchronous)


@collective(c10d.broadcast_.default)
def broadcast_(
    op: OpOverload, tensors: Any, group: Any, root: int, root_tensor: int, asynchronous: bool = True, *timeout: Any
) -> Any:
    """codes and scales of one process"""
    inbox = _Inbox(op, tensors, [], keep=True)
    for name in tensors[0]._names:
        inbox.works.append(op(inbox.of(name), group, root, root_tensor, asynchronous, *timeout)[1])
    return tensors, inbox.work(asynchronous)


@collective(c10d.scatter_.default)
def scatter_(
    op: OpOverload, outputs: Any, inputs: Any, group: Any, root: int, asynchronous: bool = True, *timeout: Any
) -> Any:
    """codes and scales, into a tensor of one quantizer and shape with the parts"""
    inbox = _Inbox(op, outputs, [t for parts in inputs for t in parts])
    for name in outputs[0]._names:
        sent = [[bits(getattr(t, name)) for t in parts] for parts in inputs]
        inbox.works.append(op(inbox.of(name), sent, group, root, asynchronous, *timeout)[1])
    return outputs, inbox.work(asynchronous)


@collective(c10d.gather_.default)
def gather_(
    op: OpOverload, outputs: Any, inputs: Any, group: Any, root: int, asynchronous: bool = True, *timeout: Any
) -> Any:
    """as allgather_, in one process"""
    (t,) = inputs
    inbox = _Inbox(op, [x for into in outputs for x in into], [t])
    for name in t._names:
        into = [inbox.of(name)] if outputs else []
        inbox.works.append(op(into, [bits(getattr(t, name))], group, root, asynchronous, *timeout))
    return inbox.work(asynchronous)


@collective(c10d.alltoall_.default)
def alltoall_(op: OpOverload, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True, *timeout: Any) -> Any:
    """codes and scales, between tensors of one quantizer and shape"""
    works, rooms = _Inbox(op, outputs, inputs).works, {}
    for name in outputs[0]._names:  # as one tensor: Gloo has no lists here
        sent = torch.cat([bits(getattr(t, name)).reshape(-1) for t in inputs])
        rooms[name] = torch.empty_like(sent)
        works.append(c10d.alltoall_base_(rooms[name], sent, group, [], [], asynchronous, *timeout))

    def finish() -> None:
        for name, room in rooms.items():
            for output, part in zip(outputs, room.chunk(len(outputs)), strict=True):
                into = getattr(output, name)
                into.copy_(part.view(into.dtype).view(into.shape))

    return outputs, process_groups.finished_work(works, finish, asynchronous)


@collective(c10d.send.default)
def send(op: OpOverload, tensors: Any, group: Any, to: int, tag: int) -> Any:
    """codes and scales, one after the other"""
    (t,) = tensors
    works = [op([bits(b)], group, to, tag) for b in t.buffers().values()]
    return process_groups.finished_work(works, lambda: None, True)


@collective(c10d.recv_.default)
def recv_(op: OpOverload, tensors: Any, group: Any, source: int, tag: int) -> Any:
    """codes and scales, into a tensor of the sender's quantizer and shape"""
    inbox = _Inbox(op, tensors, [])
    inbox.works = [op(inbox.of(name), group, source, tag) for name in tensors[0]._names]
    return inbox.work(True)


# ---- parts side by side


@collective(c10d._allgather_base_.default)
def allgather_base(op: OpOverload, output: Tensor, t: Any, group: Any, asynchronous: bool = True, *timeout: Any) -> Any:
    """as all_gather_into_tensor, into a tensor of its quantizer or a plain one"""
    size = process_groups.group_size(group)
    given, t = output, rows(_quantized(op, t), size)
    shape = (t.shape[0] * size, *t.shape[1:])
    quantizer = views.joined(t, [t.shape[0]] * size, 0, shape)
    inbox = _Joined(op, output, t, quantizer, shape)
    for name, b in t.buffers().items():
        sent = bits(b)
        into = inbox.room(name, (sent.shape[0] * size, *sent.shape[1:]), sent.dtype)
        inbox.works.append(op(into, sent, group, asynchronous, *timeout)[1])
    return given, inbox.work(asynchronous)


@collective(c10d.allgather_into_tensor_coalesced_.default)
def allgather_coalesced(op: OpOverload, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True) -> Any:
    """as _allgather_base_, each"""
    pairs = zip(outputs, inputs, strict=True)
    works = [c10d._allgather_base_(output, t, group, asynchronous)[1] for output, t in pairs]
    return process_groups.finished_work(works, lambda: None, asynchronous)


@collective(c10d.alltoall_base_.default)
def alltoall_base(
    op: OpOverload,
    output: Tensor,
    t: Any,
    group: Any,
    received: Sequence[int],
    sent: Sequence[int],
    asynchronous: bool = True,
    *timeout: Any,
) -> Any:
    """as all_to_all_single, into a tensor of its quantizer or a plain one"""
    size = process_groups.group_size(group)
    t = rows(_quantized(op, t), size)
    sent = sent or [collectives.part_size(op, t, size)] * size
    received = received or [collectives.part_size(op, output, size)] * size
    shape, quantizer = collectives.received_shape(t, received)
    parts = collectives.cut(t, sent)
    inbox, incoming = _Joined(op, output, t, quantizer, shape), [grid_rows(t, n) for n in received]
    for name in t._names:
        grids = [bits(part.buffers()[name][: grid_rows(t, n)[name]]) for part, n in zip(parts, sent, strict=True)]
        counts = [n[name] for n in incoming]
        into = inbox.room(name, (sum(counts), *grids[0].shape[1:]), grids[0].dtype)
        counts_sent = [g.shape[0] for g in grids]
        inbox.works.append(op(into, torch.cat(grids), group, counts, counts_sent, asynchronous, *timeout))
    return inbox.work(asynchronous)


# ---- sums


@collective(c10d.allreduce_.default)
def allreduce_(
    op: OpOverload, tensors: Any, group: Any, reduction: Any, sparse: Any, asynchronous: bool = True, *timeout: Any
) -> Any:
    """as all_reduce, quantized anew: the numbers travel as codes"""
    return tensors, _summed(op, tensors, tensors, group, reduction, asynchronous, whole=True)


@collective(c10d.allreduce_coalesced_.default)
def allreduce_coalesced(
    op: OpOverload, tensors: Any, group: Any, reduction: Any, asynchronous: bool = True, *timeout: Any
) -> Any:
    """as allreduce_, each"""
    return _summed(op, tensors, tensors, group, reduction, asynchronous, whole=True)


@collective(c10d.reduce_.default)
def reduce_(
    op: OpOverload,
    tensors: Any,
    group: Any,
    reduction: Any,
    root: int,
    root_tensor: int,
    asynchronous: bool = True,
    *timeout: Any,
) -> Any:
    """as allreduce_, in one process"""
    into = tensors if process_groups.group_rank(group) == root else []
    return _summed(op, into, tensors, group, reduction, asynchronous, whole=True)


@collective(c10d._reduce_scatter_base_.default)
def reduce_scatter_base(
    op: OpOverload, output: Any, t: Any, group: Any, reduction: Any, asynchronous: bool = True, *timeout: Any
) -> Any:
    """this process's part of the sum, quantized anew if what it is written to is quantized"""
    return output, _summed(op, [output], [t], group, reduction, asynchronous, whole=False)


@collective(c10d.reduce_scatter_tensor_coalesced_.default)
def reduce_scatter_coalesced(
    op: OpOverload, outputs: Any, inputs: Any, group: Any, reduction: Any, asynchronous: bool = True, *timeout: Any
) -> Any:
    """as _reduce_scatter_base_, each"""
    return _summed(op, outputs, inputs, group, reduction, asynchronous, whole=False)


def _summed(
    op: OpOverload, outputs: Any, inputs: Any, group: Any, reduction: Any, asynchronous: bool, *, whole: bool
) -> Any:
    """The work that writes to `outputs` the reduction of `inputs`, whole, or this process's rows of it."""
    size, rank = process_groups.group_size(group), process_groups.group_rank(group)
    reduce = reduction_of(op, process_groups.reduction_name(reduction))
    inputs = [_quantized(op, t) for t in inputs]
    for output, t in zip(outputs, inputs, strict=False):
        wanted = t.shape if whole else (collectives.part_size(op, t, size), *t.shape[1:])
        if tuple(output.shape) != tuple(wanted):
            raise ValueError(f"{op}: the output must have shape {tuple(wanted)}, got {tuple(output.shape)}")
    works, rooms = [], []
    for t in inputs:
        room = {name: bits(b).new_empty(size * b.numel()) for name, b in t.buffers().items()}
        for name, b in t.buffers().items():
            works.append(c10d._allgather_base_(room[name], bits(b).reshape(-1), group, asynchronous)[1])
        rooms.append(room)

    def finish() -> None:
        for output, t, room in zip(outputs, inputs, rooms, strict=False):
            total = reduce(numbers_of(t, room, size, t.shape)).to(output.dtype)
            output.copy_(total if whole else total.narrow(0, rank * output.shape[0], output.shape[0]))

    return process_groups.finished_work(works, finish, asynchronous)


# ---- what is written into


class _Inbox:
    """Quantized tensors that buffers are received into, in place where they are contiguous."""

    def __init__(self, op: OpOverload, into: Sequence[Any], sent: Sequence[Any], *, keep: bool = False) -> None:
        self.into, self.keep, self.works = into, keep, []
        self.copies: list[tuple[Tensor, Tensor]] = []
        first = (*into, *sent)[0]
        for x in (*into, *sent):
            form = [(_form(y)) for y in (first, x)]
            if form[0] != form[1] or not isinstance(x, QuantizedTensor):
                raise ValueError(
                    f"{op}: all tensors must be quantized alike, since codes and scales travel as they are; got "
                    f"{form[0]} beside {form[1]}"
                )

    def of(self, name: str) -> list[Tensor]:
        return [self._room(getattr(t, name)) for t in self.into]

    def _room(self, b: Tensor) -> Tensor:
        if b.is_contiguous():
            return bits(b)
        room = bits(b) if self.keep else torch.empty_like(bits(b))
        self.copies.append((b, room))
        return room

    def work(self, asynchronous: bool) -> Any:
        def finish() -> None:
            for b, room in self.copies:
                b.copy_(room.view(b.dtype))

        return process_groups.finished_work(self.works, finish, asynchronous)


class _Joined:
    """A tensor that parts like t are received into, side by side: quantized by `quantizer`, or plain."""

    def __init__(self, op: OpOverload, output: Any, t: Any, quantizer: Any, shape: Sequence[int]) -> None:
        self.output, self.t, self.quantizer, self.shape = output, t, quantizer, shape
        self.works, self.rooms = [], {}
        is_quantized = isinstance(output, QuantizedTensor)
        wanted = _form(t.rebuilt(t.buffers(), quantizer=quantizer, shape=shape))
        if output.numel() != t.shape.numel() // max(t.shape[0], 1) * shape[0] or (
            is_quantized and _form(output) != wanted
        ):
            raise ValueError(
                f"{op}: the output must be {wanted}, since parts keep their scales, or a plain tensor of that many "
                f"elements; got {_form(output)}"
            )

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.rooms[name] = torch.empty(shape, dtype=dtype, device=self.output.device)
        return self.rooms[name]

    def work(self, asynchronous: bool) -> Any:
        return process_groups.finished_work(self.works, self._finish, asynchronous)

    def _finish(self) -> None:
        own = self.t.buffers()
        made = {name: room.view(own[name].dtype) for name, room in self.rooms.items()}
        whole = self.t.rebuilt(made, quantizer=self.quantizer, shape=self.shape)
        if isinstance(self.output, QuantizedTensor):
            self.output.copy_(whole)
        else:
            self.output.copy_(whole.numbers().view(self.output.shape))


def _form(x: Any) -> str:
    if not isinstance(x, QuantizedTensor):
        return f"a plain tensor of {x.dtype} and shape {tuple(x.shape)}"
    return f"{x.quantizer} of {x.dtype}, shape {tuple(x.shape)} and usages {x.usages}"


def _quantized(op: OpOverload, t: Any) -> Any:
    if not isinstance(t, QuantizedTensor):
        raise ValueError(f"{op}: a plain tensor cannot be sent into a quantized one; hop.quantize it first")
    return t
