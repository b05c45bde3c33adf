"""Embeddings: the selected rows of a quantized matrix. If the matrix has one scale, so has the result."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.dispatch.operators import EMBEDDING
from hop.impls.scaled.calls import Call, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.operands import plain
from hop.impls.scaled.products import Sum
from hop.numerics import blocks, copies
from hop.tensor.buffers.operators import dequantize_buffers


def _embedding(call: Call) -> Tensor:
    """Dequantize the selected rows only, or the whole matrix where rows share bytes or blocks."""
    weight, indices, *rest = call.args
    q, rows = weight.quantizer, indices.reshape(-1)
    is_transposed = q.is_tiled() and q.layout.columns
    if q.flat or is_transposed or weight.dim() != 2 or weight.usages != (copies.ROWWISE,):
        return call.op(values(weight, torch.float32), indices, *rest)
    taken, read = [_codes(weight, rows)], q.plain if q.is_tiled() else q
    for name, (_, block) in read.stored().items():
        along = blocks.per_dimension(block, 2)[0]
        t = weight.buffers[name]
        taken.append(
            t if along == -1 else _take(t, rows if along == 1 else torch.div(rows, along, rounding_mode="floor"))
        )
    quantizer = replace(read, block=_of_rows(read.block), scale=read.scale.of_blocks(_of_rows))
    shape = [*rows.shape, weight.shape[1]]
    numbers = dequantize_buffers(str(quantizer), taken, [copies.ROWWISE], shape, torch.float32)
    return numbers.reshape([*indices.shape, weight.shape[1]])


def _declines_sum(call: Call) -> str | None:
    whole = all(b == -1 for b in blocks.per_dimension(call.args[0].quantizer.block, 2))
    return None if whole else "it takes a matrix with one scale"


def _exactly(call: Call) -> Sum:
    table, indices = plain(call.args[0], call.args[0].usages[0]), call.args[1]
    step, zero = table.scale.reshape(()), table.zero
    rows = _take(table.codes, indices.reshape(-1)).to(torch.int32)
    rows = rows - (zero.reshape(()).to(torch.int32) if isinstance(zero, Tensor) else zero)
    return Sum(rows.reshape([*indices.shape, rows.shape[1]]), step, torch.ones_like(step))


def _places(call: Call, ndim: int) -> dict[int, Places]:
    return {0: {ndim - 1: 1}, 1: {d: d for d in range(ndim - 1)}}


def _codes(weight: Any, rows: Tensor) -> Tensor:
    """The codes of selected rows, in the plain layout."""
    codes, q = weight.buffers["codes"], weight.quantizer
    if not q.is_tiled():
        return _take(codes, rows)
    known = rows.new_zeros(1).expand(weight.shape[0]).index_select(0, rows)  # index_select raises for rows out of range
    return _by_bytes(codes, lambda t: q.layout.rows(t, rows + known, weight.shape[1]))


def _of_rows(block: tuple[int, ...]) -> tuple[int, ...]:
    """The block of rows that were selected one by one."""
    rows, columns = blocks.per_dimension(block, 2)
    return (-1 if rows == -1 else 1, columns)


def _take(t: Tensor, rows: Tensor) -> Tensor:
    return _by_bytes(t, lambda t: t.index_select(0, rows))


def _by_bytes(t: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
    """select(t), which PyTorch does not implement for 8-bit floats on every GPU.

    On the CPU it does, and core ATen has no operator that views a tensor in another dtype.
    """
    if t.is_cpu or not t.dtype.is_floating_point or t.dtype.itemsize > 1:
        return select(t)
    return select(t.view(torch.uint8)).view(t.dtype)


MEANINGS = {EMBEDDING: Meaning(_embedding, _exactly, _declines_sum, _places)}
