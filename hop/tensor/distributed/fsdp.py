"""The codes and scales that FSDP2 (torch.distributed.fsdp.fully_shard) sends to gather a quantized parameter.

A tensor of R rows is split into parts of c = ceil(R / processes) rows; the last ones may have fewer, or none. A buffer
is a grid of units (hop.tensor.units), each of u rows of the tensor. A process sends the units that begin in its part;
for a unit that serves all rows each sends its copy, and the first process's is used. Everything is sent as bytes,
padded to one size for all processes.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hop.compat import dtensor, eager, process_groups
from hop.numerics import blocks, copies
from hop.numerics.quantizer import Quantizer
from hop.tensor.quantized import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh


class Parts(NamedTuple):
    """The split of `rows` rows into one part per process."""

    rows: int
    processes: int

    @property
    def size(self) -> int:
        """The number of rows of a part, except the last ones."""
        return -(-self.rows // self.processes)

    def start(self, rank: int) -> int:
        """The first row of a part."""
        return min(rank * self.size, self.rows)

    def length(self, rank: int) -> int:
        """The number of rows of a part."""
        return self.start(rank + 1) - self.start(rank)

    def units(self, rank: int, unit: int) -> tuple[int, int]:
        """The units of `unit` rows that begin in a part, as (first, end)."""
        return -(-self.start(rank) // unit), -(-self.start(rank + 1) // unit)


class Sent(NamedTuple):
    """The receiver's information in addition to the bytes."""

    quantizer: Quantizer
    shape: tuple[int, ...]  # of the whole tensor
    parts: Parts
    alone: tuple[Tensor, ...] = ()  # with a single process: the inputs it would send

    def with_inputs(self, inputs: Sequence[Tensor]) -> "Sent":
        """Keep the inputs of a single process, where FSDP2 gathers nothing and passes on only the first input (torch
        2.13).
        """
        return self._replace(alone=tuple(t.clone() for t in inputs)) if self.parts.processes == 1 else self


def row_units(quantizer: Quantizer, ndim: int) -> dict[str, int]:
    """For each buffer, the number of rows of the tensor that one of its rows serves; -1 for all."""
    rows = {name: blocks.per_dimension(block, ndim)[0] for name, (_, block) in quantizer.stored().items()}
    return {"codes": 1} | rows


def send(sent: Sent, grids: dict[str, Tensor]) -> list[Tensor]:
    """uint8 tensors with the rows of each buffer that this process sends; their sizes are equal in all processes."""
    result = []
    for name, unit in row_units(sent.quantizer, len(sent.shape)).items():
        grid = grids[name].contiguous().view(torch.uint8)
        missing = _sent_rows(sent.parts, unit) - grid.shape[0]
        result.append(grid if not missing else torch.cat([grid, grid.new_zeros(missing, *grid.shape[1:])]))
    return result


def receive(sent: Sent, gathered: Sequence[Tensor], dtype: torch.dtype) -> QuantizedTensor:
    """The whole tensor from the gathered results of `send`, (processes · rows, ...) for each buffer.

    Its buffers are views if every part ends with a unit.
    """
    described = sent.quantizer.buffers(sent.shape)
    units = row_units(sent.quantizer, len(sent.shape))
    grids = {}
    for (name, (shape, held)), data in zip(described.items(), sent.alone or gathered, strict=True):
        grids[name] = _joined(data, sent.parts, units[name], shape[0]).view(held)
    return QuantizedTensor.fitting(grids, sent.quantizer, sent.shape, dtype)


def into(out: object, new: QuantizedTensor) -> None:
    """Copy `new` into `out`, which FSDP2 keeps, except for buffers that share memory already."""
    mine = dtensor.own_part(out)
    for own, other in zip(mine.buffers().values(), new.buffers().values(), strict=True):
        if own.data_ptr() != other.data_ptr():
            with eager.preserve_version(own):  # memory that autograd saved is refilled with the same values
                own.copy_(other)


