"""Layers of hop.nn under tensor parallelism, against the same layers in one process."""

import copy
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.profiler import profile

import hop
from hop.nn.distributed import ColwiseParallel, RowwiseParallel
from hop.numerics.presets import PRESETS
from hop.numerics.requantization import GEMMLOWP
from hop.numerics.scale_rules import Static
from tests.support.processes import run
from tests.support.schemes import CROSSED

aten = torch.ops.aten
ROWS, IN, HIDDEN = 64, 256, 512
# Sums of float32 in another order: 16 units in the last place of the largest result, which is less than the worst case
# of sums of so many terms.
CLOSE = 2.0**-20
# Integers with one scale for each sum.
BITS = ("INT8_DYNAMIC", "INT8_STATIC", "INT8_TRAINING", "INT8_DA_TERNARY_W")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def made(scheme: hop.Scheme) -> tuple[nn.Module, Tensor]:
    """A calibrated model, and an input, the same in each process."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, IN)
    hop.nn.convert(model, scheme)
    hop.nn.calibrate(model, [x])
    return model, x


def train(model: Any, x: Tensor, call: Any = None) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of x; those of parameters are in the model."""
    torch.manual_seed(1)  # of stochastic rounding
    x = x.clone().requires_grad_()
    y = (model if call is None else call)(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def assert_close(got: Any, want: Tensor, exact: bool, words: str, slack: float = CLOSE) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    close = 0.0 if exact else slack * float(want.abs().max())
    assert float((got - want).abs().max()) <= close, (words, float((got - want).abs().max()), close)


def assert_trains_alike(one: nn.Module, many: nn.Module, x: Tensor, exact: bool, words: str) -> None:
    want, want_grad = train(one, x)
    got, got_grad = train(many, x)
    assert_close(got, want, exact, words)
    assert_close(got_grad, want_grad, False, words)
    for (name, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
        assert_close(p.grad, q.grad, False, f"{words}, {name}")


# ---- what runs in each process


def every_scheme(mesh: Any, rank: int) -> None:
    for name in CROSSED if mesh.size() == 2 else ("INT8_STATIC", "INT8_DA_INT4_W", "FP8_BLOCKWISE", "NVFP4_TRAINING"):
        one, x = made(CROSSED[name])
        many = copy.deepcopy(one)
        parallel.parallelize_module(many, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert_trains_alike(one, many, x, name in BITS, name)


def styles_of_pytorch(mesh: Any, rank: int) -> None:
    """PyTorch's own, for layers that keep no scales; before the layers are converted, for all."""
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    one, x = made(hop.schemes.INT8_DYNAMIC)
    many = parallel.parallelize_module(copy.deepcopy(one), mesh, plan)
    assert_trains_alike(one, many, x, True, "converted first")
    for name in ("INT8_DYNAMIC", "INT8_STATIC", "FP8_DELAYED"):
        one, x = made(CROSSED[name])
        torch.manual_seed(0)
        many = parallel.parallelize_module(Net(), mesh, plan)
        hop.nn.convert(many, CROSSED[name])
        hop.nn.calibrate(many, [x])
        assert_trains_alike(one, many, x, name in BITS, f"parallelized first, {name}")


def learned_scales(mesh: Any, rank: int) -> None:
    torch.manual_seed(0)
    one, x = Net(), torch.randn(ROWS, IN)
    hop.nn.convert(one, hop.schemes.INT8_STATIC, learn_scales=True)
    hop.nn.calibrate(one, [x])
    many = copy.deepcopy(one)
    parallel.parallelize_module(many, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert_trains_alike(one, many, x, True, "learned")
    for model in (one, many):
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    for (name, p), q in zip(many.named_parameters(), one.named_parameters(), strict=True):
        assert p.placements == p.grad.placements, name
        assert_close(p.detach(), q[1].detach(), False, name)


def sequence_parallel(mesh: Any, rank: int) -> None:
    """Rows lie on the processes between the layers: in, gathered by the first, and out, kept by the second."""
    for name in ("INT8_STATIC", "INT8_DYNAMIC", "FP8_BLOCKWISE", "MXFP8_TRAINING"):
        one, x = made(CROSSED[name])
        want, want_grad = train(one, x)
        many = copy.deepcopy(one)
        plan = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        parallel.parallelize_module(many, mesh, plan)
        rows = slice(*(ROWS // mesh.size() * (rank + i) for i in (0, 1)))
        got, got_grad = train(many, x[rows])
        assert_close(got, want[rows], name in BITS, name)
        assert_close(got_grad, want_grad[rows], False, name)
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            assert_close(p.grad, q.grad, False, name)


def moves_little(mesh: Any, rank: int) -> None:
    """The forward adds up one result, and amaxes; weights and activations stay where they are."""
    for name in CROSSED:
        model, x = made(CROSSED[name])
        parallel.parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with profile(record_shapes=True) as seen, torch.no_grad():
            model(x)
        moved = [e for e in seen.events() or () if e.name.startswith("_c10d_functional::") and "wait" not in e.name]
        sizes = sorted(torch.Size(e.input_shapes[0]).numel() for e in moved)
        assert all("all_reduce" in e.name for e in moved), (name, moved)
        assert sizes[-1] == ROWS * IN and sum(sizes[:-1]) <= 2 * (ROWS + IN), (name, sizes)


def compiled(mesh: Any, rank: int) -> None:
    """Static and dynamic, several schemes in turn."""
    for name, dynamic in (("INT8_STATIC", False), ("INT8_DYNAMIC", True), ("FP8_HYBRID", False)):
        one, x = made(CROSSED[name])
        many = copy.deepcopy(one)
        parallel.parallelize_module(many, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch._dynamo.reset()
        call = torch.compile(many, backend="aot_eager", dynamic=dynamic)
        for rows in (ROWS, 24) if dynamic else (ROWS,):
            want, want_grad = train(one, x[:rows])
            got, got_grad = train(many, x[:rows], call)
            assert_close(got, want, name in BITS, name)
            assert_close(got_grad, want_grad, False, name)


def embedding(mesh: Any, rank: int) -> None:
    torch.manual_seed(0)
    one = hop.nn.Embedding(40, 32, scheme=hop.schemes.INT8_DYNAMIC)
    index = torch.randint(0, 40, (6, 5))
    want = one(index)
    want.square().sum().backward()
    many = copy.deepcopy(one)
    parallel.parallelize_module(many, mesh, ColwiseParallel(output_layouts=Replicate()))
    got = many(index)
    got.square().sum().backward()
    assert torch.equal(got, want)
    assert_close(many.weight.grad, one.weight.grad, False, "embedding")


def sums_where_they_lie(mesh: Any, rank: int) -> None:
    """Products whose factors both lie along the summed dimension: what is one exact sum stays so, to every output."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(24, 256), torch.randn(40, 256), torch.randn(40)
    static = hop.Quantizer(hop.formats.INT8, (-1, -1), Static(requantize=GEMMLOWP))
    pairs = {
        ("INT8_ROW", "INT8_ROW"): True,
        ("INT8_TENSOR_AFFINE", "INT8_ROW_AFFINE"): True,
        ("UINT8_TENSOR_AFFINE", "INT8_ROW"): True,
        ("INT8_ROW_AFFINE", "INT4_32"): False,
        ("FP8_1X128", "FP8_128X128"): False,
        ("FP8_ROW", "FP8_TENSOR"): False,
        ("MXFP8", "MXFP8"): False,
        ("NVFP4", "NVFP4"): False,
        (None, "INT4_32"): False,
        (None, "INT8_ROW"): False,
    }
    for (of_x, of_w), exact in pairs.items():
        q = [None if name is None else PRESETS[name] for name in (of_x, of_w)]
        one = [t if p is None else hop.quantize(p, t) for p, t in zip(q, (x, w), strict=True)]
        spread = [distribute_tensor(t, mesh, [Shard(1)]) for t in (x, w)]
        many = [t if p is None else hop.quantize(p, t) for p, t in zip(q, spread, strict=True)]
        whole = distribute_tensor(bias, mesh, [Replicate()])
        for output in (torch.float32, torch.bfloat16, PRESETS["INT8_ROW"]):
            want = hop.scaled(aten.linear.default, output, *one, bias)
            got = hop.scaled(aten.linear.default, output, *many, whole)
            if isinstance(output, torch.dtype):
                assert got.dtype == output
                slack = CLOSE if output == torch.float32 else 2.0**-8
                assert_close(got, want, exact, f"{of_x}, {of_w}, {output}", slack)
            elif exact:
                assert torch.equal(got.codes.full_tensor(), want.codes), (of_x, of_w)
        if exact:
            got = hop.scaled(aten.addmm.default, torch.float32, whole, many[0], many[1].t(), alpha=2, beta=3)
            want = hop.scaled(aten.addmm.default, torch.float32, bias, one[0], one[1].t(), alpha=2, beta=3)
            assert_close(got, want, exact, f"{of_x}, {of_w}, addmm")
            scale, shift = torch.tensor([0.05]), torch.randint(-1000, 1000, (40,), dtype=torch.int32)
            want = hop.scaled(aten.linear.default, static, *one, shift, output_scale=scale)
            shift = distribute_tensor(shift, mesh, [Replicate()])
            got = hop.scaled(aten.linear.default, static, *many, shift, output_scale=scale)
            assert torch.equal(got.codes.full_tensor(), want.codes), (of_x, of_w, "by the sum")


def two_dimensions(_: Any, rank: int) -> None:
    """Batches over one axis of a mesh, features over the other, as DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for name in ("INT8_STATIC", "NVFP4_TRAINING"):
        one, x = made(CROSSED[name])
        many = copy.deepcopy(one)
        for layer, rows, columns in ((many.up, Shard(0), Shard(0)), (many.down, Shard(1), Replicate())):
            for key, placed in (("weight", rows), ("bias", columns)):
                spread = distribute_tensor(getattr(layer, key).detach(), mesh, [Replicate(), placed])
                setattr(layer, key, nn.Parameter(spread))
        batch = distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_()
        torch.manual_seed(1)
        got = many(batch)
        assert got.placements[0] == Shard(0)
        want, _ = train(one, x)
        assert_close(got.detach(), want, name in BITS, name)
        got.square().sum().backward()
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            assert_close(p.grad, q.grad, False, name)


def amax_of_a_group(mesh: Any, rank: int) -> None:
    """Processes that train on parts of a batch use one amax, that of all of it."""
    one, x = made(hop.recipes.FP8_DELAYED)
    many = copy.deepcopy(one)
    parts = x.tensor_split(mesh.size())
    for _ in range(3):
        for model, batch in ((one, x), (many, parts[rank])):
            model(batch).square().sum().backward()
        hop.nn.advance(one)
        hop.nn.advance(many, mesh)
    for role in ("input", "gradient"):
        for layer in ("up", "down"):
            mine, all_of_it = (getattr(m, layer).scales[role].amax for m in (many, one))
            torch.testing.assert_close(mine, all_of_it, rtol=1e-5, atol=0)


@pytest.mark.full
class TestStyles(unittest.TestCase):
    def test_styles_of_pytorch(self):
        run(styles_of_pytorch, 2)


@pytest.mark.full
class TestTensorParallel(unittest.TestCase):
    def test_every_scheme(self):
        run(every_scheme, 2)

    def test_four_processes(self):
        run(every_scheme, 4)

    def test_learned_scales(self):
        run(learned_scales, 2)

    def test_sequence_parallel(self):
        run(sequence_parallel, 2)

    def test_moves_little(self):
        run(moves_little, 2)

    def test_compiled(self):
        run(compiled, 2)

    def test_embedding(self):
        run(embedding, 2)

    def test_sums_where_they_lie(self):
        run(sums_where_they_lie, 2)

    def test_two_dimensions(self):
        run(two_dimensions, 4)

    def test_amax_of_a_group(self):
        run(amax_of_a_group, 2)
