"""Plain operands: a code for each element, and a float32 scale and a zero point, or an offset, for each block of their
dimensions."""

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
    """An operand of integers, or of 8-bit floats, read from one of its copies: a code for each element, and a float32
    scale for each block of its dimensions. `format` unpacks as the quantizer's own does."""
    quantizer: Any = operand.quantizer
    codes, *stored = operand.of(usage).tensors
    shape = list(operand.shape) if usage == copies.ROWWISE else copies.columns(operand.shape)
    if quantizer.layout is not None:
        beside = dict(zip(quantizer.stored(), stored, strict=True))
        codes = quantizer.layout.restore(codes, shape, format or quantizer.format, beside)
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
    """An operand whose codes are its numbers, which are integers; itself if it is one of integers."""
    format: Any = x.quantizer.format
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
    """What reads a byte for each code, and a float32 scale for each block, and an offset where `q` has such."""
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
    """codes - zero point of a plain operand, exactly: int8, uint8 or int16."""
    if isinstance(x.zero, int):
        return x.codes if x.zero == 0 else x.codes.to(torch.int16) - x.zero
    return x.codes.to(torch.int16) - spread(x.zero, x.block, x.shape)


def permuted(x: Operand, dims: list[int]) -> Operand:
    """A plain operand with its dimensions in another order."""
    buffers = tuple(t.permute(dims) for t in x.tensors)
    return _plain(x.quantizer, tuple(x.block[d] for d in dims), buffers, [x.shape[d] for d in dims])


def unsqueezed(x: Operand, dim: int) -> Operand:
    """A plain vector with a dimension of size 1 more, `dim` from the end."""
    codes, *_ = buffers = tuple(t.unsqueeze(dim) for t in x.tensors)
    return _plain(x.quantizer, (*x.block, 1) if dim == -1 else (1, *x.block), buffers, codes.shape)


def _unflattened(x: Operand, shape: list[int]) -> Operand:
    """A plain matrix of rows with the leading dimensions that were flattened to them."""
    of_rows, along = x.block
    codes, *stored = x.tensors
    if of_rows not in (-1, 1):
        stored = [spread(t, (of_rows, -1), codes.shape) for t in stored]
    lead = shape[:-1] if of_rows != -1 else [1] * (len(shape) - 1)
    block = (-1 if of_rows == -1 else 1,) * (len(shape) - 1) + (along,)
    buffers = (codes.reshape(shape), *(t.reshape([*lead, t.shape[-1]]) for t in stored))
    return _plain(x.quantizer, block, buffers, shape)


def block_of(operand: Operand, usage: str) -> Block:
    """The size of its blocks along each dimension, -1 for a whole one, in one of its copies."""
    q, shape = operand.quantizer, operand.shape
    transposed = usage == copies.COLUMNWISE
    sizes = blocks.per_dimension(q.block, 2 if transposed else len(shape))
    block = sizes[::-1] if transposed else sizes
    if len(block) != len(shape):  # the leading dimensions were flattened to rows
        block = (-1 if block[0] == -1 else 1,) * (len(shape) - 1) + block[-1:]
    return tuple(-1 if b != -1 and tracing.known_equal(n, b) else b for n, b in zip(shape, block, strict=True))


class PlainForm(NamedTuple):
    """A factor with codes in the order of its elements, and blocks of its dimensions, as kernels of GPUs read it."""

    operand: Operand
    usage: str  # the copy that is read
    block: Block  # the elements that share a scale, -1 for a whole dimension

    @classmethod
    def of(cls, x: Operand, usage: str) -> "PlainForm":
        """Raises Declined for an operand in another form."""
        q = x.quantizer
        if q.flat or not has_plain_codes(q.layout) or q.scale.is_compound:
            raise Declined(f"for the plain form of blocks of a tensor's dimensions, not {q}")
        if usage == copies.COLUMNWISE and (q.hadamard is not None or x.dim() != 2):
            raise Declined("the copy of a factor is transformed, or of more than two dimensions")
        return cls(x, usage, block_of(x, usage))

    @property
    def format(self) -> Format:
        return self.operand.quantizer.format

    @property
    def is_fine(self) -> bool:
        """Whether scales are codes themselves, as those of MX and NVFP4."""
        return self.operand.quantizer.scale.block_scale_format is not None

    def bytes(self) -> Operand:
        """With a byte for each code, and scales in float32."""
        if self.is_fine or not (self.format.is_integer or self.format.dtype in FLOAT8):
            raise Declined(f"for integers and 8-bit floats with scales in float32, not {self.operand.quantizer}")
        return plain(self.operand, self.usage)


def spread(scale: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """`scale`, of one element for each block, in a shape that broadcasts to `shape`."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        count = scale.shape[dim]
        if b in (-1, 1) or tracing.known_equal(count, 1):
            continue
        sizes = [*scale.shape[: dim + 1], b, *scale.shape[dim + 1 :]]
        scale = scale.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)
        if not tracing.known_equal(count * b, n):
            scale = scale.narrow(dim, 0, n)
    return scale
