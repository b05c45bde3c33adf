"""Read weights in torchao's safetensors files, from their tensors and the metadata of the file.

    Int8Tensor                  qdata int8, scale and zero_point per block, of any number of dimensions
    IntxUnpackedToInt8Tensor    qdata int8 with integers of 1 to 8 bits, scale, zero_point
    Int4Tensor                  qdata (N, K / 2), the first code in the low bits; scale and zero_point (groups, N),
                                both floats: x ≈ code · scale + zero_point
    Float8Tensor                qdata in e4m3 or e5m2, scale
    MXTensor, NVFP4Tensor       qdata, scale, for a matrix possibly in the order of the matrix units

The tensors of "a.weight" are "a._weight_qdata" and so on; the metadata has a JSON text for "a.weight" with the class,
its attributes and the names of its tensors. Quantization of activations is not read. Source: torchao 0.18, its
prototype.safetensors, quantization.quantize_.workflows and prototype.mx_formats.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from hop.interchange.packed import (
    FLOATS,
    FP8,
    NVFP4_MULTIPLIED,
    Config,
    Parts,
    Weight,
    assemble_rows,
    float_quantizer,
    integer_quantizer,
    mx_quantizer,
    offset_quantizer,
)
from hop.numerics import blocks
from hop.numerics.blocks import Block
from hop.numerics.formats import INT8
from hop.numerics.presets import MXFP4
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, MinMax
from hop.numerics.spelling import JsonObject, from_json, shown

_NAMES = "tensor_names"
TENSORS = "tensors"  # the key of the configuration that has the metadata of all weights
OPTIONAL = ("_scale", "_scale_and_zero", "_zero_point", "_per_tensor_scale", "_act_pre_scale", "_act_quant_scale")
OPTIONAL += ("_act_quant_zero_point", "_act_per_tensor_scale")
"""The suffixes of tensors that some weights have. Those of the activation's quantization have no effect."""


def metadata_of(files: Iterable[Any], where: Any) -> JsonObject:
    """The metadata of the weights in opened files, by name; empty if torchao wrote none of them.

    Raises ValueError, mentioning `where`, if they are not torchao's.
    """
    result: JsonObject = {}
    for file in files:
        texts = cast("dict[str, str]", file.metadata() or {})
        if _NAMES not in texts:
            continue
        names: Any = from_json(f'{{"names": {texts[_NAMES]}}}', f"{where}: tensor_names of the metadata")["names"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where}: tensor_names of the metadata must be a list of names, got {shown(names)}")
        for name in cast("list[str]", names):
            result[name] = from_json(texts.get(name, "{}"), f"{where}: the metadata of {shown(name)}")
    return result


def parameter_name(name: str) -> str:
    """The name of the parameter whose tensors' names begin with `name`: "a.weight" for "a._weight"."""
    module, dot, leaf = name.rpartition(".")
    return module + dot + leaf.removeprefix("_")


def read(parts: Parts, config: Config) -> Weight:
    """Read a weight of any class."""
    entry: Any = config[TENSORS].get(parts.name)
    fields = entry if isinstance(entry, dict) else {}
    kind, attributes = fields.get("_type"), fields.get("_data")
    if not isinstance(kind, str) or kind not in _READERS or not isinstance(attributes, dict):
        raise parts.fail(
            f"the metadata has {shown(kind)} for it, and those that are read are {', '.join(_READERS)}; save it by "
            "flatten_tensor_state_dict, and Int4 weights in the packing 'plain'"
        )
    if parts.has("_act_pre_scale"):
        raise parts.fail("'_act_pre_scale' multiplies the layer's input, which is not supported; fold it into the norm")
    return _READERS[kind](parts, attributes)


def _int8(parts: Parts, attributes: Config) -> Weight:
    codes = parts.get("_qdata", torch.int8)
    block, dtype = _block(parts, attributes, codes.shape), _dtype(parts, attributes, "dtype")
    counts = blocks.counts(codes.shape, block)
    scale, zero = _scale(parts, counts), _zero_points(parts, counts)
    if zero is None:
        q = Quantizer(INT8, block, Amax())
        return Weight(parts.assemble(q, codes.shape, dtype, codes=codes, scale=scale))
    q = Quantizer(INT8, block, MinMax())
    return Weight(parts.assemble(q, codes.shape, dtype, codes=codes, scale=scale, zero_point=zero))


