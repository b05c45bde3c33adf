"""In-place collectives of quantized tensors, which DTensor uses to distribute a tensor.

Each runs one plain collective per buffer, with the same options. Operands that do not match raise before anything is
sent.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hop.compat import process_groups
from hop.compat.eager import OpOverload
from hop.compat.process_groups import Group
from hop.tensor.distributed.collectives import bits, collective
from hop.tensor.quantized import QuantizedTensor

c10d = torch.ops.c10d
InPlace = tuple[Sequence[Tensor], torch.ScriptObject]
"""The result of an in-place collective: the tensors that it filled, and its work."""


@collective(c10d.broadcast_.default)
def broadcast_(op: OpOverload, tensors: Sequence[Tensor], group: Group, *options: object) -> InPlace:
    """codes and scales of one process"""
    return tensors, _received(op, tensors, (), options[2:], lambda _, rooms: op(rooms, group, *options))


@collective(c10d.scatter_.default)
def scatter_(
    op: OpOverload, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], group: Group, *options: object
) -> InPlace:
    """codes and scales, into a tensor of one quantizer and shape with the parts"""

    def send(name: str, rooms: list[Tensor]) -> tuple[object, torch.ScriptObject]:
        return op(rooms, [[bits(getattr(t, name)) for t in parts] for parts in inputs], group, *options)

    return outputs, _received(op, outputs, [t for parts in inputs for t in parts], options[1:], send)


def _received(
    op: OpOverload,
    into: Sequence[Tensor],
    sent: Sequence[Tensor],
    options: Sequence[object],
    send: Callable[[str, list[Tensor]], tuple[object, torch.ScriptObject]],
) -> torch.ScriptObject:
    """Run a collective that fills the quantized tensors `into`, in place if they are contiguous, and return its work.

    `options` begin with whether the caller waits for the work.
    """
    first, *others = *into, *sent
    other = next((x for x in others if _form(x) != _form(first)), first)
    if not isinstance(first, QuantizedTensor) or other is not first:
        raise ValueError(
            f"{op}: all tensors must be quantized alike, since codes and scales are sent as they are; got "
            f"{_form(first)} and {_form(other)}"
        )
    works, copies = [], []
    for name in first._names:
        buffers = [getattr(t, name) for t in into]
        rooms = [bits(b) for b in buffers]
        copies += [(b, room) for b, room in zip(buffers, rooms, strict=True) if not b.is_contiguous()]
        works.append(send(name, rooms)[1])

    def finish() -> None:
        for b, room in copies:
            b.copy_(room.view(b.dtype))

    return process_groups.finished_work(works, finish, bool(options[0]) if options else True)


def _form(x: Tensor) -> str:
    if not isinstance(x, QuantizedTensor):
        return f"a plain tensor of {x.dtype} and shape {tuple(x.shape)}"
    return f"{x.quantizer} of {x.dtype}, shape {tuple(x.shape)} and usages {x.usages}"
