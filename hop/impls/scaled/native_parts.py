"""scaled by the native kernels, of plain floats with more bits than bfloat16 beside quantized numbers.

A float32 number is the sum of three bfloat16 numbers, exactly: its upper 8 bits, the next 8 and the last. The native
product takes the three one below the other, with one reading of the weight, and what it makes of them is added up.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.impls.scaled import meaning, native
from hop.impls.scaled.calls import Call
from hop.impls.scaled.operands import Operand
from hop.impls.scaled.roles import BIAS, LHS, MATRIX, RHS
from hop.kernels import Kernel
from hop.kernels.native import library

_PARTS = {torch.float32: 3, torch.float16: 2}
_UPPER = -(2**16)  # of the 32 bits of a float32 number, those that are a bfloat16 number
_FEW = 16  # rows, for which reading the weight takes longest, and the products less
_ELEMENTS = 2**19  # of lhs and of the result that are taken at once: their parts take megabytes that are used again


def _declines(call: Call) -> str | None:
    if call.roles.family is not MATRIX:
        return f"for matrix products, not {call.roles.family.name}"
    lhs = call.find(LHS)
    if isinstance(lhs, Operand):
        return "the left factor is quantized"
    if lhs.dtype not in _PARTS:
        return f"for float32 and float16 beside quantized numbers, not {lhs.dtype}"
    if lhs.dim() < 2:
        return "one operand is a vector"
    reason = native.NATIVE.declines(_of_parts(call, _shaped(lhs, _PARTS[lhs.dtype])))
    if reason is not None:
        return reason
    rows = math.prod(tracing.hints(lhs.shape[:-1]))  # type: ignore[arg-type]
    if rows == 0 or 0 in call.find(RHS).shape:
        return "the result is empty"
    if rows > _FEW and library().path != "amx":
        return f"for at most {_FEW} rows on a CPU without matrix units (AMX)"
    return None


def _shaped(lhs: Tensor, parts: int) -> Tensor:
    """What has the shape and dtype of its parts, and no memory."""
    *lead, m, k = lhs.shape
    return lhs.new_empty((1,) * lhs.dim(), dtype=torch.bfloat16).expand([*lead, m * parts, k])


def _of_parts(call: Call, parts: Tensor) -> Call:
    """The product alone, of these parts, in float32."""
    role = call.roles.role
    args = tuple(parts if role(i) == LHS else None if role(i) == BIAS else x for i, x in enumerate(call.args))
    return call._replace(output=torch.float32, output_scale=None, output_zero_point=None, args=args)


def _run(call: Call) -> Any:
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    *lead, k = lhs.shape
    n = rhs.shape[-2 if call.roles.rhs_sums == -1 else -1]
    y = torch.empty([*lead, n], dtype=torch.float32)
    if rhs.dim() > 2:
        _write(call, lhs, y)
    else:
        step = max(_FEW, _ELEMENTS // max(k, n))
        for x, part in zip(lhs.reshape(-1, k).split(step), y.view(-1, n).split(step), strict=True):
            _write(call, x, part)
    return meaning.finish(call, y if bias is None else y.add_(bias))


def _write(call: Call, x: Tensor, y: Tensor) -> None:
    """The product of x, a matrix or a batch of them."""
    first, *rest = _terms(call, x, _truncated)
    torch.add(first, _added(rest), out=y)
    if not all(math.isfinite(v) for v in torch.aminmax(y)):
        # Where the upper bits give an infinity it stands, and of a number that is none only they are taken.
        first, *rest = _terms(call, x, _rounded)
        torch.where(first.isinf(), first, first + _added(rest), out=y)


def _terms(call: Call, x: Tensor, upper: Any) -> tuple[Tensor, ...]:
    count, m = _PARTS[x.dtype], x.shape[-2]
    parts = x.new_empty([*x.shape[:-2], count * m, x.shape[-1]], dtype=torch.bfloat16)
    rest = x.to(torch.float32)
    for i in range(count):
        part = rest if i == count - 1 else upper(rest)
        parts.narrow(-2, i * m, m).copy_(part)
        rest = rest - part if i < count - 1 else rest
    return native.NATIVE.run(_of_parts(call, parts)).split(m, -2)  # type: ignore[union-attr]


def _truncated(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & _UPPER).view(torch.float32)


def _rounded(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), _truncated(x), x)


def _added(terms: list[Tensor]) -> Tensor:
    """Their sum, from the least, in its memory."""
    total = terms[-1]
    for term in terms[-2::-1]:
        total = total.add_(term)
    return total


PARTS = Kernel("native product in parts", _declines, _run, leaf=True)
