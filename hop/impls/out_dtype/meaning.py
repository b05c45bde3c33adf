"""The meaning of out_dtype, in plain ATen: promote, run, cast.

    y = cast(op(cast(x_1, C), ..., cast(x_n, C)), output_dtype)        C = the common dtype (promotion.py)

For linear integer operators the result equals that of exact integers modulo 2^bits of `output_dtype`.
"""

from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import OpOverload, OpOverloadPacket
from hop.dispatch.compiled import operators
from hop.impls.out_dtype.arguments import Inner, describe
from hop.impls.out_dtype.fitting import check_shapes, check_types
from hop.impls.out_dtype.forms import CONVOLUTIONS
from hop.impls.out_dtype.promotion import DTYPES, common_dtype, is_integer, run_dtype
from hop.kernels.aten.convolution import lay_out
from hop.numerics.spelling import shown


def reference(op: OpOverload, output_dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Tensor:
    """What out_dtype(op, output_dtype, *args, **kwargs) returns, for arguments in canonical form."""
    inner = describe(op)
    common = common_dtype(inner, output_dtype, args, kwargs)
    cast_args, cast_kwargs = inner.cast(args, kwargs, run_dtype(op, common))
    result = op(*cast_args, **cast_kwargs)
    if op.overloadpacket in CONVOLUTIONS and all(is_integer(x.dtype) for x in args[:2]):
        result = lay_out(result, *args[:2])  # ATen's own layout differs between backends, and between fake and real
    if inner.returns_view and result.dtype == output_dtype:
        return result.clone()
    return result.to(output_dtype)


def call(op: OpOverload, output_dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Tensor:
    """out_dtype itself, for the rules that are made of it."""
    return operators["hop_out_dtype"](op, output_dtype, *args, **kwargs)


def check(
    op: OpOverload, output_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Raise for a call that breaks a rule; return its arguments in canonical form."""
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


def _check_integers(inner: Inner, output_dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a quantized tensor, whose real numbers an integer result would cut off."""
    for name, value in inner.operands(args, kwargs):
        if isinstance(value, Tensor) and hasattr(value, "quantizer"):
            raise TypeError(
                f"out_dtype: argument {name!r} of {inner.op} is a QuantizedTensor, which stands for real numbers, and "
                f"output_dtype is {output_dtype}; give its .codes, or use hop.scaled"
            )


def _such(op: Any) -> str:
    if isinstance(op, OpOverloadPacket):
        return f"take one of {', '.join(f'{op}.{o}' for o in op.overloads())}"
    return "take one such as torch.ops.aten.mm.default"


def _check_operands(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            continue  # PyTorch lets a number in a CPU tensor stand beside tensors of any device
        if first is None:
            first = (name, value)
        elif value.device != first[1].device:
            raise RuntimeError(
                f"out_dtype: all tensors must be on one device, but argument {first[0]!r} of {inner.op} is on "
                f"{first[1].device} and argument {name!r} on {value.device}; move one of them"
            )
