"""The names of calls in a profile, such as hop::scaled[linear, int8 x int8 -> bfloat16, 128x4096x4096]."""

import torch
from torch import Tensor

from hop.compat import profiling
from hop.compat.eager import OpOverload
from hop.dispatch import operators, plan
from hop.numerics.quantizer import Quantizer


def name(function: str, args: tuple[object, ...]) -> str:
    """Compose the name from function, operator, formats of operands and result, and sizes.

    The sizes are rows, columns and summed dimension for a matrix product, else the shape of the first operand.
    """
    op = args[0] if args and isinstance(args[0], OpOverload) else None
    # The first four of hop_scaled include the scale and zero point of the result.
    operands = args[4:] if function in ("hop_scaled", "hop_scaled_buffers") else args
    tensors = [x for x in plan.tensors(operands, {}) if x.dim()]
    formats = " x ".join(_format(x) for x in tensors[:2])
    result = next((_format(x) for x in args if isinstance(x, torch.dtype | Quantizer)), None)
    parts = [op.overloadpacket.__name__] if op is not None else []
    parts += [formats if result is None else f"{formats} -> {result}"] if formats else []
    parts += ["x".join(map(str, _sizes(op, tensors)))] if tensors else []
    return f"hop::{function.removeprefix('hop_')}[{', '.join(parts)}]"


def _format(x: object) -> str:
    if isinstance(x, Quantizer):
        return x.format.name
    quantizer = getattr(x, "quantizer", None)
    return (
        _format(quantizer)
        if quantizer is not None
        else str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")
    )


def _sizes(op: OpOverload | None, tensors: list[Tensor]) -> list[int]:
    row = operators.of(op)
    if row.family is not operators.MATRIX or len(tensors) < 2:
        return list(tensors[0].shape)
    at = row.roles.index(operators.LHS)
    lhs, rhs = (tensors[at], tensors[at + 1]) if len(tensors) > at + 1 else tensors[:2]
    columns = rhs.shape[-2 if row.rhs_sums == -1 else -1] if rhs.dim() > 1 else 1
    return [*lhs.shape[:-1], columns, lhs.shape[-1]]


profiling.NAMES.append(name)
