"""Read fp8 weights in blocks, as DeepSeek and transformers write them; ModelOpt's NVFP4 and FP8; GPT-OSS' MXFP4;
bitsandbytes' NF4 and int8.

    fp8             weight (N, K), weight_scale_inv per block, a float or a power of two
    ModelOpt        weight (N, K / 2), weight_scale in e4m3 per 16 elements, times weight_scale_2; or fp8 weight (N, K),
                    weight_scale of the tensor, per row, per block (N / 128, 1, K / 128, 1), or exponents per 32
    ... of experts  gate_up_proj (E, N, K) or transposed, (E, K, N), gate_up_proj_weight_scale and so on: by tensor,
                    expert, row or group of the dimension that products sum over
    MXFP4           gate_up_proj_blocks (E, N, K / 32, 16), gate_up_proj_scales (E, N, K / 32), exponents; the model
                    has (E, K, N)
    NF4             codes of the flat tensor, the first in the high bits; absmax, or codes of it with a map per block
    int8            weight (N, K) and SCB, the amax of each row

Sources: transformers' finegrained_fp8 and mxfp4, ModelOpt's nvfp4_tensor and unified_export_hf, bitsandbytes'
functional.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from hop.interchange.packed import (
    AT_ONCE,
    FLOATS,
    FP8,
    NVFP4_MULTIPLIED,
    Config,
    Parts,
    Weight,
    float_quantizer,
    mx_quantizer,
    number,
    transposed_stack,
)
from hop.numerics import blocks, spelling
from hop.numerics.formats import INT8, NF4
from hop.numerics.presets import MXFP4
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax

_NVFP4_STACK = NVFP4_MULTIPLIED.of_batch(2)

_MOST_DIMENSIONS = 64  # PyTorch's limit


def read_fp8_blocks(parts: Parts, config: Config) -> Weight:
    weight = parts.get("", *FP8)
    scale = parts.get("_scale_inv", *FLOATS, torch.uint8, torch.float8_e8m0fnu)
    sizes: Any = config.get("weight_block_size") or [128, 128]
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(n) is not int or not 0 < n < 2**31 for n in sizes):
        raise parts.fail(f"the configuration's weight_block_size is {spelling.shown(sizes)}, and must be two sizes")
    if weight.dim() < 2:
        raise parts.fail(f"the weight has shape {tuple(weight.shape)}, and must have two dimensions or more")
    block = (-1, -1) if scale.numel() == 1 else tuple(cast("list[int]", sizes))
    ones = [(1,), ()] if scale.numel() == 1 else []
    scale_of = parts.fits("_scale_inv", scale, blocks.counts(weight.shape, block), *ones)
    s = torch.exp2(scale_of.to(torch.float32) - 127) if scale.dtype == torch.uint8 else scale_of.to(torch.float32)
    dtype = scale.dtype if scale.dtype in FLOATS else torch.bfloat16
    q = float_quantizer(weight.dtype, block, powers=scale.dtype not in FLOATS)
    return Weight(parts.assemble(q, weight.shape, dtype, codes=weight, scale=s))


def read_nvfp4(parts: Parts, config: Config) -> Weight:
    packed = parts.get("weight", torch.uint8, ndim=2)
    scale = parts.get("weight_scale", torch.float8_e4m3fn, ndim=2)
    outer = parts.fits("weight_scale_2", parts.get("weight_scale_2", torch.float32), (1, 1), (1,), ())
    shape = (packed.shape[0], 2 * packed.shape[1])
    return Weight(parts.assemble(NVFP4_MULTIPLIED, shape, torch.bfloat16, codes=packed, scale=scale, outer_scale=outer))


def read_fp8(parts: Parts, config: Config) -> Weight:
    """Read ModelOpt's fp8 weights: with a scale for the tensor, for each row, or for blocks of 128 by 128; and MXFP8,
    whose scales are exponents.
    """
    weight = parts.get("weight", *FP8)
    scale = parts.get("weight_scale", *FLOATS, torch.uint8)
    if scale.dtype == torch.uint8:
        mx = mx_quantizer(weight.dtype)
        return Weight(parts.assemble(mx, weight.shape, torch.bfloat16, codes=weight, scale=scale))
    if weight.dim() < 2:
        raise parts.fail(f"'weight' has shape {tuple(weight.shape)}, and must have two dimensions or more")
    rows, columns = weight.shape[-2:]
    if scale.numel() == 1:
        block, shapes = (-1, -1), [(1,), ()]
    elif scale.dim() == 4:  # of each block, with the sizes in a block reduced to 1
        block, shapes = (128, 128), [(-(-rows // 128), 1, -(-columns // 128), 1)]
    else:
        block, shapes = (1, -1), [weight.shape[:-1]]
    scale = parts.fits("weight_scale", scale, blocks.counts(weight.shape, block), *shapes).to(torch.float32)
    q = float_quantizer(weight.dtype, block)
    return Weight(parts.assemble(q, weight.shape, torch.bfloat16, codes=weight, scale=scale))


def read_stacked_nvfp4(parts: Parts, config: Config) -> Weight:
    """Read ModelOpt's NVFP4 weights of experts, whose groups of 16 run along the last dimension, or, if the stack is
    transposed, along the one before it.
    """
    packed = parts.get("", torch.uint8, ndim=3)
    scale = parts.get("_weight_scale", torch.float8_e4m3fn, ndim=3)
    (count, first, last), shape = packed.shape, tuple(scale.shape)
    transposed = shape == (count, first // 8, last) and not first % 8
    if not transposed and (last % 8 or shape != (count, first, last // 8)):
        raise parts.fail(
            f"'_weight_scale' has shape {shape}, and must have a scale for 8 bytes of {tuple(packed.shape)}, along the "
            "last dimension or the one before"
        )
    if transposed and last % 2:
        raise parts.fail(f"it has {last} columns of transposed codes, and must have an even number")
    if transposed:
        packed, scale = packed.transpose(1, 2), scale.transpose(1, 2)
    outer = _of_experts(parts, "_weight_scale_2", parts.get("_weight_scale_2", torch.float32), count)
    shape = (*packed.shape[:2], 2 * packed.shape[2])
    stack = parts.assemble(_NVFP4_STACK, shape, torch.bfloat16, codes=packed, scale=scale, outer_scale=outer)
    return Weight(transposed_stack(stack) if transposed else stack)


def read_stacked_fp8(parts: Parts, config: Config) -> Weight:
    """Read ModelOpt's fp8 and MXFP8 weights of experts."""
    weight, scale = parts.get("", *FP8, ndim=3), parts.get("_weight_scale", *FLOATS, torch.uint8)
    count, first, last = weight.shape
    if scale.dtype == torch.uint8:
        across = tuple(scale.shape) == (count, -(-first // 32), last)
        mx = mx_quantizer(weight.dtype, (32, 1) if across else (1, 32))
        return Weight(parts.assemble(mx, weight.shape, torch.bfloat16, codes=weight, scale=scale))
    rows, columns = (count, first, 1), (count, 1, last)
    shape = tuple(scale.shape)
    if first == last != 1 and shape == (count, first):
        raise parts.fail(
            f"'_weight_scale' has shape {shape}, which may be of the rows or the columns of {tuple(weight.shape)}; "
            f"reshape it to {rows} or {columns}"
        )
    if scale.numel() == 1 or shape in ((count,), (count, 1), (count, 1, 1)):
        block, scale = (1, -1, -1), _of_experts(parts, "_weight_scale", scale, count)
    elif shape in (columns, (count, last)):
        block, scale = (1, -1, 1), scale.reshape(columns)
    else:
        block, scale = (1, -1), parts.fits("_weight_scale", scale, rows, rows[:2], columns, (count, last))
    q = float_quantizer(weight.dtype, block)
    return Weight(parts.assemble(q, weight.shape, torch.bfloat16, codes=weight, scale=scale.to(torch.float32)))


def _of_experts(parts: Parts, end: str, scale: Tensor, count: int) -> Tensor:
    """The scale of each expert, (E, 1, 1), which may be that of all."""
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(count)
    return parts.fits(end, scale, (count, 1, 1), (count, 1), (count,))


def read_mxfp4(parts: Parts, config: Config) -> Weight:
    """Read GPT-OSS' MXFP4 weights of experts, which the model has transposed."""
    packed, scale = parts.get("_blocks", torch.uint8, ndim=4), parts.get("_scales", torch.uint8, ndim=3)
    count, rows, groups, _ = packed.shape
    packed = parts.fits("_blocks", packed, (count, rows, groups, 16)).flatten(2)
    if rows % 2:
        raise parts.fail(f"'_blocks' has {rows} rows, and must have an even number")
    stack = parts.assemble(MXFP4, (count, rows, 32 * groups), torch.bfloat16, codes=packed, scale=scale)
    return Weight(transposed_stack(stack))


def read_nf4(parts: Parts, config: Config) -> Weight:
    raw = parts.get(".quant_state.bitsandbytes__nf4", torch.uint8, ndim=1)
    try:
        state = spelling.from_json(bytes(raw.tolist()), "'.quant_state.bitsandbytes__nf4'")
    except ValueError as error:
        raise parts.fail(str(error)) from error
    shape, dtype = _shape_and_dtype(parts, state)
    block, count = number(parts, state, "blocksize", 1, 2**20), math.prod(shape)
    codes = parts.get("", torch.uint8)
    if codes.numel() != -(-count // 2):
        raise parts.fail(f"it has {codes.numel()} bytes of codes, and shape {shape} has {count} elements")
    book = parts.get(".quant_map", torch.float32)
    if not torch.equal(book, torch.tensor(NF4.book)):
        raise parts.fail("'.quant_map' must be the values of NF4")
    scale = _absmax(parts, state, -(-count // block))
    q = Quantizer(NF4, (block,), Amax(), flat=True)
    unpacked_codes = torch.empty(codes.numel(), dtype=torch.uint8)
    flat = codes.reshape(-1)
    for start in range(0, flat.numel(), AT_ONCE):
        part = flat[start : start + AT_ONCE]
        unpacked_codes[start : start + AT_ONCE] = (part >> 4) | (part << 4)  # our first code is in the low bits
    if count % 2:
        unpacked_codes[-1] &= 15
    return Weight(parts.assemble(q, shape, dtype, codes=unpacked_codes, scale=scale))


def _shape_and_dtype(parts: Parts, state: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of a weight, from its state."""
    shape: Any = state.get("shape")
    sizes = cast("list[int]", shape) if isinstance(shape, list) else [-1]
    dtype = {str(d).removeprefix("torch."): d for d in FLOATS}.get(str(state.get("dtype")))
    if len(sizes) > _MOST_DIMENSIONS or any(type(n) is not int or not 0 < n < 2**40 for n in sizes) or dtype is None:
        raise parts.fail(
            f"its state says shape {spelling.shown(shape)} and dtype {spelling.shown(state.get('dtype'))}; they must "
            f"be up to {_MOST_DIMENSIONS} sizes and a float"
        )
    return tuple(sizes), dtype


def _absmax(parts: Parts, state: dict[str, Any], count: int) -> Tensor:
    """The float32 scales of the blocks."""
    if not parts.has(".nested_absmax"):
        return parts.fits(".absmax", parts.get(".absmax", torch.float32), (count,))
    codes = parts.fits(".absmax", parts.get(".absmax", torch.uint8), (count,))
    block, offset = number(parts, state, "nested_blocksize", 1, 2**20), state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise parts.fail(f"its state says nested_offset {spelling.shown(offset)}, which must be a number")
    outer = parts.fits(".nested_absmax", parts.get(".nested_absmax", torch.float32), (-(-count // block),))
    book = parts.fits(".nested_quant_map", parts.get(".nested_quant_map", torch.float32), (256,))
    return book[codes.to(torch.int64)] * outer.repeat_interleave(block)[:count] + torch.tensor(float(offset))


def read_int8(parts: Parts, config: Config) -> Weight:
    """Read bitsandbytes' int8 weights.

    bitsandbytes multiplies codes by the amax, and the product by float32(1 / 127). With our scale, float32(amax / 127),
    values differ by at most two units in the last place.
    """
    weight = parts.get("weight", torch.int8, ndim=2)
    if parts.has("weight_format") and bool((parts.get("weight_format", torch.uint8) != 0).any()):
        raise parts.fail("'weight_format' must be 0, for rows in order; save it by a newer bitsandbytes")
    amax = parts.fits("SCB", parts.get("SCB", torch.float32), (weight.shape[0], 1), (weight.shape[0],))
    scale = (amax.to(torch.float64) / 127).to(torch.float32)
    return Weight(parts.assemble(Quantizer(INT8, (1, -1)), weight.shape, torch.float32, codes=weight, scale=scale))
