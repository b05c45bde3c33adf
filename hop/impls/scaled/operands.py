"""Plain operands: a code per element, and a float32 scale and a zero point or offset per block."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Declined
from hop.dispatch.operand import Operand
from hop.numerics import blocks, copies
from hop.numerics.blocks import Block
from hop.numerics.formats import INT8, Format, Integer
from hop.numerics.layouts import has_plain_codes
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static, StoredScales

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def plain(operand: Operand, usage: str, format: Format | None = None) -> Operand:
    """Convert one copy of an operand of integers or 8-bit floats to plain form.

    The result has a code per element and a float32 scale per block. `format` replaces the quantizer's own to unpack
    faster.
    """
    quantizer = operand.quantizer
    codes, *stored = operand.of(usage).tensors
    shape = list(operand.shape) if usage == copies.ROWWISE else copies.columns(operand.shape)
    if quantizer.layout is not None:
        additional = dict(zip(quantizer.stored(), stored, strict=True))
        codes = quantizer.layout.restore(codes, shape, format or quantizer.format, additional)
    elif quantizer.per_byte() > 1:
        codes = (format or quantizer.format).unpack(codes, shape[-1] if shape else 1).reshape(shape)
    if quantizer.scale.is_compound:
        described = list(quantizer.stored_by_rule().values())
        stored = blocks.served(stored[: len(described)], described, quantizer.block, range(len(shape)))
    scale, second = quantizer.scale.scale_of(stored, quantizer.format), quantizer.scale.offset_of(stored)
    if quantizer.scale.has_zero_point():
        second = stored[1]
    result = _plain(quantizer, quantizer.block, (codes, scale) if second is None else (codes, scale, second), shape)
    if usage == copies.ROWWISE:
        return result
    transposed = permuted(result, [1, 0])
    return transposed if operand.dim() == 2 else _unflattened(transposed, list(operand.shape))


def in_integers(x: Operand, usage: str) -> Operand:
    """An operand whose codes are integer values; x itself if its format is an integer one."""
    format = x.quantizer.format
    if format.is_integer:
        return x
    codes, *stored = x.of(usage).tensors
    shape = list(x.shape) if usage == copies.ROWWISE else copies.columns(x.shape)
    if x.quantizer.per_byte() > 1:
        codes = format.unpack(codes, shape[-1]).reshape(shape)
    values = format.decode(codes).to(torch.int8)
    return Operand(_of_integers(x.quantizer), (values, *stored), (usage,), x.shape)


@functools.lru_cache(maxsize=4096)
def _of_integers(q: Quantizer) -> Quantizer:
    return replace(q, format=INT8)


def _plain(q: Quantizer, block: Block, buffers: tuple[Tensor, ...], shape: Sequence[int]) -> Operand:
    return Operand(_reading_plain(q, block or (-1,)), buffers, (copies.ROWWISE,), tuple(shape))


@functools.lru_cache(maxsize=4096)
def _reading_plain(q: Quantizer, block: Block) -> Quantizer:
    """The quantizer of a plain operand: one-byte codes, float32 scales, and offsets if `q` has them."""
    stored_format: Any = q.format
    format = (
        stored_format
        if stored_format.bits >= 8
        else Integer(stored_format.name, 8, stored_format.dtype, stored_format.low, stored_format.high)
    )
    has_offset = q.scale.has_offset()
    rule = StoredScales(torch.float32, offset=True) if has_offset else Static(affine=q.scale.has_zero_point())
    return Quantizer(format, block, rule)


def centered(x: Operand) -> Tensor:
    """Codes minus zero point of a plain operand, exactly, as int8, uint8 or int16."""
    if isinstance(x.zero, int):
        return x.codes if x.zero == 0 else x.codes.to(torch.int16) - x.zero
    return x.codes.to(torch.int16) - spread(x.zero, x.block, x.shape)


def permuted(x: Operand, dims: list[int]) -> Operand:
    """A plain operand with permuted dimensions."""
    buffers = tuple(t.permute(dims) for t in x.tensors)
    return _plain(x.quantizer, tuple(x.block[d] for d in dims), buffers, [x.shape[d] for d in dims])


def unsqueezed(x: Operand, dim: int) -> Operand:
    """A plain vector with an added dimension of size 1 at `dim`, -1 for last, else first."""
    codes, *_ = buffers = tuple(t.unsqueeze(dim) for t in x.tensors)
    return _plain(x.quantizer, (*x.block, 1) if dim == -1 else (1, *x.block), buffers, codes.shape)


def _unflattened(x: Operand, shape: list[int]) -> Operand:
    """Restore the leading dimensions of a plain matrix of rows."""
    of_rows, along = x.block
    codes, *stored = x.tensors
    if of_rows not in (-1, 1):
        stored = [spread(t, (of_rows, -1), codes.shape) for t in stored]
    lead = shape[:-1] if of_rows != -1 else [1] * (len(shape) - 1)
    block = (-1 if of_rows == -1 else 1,) * (len(shape) - 1) + (along,)
    buffers = (codes.reshape(shape), *(t.reshape([*lead, t.shape[-1]]) for t in stored))
    return _plain(x.quantizer, block, buffers, shape)


def block_of(operand: Operand, usage: str) -> Block:
    """The block size along each dimension in one of its copies; -1 for a whole dimension."""
    q, shape = operand.quantizer, operand.shape
    transposed = usage == copies.COLUMNWISE
    sizes = blocks.per_dimension(q.block, 2 if transposed else len(shape))
    block = sizes[::-1] if transposed else sizes
    if len(block) != len(shape):  # leading dimensions were flattened to rows
        block = (-1 if block[0] == -1 else 1,) * (len(shape) - 1) + block[-1:]
    return tuple(-1 if b != -1 and tracing.known_equal(n, b) else b for n, b in zip(shape, block, strict=True))


class PlainForm(NamedTuple):
    """A factor in the form GPU kernels read: codes in element order, scales for blocks of its dimensions."""

    operand: Operand
    usage: str  # the copy to read
    block: Block  # elements that share a scale, -1 for a whole dimension

    @classmethod
    def of(cls, x: Operand, usage: str) -> "PlainForm":
        """Describe one copy of an operand. Raises Declined if it has another form."""
        q = x.quantizer
        if q.flat or not has_plain_codes(q.layout) or q.scale.is_compound:
            raise Declined(f"for plain layout and blocks of a tensor's dimensions, not {q}")
        if usage == copies.COLUMNWISE and (q.hadamard is not None or x.dim() != 2):
            raise Declined("a factor's copy has a Hadamard transform or more than two dimensions")
        return cls(x, usage, block_of(x, usage))

    @property
    def format(self) -> Format:
        return self.operand.quantizer.format

    @property
    def is_fine(self) -> bool:
        """Whether scales are codes themselves, as in MX and NVFP4."""
        return self.operand.quantizer.scale.block_scale_format is not None

    def bytes(self) -> Operand:
        """The factor with one-byte codes and float32 scales. Raises Declined if it has another form."""
        if self.is_fine or not (self.format.is_integer or self.format.dtype in FLOAT8):
            raise Declined(f"for integers and 8-bit floats with scales in float32, not {self.operand.quantizer}")
        return plain(self.operand, self.usage)


def spread(scale: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """Expand `scale`, with one element per block, so that it broadcasts to `shape`."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        count = scale.shape[dim]
        if b in (-1, 1) or tracing.known_equal(count, 1):
            continue
        sizes = [*scale.shape[: dim + 1], b, *scale.shape[dim + 1 :]]
        scale = scale.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)
        if not tracing.known_equal(count * b, n):
            scale = scale.narrow(dim, 0, n)
    return scale
