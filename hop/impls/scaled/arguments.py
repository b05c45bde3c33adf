"""Check the arguments of scaled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import dtensor, eager, tracing
from hop.compat.eager import OpOverload
from hop.dispatch import operators as families
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, CONDITION, INDEX, LHS, MASK, RHS, SCALED, TABLE, argument_names
from hop.impls.out_dtype.fitting import check_shapes
from hop.impls.quantize.arguments import fitting_scales
from hop.impls.scaled import calls, meaning
from hop.impls.scaled.calls import Call
from hop.impls.scaled.gradient import is_quantized
from hop.impls.scaled.operands import block_of
from hop.impls.scaled.products import has_wide_sums, is_transposed
from hop.numerics import copies
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown

PAIRS = {
    ("integers", "integers"): "int32 sums",
    ("floats of 8 or 4 bits", "floats of 8 or 4 bits"): "float32 sums",
    ("plain floats", "integers"): "float32 sums",
    ("plain floats", "floats of 8 or 4 bits"): "float32 sums",
    ("plain floats", "codebooks"): "float32 sums",
}
"""The pairs of operand kinds that a product accepts, in either order, and the dtype of its sums."""


def check_output(output: object) -> None:
    """Raise unless `output` is a dtype or Quantizer that scaled supports."""
    if isinstance(output, torch.dtype):
        if output not in copies.APPEARANCES:
            raise TypeError(
                f"scaled: output must be float16, bfloat16, float32, float64 or a Quantizer, got {output}; give a "
                "Quantizer such as hop.presets.INT8_TENSOR for integers that represent real numbers, or use "
                "hop.out_dtype for bare sums"
            )
        return
    if not isinstance(output, Quantizer):
        raise TypeError(
            f"scaled: output must be a torch.dtype or a Quantizer, got {shown(output)}; give one such as torch.float32 "
            "or hop.presets.INT8_TENSOR"
        )
    if output.is_random():
        raise ValueError(f"scaled: output {output} rounds at random; use a dtype, then hop.quantize with noise")


def check_op(op: object) -> None:
    """Raise ValueError unless scaled supports `op`."""
    if isinstance(op, eager.OpOverload) and op in SCALED:
        return
    name = str(getattr(op, "__name__", op)).removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0]
    named = sorted(str(known) for known in SCALED if known._schema.name == f"aten::{name}")
    if named:
        raise ValueError(f"scaled: op must be an operator overload of torch.ops, got {op}; use {' or '.join(named)}")
    known = ", ".join(sorted({o._schema.name.removeprefix("aten::") for o in SCALED}))
    raise ValueError(
        f"scaled: op must be an operator that hop.scaled supports, got {op}; use one of torch.ops.aten: {known}"
    )


def check(call: Call) -> Call:
    """Raise for an invalid call; return it with its output scales in float32."""
    check_output(call.output)
    _check_roles(call)
    if call.roles.product is not None:
        _check_product(call)
    meaning.of(call).check(call)
    if isinstance(call.output, torch.dtype):
        for name in ("output_scale", "output_zero_point"):
            if getattr(call, name) is not None:
                raise ValueError(
                    f"scaled: {name} must be None where output is a dtype, got it with output {call.output}; leave it "
                    "out, or give a Quantizer"
                )
        return call
    if (convention := calls.integer_function(call.output)) is not None:
        _check_integers(call, convention)
    if calls.by_sum(call.output) and (reason := meaning.exact_declines(call)) is not None:
        raise ValueError(
            f"scaled: output {call.output} is found from an exact integer sum, but {reason}; use "
            "Static(requantize=Division())"
        )
    scale, zero_point = fitting_scales(
        "scaled", calls.OUTPUT_NAMES, call.output, None, call.device, call.output_scale, call.output_zero_point
    )
    return call._replace(output_scale=scale, output_zero_point=zero_point)


def check_quantized(op: OpOverload, output: object, args: Sequence[object]) -> None:
    """Raise TypeError unless an operand is quantized, or the output of an operator other than a product.

    Functions, norms and softmax also accept all-float calls, because their results differ from ATen's.
    """
    is_product = TABLE[op].product is not None or TABLE[op].family is families.EMBEDDING
    if not is_product and (not isinstance(output, torch.dtype) or TABLE[op].family in families.OWN):
        return
    if any(isinstance(x, Tensor) and is_quantized(dtensor.own_part(x)) for x in args):
        return
    given = zip(argument_names(op), args, strict=False)
    tensors_by_name = [(name, x) for name, arg in given for x in calls.tensors([arg])]
    others = (INDEX, CONDITION, MASK, BIAS)
    operands = [x for i, arg in enumerate(args) if TABLE[op].role(i) not in others for x in calls.tensors([arg])]
    if not all(x.dtype in copies.APPEARANCES for x in operands):
        return  # _check_roles reports it
    if tensors_by_name and all(
        isinstance(x, Tensor) and not is_quantized(dtensor.own_part(x)) for _, x in tensors_by_name
    ):
        names = " or ".join(dict.fromkeys(repr(name) for name, _ in tensors_by_name))
        other = "" if is_product else ", give a Quantizer as output"
        raise TypeError(
            f"scaled: argument {names} of {op} must be a QuantizedTensor, got plain tensors; quantize one with "
            f"hop.quantize{other}, or use {op} itself"
        )


def _check_roles(call: Call) -> None:
    names = argument_names(call.op)
    operands: list[tuple[str, object]] = []
    for position, (name, arg) in enumerate(zip(names, call.args, strict=False)):
        role = call.roles.role(position)
        for x in calls.tensors([arg]):
            operands.append((name, x))
            if not isinstance(x, Tensor):
                if role not in (LHS, RHS, "other"):
                    raise ValueError(
                        f"scaled: argument {name!r} of {call.op} is its {role}, which cannot be quantized, got a "
                        "QuantizedTensor; call hop.dequantize on it"
                    )
            elif role == BIAS:
                is_sum = call.roles.product is not None
                whole = (torch.int32, torch.int64) if is_sum and _is_wide(call) else (torch.int32,)
                if not (x.is_floating_point() or (is_sum and x.dtype in whole)):
                    units = ", or int32 in units of the product of the scales" if is_sum else ""
                    raise TypeError(
                        f"scaled: argument {name!r} of {call.op} must be floating point{units}; got {x.dtype}; cast it "
                        "to torch.float32"
                    )
            elif role == MASK:
                if not (x.is_floating_point() or x.dtype == torch.bool):
                    raise TypeError(
                        f"scaled: argument {name!r} of {call.op} must be bool or floating point, got {x.dtype}; cast it"
                    )
            elif role not in (INDEX, CONDITION) and x.dtype not in copies.APPEARANCES:
                raise TypeError(
                    f"scaled: argument {name!r} of {call.op} must be a QuantizedTensor or float16, bfloat16, float32 "
                    f"or float64, got {x.dtype}; quantize it with hop.quantize, or use hop.out_dtype for bare codes"
                )
    check_devices("scaled", call.op, operands)


def check_devices(caller: str, op: OpOverload, operands: Sequence[tuple[str, Any]]) -> None:
    """Raise RuntimeError unless all tensors, the arguments `operands` of `op`, are on one device."""
    (first, one), *others = operands
    for name, other in others:
        if other.device != one.device:
            raise RuntimeError(
                f"{caller}: all tensors must be on one device, but argument {first!r} of {op} is on {one.device} "
                f"and {name!r} on {other.device}; move one of them"
            )


def _check_integers(call: Call, convention: IntegerFunction) -> None:
    """Raise ValueError unless the output's integer convention supports the operator, and codes have one scale."""
    if not convention.takes(call.op, call.kwargs):
        raise ValueError(
            f"scaled: output {call.output} does not support {call.op} with {call.kwargs}; use a convention of "
            "hop.integer_functions that does, or of hop.requantization for a product"
        )
    for x in calls.tensors(call.args):
        if calls.is_integer(x) and copies.ROWWISE in x.usages and all(b == -1 for b in x.quantizer.block):
            continue
        if call.roles.family is families.NORM and x is not call.args[0]:
            continue  # a norm's weight and bias are checked by its family
        raise ValueError(
            f"scaled: output {call.output} is found from integers with one scale, got {calls.described(x)}; quantize "
            "it by one such as hop.presets.INT8_TENSOR"
        )


