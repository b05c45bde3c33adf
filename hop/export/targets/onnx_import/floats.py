"""Converters of nodes that compute each element, reduce, or normalize."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.dispatch.operators import aten
from hop.export.targets.onnx_import.calls import Call, Converter
from hop.export.targets.onnx_import.reading import DTYPES

_KINDS = {
    1: "FLOAT",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    9: "BOOL",
    10: "FLOAT16",
    11: "DOUBLE",
    16: "BFLOAT16",
}


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0), call.tensor(1))


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call], Tensor]:
    def convert(call: Call) -> Tensor:
        first, *rest = call.tensors()
        for x in rest:
            first = function(first, x)
        return first

    return convert


# ---- functions of elements


def _quotient(call: Call) -> Tensor:
    a, b = call.tensor(0), call.tensor(1)
    return torch.div(a, b, rounding_mode=None if a.dtype.is_floating_point else "trunc")


def _remainder(call: Call) -> Tensor:
    return (torch.fmod if call.attribute("fmod", 0) else torch.remainder)(call.tensor(0), call.tensor(1))


def _power(call: Call) -> Tensor:
    known = call.known[1]
    exponent = call.number(1) if known is not None and known.data.numel() == 1 else call.tensor(1)
    x = call.tensor(0)
    return torch.pow(x, exponent).to(x.dtype)  # type: ignore[arg-type]


def _clip(call: Call) -> Tensor:
    if call.opset < 11 or "min" in call.node.attributes or "max" in call.node.attributes:
        low, high = call.attribute("min", None), call.attribute("max", None)
    else:
        low, high = call.number(1), call.number(2)
    x = call.tensor(0)
    return x if low is None and high is None else torch.clamp(x, low, high)


def _hard_sigmoid(call: Call) -> Tensor:
    x, alpha, beta = call.tensor(0), call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return (x * alpha + beta).clamp(0.0, 1.0)


def _gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0), approximate=call.only("approximate", "none", "tanh"))


def _prelu(call: Call) -> Tensor:
    x, slope = call.tensor(0), call.tensor(1)
    return torch.where(x < 0, x * slope, x)


def _infinite(call: Call) -> Tensor:
    call.only("detect_negative", 1)
    call.only("detect_positive", 1)
    return torch.isinf(call.tensor(0))


def _cast(call: Call) -> Tensor:
    number = call.attribute("to", 0)
    call.attribute("saturate", 1)  # of 8-bit floats
    call.attribute("round_mode", "up")  # of 8-bit floats
    if number not in _KINDS:
        call.refuse(f"it casts to the type {number}; supported are {', '.join(_KINDS.values())}")
    return call.tensor(0).to(DTYPES[_KINDS[number]])


def _cast_like(call: Call) -> Tensor:
    call.attribute("saturate", 1)
    return call.tensor(0).to(call.tensor(1).dtype)


def _shift(call: Call) -> Tensor:
    function = torch.bitwise_left_shift if call.only("direction", "LEFT", "RIGHT") == "LEFT" else None
    return (function or torch.bitwise_right_shift)(call.tensor(0), call.tensor(1))


# ---- reductions


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[[Call], Tensor]:
    def convert(call: Call) -> Tensor:
        x, keeps = call.tensor(0), bool(call.attribute("keepdims", 1))
        axes, stays = call.axes(x.dim()), call.attribute("noop_with_empty_axes", 0)
        if not axes and stays:
            return x
        return function(x, axes or list(range(x.dim())), keeps)

    return convert


def _product(x: Tensor, axes: list[int], keeps: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keeps)
    return x


def _sum(x: Tensor, axes: list[int], keeps: bool) -> Tensor:
    return x.sum(axes, keepdim=keeps, dtype=x.dtype)


def _index(function: Callable[..., Tensor]) -> Callable[[Call], Tensor]:
    def convert(call: Call) -> Tensor:
        call.only("select_last_index", 0)
        axis, keeps = call.attribute("axis", 0), bool(call.attribute("keepdims", 1))
        return function(call.tensor(0), axis, keeps)

    return convert


def _running_sum(call: Call) -> Tensor:
    call.only("exclusive", 0)
    call.only("reverse", 0)
    x = call.tensor(0)
    return x.cumsum(int(call.number(1) or 0), dtype=x.dtype)


# ---- softmax and norms


def _softmax(op: OpOverload) -> Callable[[Call], Tensor]:
    def convert(call: Call) -> Tensor:
        x = call.tensor(0)
        axis = call.axis(call.attribute("axis", -1 if call.opset >= 13 else 1), x.dim())
        if call.opset < 13 and axis != x.dim() - 1:
            call.refuse(f"before opset 13, softmax over several dimensions, from {axis} on, is not supported")
        return op(x, axis)

    return convert


def _layer_norm(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.axis(call.attribute("axis", -1), x.dim())
    call.only("stash_type", 1)
    if len([name for name in call.node.outputs if name]) > 1:
        call.refuse("its mean and deviation are not supported as results")
    weight, bias = call.tensor(1), call.optional(2)
    return F.layer_norm(x, list(weight.shape[-(x.dim() - axis) :]), weight, bias, call.attribute("epsilon", 1e-5))


def _rms_norm(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    axis = call.axis(call.attribute("axis", -1), x.dim())
    call.only("stash_type", 1)
    return F.rms_norm(x, list(x.shape[axis:]), weight, call.attribute("epsilon", 1e-5))


def _batch_norm(call: Call) -> Tensor:
    call.only("training_mode", 0)
    call.attribute("momentum", 0.9)
    x, weight, bias, mean, variance = (call.tensor(i) for i in range(5))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, call.attribute("epsilon", 1e-5))


def _instance_norm(call: Call) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    return F.instance_norm(x, None, None, weight, bias, True, 0.0, call.attribute("epsilon", 1e-5))


def _group_norm(call: Call) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    call.only("stash_type", 1)
    groups = call.attribute("num_groups", 1)
    if weight.numel() != x.shape[1]:
        call.refuse("its weights are per group (opset 18); convert it to opset 21")
    return F.group_norm(x, groups, weight, bias, call.attribute("epsilon", 1e-5))


FLOATS: dict[str, Converter] = {
    **{
        name: _unary(function)
        for name, function in {
            "Abs": torch.abs,
            "Acos": torch.acos,
            "Asin": torch.asin,
            "Atan": torch.atan,
            "BitwiseNot": torch.bitwise_not,
            "Ceil": torch.ceil,
            "Cos": torch.cos,
            "Cosh": torch.cosh,
            "Erf": torch.erf,
            "Exp": torch.exp,
            "Floor": torch.floor,
            "HardSwish": F.hardswish,
            "IsNaN": torch.isnan,
            "Log": torch.log,
            "Mish": F.mish,
            "Neg": torch.neg,
            "Not": torch.logical_not,
            "Reciprocal": torch.reciprocal,
            "Relu": torch.relu,
            "Round": torch.round,
            "Sigmoid": torch.sigmoid,
            "Sign": torch.sign,
            "Sin": torch.sin,
            "Sinh": torch.sinh,
            "Softplus": F.softplus,
            "Softsign": F.softsign,
            "Sqrt": torch.sqrt,
            "Tan": torch.tan,
            "Tanh": torch.tanh,
            "com.microsoft.Gelu": F.gelu,
        }.items()
    },
    **{
        name: _binary(function)
        for name, function in {
            "Add": torch.add,
            "And": torch.logical_and,
            "BitwiseAnd": torch.bitwise_and,
            "BitwiseOr": torch.bitwise_or,
            "BitwiseXor": torch.bitwise_xor,
            "Equal": torch.eq,
            "Greater": torch.gt,
            "GreaterOrEqual": torch.ge,
            "Less": torch.lt,
            "LessOrEqual": torch.le,
            "Mul": torch.mul,
            "Or": torch.logical_or,
            "Sub": torch.sub,
            "Xor": torch.logical_xor,
        }.items()
    },
    "BitShift": _shift,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Celu": lambda call: F.celu(call.tensor(0), call.attribute("alpha", 1.0)),
    "Clip": _clip,
    "Div": _quotient,
    "Elu": lambda call: F.elu(call.tensor(0), call.attribute("alpha", 1.0)),
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "IsInf": _infinite,
    "LeakyRelu": lambda call: aten.leaky_relu.default(call.tensor(0), call.attribute("alpha", 0.01)),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Mod": _remainder,
    "PRelu": _prelu,
    "Pow": _power,
    "Sum": _variadic(torch.add),
    "Where": lambda call: torch.where(call.tensor(0), call.tensor(1), call.tensor(2)),
    "ArgMax": _index(torch.argmax),
    "ArgMin": _index(torch.argmin),
    "CumSum": _running_sum,
    "ReduceL2": _reduction(lambda x, axes, keeps: x.square().sum(axes, keepdim=keeps).sqrt()),
    "ReduceMax": _reduction(lambda x, axes, keeps: x.amax(axes, keepdim=keeps)),
    "ReduceMean": _reduction(lambda x, axes, keeps: aten.mean.dim(x, axes, keeps)),
    "ReduceMin": _reduction(lambda x, axes, keeps: x.amin(axes, keepdim=keeps)),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(lambda x, axes, keeps: x.square().sum(axes, keepdim=keeps)),
    "Softmax": _softmax(aten.softmax.int),
    "LogSoftmax": _softmax(aten.log_softmax.int),
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
}
"""The converter of each operator; it raises NotImplementedError for an unsupported call."""
