"""Quantization of activations in the compressed-tensors format: `input_activations` of the configuration, and the
tensors input_scale and input_zero_point of static scales, which ModelOpt has, too.

    strategy tensor, dynamic or not     one scale for the tensor
    strategy token, dynamic             one for each row
    strategy group, dynamic             one for each group of a row; exponents for MX

Zero points are those of signed integers. Dynamic scales are computed by the tool that runs the model: the package
divides the amax of symmetric integers by 2^bits / 2 - 1/2, and hop by 2^bits / 2 - 1.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hop.interchange.packed import Parts, signed_format
from hop.numerics import blocks
from hop.numerics.blocks import Block
from hop.numerics.float_rules import Microscaling
from hop.numerics.formats import E2M1, E4M3
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, MinMax, Static
from hop.numerics.schemes import Scheme
from hop.numerics.spelling import JsonObject, shown
from hop.tensor import QuantizedTensor

SCALE, ZERO_POINT = "input_scale", "input_zero_point"


class Activation(NamedTuple):
    """How a layer's input is quantized, with the scale and zero point of a static quantizer."""

    quantizer: Quantizer
    scale: Tensor | None = None
    zero_point: Tensor | None = None


def activations_of(module: nn.Module) -> dict[str, Activation]:
    """The quantization of inputs by a module's layers with quantized weights, by the weight's name."""
    result: dict[str, Activation] = {}
    for name, layer in module.named_modules():
        scheme: Any = getattr(layer, "scheme", None)
        if not isinstance(scheme, Scheme) or scheme.lhs is None:
            continue
        if not isinstance(getattr(layer, "weight", None), QuantizedTensor):
            continue
        state: Any = layer.get_submodule("scales.input") if scheme.lhs.scale.is_static else None
        scales = () if state is None else (state.scale, state.zero_point)
        result[f"{name}.weight"] = Activation(scheme.lhs, *scales)
    return result


def input_args(activation: Activation) -> tuple[JsonObject, dict[str, Tensor]]:
    """The arguments of the configuration and the tensors, by name suffix.

    Raises ValueError, with the reason, if the package cannot represent the quantizer.
    """
    q = activation.quantizer
    rule, block = q.scale, blocks.per_dimension(q.block, 2)
    strategies: dict[Block, JsonObject] = {(-1, -1): {"strategy": "tensor"}, (1, -1): {"strategy": "token"}}
    strategy = strategies.get(block)
    is_mx, is_float = isinstance(rule, Microscaling), q.format in (E4M3, E2M1)
    known = is_mx and is_float if is_mx or q.format == E2M1 else q.format.is_integer or is_float
    if strategy is None and block[0] == 1:
        strategy = {"strategy": "group", "group_size": block[1]}
    if q.is_random() or q.hadamard is not None or q.flat or q.layout is not None or q.format.bits > 8:
        strategy = None
    if not known or strategy is None or rule.is_delayed or rule.is_compound or (rule.is_static and block != (-1, -1)):
        raise ValueError(
            f"its input is quantized by {q}, and the package has integers of at most 8 bits and e4m3 with a scale for "
            "the tensor, static or not, for each row or group of a row, and MXFP8 and MXFP4"
        )
    kind, affine = "int" if q.format.is_integer else "float", rule.has_zero_point()
    args: JsonObject = {"num_bits": q.format.bits, "type": kind, "symmetric": not affine, **strategy}
    args["dynamic"] = not rule.is_static
    if is_mx:
        args |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    tensors: dict[str, Tensor] = {}
    if rule.is_static:
        scale, zero = activation.scale, activation.zero_point
        if scale is None or not bool(scale.isfinite().all()):
            raise ValueError("the static scale of its input is not set; calibrate the model first")
        tensors[SCALE] = scale.detach().cpu().to(torch.float32).reshape(1)
        if zero is not None:
            middle = 0 if q.format.dtype.is_signed else 2 ** (q.format.bits - 1)
            tensors[ZERO_POINT] = (zero.detach().cpu().round() - middle).to(torch.int8).reshape(1)
    return args, tensors


def input_quantizer(parts: Parts, args: Mapping[str, Any]) -> Quantizer:
    """The quantizer of `input_activations`."""
    bits, kind, strategy, dynamic = (args.get(key) for key in ("num_bits", "type", "strategy", "dynamic"))
    symmetric, group = args.get("symmetric", True), args.get("group_size")
    block: Block | None = None
    if strategy in ("tensor", "token"):
        block = (-1, -1) if strategy == "tensor" else (1, -1)
    elif strategy == "group" and type(group) is int and 0 < group < 2**31:
        block = (1, group)
    static = dynamic is False
    known = type(symmetric) is bool and block is not None and isinstance(dynamic, bool) and type(bits) is int
    if known and (not static or block == (-1, -1)):
        assert block is not None and type(bits) is int
        is_mx = args.get("scale_dtype") == "torch.uint8" and block == (1, 32) and not static
        if kind == "int" and 2 <= bits <= 8:
            rule = Static(affine=not symmetric) if static else Amax() if symmetric else MinMax()
            return Quantizer(signed_format(bits), block, rule)
        if kind == "float" and symmetric and is_mx and bits in (4, 8):
            return Quantizer(E4M3 if bits == 8 else E2M1, block, Microscaling())
        if kind == "float" and symmetric and bits == 8:
            return Quantizer(E4M3, block, Static() if static else BlockScaling() if group else CurrentScaling())
    raise parts.fail(
        f"input_activations of the configuration is {shown(dict(args))}; those that are read are integers of 2 to 8 "
        "bits and floats of 8 with strategy 'tensor', static or dynamic, and with 'token' or 'group', dynamic; and MX"
    )


def read_activation(parts: Parts, args: Mapping[str, Any]) -> Activation:
    """The quantization of a layer's input, from the arguments and the layer's input_scale and input_zero_point."""
    q = input_quantizer(parts, args)
    if not q.scale.is_static:
        return Activation(q)
    scale = parts.fits(SCALE, parts.get(SCALE, torch.float32, torch.bfloat16, torch.float16), (1,), ())
    scale = scale.to(torch.float32)
    if not 0 < float(scale) < float("inf"):
        raise parts.fail(f"{SCALE!r} is {float(scale)}, and must be finite and above 0")
    if not q.scale.has_zero_point():
        return Activation(q, scale)
    zero = parts.fits(ZERO_POINT, parts.get(ZERO_POINT, torch.int8), (1,), ())
    if not q.format.min <= int(zero) <= q.format.max:
        raise parts.fail(f"{ZERO_POINT!r} is {int(zero)}, and must be from {q.format.min} to {q.format.max}")
    return Activation(q, scale, zero)


def read_modelopt_activation(parts: Parts, is_nvfp4: bool) -> Activation | None:
    """The quantization of the input of a layer with ModelOpt's fp8 weight, by its input_scale; None if it has none."""
    if not parts.has(SCALE):
        return None
    if is_nvfp4:
        raise parts.fail(
            f"{SCALE!r} is the outer scale of inputs in NVFP4, which are not read; leave the inputs in floats"
        )
    return read_activation(parts, {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})


def args_for(parts: Parts, groups: list[Any]) -> Mapping[str, Any] | None:
    """The `input_activations` of the groups that may hold a weight; None if they quantize no activations."""
    found: list[Any] = []
    for group in groups:
        args: Any = group.get("input_activations") if isinstance(group, dict) else None
        if args not in found:
            found.append(args)
    if len(found) > 1 or (found and not isinstance(found[0], dict | None)):
        raise parts.fail(f"its config_groups have the input_activations {shown(found)}, and must have the same object")
    return found[0] if found else None
