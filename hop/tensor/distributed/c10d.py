"""In-place collectives of quantized tensors, which DTensor uses to distribute a tensor.

Each runs one plain collective per buffer, with the same options. Operands that do not match raise before anything is
sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import process_groups
from hop.compat.eager import OpOverload
from hop.tensor.distributed.collectives import bits, collective
from hop.tensor.quantized import QuantizedTensor

c10d = torch.ops.c10d


@collective(c10d.broadcast_.default)
def broadcast_(op: OpOverload, tensors: object, group: object, *options: object) -> Any:
    """codes and scales of one process"""
    return tensors, _received(op, tensors, (), options[2:], lambda _, rooms: op(rooms, group, *options))


@collective(c10d.scatter_.default)
def scatter_(op: OpOverload, outputs: Any, inputs: Any, group: Any, *options: Any) -> Any:
    """codes and scales, into a tensor of one quantizer and shape with the parts"""

    def send(name: str, rooms: list[Tensor]) -> Any:
        return op(rooms, [[bits(getattr(t, name)) for t in parts] for parts in inputs], group, *options)

    return outputs, _received(op, outputs, [t for parts in inputs for t in parts], options[1:], send)


def _received(op: OpOverload, into: Any, sent: Sequence[Any], options: Sequence[Any], send: Callable[..., Any]) -> Any:
    """Run a collective that fills the quantized tensors `into`, in place if they are contiguous, and return its work.

    `options` begin with whether the caller waits for the work.
    """
    first = (*into, *sent)[0]
    for x in (*into, *sent):
        if _form(first) != _form(x) or not isinstance(x, QuantizedTensor):
            raise ValueError(
                f"{op}: all tensors must be quantized alike, since codes and scales are sent as they are; got "
                f"{_form(first)} and {_form(x)}"
            )
    works, copies = [], []
    for name in into[0]._names:
        buffers = [getattr(t, name) for t in into]
        rooms = [bits(b) for b in buffers]
        copies += [(b, room) for b, room in zip(buffers, rooms, strict=True) if not b.is_contiguous()]
        works.append(send(name, rooms)[1])

    def finish() -> None:
        for b, room in copies:
            b.copy_(room.view(b.dtype))

    return process_groups.finished_work(works, finish, options[0] if options else True)


def _form(x: Any) -> str:
    if not isinstance(x, QuantizedTensor):
        return f"a plain tensor of {x.dtype} and shape {tuple(x.shape)}"
    return f"{x.quantizer} of {x.dtype}, shape {tuple(x.shape)} and usages {x.usages}"
