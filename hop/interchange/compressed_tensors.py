"""Read weights in the compressed-tensors format, from their tensors and the groups of the configuration.

    weight_packed int32      pack-quantized: integers of 1 to 8 bits minus the smallest, with scales and zero points
    weight_packed uint8      nvfp4-pack-quantized if there is a weight_global_scale, which divides scales, else
                             mxfp4-pack-quantized
    weight int8 or float8    int-quantized, float-quantized, naive-quantized; mxfp8 if scales are exponents

An MX scale with exponent 255 is NaN, as in the OCP specification; the package reads infinity. Source: the package
compressed_tensors 0.20, its compressors and lifecycle.forward.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hop.interchange.packed import (
    FLOATS,
    FP8,
    Config,
    Parts,
    Weight,
    assemble_rows,
    float_quantizer,
    integer_quantizer,
    sorting_permutation,
    unpack_words,
)
from hop.interchange.patterns import matches
from hop.numerics import blocks
from hop.numerics.blocks import Block
from hop.numerics.float_rules import Microscaling
from hop.numerics.formats import E2M1, E4M3, INT8
from hop.numerics.presets import MXFP4
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, MinMax
from hop.numerics.stored_scales import StoredScales

NVFP4 = Quantizer(E2M1, (1, 16), StoredScales(E4M3, outer=(-1, -1), outer_dtype=torch.float32, divided=True))
_MOST_GROUPS = 256


def with_target_sets(config: Config, where: object) -> Config:
    """The configuration with the targets of its groups as sets of names and lists of expressions, because each weight
    is looked up in all groups.

    Raises ValueError, mentioning `where`, if there are implausibly many groups.
    """
    config_groups = config.get("config_groups")
    if not isinstance(config_groups, dict):
        return config
    groups = config_groups
    if len(groups) > _MOST_GROUPS:
        raise ValueError(
            f"{where}: config_groups has {len(groups)} groups, and at most {_MOST_GROUPS} are supported; merge them"
        )
    result = {name: _with_target_set(group) for name, group in groups.items()}
    count = sum(len(group["expressions"]) for group in result.values() if isinstance(group, dict))
    if count > _MOST_GROUPS:
        raise ValueError(
            f"{where}: config_groups has {count} targets that begin with 're:', and at most {_MOST_GROUPS} are "
            "supported; merge them"
        )
    return {**config, "config_groups": result}


def _with_target_set(group: object) -> Any:
    if not isinstance(group, dict):
        return group
    fields = group
    targets = fields.get("targets")
    names = targets if isinstance(targets, list) else []
    texts = [x for x in names if isinstance(x, str)]
    expressions = [x.removeprefix("re:") for x in texts if x.startswith("re:")]
    return {**fields, "targets": frozenset(texts), "expressions": expressions}


def read_packed(parts: Parts, config: Config) -> Weight:
    """Read a weight stored as `weight_packed`."""
    packed = parts.get("weight_packed", torch.int32, torch.uint8, ndim=2)
    return _integers(parts, config, packed) if packed.dtype == torch.int32 else _fp4(parts, packed)


def _fp4(parts: Parts, packed: Tensor) -> Weight:
    shape = (packed.shape[0], 2 * packed.shape[1])
    if parts.has("weight_global_scale"):
        scale = parts.get("weight_scale", torch.float8_e4m3fn, ndim=2)
        outer = parts.get("weight_global_scale", torch.float32)
        outer = parts.fits("weight_global_scale", outer, (1, 1), (1,), ())
        return Weight(parts.assemble(NVFP4, shape, torch.bfloat16, codes=packed, scale=scale, outer_scale=outer))
    scale = parts.get("weight_scale", torch.uint8, ndim=2)
    return Weight(parts.assemble(MXFP4, shape, torch.bfloat16, codes=packed, scale=scale))


def _integers(parts: Parts, config: Config, packed: Tensor) -> Weight:
    shape = parts.fits("weight_shape", parts.get("weight_shape", torch.int64, torch.int32, ndim=1), (2,))
    rows, size = cast("list[int]", shape.tolist())
    if rows != packed.shape[0] or not 0 < size <= 32 * packed.shape[1]:
        raise parts.fail(f"'weight_shape' says ({rows}, {size}), and 'weight_packed' has shape {tuple(packed.shape)}")
    scale = parts.get("weight_scale", *FLOATS)
    words = packed.shape[1]
    bits, block = _scheme(parts, config, (rows, size), scale, lambda bits: -(-size * bits // 32) == words)
    counts = blocks.counts((rows, size), block)
    scales = parts.fits("weight_scale", scale, counts, counts[:1])
    affine = parts.has("weight_zero_point")
    q, rest = integer_quantizer(bits, block, affine), {"scale": scales}
    if affine:
        rest["zero_point"] = _zero_points(parts, bits, rows, counts)
    order = None
    if parts.has("weight_g_idx") and block[-1] != -1 and not bool((parts.get("weight_g_idx", torch.int32) < 0).all()):
        order = sorting_permutation(parts, "weight_g_idx", size, block[-1])

    def codes(start: int, stop: int) -> Tensor:
        values = unpack_words(packed[start:stop], bits, size)
        values = values if order is None else values[:, order]
        return values if affine else (values.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)

    return Weight(assemble_rows(q, (rows, size), scale.dtype, codes, **rest), order)


def _zero_points(parts: Parts, bits: int, rows: int, counts: Sequence[int]) -> Tensor:
    """Zero points of packed integers, unsigned like the codes. Stored packed as well, or as int8 in the shape of the
    scales.
    """
    zero = parts.get("weight_zero_point", torch.int32, torch.int8)
    if zero.dtype == torch.int8:
        zero = parts.fits("weight_zero_point", zero, counts, counts[:1])
        middle = 2 ** (bits - 1)
        if zero.numel() and not -middle <= int(zero.min()) <= int(zero.max()) < middle:
            raise parts.fail(
                f"'weight_zero_point' has values from {int(zero.min())} to {int(zero.max())}, and must have {bits} "
                f"bits, from {-middle} to {middle - 1}"
            )
        return (zero.to(torch.int16) + middle).to(torch.uint8)
    zero = parts.fits("weight_zero_point", zero, (-(-rows * bits // 32), counts[1]))
    return unpack_words(zero.t(), bits, rows).t()


def read_plain(parts: Parts, config: Config) -> Weight:
    """Read a weight with one byte per element."""
    weight = parts.get("weight", torch.int8, *FP8)
    if weight.dim() < 2:
        raise parts.fail(f"'weight' has shape {tuple(weight.shape)}, and must have two dimensions or more")
    format = FP8.get(weight.dtype, INT8)
    scale = parts.get("weight_scale", *FLOATS, torch.uint8)
    if scale.dtype == torch.uint8:
        q = Quantizer(format, (1, 32), Microscaling())
        return Weight(parts.assemble(q, weight.shape, torch.bfloat16, codes=weight, scale=scale))
    _, block = _scheme(parts, config, tuple(weight.shape), scale, lambda bits: True)
    counts = tuple(blocks.counts(weight.shape, block))
    shapes = [counts, counts[:-1], *[()] * (scale.numel() == 1), *[(1,)] * (scale.numel() == 1)]
    rest = {"scale": parts.fits("weight_scale", scale, *shapes).to(torch.float32)}
    if weight.dtype != torch.int8:
        if parts.has("weight_zero_point"):
            raise parts.fail("'weight_zero_point' is for integers, and the weight is in floats")
        q = float_quantizer(weight.dtype, block)
    elif parts.has("weight_zero_point"):
        zero = parts.get("weight_zero_point", torch.int8)
        rest["zero_point"], q = parts.fits("weight_zero_point", zero, *shapes), Quantizer(INT8, block, MinMax())
    else:
        q = Quantizer(INT8, block, Amax())
    return Weight(parts.assemble(q, weight.shape, scale.dtype, codes=weight, **rest))


def _scheme(parts: Parts, config: Config, shape: tuple[int, ...], scale: Tensor, fits: Any) -> tuple[int, Block]:
    """The bits and the block of a weight, from the configuration's group that its tensors fit.

    If groups name the weight's module, or have an expression that matches it, the first of them counts, as in vLLM.
    """
    forms: set[tuple[int, Block]] = set()
    for group in groups_for(parts, config):
        args = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(args, dict):
            continue
        args = args
        bits, block = args.get("num_bits"), _block(args)
        if type(bits) is not int or not 1 <= bits <= 8 or block is None or not fits(bits):
            continue
        block = tuple(-1 if b != 1 and b >= n else b for b, n in zip(block, shape[-2:], strict=True))
        counts = blocks.counts(shape, block)
        shapes = (tuple(counts), tuple(counts[:-1]), (1,), ())
        if scale.numel() == math.prod(counts) and tuple(scale.shape) in shapes:
            forms.add((bits, block))
    if len(forms) != 1:
        many = f"fits several of them: {sorted(forms)}" if forms else "fits none of them"
        raise parts.fail(
            f"the weight, of shape {shape} with scales of {tuple(scale.shape)}, must fit one of the "
            f"config_groups, and {many}"
        )
    return forms.pop()


def groups_for(parts: Parts, config: Config) -> list[Any]:
    """The groups of the configuration that may hold a weight: the first that names its module, otherwise all."""
    config_groups = config.get("config_groups")
    groups = list(config_groups.values()) if isinstance(config_groups, dict) else []
    name = parts.name.removesuffix(".weight")
    return [group for group in groups if isinstance(group, dict) and _is_target(parts, name, group)][:1] or groups


def _is_target(parts: Parts, name: str, group: dict[str, Any]) -> bool:
    try:
        return name in group["targets"] or any(matches(expression, name) for expression in group["expressions"])
    except ValueError as error:
        raise parts.fail(f"a target of the config_groups cannot be matched: {error}") from error


def _block(args: Mapping[str, object]) -> Block | None:
    """The block of a strategy; None if weights cannot have it."""
    size, structure, strategy = args.get("group_size"), args.get("block_structure"), args.get("strategy")
    if strategy is None:
        strategy = "block" if structure else "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("group", "tensor_group"):
        return (1, size) if type(size) is int and 0 < size < 2**31 else None
    if strategy == "block":
        sizes = structure if isinstance(structure, list) else ()
        good = len(sizes) == 2 and all(type(n) is int and 0 < n < 2**31 for n in sizes)
        return tuple(sizes) if good else None
    return {"tensor": (-1, -1), "channel": (1, -1)}.get(strategy) if isinstance(strategy, str) else None