def _intx(parts: Parts, attributes: Config) -> Weight:
    target = _value(attributes, "target_dtype")
    bits = {f"int{n}": n for n in range(1, 9)}.get(target if isinstance(target, str) else "")
    if bits is None:
        raise parts.fail(f"its target_dtype is {shown(target)}, and must be int1 to int8")
    if bits == 8:
        return _int8(parts, attributes)
    stored = parts.get("_qdata", torch.int8, ndim=2)
    shape = (stored.shape[0], stored.shape[1])
    block, dtype = _block(parts, attributes, shape), _dtype(parts, attributes, "dtype")
    counts, middle = blocks.counts(shape, block), 2 ** (bits - 1)
    rest, zero = {"scale": _scale(parts, counts)}, _zero_points(parts, counts)
    for end, x in (("_qdata", stored), ("_zero_point", zero)):
        low, high = (int(n) for n in x.aminmax()) if x is not None and x.numel() else (0, 0)
        if not -middle <= low <= high < middle:
            raise parts.fail(f"{end!r} has values from {low} to {high}, and must have those of int{bits}")
    if zero is not None:
        rest["zero_point"] = (zero.to(torch.int16) + middle).to(torch.uint8)

    def codes(start: int, stop: int) -> Tensor:
        part = stored[start:stop]
        return part if zero is None else (part.to(torch.int16) + middle).to(torch.uint8)

    return Weight(assemble_rows(integer_quantizer(bits, block, zero is not None), shape, dtype, codes, **rest))


def _int4(parts: Parts, attributes: Config) -> Weight:
    packed = parts.get("_qdata", torch.int8, torch.uint8, ndim=2)
    shape = (packed.shape[0], 2 * packed.shape[1])
    if attributes.get("shape") != list(shape):
        raise parts.fail(
            f"its shape is {shown(attributes.get('shape'))}, and '_qdata' of {tuple(packed.shape)} has {shape}"
        )
    block = _block(parts, attributes, shape)
    if block[0] != 1:
        raise parts.fail(f"its block_size is {shown(attributes['block_size'])}, and must be a group of one row")
    counts = blocks.counts(shape, block)
    scale = parts.get("_scale", *FLOATS, ndim=2)
    zero = parts.get("_zero_point", *FLOATS, ndim=2)
    groups = (counts[1], counts[0])
    scales, zeros = (
        parts.fits(end, x, groups).t().to(torch.float32) for end, x in (("_scale", scale), ("_zero_point", zero))
    )
    q = offset_quantizer(block)
    codes = packed.view(torch.uint8) ^ 0x88  # signed to unsigned, by adding 8
    return Weight(parts.assemble(q, shape, scale.dtype, codes=codes, scale=scales, offset=scales * 8 - zeros))


def _float8(parts: Parts, attributes: Config) -> Weight:
    codes = parts.get("_qdata", *FP8)
    block, dtype = _block(parts, attributes, codes.shape), _dtype(parts, attributes, "dtype")
    scale = _scale(parts, blocks.counts(codes.shape, block))
    return Weight(parts.assemble(float_quantizer(codes.dtype, block), codes.shape, dtype, codes=codes, scale=scale))


def _mx(parts: Parts, attributes: Config) -> Weight:
    dtype = _dtype(parts, attributes, "orig_dtype")
    if attributes.get("block_size") != 32:
        raise parts.fail(f"its block_size is {shown(attributes.get('block_size'))}, and must be 32")
    element = _value(attributes, "elem_dtype")
    if element == "float4_e2m1fn_x2":
        codes = parts.get("_qdata", torch.uint8, ndim=2)
        shape, q = (codes.shape[0], 2 * codes.shape[1]), MXFP4
    elif element in ("float8_e4m3fn", "float8_e5m2"):
        codes = parts.get("_qdata", getattr(torch, element), ndim=2)
        shape, q = (codes.shape[0], codes.shape[1]), mx_quantizer(codes.dtype)
    else:
        raise parts.fail(f"its elem_dtype is {shown(element)}, and must be that of MXFP8 or MXFP4")
    scale = _ordered(parts, attributes, parts.get("_scale", torch.float8_e8m0fnu, torch.uint8), shape, 32)
    return Weight(parts.assemble(q, shape, dtype, codes=codes, scale=scale))


