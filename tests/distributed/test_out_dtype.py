"""out_dtype on DTensors, over two processes: integers equal one process's bit for bit."""

import itertools
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hop
from tests.support import processes
from tests.support.cases import BY_NAME, FLOAT, INTEGER, OPERATORS, arguments, assert_right, draw
from tests.support.leaves import DEQUANTIZE, LEAVES, SETTINGS
from tests.support.quantized import QUANTIZED
from tests.support.scaled import SCALED

aten = torch.ops.aten
WORLD = 2
COVERED = {(o.name, "dtensor") for o in (*OPERATORS, *LEAVES)}
COVERED_QUANTIZED = {(o.name, "dtensor") for o in QUANTIZED}
COVERED_SCALED = {(o.name, "dtensor") for o in SCALED}


def run(name: str) -> None:
    processes.run(CHECKS[name], WORLD)


# ---- what runs in each process


def every_operator(mesh: Any, rank: int) -> None:
    """Each operand replicated or sharded along its first or last dimension, in all combinations."""
    for operator, fmt in itertools.product(OPERATORS, (INTEGER, FLOAT)):
        args, kwargs = arguments(operator, fmt)
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        for placements in itertools.product((Replicate(), Shard(0), Shard(-1)), repeat=len(tensors)):
            filled = list(args)
            for i, p in zip(tensors, placements, strict=True):
                dim = p.dim % args[i].dim() if isinstance(p, Shard) else None
                filled[i] = distribute_tensor(args[i], mesh, [p if dim is None else Shard(dim)])
            got = hop.out_dtype(operator.op, fmt.output, *filled, **kwargs)
            assert isinstance(got, DTensor)
            assert_right(operator, fmt, args, kwargs, got.full_tensor())


def at_least_one_sharding(mesh: Any, rank: int) -> None:
    """Placements that must work and must not gather: a sharded batch, and a sharded sum."""
    a, b = draw((6, 8), torch.int8, RNG()), draw((8, 4), torch.int8, RNG())
    row = hop.out_dtype(
        aten.mm.default, torch.int32, distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    )
    assert row.placements == (Shard(0),)
    split = hop.out_dtype(
        aten.mm.default, torch.int32, distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    )
    assert split.placements[0].is_partial()
    want = hop.out_dtype(aten.mm.default, torch.int32, a, b)
    assert torch.equal(row.full_tensor(), want) and torch.equal(split.full_tensor(), want)


def wrapping_partials(mesh: Any, rank: int) -> None:
    """Two parts of 100 make -56 in int8, before anything is promoted."""
    part = torch.full((3, 4), 100, dtype=torch.int8)
    x = DTensor.from_local(part, mesh, [Partial()])
    one = torch.full((3, 4), -56, dtype=torch.int8)
    for output in (torch.int32, torch.float32, torch.int8):
        got = hop.out_dtype(aten.mul.Scalar, output, x, 3)
        assert torch.equal(got.full_tensor(), hop.out_dtype(aten.mul.Scalar, output, one, 3))
    y = draw((4, 5), torch.int8, RNG())
    got = hop.out_dtype(aten.mm.default, torch.int32, x, distribute_tensor(y, mesh, [Replicate()]))
    assert torch.equal(got.full_tensor(), hop.out_dtype(aten.mm.default, torch.int32, one, y))


def sums_before_casts(mesh: Any, rank: int) -> None:
    """A product whose sum is spread over processes, cast to formats that round or wrap."""
    a, b = draw((16, 64), torch.int8, RNG()), draw((64, 32), torch.int8, RNG())
    left, right = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    for output in (torch.bfloat16, torch.int8, torch.int16, torch.float16, torch.int64):
        got = hop.out_dtype(aten.mm.default, output, left, right)
        assert got.dtype == output
        assert torch.equal(got.full_tensor(), hop.out_dtype(aten.mm.default, output, a, b)), output
    bias = draw((7,), torch.int32, RNG())
    w = draw((7, 64), torch.int8, RNG())
    got = hop.out_dtype(
        aten.linear.default,
        torch.int32,
        left,
        distribute_tensor(w, mesh, [Shard(1)]),
        distribute_tensor(bias, mesh, [Replicate()]),
    )
    assert torch.equal(got.full_tensor(), hop.out_dtype(aten.linear.default, torch.int32, a, w, bias))


