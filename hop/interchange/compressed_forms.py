"""Storage of a weight in the compressed-tensors format: the format's name, its arguments and the tensors.

hop.interchange.compressed_tensors reads and describes this format. Scales are written in the weight's dtype if it
represents each of them exactly, and in float32 otherwise: the package multiplies in the scales' dtype, so that its
values equal those of `hop.dequantize` bit for bit.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.interchange.compressed_tensors import NVFP4
from hop.interchange.gguf import unpack_codes
from hop.interchange.packed import AT_ONCE, pack_words
from hop.numerics import blocks
from hop.numerics.float_rules import Microscaling
from hop.numerics.formats import E2M1, E4M3
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import JsonObject
from hop.numerics.stored_scales import StoredScales
from hop.tensor import QuantizedTensor

INTEGERS = ("pack-quantized", "int-quantized")


class Form(NamedTuple):
    """The stored form of a weight: format, arguments and tensors."""

    format: str
    args: Mapping[str, Any]  # of the configuration
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes by name suffix
    small: Mapping[str, Tensor]  # the tensors other than codes, by name suffix
    end: str  # the name suffix of the codes
    zero: int  # subtracted from each code


def storage_form(tensor: QuantizedTensor, wanted: str | None = None) -> Form:
    """The stored form of a weight; `wanted`, one of INTEGERS, selects the format of integer weights.

    Raises ValueError, with the reason, if the package cannot represent the weight.
    """
    q, shape = tensor.quantizer, tuple(tensor.shape)
    if why := _unsupported_reason(tensor, q):
        raise ValueError(why)
    buffers = tensor.buffers()
    if q.format.is_integer:
        return _integers(tensor, _block(q, shape), wanted)
    if isinstance(q.scale, Microscaling) and q.format in (E2M1, E4M3):
        return _mx(q, shape, buffers)
    if q.format == E2M1 and q.scale == NVFP4.scale and blocks.per_dimension(q.block, 2) == NVFP4.block:
        return _nvfp4(shape, buffers)
    if q.format == E4M3 and _has_float_scales(q, buffers):
        return _floats(tensor, _block(q, shape))
    raise ValueError(
        f"it is by {q}, and the package has integers of 1 to 8 bits and e4m3, both with scales in floats; MXFP4 and "
        "MXFP8; and NVFP4 whose scales a float divides"
    )


def iterate_rows(tensor: QuantizedTensor, form: Form) -> Iterator[tuple[int, Tensor]]:
    """The stored codes, a chunk of rows at a time, each with its first row's index."""
    q, buffers, (rows, size) = tensor.quantizer, tensor.buffers(), tensor.shape
    if q.layout is not None and not q.is_dense():
        buffers, q = q.packed(buffers, (rows, size), None), q.plain
    high = buffers.get("high_codes")
    dtype, _ = form.entries[form.end]
    signed = q.format.is_integer and q.format.dtype.is_signed
    for first in range(0, rows, step := max(AT_ONCE // max(size, 1), 1)):
        part = slice(first, first + step)
        codes = buffers["codes"][part].detach().cpu()
        if dtype == torch.uint8:
            yield first, codes  # two codes of 4 bits per byte, as in the file
            continue
        block_codes = unpack_codes(codes, None if high is None else high[part].cpu(), q.format.bits, signed)[:, :size]
        if dtype == torch.float8_e4m3fn:
            yield first, block_codes
        elif dtype == torch.int32:
            unsigned = (block_codes.to(torch.int16) - form.zero).to(torch.uint8)
            yield first, pack_words(unsigned, form.args["num_bits"])
        else:
            yield first, (block_codes.to(torch.int16) - form.zero).to(torch.int8)


def _unsupported_reason(tensor: QuantizedTensor, q: Quantizer) -> str | None:
    """The reason why a weight of any format cannot be stored, or None."""
    if tensor.dim() != 2:
        return f"it has shape {tuple(tensor.shape)}, and the package supports matrices only"
    if "rowwise" not in tensor.usages:
        return "it has no row-wise copy"
    if q.is_decoded():
        return f"layout={q.layout} holds values instead of codes"
    if q.flat:
        return "its blocks run over the flat tensor (flat=True)"
    return None


def _has_float_scales(q: Quantizer, buffers: Mapping[str, Tensor]) -> bool:
    """Whether each block has a float scale that is stored as it is."""
    stored = q.scale.scale_is_stored or (isinstance(q.scale, StoredScales) and not q.scale.is_compound)
    return stored and "scale" in buffers and buffers["scale"].is_floating_point()


def _block(q: Quantizer, shape: tuple[int, ...]) -> tuple[int, int]:
    """The block of a matrix, with -1 for a whole dimension."""
    rows, columns = (
        -1 if b != 1 and b >= n else b for b, n in zip(blocks.per_dimension(q.block, 2), shape, strict=True)
    )
    return rows, columns


def _strategy(block: tuple[int, int], shape: tuple[int, ...]) -> JsonObject:
    """The configuration's description of which elements share a scale."""
    rows, columns = block
    if (rows, columns) == (-1, -1):
        return {"strategy": "tensor"}
    if rows == 1 and columns == -1:
        return {"strategy": "channel"}
    if rows == 1:
        _check_groups(columns, shape)
        return {"strategy": "group", "group_size": columns}
    return {"strategy": "block", "block_structure": [n if b == -1 else b for b, n in zip(block, shape, strict=True)]}


def _check_groups(group: int, shape: tuple[int, ...]) -> None:
    if shape[1] % group:
        raise ValueError(f"its rows of {shape[1]} are not a multiple of its groups of {group}, as the package requires")


def _scales(tensor: QuantizedTensor, scale: Tensor, strategy: str) -> Tensor:
    """Scales in the file's dtype and shape."""
    exact = tensor.dtype in (torch.bfloat16, torch.float16) and torch.equal(
        scale.to(tensor.dtype).to(torch.float32).nan_to_num(nan=0.5), scale.to(torch.float32).nan_to_num(nan=0.5)
    )
    scales = scale.detach().cpu().to(tensor.dtype if exact else torch.float32)
    return scales.reshape(1) if strategy == "tensor" else scales


def _args(bits: int, kind: str, symmetric: bool, strategy: Mapping[str, object], scale: torch.dtype) -> JsonObject:
    args = {"num_bits": bits, "type": kind, "symmetric": symmetric, **strategy, "dynamic": False}
    return args | {"scale_dtype": str(scale)}


def _integers(tensor: QuantizedTensor, block: tuple[int, int], wanted: str | None) -> Form:
    q, buffers, shape = tensor.quantizer, tensor.buffers(), tuple(tensor.shape)
    rule, bits = q.scale, q.format.bits
    if not _has_float_scales(q, buffers) or bits > 8:
        raise ValueError(
            f"its scales, by {rule}, are not one float per block of integers of at most 8 bits, without offsets"
        )
    scale = buffers["scale"]
    strategy = _strategy(block, shape)
    by = strategy["strategy"]
    middle = 0 if q.format.dtype.is_signed else 2 ** (bits - 1)
    zeros = buffers.get("zero_point")
    constant = int(rule.zero(q.format))
    affine = zeros is not None or constant != middle
    if wanted is None:
        wanted = INTEGERS[1] if bits == 8 and by != "group" else INTEGERS[0]
    if affine and by in ("tensor", "block"):
        wanted = INTEGERS[1]  # the package packs zero points only if they are per row
    small = {"weight_scale": _scales(tensor, scale, by)}
    if affine:
        zero_points = torch.full(scale.shape, constant) if zeros is None else zeros.detach().cpu()
        zero_points = zero_points.to(torch.int16) - middle
        if wanted == INTEGERS[0]:
            words = pack_words((zero_points + 2 ** (bits - 1)).to(torch.uint8).t().contiguous(), bits)
            small["weight_zero_point"] = words.t().contiguous()
        else:
            small["weight_zero_point"] = zero_points.to(torch.int8).reshape(small["weight_scale"].shape)
    args = _args(bits, "int", not affine, strategy, small["weight_scale"].dtype)
    if wanted == INTEGERS[1]:
        return _form(wanted, args, "weight", (torch.int8, shape), small, middle)
    small["weight_shape"] = torch.tensor(shape)
    words = (torch.int32, (shape[0], -(-shape[1] * bits // 32)))
    return _form(wanted, args, "weight_packed", words, small, middle - 2 ** (bits - 1))


def _floats(tensor: QuantizedTensor, block: tuple[int, int]) -> Form:
    shape, strategy = tuple(tensor.shape), _strategy(block, tuple(tensor.shape))
    scale = _scales(tensor, tensor.buffers()["scale"], strategy["strategy"])
    args = _args(8, "float", True, strategy, scale.dtype)
    return _form("float-quantized", args, "weight", (torch.float8_e4m3fn, shape), {"weight_scale": scale})


def _mx(q: Quantizer, shape: tuple[int, ...], buffers: Mapping[str, Tensor]) -> Form:
    if blocks.per_dimension(q.block, 2) != (1, 32):
        raise ValueError(f"its blocks are {q.block}, and the package has MX in groups of 32")
    _check_groups(32, shape)
    group = {"strategy": "group", "group_size": 32}
    args = _args(q.format.bits, "float", True, group, torch.uint8) | {"zp_dtype": "torch.uint8"}
    small = {"weight_scale": buffers["scale"].detach().cpu().view(torch.uint8)}
    if q.format == E2M1:
        codes = (torch.uint8, (shape[0], shape[1] // 2))
        return _form("mxfp4-pack-quantized", args, "weight_packed", codes, small)
    return _form("mxfp8-quantized", args, "weight", (torch.float8_e4m3fn, shape), small)


def _nvfp4(shape: tuple[int, ...], buffers: Mapping[str, Tensor]) -> Form:
    _check_groups(16, shape)
    args = _args(4, "float", True, {"strategy": "tensor_group", "group_size": 16}, torch.float8_e4m3fn)
    small = {
        "weight_scale": buffers["scale"].detach().cpu(),
        "weight_global_scale": buffers["outer_scale"].detach().cpu().reshape(1),
    }
    codes = (torch.uint8, (shape[0], shape[1] // 2))
    return _form("nvfp4-pack-quantized", args, "weight_packed", codes, small)


def _form(
    format: str,
    args: Mapping[str, object],
    end: str,
    codes: tuple[torch.dtype, tuple[int, ...]],
    small: Mapping[str, Tensor],
    zero: int = 0,
) -> Form:
    entries = {end: codes} | {name: (t.dtype, tuple(t.shape)) for name, t in small.items()}
    return Form(format, args, entries, small, end, zero)
