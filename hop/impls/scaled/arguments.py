"""What may be asked of scaled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.compat.eager import OpOverload
from hop.dispatch.operators import BIAS, CONVOLUTION, INDEX, LHS, MATRIX, RHS, SCALED
from hop.impls.quantize.arguments import fitting_scales
from hop.impls.scaled.calls import Call, by_sum, tensors, usage
from hop.impls.scaled.meaning import exact_declines
from hop.impls.scaled.operands import block_of
from hop.impls.scaled.products import is_transposed
from hop.numerics import copies
from hop.numerics.formats import Codebook, Float, Integer
from hop.numerics.quantizer import Quantizer

_KINDS: dict[type, str] = {Integer: "integers", Float: "floats of 8 or 4 bits", Codebook: "codebooks"}

PAIRS = {
    ("integers", "integers"): "int32 sums",
    ("floats of 8 or 4 bits", "floats of 8 or 4 bits"): "float32 sums",
    ("plain floats", "integers"): "float32 sums",
    ("plain floats", "floats of 8 or 4 bits"): "float32 sums",
    ("plain floats", "codebooks"): "float32 sums",
}
"""The kinds of operands that a product takes, in either order, and how it sums."""


def kind(x: Any) -> str:
    """What a product knows of an operand."""
    if isinstance(x, Tensor):
        return "plain floats"
    return next(name for cls, name in _KINDS.items() if isinstance(x.quantizer.format, cls))


def check_output(output: Any) -> None:
    """Raise unless it is a dtype or a Quantizer that scaled gives."""
    if isinstance(output, torch.dtype):
        if output not in copies.APPEARANCES:
            raise TypeError(
                f"scaled: output must be float16, bfloat16, float32, float64 or a Quantizer, got {output}; integers "
                "that stand for real numbers need a Quantizer, such as hop.presets.INT8_TENSOR, and bare sums are "
                "what hop.out_dtype gives"
            )
        return
    if not isinstance(output, Quantizer):
        raise TypeError(f"scaled: output must be a torch.dtype or a Quantizer, got {output!r}")
    if output.stochastic:
        raise ValueError(f"scaled: output {output} rounds at random; take a dtype, and hop.quantize with noise")


def check_op(op: Any) -> None:
    """Raise unless it is an operator that scaled knows."""
    if isinstance(op, eager.OpOverload) and op in SCALED:
        return
    name = str(getattr(op, "__name__", op)).removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0]
    named = sorted(str(known) for known in SCALED if known._schema.name == f"aten::{name}")
    if named:
        raise ValueError(f"scaled: op must be an operator overload of torch.ops, got {op}; take {' or '.join(named)}")
    known = ", ".join(sorted({o._schema.name.removeprefix("aten::") for o in SCALED}))
    raise ValueError(f"scaled: op must be one of these operators of torch.ops.aten, got {op}: {known}")


def check(call: Call) -> Call:
    """Raise for a call that breaks a rule; return it with its scales in float32."""
    check_output(call.output)
    _check_roles(call)
    if call.roles.product is not None:
        _check_product(call)
    if isinstance(call.output, torch.dtype):
        for name in ("output_scale", "output_zero_point"):
            if getattr(call, name) is not None:
                raise ValueError(f"scaled: {name} is given, but output {call.output} is no Quantizer; give one of them")
        return call
    if by_sum(call.output) and (reason := exact_declines(call)) is not None:
        raise ValueError(
            f"scaled: output {call.output} is found from an exact integer sum, but {reason}; use "
            "Static(requantize=Division())"
        )
    scale, zero_point = fitting_scales(
        "scaled", "output_", call.output, None, call.device, call.output_scale, call.output_zero_point
    )
    return call._replace(output_scale=scale, output_zero_point=zero_point)


def _check_roles(call: Call) -> None:
    names = [a.name for a in call.op._schema.arguments]
    found: list[tuple[str, Any]] = []
    for position, (name, arg) in enumerate(zip(names, call.args, strict=False)):
        role = call.roles.role(position)
        for x in tensors([arg]):
            found.append((name, x))
            if not isinstance(x, Tensor):
                if role not in (LHS, RHS, "other"):
                    raise ValueError(f"scaled: argument {name!r} of {call.op} is its {role}, which cannot be quantized")
            elif role == BIAS:
                if not (x.is_floating_point() or x.dtype == torch.int32):
                    raise TypeError(
                        f"scaled: argument {name!r} of {call.op} must be floating point, or int32 in units of the "
                        f"product of the scales; got {x.dtype}"
                    )
            elif role != INDEX and x.dtype not in copies.APPEARANCES:
                raise TypeError(
                    f"scaled: argument {name!r} of {call.op} must be a QuantizedTensor or float16, bfloat16, float32 "
                    f"or float64, got {x.dtype}; hop.out_dtype runs operators on bare codes"
                )
    if all(isinstance(x, Tensor) for _, x in found):
        raise TypeError(f"scaled: one argument of {call.op} at least must be a QuantizedTensor; use {call.op} itself")
    check_devices("scaled", call.op, found)


def check_devices(caller: str, op: OpOverload, operands: Sequence[tuple[str, Any]]) -> None:
    """Raise RuntimeError unless all tensors, the arguments `operands` of `op`, are on one device."""
    (first, one), *others = operands
    for name, other in others:
        if other.device != one.device:
            raise RuntimeError(
                f"{caller}: all tensors must be on one device, but argument {first!r} of {op} is on {one.device} "
                f"and {name!r} on {other.device}; move one of them"
            )


def _check_product(call: Call) -> None:
    lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
    kinds = kind(lhs), kind(rhs)
    if kinds not in PAIRS and kinds[::-1] not in PAIRS:
        supported = "; ".join(f"{a} with {b}" for a, b in PAIRS)
        raise ValueError(f"scaled: {call.op} takes {supported}; got {_described(lhs)} with {_described(rhs)}")
    if call.roles.family is MATRIX:
        _check_shapes(call)
    integers = kinds == ("integers", "integers")
    if bias is not None and not bias.is_floating_point():
        if not integers:
            raise ValueError(f"scaled: an int32 bias of {call.op} is for two operands of integers; give a float one")
        if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
            raise ValueError(f"scaled: with an int32 bias, alpha and beta of {call.op} must be 1; got {call.kwargs}")
    if not integers:
        return
    if any(x.quantizer.flat for x in (lhs, rhs)):
        raise ValueError(f"scaled: {call.op} of integers takes no blocks over the flattened tensor; got flat=True")
    if call.roles.family is CONVOLUTION:
        _check_convolution(call)
        return
    blocked = []
    for name, role, along in (("lhs", LHS, -1), ("rhs", RHS, call.roles.rhs_sums)):
        x = call.find(role)
        if x.dim() == 0:
            continue
        dim = -1 if x.dim() == 1 else along
        block = block_of(x, usage(call, role))
        blocked.append(block[dim])
        if block[dim] == 1 and not tracing.known_equal(x.shape[dim], 1):
            raise ValueError(
                f"scaled: the scale of {name} changes with each element of the dimension that {call.op} sums over "
                f"({x.quantizer}); take a block along it, of all of it or of a "
                "group, or quantize with usages='columnwise'"
            )
    if bias is not None and not bias.is_floating_point() and any(b != -1 for b in blocked):
        raise ValueError(
            f"scaled: an int32 bias of {call.op} has no unit where scales come in groups; give a float one"
        )


def _check_shapes(call: Call) -> None:
    """Raise for matrices that do not fit, where their sizes are known; the operator itself does for the others."""
    found: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for position, argument in enumerate(call.op._schema.arguments[: len(call.args)]):
        role, x = call.roles.role(position), call.args[position]
        if role in (LHS, RHS, BIAS) and x is not None:
            found[role] = argument.name, tuple(x.shape)
    (lhs, left), (rhs, right), along = found[LHS], found[RHS], call.roles.rhs_sums
    if min(len(left), len(right)) < 2 or not all(isinstance(n, int) for n in (*left, *right)):
        return
    if left[-1] != right[along]:
        which = "last" if along == -1 else "last but one"
        raise RuntimeError(
            f"scaled: {call.op} sums over the last dimension of {lhs!r} and the {which} of {rhs!r}, which must be "
            f"equal; got shapes {left} and {right}"
        )
    bias, shape = found.get(BIAS, ("", ()))
    width = right[-2 if along == -1 else -1]
    if shape and isinstance(shape[-1], int) and shape[-1] not in (1, width):
        raise RuntimeError(f"scaled: {bias!r} of {call.op} must have {width} elements for {rhs!r} {right}; got {shape}")


def _check_convolution(call: Call) -> None:
    x, weight = call.find(LHS), call.find(RHS)
    channel = 1 if is_transposed(call)[0] else 0
    batch = 0 if x.dim() == weight.dim() else None
    for name, own, free in (("input", x, batch), ("weight", weight, channel)):
        if copies.ROWWISE not in own.usages:
            raise ValueError(f"scaled: {call.op} reads row-wise copies, and {name} has usages {own.usages}")
        block = block_of(own, copies.ROWWISE)
        for dim, b in enumerate(block):
            if dim != free and b != -1 and not tracing.known_equal(own.shape[dim], 1):
                raise ValueError(
                    f"scaled: {call.op} of integers takes one scale for each "
                    f"{'example' if name == 'input' else 'output channel'} at most; the blocks of {name} are "
                    f"{block}"
                )


def _described(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else str(x.quantizer)
