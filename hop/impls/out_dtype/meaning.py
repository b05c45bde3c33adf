"""The reference of out_dtype in plain ATen: promote, run, cast.

    y = cast(op(cast(x_1, C), ..., cast(x_n, C)), output_dtype)        C = the common dtype (promotion.py)

For linear integer operators the result equals that of exact integers modulo 2^bits of `output_dtype`.

If integers become float32 and then integers again, as in a mean or with a float factor, backends add and multiply in
different orders, with or without FMA, and the last bit decides between two integers. Therefore `op` runs in float64,
where products of two float32 values and sums of integers are exact, and its result is rounded to float32 once.
"""

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload, OpOverloadPacket
from hop.compat.pytree import Args, ArgsKwargs, Kwargs
from hop.dispatch.compiled import operators
from hop.dispatch.operators import DIVIDE, MULTIPLY, aten, within
from hop.impls.out_dtype import choosing
from hop.impls.out_dtype.arguments import Inner, describe
from hop.impls.out_dtype.fitting import check_shapes, check_types
from hop.impls.out_dtype.forms import CONVOLUTIONS, as_product
from hop.impls.out_dtype.promotion import DTYPES, common_dtype, is_integer, run_dtype
from hop.kernels.aten.convolution import lay_out
from hop.numerics.spelling import shown


def reference(op: OpOverload, output_dtype: torch.dtype, /, *args: Any, **kwargs: object) -> Tensor:
    """The result of out_dtype(op, output_dtype, *args, **kwargs) for canonical arguments."""
    inner = describe(op)
    common = common_dtype(inner, output_dtype, args, kwargs)
    dtype = run_dtype(op, common)
    cast_args, cast_kwargs = inner.cast(args, kwargs, dtype)
    if passes_floats(inner, output_dtype, args, kwargs):
        result = _rounded_once(inner, *_in_float64(inner, cast_args, cast_kwargs))
    else:
        result = run(inner, dtype, cast_args, cast_kwargs)
        passes = result.dtype is torch.float32 and is_integer(common) and is_integer(output_dtype)  # for example exp
        if passes and not _rounds_once(inner, args, kwargs):
            result = _rounded_once(inner, *_in_float64(inner, *inner.cast(cast_args, cast_kwargs, torch.float32)))
    if op.overloadpacket in CONVOLUTIONS and all(is_integer(x.dtype) for x in args[:2]):
        result = lay_out(result, *args[:2])  # ATen's layout differs between backends, and between fake and real tensors
    if inner.returns_view and result.dtype == output_dtype:
        return result.clone()
    return result.to(output_dtype)


