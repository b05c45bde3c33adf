"""Shared code of the checkpoint readers: a weight's tensors, integers packed into words, columns sorted by group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.interchange.gguf import buffers_from_parts
from hop.numerics.blocks import Block
from hop.numerics.float_rules import Microscaling
from hop.numerics.formats import E2M1, E4M3, E5M2, INT4, INT8, UINT2, UINT4, UINT5, UINT6, UINT8, Integer
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, MinMax
from hop.numerics.spelling import shown
from hop.numerics.stored_scales import StoredScales
from hop.tensor import QuantizedTensor

Config = Mapping[str, Any]

AT_ONCE = 2**20  # elements that are unpacked to bytes at a time

FP8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

NVFP4_MULTIPLIED = Quantizer(E2M1, (1, 16), StoredScales(E4M3, outer=(-1, -1), outer_dtype=torch.float32))
"""NVFP4 whose outer scale multiplies scales. That of compressed-tensors divides them."""


class Weight(NamedTuple):
    """A weight, and the file's column of each of its columns; None if the order is the same."""

    tensor: QuantizedTensor
    permutation: Tensor | None = None


class Parts:
    """The tensors of one weight, by name suffix.

    Args:
        name: the weight's name.
        tensors: the tensors that the file has.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self._tensors = name, tensors

    def fail(self, text: str) -> ValueError:
        return ValueError(f"tensor {shown(self.name)}: {text}")

    def has(self, end: str) -> bool:
        return end in self._tensors

    def get(self, end: str, *dtypes: torch.dtype, ndim: int | None = None) -> Tensor:
        """A tensor, which must have one of these dtypes and, if given, `ndim` dimensions."""
        if end not in self._tensors:
            raise self.fail(f"the file lacks its {end!r}")
        t = self._tensors[end]
        if t.dtype not in dtypes or ndim not in (None, t.dim()):
            wanted = " or ".join(str(d) for d in dtypes) + ("" if ndim is None else f" of {ndim} dimensions")
            raise self.fail(f"{end!r} is {t.dtype} of {tuple(t.shape)}, and must be {wanted}")
        if not t.numel():  # its other sizes would count rows to read, and no byte of the file backs them
            raise self.fail(f"{end!r} has shape {tuple(t.shape)}, and must have elements")
        return t

    def fits(self, end: str, t: Tensor, *shapes: Sequence[int]) -> Tensor:
        """`t` reshaped to the first of the shapes; it must have one of them."""
        if tuple(t.shape) not in [tuple(s) for s in shapes]:
            wanted = " or ".join(str(tuple(s)) for s in shapes)
            raise self.fail(f"{end!r} has shape {tuple(t.shape)}, and must have {wanted}")
        return t.reshape(tuple(shapes[0]))

    def assemble(self, quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, **buffers: Tensor) -> Any:
        """A QuantizedTensor of the buffers, whose shapes must be those that the quantizer requires."""
        for name, (wanted, _) in quantizer.buffers(shape).items():
            buffers[name] = self.fits(name, buffers[name], wanted).contiguous()
        return QuantizedTensor(buffers, quantizer, tuple(shape), dtype)


def unsigned_format(bits: int) -> Integer:
    """The unsigned integer format of `bits` bits."""
    known = {2: UINT2, 4: UINT4, 5: UINT5, 6: UINT6, 8: UINT8}
    return known.get(bits) or Integer(f"uint{bits}", bits, torch.uint8, 0, 2**bits - 1)


def signed_format(bits: int) -> Integer:
    """The signed integer format of `bits` bits."""
    known = {4: INT4, 8: INT8}
    return known.get(bits) or Integer(f"int{bits}", bits, torch.int8, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def integer_quantizer(bits: int, block: Block, affine: bool) -> Quantizer:
    """The quantizer of integers with scales and, if affine, zero points."""
    format, rule = (unsigned_format(bits), MinMax()) if affine else (signed_format(bits), Amax())
    return Quantizer(format, block, rule, layout=Planes() if bits in (3, 5, 6) else None)


def float_quantizer(dtype: torch.dtype, block: Block, powers: bool = False) -> Quantizer:
    """The quantizer of 8-bit floats with float32 scales. With `powers`, scales are powers of two, which some kernels
    rely on.
    """
    rule = BlockScaling(power_of_two=powers) if min(block) > 1 else CurrentScaling()
    return Quantizer(FP8[dtype], block, rule)


def mx_quantizer(dtype: torch.dtype, block: Block = (1, 32)) -> Quantizer:
    """The quantizer of 8-bit floats whose scales are exponents."""
    return Quantizer(FP8[dtype], block, Microscaling())


def offset_quantizer(block: Block) -> Quantizer:
    """The quantizer of 4-bit integers with a float scale and a float offset, which is subtracted."""
    return Quantizer(UINT4, block, StoredScales(torch.float32, offset=True))


def unpack_words(words: Tensor, bits: int, size: int) -> Tensor:
    """Unpack (n, w) int32 words into (n, size) uint8 integers of `bits` bits, from the lowest bit of the first word on.

    An integer may straddle two words.
    """
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[:, :size].contiguous()
    if bits in (1, 2, 4):
        fields = torch.stack([(raw >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 2)
        return fields.flatten(1)[:, :size].contiguous()
    at = torch.arange(size) * bits
    raw = torch.nn.functional.pad(raw, (0, 1)).to(torch.int16)  # the last integer may end with the last byte
    pair = raw[:, at // 8] + raw[:, at // 8 + 1].bitwise_left_shift(8)
    return ((pair >> (at % 8)) & (2**bits - 1)).to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack (n, size) uint8 into (n, words) int32, the inverse of `unpack_words`; unused bits are 0."""
    rows, size = codes.shape
    words = -(-size * bits // 32)
    if bits in (1, 2, 4, 8):
        each = 8 // bits
        fields = torch.nn.functional.pad(codes, (0, 4 * words * each - size)).unflatten(1, (-1, each))
        raw = fields[:, :, 0]
        for i in range(1, each):
            raw = raw | (fields[:, :, i] << (i * bits))
        return raw.contiguous().view(torch.int32)
    single = torch.stack([(codes >> i) & 1 for i in range(bits)], 2).flatten(1)
    single = torch.nn.functional.pad(single, (0, 32 * words - size * bits)).unflatten(1, (-1, 8))
    raw = single[:, :, 0]
    for i in range(1, 8):
        raw = raw | (single[:, :, i] << i)
    return raw.contiguous().view(torch.int32).reshape(rows, words)


def assemble_rows(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, codes: Callable[[int, int], Tensor], **rest: Tensor
) -> QuantizedTensor:
    """A matrix whose codes are computed a chunk of rows at a time.

    Args:
        codes: a function from a range of rows (start, stop) to their codes, one integer of the format per element.
        rest: the buffers other than codes.
    """
    rows, size = shape
    buffers: dict[str, Tensor] = {}
    for name, (wanted, of) in quantizer.buffers(shape).items():
        buffers[name] = (
            rest[name].reshape(wanted).to(of).contiguous() if name in rest else torch.empty(wanted, dtype=of)
        )
    for start in range(0, rows, step := max(AT_ONCE // max(size, 1), 1)):
        stop = min(start + step, rows)
        for name, part in buffers_from_parts(quantizer, {"codes": codes(start, stop)}).items():
            buffers[name][start:stop] = part
    return QuantizedTensor(buffers, quantizer, tuple(shape), dtype)


def transposed_stack(stack: Any) -> QuantizedTensor:
    """The quantized stack (E, R, K), in the plain layout, as (E, K, R): with transposed codes and scales."""
    q, format, (count, rows, size) = stack.quantizer, stack.quantizer.format, stack.shape
    buffers = {name: b.transpose(1, 2).contiguous() for name, b in stack.buffers().items() if name != "codes"}
    codes = stack.buffers()["codes"]
    if q.per_byte() == 1:
        codes = codes.transpose(1, 2).contiguous()
    else:
        codes = format.pack(format.unpack(codes, size).transpose(1, 2).contiguous())
    return stack.rebuilt({"codes": codes, **buffers}, quantizer=q.transposed(3), shape=(count, size, rows))


def sorting_permutation(parts: Parts, end: str, size: int, group: int) -> Tensor | None:
    """The permutation that sorts columns by group, given the group of each; None if they are sorted."""
    groups = parts.fits(end, parts.get(end, torch.int32, torch.int64), (size,)).to(torch.int64)
    wanted = torch.arange(size) // group
    if torch.equal(groups, wanted):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], wanted):
        raise parts.fail(f"{end!r} must assign {group} columns to each group")
    return order


def number(parts: Parts, config: Config, key: str, least: int, most: int, default: int | None = None) -> int:
    """An integer of a configuration. Raises if it is not within the limits."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise parts.fail(f"the configuration's {key} is {shown(value)}, and must be an integer from {least} to {most}")
    return value
