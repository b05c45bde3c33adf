"""scaled by the native kernels, of plain floats with more bits than bfloat16 beside quantized numbers.

A float32 number is the sum of three bfloat16 numbers, exactly: its upper 8 bits, the next 8 and the last. The native
product takes the three one below the other, with one reading of the weight, and what it makes of them is added up.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hop import _compile
from hop.impls.scaled import meaning, native
from hop.impls.scaled.calls import Call
from hop.impls.scaled.operands import Operand
from hop.impls.scaled.products import biased
from hop.impls.scaled.roles import BIAS, LHS, MATRIX
from hop.kernels import Kernel
from hop.kernels.native import library

_PARTS = {torch.float32: 3, torch.float16: 2}
_UPPER = -(2**16)  # of the 32 bits of a float32 number, those that are a bfloat16 number
_FEW = 16  # rows, for which reading the weight takes longest, and the products less
_ELEMENTS = 2**18  # of lhs that are taken at once, so that their parts stay in the cache


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
    rows = math.prod(_compile.hints(lhs.shape[:-1]))  # type: ignore[arg-type]
    if rows == 0:
        return "there are no rows"
    if rows > _FEW and library().level() != "amx":
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
    lhs = call.find(LHS)
    *lead, m, k = lhs.shape
    if call.find(native.RHS).dim() > 2:
        y = _summed(call, lhs)
    else:
        rows = lhs.reshape(-1, k)
        step = max(1, _ELEMENTS // max(k, 1))
        found = [_summed(call, part) for part in rows.split(step)]
        y = found[0] if len(found) == 1 else torch.cat(found)
        y = y.reshape([*lead, m, y.shape[-1]])
    return meaning.finish(call, biased(call, y, call.find(BIAS)))


def _summed(call: Call, x: Tensor) -> Tensor:
    """The product of x, a matrix or a batch of them, in float32."""
    terms = _terms(call, x, _truncated)
    y = _added(terms)
    if y.numel() == 0 or all(math.isfinite(v) for v in torch.aminmax(y)):
        return y
    # Where the upper bits give an infinity it stands, and of a number that is none only they are taken.
    first, *rest = _terms(call, x, _rounded)
    return torch.where(first.isinf(), first, _added([first, *rest]))


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


def _added(terms: Any) -> Tensor:
    """From the least to the first."""
    first, *rest = terms
    total = rest[-1]
    for term in rest[-2::-1]:
        total = term + total
    return first + total


PARTS = Kernel("native product in parts", _declines, _run, leaf=True)