def _nvfp4(parts: Parts, attributes: Config) -> Weight:
    dtype = _dtype(parts, attributes, "orig_dtype")
    if attributes.get("block_size") != 16:
        raise parts.fail(f"its block_size is {shown(attributes.get('block_size'))}, and must be 16")
    codes = parts.get("_qdata", torch.uint8, ndim=2)
    shape = (codes.shape[0], 2 * codes.shape[1])
    scale = _ordered(parts, attributes, parts.get("_scale", torch.float8_e4m3fn), shape, 16).view(torch.float8_e4m3fn)
    outer = torch.ones(1, 1)
    if parts.has("_per_tensor_scale"):
        stored = parts.get("_per_tensor_scale", torch.float32)
        outer = parts.fits("_per_tensor_scale", stored, (1, 1), (1,), ())
    return Weight(parts.assemble(NVFP4_MULTIPLIED, shape, dtype, codes=codes, scale=scale, outer_scale=outer))


_READERS = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "Float8Tensor": _float8,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
"""By class. The others are in the order of a device's kernel."""


# ---- parts


def _value(attributes: Config, key: str) -> Any:
    """An attribute that is a dtype or an enumeration: {"_type": ..., "_data": its name}."""
    value: Any = attributes.get(key)
    return value.get("_data") if isinstance(value, dict) else value


def _dtype(parts: Parts, attributes: Config, key: str) -> torch.dtype:
    dtype = {str(d).removeprefix("torch."): d for d in FLOATS}.get(str(_value(attributes, key)))
    if dtype is None:
        raise parts.fail(f"its {key} is {shown(_value(attributes, key))}, and must be one of {FLOATS}")
    return dtype


def _block(parts: Parts, attributes: Config, shape: Iterable[int]) -> Block:
    """The block_size, with -1 for a whole dimension."""
    sizes, size = tuple(shape), attributes.get("block_size")
    given = size if isinstance(size, list) else []
    if len(given) != len(sizes) or len(sizes) < 2 or any(type(n) is not int or not 0 < n < 2**31 for n in given):
        raise parts.fail(f"its block_size is {shown(size)}, and must be a size for each dimension of {sizes}")
    return tuple(-1 if b != 1 and b >= n else b for b, n in zip(given, sizes, strict=True))


def _scale(parts: Parts, counts: Iterable[int]) -> Tensor:
    """The scales, one per block; those of rows or of the tensor may lack dimensions of 1."""
    wanted, scale = tuple(counts), parts.get("_scale", *FLOATS)
    few = [(), (1,)] if scale.numel() == 1 else [wanted[:-1]] if wanted[-1] == 1 else []
    return parts.fits("_scale", scale, wanted, *few).to(torch.float32)


def _zero_points(parts: Parts, counts: Iterable[int]) -> Tensor | None:
    """The zero points; None if all are 0, as those of symmetric codes."""
    if not parts.has("_zero_point"):
        return None
    wanted, zero = tuple(counts), parts.get("_zero_point", torch.int8, torch.int32, torch.int64)
    few = [(), (1,)] if zero.numel() == 1 else [wanted[:-1]] if wanted[-1] == 1 else []
    zero = parts.fits("_zero_point", zero, wanted, *few)
    if not bool(zero.any()):
        return None
    low, high = (int(n) for n in zero.aminmax())
    if not -128 <= low <= high < 128:
        raise parts.fail(f"'_zero_point' has values from {low} to {high}, and must have those of int8")
    return zero.to(torch.int8)


def _ordered(parts: Parts, attributes: Config, scale: Tensor, shape: tuple[int, int], block: int) -> Tensor:
    """The bytes of the scales of a matrix, (rows, groups), from their order in the file.

    Matrix units read tiles of 128 rows and 4 groups, padded, with byte 16 (i % 32) + 4 (i // 32) + j of scale (i, j).
    """
    rows, groups, raw = shape[0], -(-shape[1] // block), scale.view(torch.uint8)
    if attributes.get("is_swizzled_scales") is not True:
        return parts.fits("_scale", raw, (rows, groups)).contiguous()
    down, across = -(-rows // 128), -(-groups // 4)
    if raw.numel() != 512 * down * across:
        raise parts.fail(
            f"'_scale' has {raw.numel()} scales, and {rows} rows of {groups} in tiles of 128 by 4 have "
            f"{512 * down * across}"
        )
    tiles = raw.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)  # down, i // 32, i % 32, across, j
    return tiles.reshape(128 * down, 4 * across)[:rows, :groups].contiguous()