def gradients(mesh: Any, rank: int) -> None:
    a, b = draw((6, 8), torch.float64, RNG()), draw((8, 4), torch.float64, RNG())
    for left, right in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        x = distribute_tensor(a, mesh, [left]).requires_grad_()
        w = distribute_tensor(b, mesh, [right]).requires_grad_()
        hop.out_dtype(aten.mm.default, torch.float64, x, w).full_tensor().square().sum().backward()
        p, q = a.clone().requires_grad_(), b.clone().requires_grad_()
        (p @ q).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), p.grad)
        torch.testing.assert_close(w.grad.full_tensor(), q.grad)


def compiled(mesh: Any, rank: int) -> None:
    args, _ = arguments(BY_NAME["mm"], INTEGER)
    a, b = (distribute_tensor(x, mesh, [p]) for x, p in zip(args, (Shard(0), Replicate()), strict=True))

    def f(a: Tensor, b: Tensor) -> Tensor:
        return hop.out_dtype(aten.mm.default, torch.int32, a, b)

    got = torch.compile(f, backend="aot_eager", fullgraph=True)(a, b)
    assert torch.equal(got.full_tensor(), f(*args))


def every_leaf(mesh: Any, rank: int) -> None:
    """x replicated or sharded along each dimension, the rest replicated; the gradient of x too."""
    for leaf, setting in itertools.product(LEAVES[:2], SETTINGS):
        case = leaf.case(setting)
        x, *rest = case.tensors
        rest = [distribute_tensor(t, mesh, [Replicate()]) for t in rest]
        plain = x.clone().requires_grad_()
        case.function(plain, *case.tensors[1:]).float().square().sum().backward()
        for placement in (Replicate(), *(Shard(d) for d in range(x.dim()))):
            sharded = distribute_tensor(x, mesh, [placement]).requires_grad_()
            got = case.function(sharded, *rest)
            assert isinstance(got, DTensor)
            case.check(got.detach().full_tensor())
            got.full_tensor().float().square().sum().backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
    for setting in SETTINGS:
        case = DEQUANTIZE.case(setting)
        gathered = setting.quantizer.flat or any(t.shape[0] == 1 for t in case.tensors)  # Gloo has no 8-bit floats
        whole, split = DTensor.from_local, _split
        got = case.function(
            *(whole(t, mesh, [Replicate()]) if gathered else split(t, mesh, rank) for t in case.tensors)
        )
        assert isinstance(got, DTensor)
        case.check(got.full_tensor())


def every_scaled(mesh: Any, rank: int) -> None:
    """Each tensor replicated, all sharded along the first dimension, and each sharded alone along its first or last."""
    for operator in SCALED:
        case = operator.case()
        count = len(case.tensors)
        alone = [[d if i == k else None for i in range(count)] for k in range(count) for d in (0, -1)]
        for chosen in ([None] * count, [0] * count, *alone):
            pairs = list(zip(case.tensors, chosen, strict=True))
            # Gloo gathers no 8-bit floats
            if any(d is not None and t.dtype.is_floating_point and t.itemsize == 1 for t, d in pairs):
                continue
            placed = [_placed(t, d, mesh) for t, d in pairs]
            got = case.function(*placed)
            assert isinstance(got, DTensor), operator.name
            case.check(got.full_tensor())


