"""The operators that out_dtype is tested with, the number formats that they run in, and the oracle of each.

Every suite draws on these two lists: a row added here meets every route.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hop
from hop.impls.out_dtype import out_dtype_operator as out_dtype_operator
from tests.support import oracles
from tests.support.case import Case

aten = torch.ops.aten


@dataclass(frozen=True)
class T:
    """An operand: its shape and its part. "lhs" and "rhs" are multiplied, "added" is as wide as the result, "index"
    holds rows below `rows`."""

    shape: tuple[int, ...]
    part: str = "lhs"
    rows: int = 0


@dataclass(frozen=True)
class Operator:
    name: str
    op: Any
    args: tuple[Any, ...]
    oracle: Callable[..., Any]
    terms: int = 1  # how many products or summands one element of the result has
    kwargs: dict[str, Any] = field(default_factory=dict)

    def case(self, fmt: "Format") -> Case:
        """The call in the dtypes of `fmt`."""
        args, kwargs = arguments(self, fmt)
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

        def filled(tensors: tuple[Tensor, ...]) -> list[Any]:
            found = list(args)
            for i, x in zip(places, tensors, strict=True):
                found[i] = x
            return found

        def inner(*tensors: Tensor) -> Tensor:
            floats = [
                x.to(torch.float32) if isinstance(x, Tensor) and not _runs(x) and not is_index(self, i) else x
                for i, x in enumerate(filled(tensors))
            ]
            return self.op(*floats, **kwargs)

        made = Case(
            function=lambda *tensors: hop.out_dtype(self.op, fmt.output, *filled(tensors), **kwargs),
            tensors=[args[i] for i in places],
            check=lambda got: assert_right(self, fmt, args, kwargs, got),
            reference=lambda *tensors: out_dtype_operator.reference(self.op, fmt.output, *filled(tensors), **kwargs),
            inner=inner,
            bound=0.0 if fmt.is_integer else float(tolerance(self, fmt, args, kwargs).max()),
            keeps_nodes_under_vmap=self.name in KEEP_NODE_UNDER_VMAP,
        )
        return made.on_device()


def _runs(x: Tensor) -> bool:
    """Whether ATen has float operators for it."""
    return x.dtype in (torch.float32, torch.float64)


# Those with a rule of their own under vmap.
KEEP_NODE_UNDER_VMAP = {
    *("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "convolution", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose2d", "add", "sub", "mul", "mul_scalar", "div", "div_scalar", "clamp"),
}

OPERATORS = [
    Operator("mm", aten.mm.default, (T((5, 24)), T((24, 7), "rhs")), oracles.mm, 24),
    Operator("bmm", aten.bmm.default, (T((3, 5, 24)), T((3, 24, 7), "rhs")), oracles.mm, 24),
    Operator("addmm", aten.addmm.default, (T((7,), "added"), T((5, 24)), T((24, 7), "rhs")), oracles.addmm, 80,
        {"beta": 2, "alpha": 3}),
    Operator("baddbmm", aten.baddbmm.default, (T((3, 1, 7), "added"), T((3, 5, 24)), T((3, 24, 7), "rhs")),
        oracles.addmm, 80, {"beta": 3, "alpha": 2}),
    Operator("matmul", aten.matmul.default, (T((2, 1, 5, 24)), T((3, 24, 7), "rhs")), oracles.mm, 24),
    Operator("linear", aten.linear.default, (T((2, 3, 24)), T((7, 24), "rhs"), T((7,), "added")), oracles.linear, 25),
    Operator("mv", aten.mv.default, (T((5, 24)), T((24,), "rhs")), oracles.mm, 24),
    Operator("dot", aten.dot.default, (T((24,)), T((24,), "rhs")), oracles.mm, 24),
    Operator("convolution", aten.convolution.default,
        (T((2, 4, 7, 6)), T((6, 2, 3, 2), "rhs"), T((6,), "added"), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        oracles.convolution, 13),
    Operator("conv1d", aten.conv1d.default, (T((2, 3, 9)), T((4, 3, 3), "rhs"), None, [2], [1]), oracles.conv, 9),
    Operator("conv2d", aten.conv2d.default, (T((2, 3, 6, 5)), T((4, 3, 3, 3), "rhs"), T((4,), "added")), oracles.conv,
        28),
    Operator("conv3d", aten.conv3d.default, (T((1, 2, 4, 5, 4)), T((3, 2, 2, 3, 2), "rhs"), None, [1, 2, 1]),
        oracles.conv, 24),
    Operator("conv_transpose2d", aten.conv_transpose2d.input,
        (T((2, 4, 4, 3)), T((4, 3, 3, 2), "rhs"), T((6,), "added"), [2, 3], [1, 0], [1, 2], 2, [1, 1]),
        oracles.conv_transpose, 25),
    Operator("add", aten.add.Tensor, (T((4, 1, 5)), T((3, 5), "rhs")), oracles.add, 3, {"alpha": 3}),
    Operator("sub", aten.sub.Tensor, (T((4, 1, 5)), T((3, 5), "rhs")), oracles.sub, 3, {"alpha": 2}),
    Operator("mul", aten.mul.Tensor, (T((4, 1, 5)), T((3, 5), "rhs")), np.multiply, 1),
    Operator("mul_scalar", aten.mul.Scalar, (T((4, 5)), 3), np.multiply, 1),
    Operator("div", aten.div.Tensor, (T((4, 1, 5)), T((3, 5), "divisor")), oracles.div, 1),
    Operator("div_scalar", aten.div.Scalar, (T((4, 5)), 3), oracles.div, 1),
    Operator("sum", aten.sum.dim_IntList, (T((4, 6, 5)), [1], True), oracles.total, 6),
    Operator("mean", aten.mean.dim, (T((4, 6, 5)), [0, 2]), oracles.mean, 20),
    Operator("cumsum", aten.cumsum.default, (T((4, 6)), 1), oracles.cumsum, 6),
    Operator("clamp", aten.clamp.default, (T((4, 6)), -1, 2), oracles.clamp, 1),
    Operator("avg_pool2d", aten.avg_pool2d.default, (T((2, 3, 6, 5)), [3, 2], [2, 2], [1, 1]), oracles.avg_pool2d, 6),
    Operator("embedding", aten.embedding.default, (T((9, 4)), T((2, 3), "index", rows=9)), oracles.embedding, 1),
]  # fmt: skip
BY_NAME = {o.name: o for o in OPERATORS}


@dataclass(frozen=True)
class Format:
    """The dtypes of the parts, and the dtype of the result."""

    name: str
    lhs: torch.dtype
    rhs: torch.dtype
    added: torch.dtype
    output: torch.dtype
    compute: torch.dtype  # in which the result is accumulated

    @property
    def is_integer(self) -> bool:
        return not self.output.is_floating_point


FORMATS = [
    Format("int8_int32", torch.int8, torch.int8, torch.int32, torch.int32, torch.int32),
    Format("uint8_int8_int32", torch.uint8, torch.int8, torch.int32, torch.int32, torch.int32),
    Format("int8_uint8_int32", torch.int8, torch.uint8, torch.int32, torch.int32, torch.int32),
    Format("int16_int32", torch.int16, torch.int16, torch.int32, torch.int32, torch.int32),
    Format("int16_int8_int32", torch.int16, torch.int8, torch.int32, torch.int32, torch.int32),
    Format("int8_int8", torch.int8, torch.int8, torch.int8, torch.int8, torch.int8),
    Format("int8_int64", torch.int8, torch.int8, torch.int64, torch.int64, torch.int64),
    Format("uint16_int32", torch.uint16, torch.int16, torch.int32, torch.int32, torch.int32),
    Format("uint8_uint16", torch.uint8, torch.uint8, torch.uint16, torch.uint16, torch.int64),
    Format("float64", torch.float64, torch.float64, torch.float64, torch.float64, torch.float64),
    Format("float32_bfloat16", torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32),
    Format("bfloat16_float32", torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32),
    Format("float16", torch.float16, torch.float16, torch.float16, torch.float16, torch.float32),
    Format("e4m3_float32", torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, torch.float32, torch.float32),
    Format("e5m2_e4m3_bfloat16", torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16, torch.float32),
    Format("e4m3_float16", torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float16, torch.float32),
    Format("float32_int8", torch.float32, torch.int8, torch.float32, torch.float32, torch.float32),
    Format("int8_bfloat16", torch.int8, torch.int8, torch.bfloat16, torch.bfloat16, torch.float32),
    Format("float32_int32", torch.float32, torch.int8, torch.float32, torch.int32, torch.float32),
]
FORMAT_BY_NAME = {f.name: f for f in FORMATS}
# The formats of the routes that are crossed with every operator once.
INTEGER, FLOAT, GRADIENT = FORMAT_BY_NAME["int8_int32"], FORMAT_BY_NAME["bfloat16_float32"], FORMAT_BY_NAME["float64"]


def draw(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator, *, full_range: bool = True) -> Tensor:
    """Random values: integers over the whole range of the dtype and its two ends, floats around 1."""
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    info = torch.iinfo(dtype)
    low, high = (info.min, info.max) if full_range and dtype.itemsize < 4 else (-1000, 1000)
    values = rng.integers(low, high, size=shape, endpoint=True)
    ends = rng.random(shape) < 0.1
    values = np.where(ends, rng.choice(np.array([low, high]), size=shape), values)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def arguments(operator: Operator, fmt: Format, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `operator` in the dtypes of `fmt`."""
    rng = np.random.default_rng(seed)

    def one(arg: Any) -> Any:
        if not isinstance(arg, T):
            return list(arg) if isinstance(arg, list) else arg
        if arg.part == "index":
            return torch.from_numpy(rng.integers(0, arg.rows, size=arg.shape))
        if arg.part == "divisor":
            x = draw(arg.shape, fmt.rhs, rng)
            return torch.where(x.to(torch.float32).abs() < 0.25, torch.ones_like(x), x)
        return draw(arg.shape, getattr(fmt, arg.part), rng)

    made = (one(a) for a in operator.args)
    return tuple(made), dict(operator.kwargs)