def _is_wide(call: Call) -> bool:
    """Whether the sums need 64 bits."""
    factors = [x for x in (call.find(LHS), call.find(RHS)) if isinstance(x, Operand)]
    return has_wide_sums(*factors)


def _check_product(call: Call) -> None:
    lhs, rhs, bias = (call.find(role) for role in (LHS, RHS, BIAS))
    kinds = calls.kind(lhs), calls.kind(rhs)
    if kinds not in PAIRS and kinds[::-1] not in PAIRS and not calls.has_stored_sums(call):
        supported = "; ".join(f"{a} with {b}" for a, b in PAIRS)
        raise ValueError(
            f"scaled: {call.op} takes {supported}; got {name_of(call, LHS)} by {calls.described(lhs)} with "
            f"{name_of(call, RHS)} by {calls.described(rhs)}; quantize both by formats of one kind"
        )
    check_shapes("scaled", call.op, call.args)
    integers = kinds == ("integers", "integers")
    if bias is not None and not bias.is_floating_point():
        if not integers:
            raise ValueError(
                f"scaled: argument {name_of(call, BIAS)} of {call.op}, an int32 bias, is for two operands of integers, "
                f"got {bias.dtype}; give a float one"
            )
        if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("beta", 1) != 1:
            raise ValueError(
                f"scaled: with an int32 bias, alpha and beta of {call.op} must be 1; got {call.kwargs}; leave them out"
            )
    if not integers:
        return
    for role, x in ((LHS, lhs), (RHS, rhs)):
        if x.quantizer.flat:
            raise ValueError(
                f"scaled: {call.op} of integers takes no blocks over the flattened tensor; got {name_of(call, role)} "
                "with flat=True; use flat=False"
            )
    if call.roles.family is families.CONVOLUTION:
        _check_convolution(call)
        return
    blocked = []
    for role, along in ((LHS, -1), (RHS, call.roles.rhs_sums)):
        x = call.find(role)
        if x.dim() == 0:
            continue
        dim = -1 if x.dim() == 1 else along
        block = block_of(x, calls.usage(call, role))
        blocked.append(block[dim])
        if block[dim] == 1 and not tracing.known_equal(x.shape[dim], 1):
            raise ValueError(
                f"scaled: the scale of {name_of(call, role)} must not change with each element of the dimension that "
                f"{call.op} sums over, got {x.quantizer}; use a block along it, of all of it or of a group, or "
                "quantize with usages='columnwise'"
            )
    if bias is not None and not bias.is_floating_point() and any(b != -1 for b in blocked):
        raise ValueError(
            f"scaled: an int32 bias of {call.op} has no unit where scales come in groups; give a float one"
        )


def _check_convolution(call: Call) -> None:
    x, weight = call.find(LHS), call.find(RHS)
    channel = 1 if is_transposed(call)[0] else 0
    batch = 0 if x.dim() == weight.dim() else None
    for name, own, free in (("input", x, batch), ("weight", weight, channel)):
        if copies.ROWWISE not in own.usages:
            raise ValueError(
                f"scaled: {call.op} reads row-wise copies, and {name} has usages {own.usages}; quantize it with "
                "usages='rowwise'"
            )
        block = block_of(own, copies.ROWWISE)
        for dim, b in enumerate(block):
            if dim != free and b != -1 and not tracing.known_equal(own.shape[dim], 1):
                raise ValueError(
                    f"scaled: {call.op} of integers takes one scale for each "
                    f"{'example' if name == 'input' else 'output channel'} at most; the blocks of {name} are "
                    f"{block}; take a preset such as hop.presets.INT8_CONV"
                )


def name_of(call: Call, role: str) -> str:
    """The quoted name of the argument with a role, for error messages."""
    return repr(argument_names(call.op)[call.roles.roles.index(role)])