def every_quantized(mesh: Any, rank: int) -> None:
    """Each operand replicated, or sharded alone along its first dimension; gradients too, where there are no random
    bits."""
    for operator in QUANTIZED:
        if operator.scheme.is_stochastic():
            continue
        case = operator.case()
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in case.tensors]
        case.function(*inputs).square().sum().backward()
        for chosen in (None, *range(len(case.tensors))):
            placed = [_placed(t, 0 if i == chosen else None, mesh) for i, t in enumerate(case.tensors)]
            placed = [x.detach().requires_grad_(x.is_floating_point()) for x in placed]
            got = case.function(*placed)
            assert isinstance(got, DTensor), operator.name
            case.check(got.detach().full_tensor())
            got.full_tensor().square().sum().backward()
            for mine, one in zip(placed, inputs, strict=True):
                if one.grad is not None:
                    close = 1e-4 * float(one.grad.abs().max())
                    torch.testing.assert_close(mine.grad.full_tensor(), one.grad, rtol=1e-4, atol=close)


def _placed(t: Tensor, dim: int | None, mesh: Any) -> Any:
    if dim is None or t.dim() == 0:
        return DTensor.from_local(t, mesh, [Replicate()], run_check=False)
    return distribute_tensor(t, mesh, [Shard(dim % t.dim())])


def scaled_without_gathering(mesh: Any, rank: int) -> None:
    """Rows of activations and columns of weights stay where they are, their scales with them; gradients too."""
    torch.manual_seed(0)  # the same in each process
    x, w, bias = torch.randn(6, 40), torch.randn(8, 40), torch.randn(8)
    q = hop.presets.INT8_ROW
    want = hop.scaled(aten.linear.default, torch.float32, hop.quantize(q, x), hop.quantize(q, w), bias)
    for rows, columns in ((Shard(0), Replicate()), (Replicate(), Shard(0))):
        dx, dw = (distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, rows), (w, columns)))
        db = distribute_tensor(bias, mesh, [columns])
        got = hop.scaled(aten.linear.default, torch.float32, hop.quantize(q, dx), hop.quantize(q, dw), db)
        assert isinstance(got, DTensor)
        assert got.placements == ((Shard(0),) if rows.is_shard() else (Shard(1),))
        assert torch.equal(got.detach().full_tensor(), want)
        got.full_tensor().square().sum().backward()
        plain = [t.clone().requires_grad_() for t in (x, w)]
        hop.scaled(
            aten.linear.default, torch.float32, *(hop.quantize(q, t) for t in plain), bias
        ).square().sum().backward()
        for mine, one in zip((dx, dw), plain, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
    for op in (aten.relu.default, aten.clone.default, aten.contiguous.default, aten.alias.default):
        got = hop.scaled(op, torch.float32, hop.quantize(q, distribute_tensor(x, mesh, [Shard(0)])))
        assert got.placements == (Shard(0),) and torch.equal(
            got.full_tensor(), hop.scaled(op, torch.float32, hop.quantize(q, x))
        ), op


def _split(t: Tensor, mesh: Any, rank: int) -> Any:
    """Sharded along the first dimension."""
    part = t.tensor_split(WORLD)[rank]
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride())


def RNG() -> Any:
    import numpy as np

    return np.random.default_rng(3)


CHECKS: dict[str, Callable[[Any, int], None]] = {
    f.__name__: f
    for f in (
        every_operator,
        every_leaf,
        every_scaled,
        every_quantized,
        scaled_without_gathering,
        at_least_one_sharding,
        wrapping_partials,
        sums_before_casts,
        gradients,
        compiled,
    )
}


@pytest.mark.full
class TestTwoProcesses(unittest.TestCase):
    def test_every_operator(self):
        run("every_operator")

    def test_every_leaf(self):
        run("every_leaf")

    def test_placements(self):
        run("at_least_one_sharding")

    def test_partial_operands_are_reduced_before_promotion(self):
        run("wrapping_partials")

    def test_partial_results_are_reduced_before_the_cast(self):
        run("sums_before_casts")

    def test_gradients(self):
        run("gradients")

    def test_compiled(self):
        run("compiled")

    def test_every_scaled(self):
        run("every_scaled")

    def test_every_quantized(self):
        run("every_quantized")

    def test_scaled_without_gathering(self):
        run("scaled_without_gathering")
