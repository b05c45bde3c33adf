"""Nodes that compute sizes: on integers that are known while the program is traced, some of them symbolic."""

import math
import operator
from collections.abc import Callable

import torch

from hop.export.targets.onnx_import.calls import Call, Numbers
from hop.export.targets.onnx_import.reading import Constant

_MOST = 4096  # elements of a result


def _whole(call: Call) -> list[Numbers]:
    return [x if isinstance(x, Numbers) else call.refuse("its inputs are not all sizes") for x in call.inputs if x]


def _elementwise(function: Callable[[int, int], int], dtype: torch.dtype | None = None) -> Callable[[Call], Numbers]:
    def convert(call: Call) -> Numbers:
        a, b = call.numbers(0), call.numbers(1)
        n = max(len(a), len(b)) if a and b else 0
        if any(len(x) not in (1, n) for x in (a, b)):
            raise ValueError(f"its inputs have {len(a)} and {len(b)} elements, which cannot be broadcast")
        a, b = (x * n if len(x) == 1 else x for x in (a, b))
        rank = max(x.rank for x in _whole(call))
        return Numbers(tuple(map(function, a, b)), rank, dtype or call.inputs[0].dtype)

    return convert


def _quotient(a: int, b: int) -> int:
    """a / b, rounded toward zero."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a // b  # sizes are not negative


def _concatenate(call: Call) -> Numbers:
    call.only("axis", 0, -1)
    parts = [call.numbers(i) for i in range(len(call.inputs))]
    return Numbers(tuple(v for part in parts for v in part), 1, call.inputs[0].dtype)


def _gather(call: Call) -> Numbers:
    call.only("axis", 0, -1)
    values, places = call.numbers(0), call.numbers(1)
    return call.inputs[1]._replace(values=tuple(values[i] for i in places), dtype=call.inputs[0].dtype)


def _slice(call: Call) -> Numbers:
    values = call.numbers(0)
    given = [call.numbers(i)[0] if call.has(i) else d for i, d in ((1, 0), (2, len(values)), (3, 0), (4, 1))]
    start, end, _, step = given
    return call.inputs[0]._replace(values=tuple(values[slice(start, end, step)]))


def _reshaped(rank: int | None) -> Callable[[Call], Numbers]:
    """A rule that keeps the elements and gives them `rank`; None for the rank that a Reshape asks for."""

    def convert(call: Call) -> Numbers:
        values = call.numbers(0)
        wanted = rank
        if wanted is None:
            call.attribute("allowzero", 0)
            wanted = len(call.numbers(1))
        elif call.axes(2) not in (None, [0]):
            call.refuse("sizes have at most one dimension")
        if wanted > 1 or (not wanted and len(values) != 1):
            call.refuse("sizes have at most one dimension")
        return call.inputs[0]._replace(values=tuple(values), rank=wanted)

    return convert


def _same(call: Call) -> Numbers:
    call.numbers(0)
    return call.inputs[0]


def _cast(call: Call) -> Numbers:
    kinds = {6: torch.int32, 7: torch.int64, 9: torch.bool}
    if (to := call.attribute("to", 0)) not in kinds:
        call.refuse("sizes are not cast to floats")
    call.attribute("saturate", 1)
    convert = bool if to == 9 else lambda v: int(v) if isinstance(v, bool) else v
    return call.inputs[0]._replace(values=tuple(map(convert, call.numbers(0))), dtype=kinds[to])


def _reduced(function: Callable[[list[int]], int]) -> Callable[[Call], Numbers]:
    def convert(call: Call) -> Numbers:
        values, keeps = call.numbers(0), call.attribute("keepdims", 1)
        call.attribute("noop_with_empty_axes", 0)
        call.axes(1)
        return call.inputs[0]._replace(values=(function(values),), rank=keeps)

    return convert


def _where(call: Call) -> Numbers:
    parts = [call.numbers(i) for i in range(3)]
    n = max(map(len, parts))
    if any(len(x) not in (1, n) for x in parts):
        raise ValueError(f"its inputs have {', '.join(map(str, map(len, parts)))} elements, which cannot be broadcast")
    condition, a, b = (x * n if len(x) == 1 else x for x in parts)
    values = tuple(x if c else y for c, x, y in zip(condition, a, b, strict=True))
    return Numbers(values, max(x.rank for x in _whole(call)), call.inputs[1].dtype)


def _filled(call: Call) -> Numbers:
    sizes, value = call.numbers(0), call.attribute("value", None)
    if not isinstance(value, Constant):
        call.refuse("it makes floats")
    fill = value.elements
    if len(sizes) > 1 or fill is None or len(fill) != 1 or not isinstance(fill[0], int):
        call.refuse("it does not make sizes")
    n = sizes[0] if sizes else 1
    if not isinstance(n, int) or not 0 <= n <= _MOST:
        call.refuse(f"it makes {n} sizes")
    return Numbers(tuple(fill) * n, len(sizes), value.data.dtype)


def _range(call: Call) -> Numbers:
    (start,), (end,), (step,) = (call.numbers(i) for i in range(3))
    if not all(isinstance(n, int) for n in (start, end, step)) or len(range(start, end, step)) > _MOST:
        call.refuse("it makes a range of sizes that are not static, or of more than 4096")
    return Numbers(tuple(range(start, end, step)), 1, call.inputs[0].dtype)


SIZES: dict[str, Callable[[Call], Numbers]] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(operator.mod),
    "Min": _elementwise(min),
    "Max": _elementwise(max),
    "Equal": _elementwise(operator.eq, torch.bool),
    "Less": _elementwise(operator.lt, torch.bool),
    "Greater": _elementwise(operator.gt, torch.bool),
    "Concat": _concatenate,
    "Gather": _gather,
    "Slice": _slice,
    "Reshape": _reshaped(None),
    "Unsqueeze": _reshaped(1),
    "Squeeze": _reshaped(0),
    "Identity": _same,
    "Cast": _cast,
    "ReduceProd": _reduced(math.prod),
    "ReduceSum": _reduced(sum),
    "Where": _where,
    "ConstantOfShape": _filled,
    "Range": _range,
}
"""Converters for nodes whose inputs are all Numbers; a refusal means that tensors are computed instead."""