def _to_numpy(value: Any, wide: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.int64 or not value.dtype.is_floating_point:
        return value.to("cpu", torch.int64).numpy()
    return value.to("cpu", torch.float64).numpy().astype(wide)


def expected(operator: Operator, fmt: Format, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The oracle's result: exact integers modulo 2^bits, or float64."""
    values = [_to_numpy(a, np.float64) for a in args]
    if fmt.compute.is_floating_point:
        values = [
            v.astype(np.float64) if isinstance(v, np.ndarray) and not is_index(operator, i) else v
            for i, v in enumerate(values)
        ]
    result = np.asarray(operator.oracle(*values, **kwargs))
    if fmt.is_integer:
        # numpy's cast of integers is modulo 2^bits; that of floats is truncation
        return torch.from_numpy(np.array(result.astype(np.int64))).to(fmt.output)
    return torch.from_numpy(np.array(result, dtype=np.float64))


def is_index(operator: Operator, position: int) -> bool:
    arg = operator.args[position]
    return isinstance(arg, T) and arg.part == "index"


def tolerance(operator: Operator, fmt: Format, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What rounding can do at most: half a gap of the output format at the result, and the usual bound
    terms · eps · Σ|products| for a sum in the compute dtype (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1)."""
    want = expected(operator, fmt, args, kwargs)
    magnitudes = tuple(a.abs() if isinstance(a, Tensor) and a.is_floating_point() else a for a in _widen(args))
    spread = expected(operator, GRADIENT, magnitudes, kwargs).abs() if operator.name != "clamp" else want.abs()
    if operator.name in ("sub", "add"):
        spread = spread + 4 * sum(a.abs().max() for a in magnitudes if isinstance(a, Tensor))
    info, eps = torch.finfo(fmt.output), torch.finfo(fmt.compute).eps
    return want.abs() * info.eps / 2 + (operator.terms + 2) * eps * spread + info.smallest_normal * info.eps


def _widen(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to("cpu", torch.float64) if isinstance(a, Tensor) and a.dtype != torch.int64 else a for a in args)


def assert_right(operator: Operator, fmt: Format, args: tuple[Any, ...], kwargs: dict[str, Any], got: Tensor) -> None:
    """Fail unless `got` is what the oracle says, in the right dtype and shape."""
    want = expected(operator, fmt, args, kwargs)
    assert got.dtype == fmt.output, f"{operator.name} {fmt.name}: dtype {got.dtype}, expected {fmt.output}"
    assert got.shape == want.shape, f"{operator.name} {fmt.name}: shape {got.shape}, expected {want.shape}"
    if fmt.is_integer:
        wrong = int((got.to(torch.int64) != want.to(torch.int64)).sum())
        assert wrong == 0, f"{operator.name} {fmt.name}: {wrong} of {want.numel()} integers differ"
        return
    error = (got.to(torch.float64) - want).abs()
    bound = tolerance(operator, fmt, args, kwargs)
    assert bool((error <= bound).all()), (
        f"{operator.name} {fmt.name}: error {float((error / bound).max()):.2f} times the bound of its rounding"
    )