def run(inner: Inner, dtype: torch.dtype, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """Run the operator with promoted arguments cast to `dtype`."""
    cast_args, cast_kwargs = inner.cast(args, kwargs, dtype)
    form = None if dtype.is_floating_point or dtype.is_complex else choosing.form(inner.op)
    return inner.op(*cast_args, **cast_kwargs) if form is None else form(inner.op, *cast_args, **cast_kwargs)


# On CPUs these round only once in float32 as well; GPUs may multiply by a reciprocal.
_ONE_ROUNDING = within(DIVIDE, MULTIPLY)


def _rounds_once(inner: Inner, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether float32 gives what float64 rounded to float32 gives, on every backend."""
    if inner.op not in _ONE_ROUNDING:
        return False
    return all(
        x.is_cpu for name, x in inner.operands(args, kwargs) if isinstance(x, Tensor) and inner.promotes(name, x)
    )


def passes_floats(
    inner: Inner, output_dtype: torch.dtype, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Whether the call converts integers to float32 and back to integers."""
    if output_dtype.is_floating_point or output_dtype.is_complex:
        return False
    if run_dtype(inner.op, common_dtype(inner, output_dtype, args, kwargs)) is not torch.float32:
        return False
    if _rounds_once(inner, args, kwargs):
        return False
    operands = [x for name, x in inner.operands(args, kwargs) if isinstance(x, Tensor) and inner.promotes(name, x)]
    return all(x.dim() == 0 or not (x.is_floating_point() or x.is_complex()) for x in operands)


def _in_float64(inner: Inner, args: tuple[object, ...], kwargs: Mapping[str, object]) -> ArgsKwargs:
    """Convert float32 arguments to float64. Numbers are rounded to float32 first; products of 24 bits fit in 53."""
    args, kwargs = inner.cast(args, kwargs, torch.float64)
    names = [a.name for a in inner.positional]

    def rounded(name: str, x: object) -> object:
        return ctypes.c_float(x).value if isinstance(x, float) and name in inner.promoted else x

    return tuple(map(rounded, names, args)), {name: rounded(name, x) for name, x in kwargs.items()}


def _rounded_once(inner: Inner, args: Args, kwargs: Kwargs) -> Tensor:
    """Run the operator in float64, and round the result to float32.

    Products and means are written out, because a kernel may scale a product's operands, or multiply a sum by 1 / n.
    """
    form = as_product(inner.op, args, kwargs)
    if form is not None:
        result = form.complete(torch.matmul(form.lhs, form.rhs))
    elif inner.op in (aten.mean.default, aten.mean.dim) and kwargs.get("dtype") is None:
        given: Args = (*args, *(None, False)[len(args) - 1 :])
        x, dims, keepdim = given
        dims = dims or list(range(x.dim()))
        result = x.sum(dims, keepdim) / math.prod(x.shape[d] for d in dims) if x.dim() else x
    else:
        result = inner.op(*args, **kwargs)
    return result.to(torch.float32)


def call(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    """Call out_dtype, for rules that are composed of it."""
    return operators["hop_out_dtype"](op, output_dtype, *args, **kwargs)


def check(op: OpOverload, output_dtype: torch.dtype, args: Args, kwargs: Kwargs) -> ArgsKwargs:
    """Raise for an invalid call; return its arguments in canonical form."""
    if not isinstance(op, OpOverload):
        raise ValueError(f"out_dtype: op must be an operator overload of torch.ops, got {shown(op)}; {_such(op)}")
    if not isinstance(output_dtype, torch.dtype):
        raise TypeError(
            f"out_dtype: output_dtype must be a torch.dtype, got {shown(output_dtype)}; give one such as torch.int32"
        )
    if output_dtype not in DTYPES:
        raise TypeError(
            f"out_dtype: output_dtype must be a dtype that tensors can be cast to, got {output_dtype}; give one such "
            "as torch.int32"
        )
    inner = describe(op)
    args, kwargs = inner.bind(args, kwargs)
    check_types("out_dtype", op, args, kwargs)
    inner.check_drawing("out_dtype", args)
    _check_operands(inner, args, kwargs)
    check_shapes("out_dtype", op, args)
    if not (output_dtype.is_floating_point or output_dtype.is_complex):
        _check_integers(inner, output_dtype, args, kwargs)
    return args, kwargs


def _check_integers(
    inner: Inner, output_dtype: torch.dtype, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise TypeError for a quantized tensor with an integer output, which would truncate its real values."""
    for name, value in inner.operands(args, kwargs):
        if isinstance(value, Tensor) and hasattr(value, "quantizer"):
            raise TypeError(
                f"out_dtype: argument {name!r} of {inner.op} is a QuantizedTensor, which represents real numbers, but "
                f"output_dtype is {output_dtype}; give its .codes, or use hop.scaled"
            )


def _such(op: object) -> str:
    if isinstance(op, OpOverloadPacket):
        return f"use one of {', '.join(f'{op}.{o}' for o in op.overloads())}"
    return "use one such as torch.ops.aten.mm.default"


def _check_operands(inner: Inner, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    first: tuple[str, Tensor] | None = None
    for name, value in inner.operands(args, kwargs):
        if not isinstance(value, Tensor):
            continue
        if name in inner.promoted and value.dtype not in DTYPES:
            raise TypeError(
                f"out_dtype: argument {name!r} of {inner.op} has dtype {value.dtype}, which cannot be cast to a "
                "compute dtype; dequantize it first"
            )
        if value.dim() == 0 and value.device.type == "cpu":
            continue  # PyTorch allows zero-dimensional CPU tensors together with tensors of any device
        if first is None:
            first = (name, value)
        elif value.device != first[1].device:
            raise RuntimeError(
                f"out_dtype: all tensors must be on one device, but argument {first[0]!r} of {inner.op} is on "
                f"{first[1].device} and argument {name!r} on {value.device}; move one of them"
            )