def own_memory(t: QuantizedTensor, gathered: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The buffers of t that share no memory with `gathered`: FSDP2 frees them with those."""
    known = {x.untyped_storage().data_ptr() for x in gathered}
    return tuple(b for b in t.buffers().values() if b.untyped_storage().data_ptr() not in known)


def _sent_rows(parts: Parts, unit: int) -> int:
    return 1 if unit == -1 else -(-parts.size // unit)


def _joined(data: Tensor, parts: Parts, unit: int, rows: int) -> Tensor:
    """The `rows` rows of a buffer, without padding."""
    if unit == -1 or parts.size % unit == 0 or parts.size == parts.rows:
        return data[:rows]
    each = data.unflatten(0, (parts.processes, _sent_rows(parts, unit)))
    counts = [last - first for first, last in (parts.units(rank, unit) for rank in range(parts.processes))]
    return torch.cat([piece[:n] for piece, n in zip(each, counts, strict=True)])


# ---- parameters that are QuantizedTensors


def check(t: QuantizedTensor) -> None:
    """Raise ValueError unless FSDP2 can shard t by rows, flatten it, and gather it, all as codes."""
    q = t.quantizer
    if q.is_tiled():
        raise ValueError(
            f"fully_shard: a QuantizedTensor must have rows that can be split, but {q} is packed for products; "
            "quantize or freeze with pack=False, or call hop.unpack"
        )
    if t.usages != (copies.ROWWISE,) or q.flat:
        raise ValueError(
            f"fully_shard: a QuantizedTensor must have only a row-wise copy, and blocks that do not run over "
            f"the flattened tensor; got usages={t.usages} and {q}; quantize it so"
        )
    if any(unit not in (1, -1) for unit in row_units(q, t.dim()).values()):
        raise ValueError(
            f"fully_shard: blocks of several rows of a QuantizedTensor, {q}, cannot be split or flattened without "
            "their values; use blocks along rows, or shard the float weight, prepared by hop.nn.gather_as_codes"
        )


def pre_all_gather(t: QuantizedTensor, mesh: "DeviceMesh") -> tuple[tuple[Tensor, ...], Sent]:
    """Implement fsdp_pre_all_gather for a part of a QuantizedTensor."""
    t.check()
    lengths = t.__dict__.get("_lengths")
    if lengths is None:  # of the parts of all processes: constant for the life of the tensor
        lengths = t._lengths = process_groups.gather_numbers(t.shape[0], mesh)  # type: ignore[attr-defined]
    parts = Parts(sum(lengths), len(lengths))
    if lengths != [parts.length(rank) for rank in range(parts.processes)]:
        raise ValueError(
            f"fully_shard: a QuantizedTensor must be sharded along its first dimension, got parts of {lengths} rows; "
            "leave shard_placement_fn out"
        )
    sent = Sent(t.quantizer, (parts.rows, *t.shape[1:]), parts)
    inputs = send(sent, t.buffers())
    return tuple(inputs), sent.with_inputs(inputs)


def post_all_gather(
    gathered: Sequence[Tensor], sent: Sent, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """Implement fsdp_post_all_gather for a QuantizedTensor."""
    new = receive(sent, gathered, dtype)
    if out is not None:
        return into(out, new)
    return new, own_memory(new, gathered)


def bytes_sent(quantizer: Quantizer, shape: Sequence[int], processes: int = 1) -> int:
    """Total bytes that all processes send when a tensor of `shape` is gathered, including padding."""
    parts, units = Parts(shape[0], processes), row_units(quantizer, len(shape))
    total = 0
    for name, (size, dtype) in quantizer.buffers(shape).items():
        total += _sent_rows(parts, units[name]) * math.prod(size[1:]) * dtype.itemsize
    return total * processes


def _gathering(t: QuantizedTensor) -> "Callable[[DeviceMesh], tuple[tuple[Tensor, ...], Sent]]":
    """fsdp_pre_all_gather: a function from a mesh to the data to send of this part of a parameter.

    fully_shard looks this attribute up, so it raises early for unsupported tensors.
    """
    check(t)
    return lambda mesh: pre_all_gather(t, mesh)


def _gathered(
    t: QuantizedTensor,
    gathered: Sequence[Tensor],
    sent: Sent,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """fsdp_post_all_gather: the whole parameter, appearing in `dtype`; or fill `out`."""
    return post_all_gather(gathered, sent, dtype, out)


QuantizedTensor.fsdp_pre_all_gather = property(_gathering)  # type: ignore[attr-defined]
QuantizedTensor.fsdp_post_all_gather = _gathered  # type: ignore[attr-defined]
