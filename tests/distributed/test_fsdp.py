"""FSDP2: weights travel as codes and scales, and training gives what one process gives."""

import copy
import itertools
import unittest
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop import nn, presets, recipes, schemes
from hop.nn.weights.master import MasterWeight
from tests.support.files import read_back
from tests.support.processes import run
from tests.support.schemes import EVERY

aten = torch.ops.aten
SCHEMES = ("INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_INT4_W", "INT8_DA_TERNARY_W", "INT8_TRAINING")
SCHEMES += ("FP8_HYBRID", "FP8_DELAYED", "FP8_BLOCKWISE", "MXFP8_TRAINING", "NVFP4_TRAINING")
UNEVEN = (32, 10, 3, 16)  # 10 rows for 4 processes are 3, 3, 3, 1, and 3 rows 1, 1, 1, 0
CUT = (160, 160, 130)  # blocks of 128 and of 16 rows are cut


def batch(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def built(scheme: hop.Scheme, widths: tuple[int, ...] = UNEVEN) -> torch.nn.Sequential:
    """The same model in each process and each call."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, scheme=scheme), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    nn.calibrate(model, [batch(64, widths[0], 9)], progress=False)
    return model


def sharded(model: torch.nn.Sequential, mesh: Any, **options: Any) -> Any:
    """The model under FSDP2, each Linear a group of its own."""
    nn.gather_as_codes(model)
    for layer in model:
        if hasattr(layer, "weight"):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def stepped(model: Any, x: Tensor, seed: int = 5) -> Tensor:
    """The result, after the backward of its mean square."""
    torch.manual_seed(seed)  # of stochastic gradients
    y = model(x)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    y.square().mean().backward()
    return y.detach()


def assert_like(one: Any, many: Any, bound: float = 0.0, gradients: bool = False) -> None:
    """Parameters, or gradients, equal those of one process up to `bound` times the largest."""
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        a, b = (p.grad, q.grad) if gradients else (p.detach(), q.detach())
        difference = (a - b.full_tensor()).abs().max()
        assert difference <= bound * a.abs().max(), float(difference / a.abs().max())


class Gathered(TorchDispatchMode):
    """The bytes that this process gives to all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base_" in str(op):
            self.bytes += args[1].numel() * args[1].element_size()
        return op(*args, **(kwargs or {}))


# ---- what runs in each process


def every_scheme(mesh: Any, rank: int) -> None:
    """Steps of AdamW: the codes are those of one process, and so, on the same data, is all else, to the bit."""
    turns = [
        *((name, UNEVEN) for name in SCHEMES),
        *((name, CUT) for name in ("FP8_HYBRID", "FP8_BLOCKWISE", "NVFP4_TRAINING")),
    ]
    for name, widths in turns:
        one, many = (built(EVERY[name], widths) for _ in range(2))
        sharded(many, mesh)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, many)]
        for optimizer, model in zip(optimizers, (one, many), strict=True):
            nn.advance_after(optimizer, model)
        for step in range(2):
            x = batch(16, widths[0], step)
            assert torch.equal(stepped(one, x), stepped(many, x)), (name, widths, step)
            assert_like(one, many, gradients=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_like(one, many)


def own_data(mesh: Any, rank: int) -> None:
    """A batch spread over processes: forwards equal to the bit, gradients sums in another order."""
    count = mesh.size()
    for name in ("INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_TERNARY_W"):
        one, many = (built(EVERY[name]) for _ in range(2))
        sharded(many, mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, many)]
        x = batch(16 * count, 32, 1)
        mine = slice(16 * rank, 16 * rank + 16)
        want = stepped(one, x)
        assert torch.equal(want[mine], stepped(many, x[mine]))
        assert_like(one, many, 1e-5, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
        assert_like(one, many, 1e-6)


def convolutions(mesh: Any, rank: int) -> None:
    """Weights with a dimension of one element, along which a block is all."""
    for name in ("INT8_DYNAMIC", "FP8_HYBRID"):
        torch.manual_seed(0)
        floats = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
        one, many = (nn.convert(copy.deepcopy(floats), EVERY[name]) for _ in range(2))
        sharded(many, mesh)
        x = batch(4, 36, 0).view(4, 1, 6, 6)
        assert torch.equal(stepped(one, x), stepped(many, x)), name
        assert_like(one, many, gradients=True)


def options_of_fsdp(mesh: Any, rank: int) -> None:
    """Not resharding, prefetching, gradients accumulated over microbatches, and a parameter dtype."""
    one = built(recipes.MXFP8_TRAINING, CUT)
    for reshard in (True, False):
        many = sharded(built(recipes.MXFP8_TRAINING, CUT), mesh, reshard_after_forward=reshard)
        many[0].set_modules_to_forward_prefetch([many[2]])
        many[2].set_modules_to_backward_prefetch([many[0]])
        one.zero_grad()
        for i in range(3):
            many.set_requires_gradient_sync(i == 2)
            x = batch(16, CUT[0], i)
            assert torch.equal(stepped(one, x), stepped(many, x))
        assert_like(one, many, 1e-6, gradients=True)
    many = sharded(built(schemes.INT8_DYNAMIC), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    one = built(schemes.INT8_DYNAMIC)
    for layer in one:
        if hasattr(layer, "weight"):  # codes of the float32 weight, which appear in bfloat16
            codes = hop.quantize(presets.INT8_ROW, layer.weight.detach()).to(torch.bfloat16)
            layer.weight, layer.bias = torch.nn.Parameter(codes), torch.nn.Parameter(layer.bias.to(torch.bfloat16))
    x = batch(16, 32, 0).to(torch.bfloat16)
    assert torch.equal(stepped(one, x), stepped(many, x))
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        assert q.grad.dtype == torch.float32 and torch.equal(p.grad.float(), q.grad.full_tensor())


def state(mesh: Any, rank: int) -> None:
    """What is done with parameters besides: optimizers of all kinds, clipping, state_dicts, copies."""
    one = built(schemes.INT8_DYNAMIC)
    for kind in ({"foreach": True}, {"fused": True}, {}):
        one, many = built(schemes.INT8_DYNAMIC), sharded(built(schemes.INT8_DYNAMIC), mesh)
        for model in (one, many):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)
            stepped(model, batch(8, 32, 0))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert_like(one, many, 1e-6)
    held = {key: t.detach().clone() for key, t in many.state_dict().items()}
    read = read_back(held, weights_only=False)
    for given, assign in itertools.product((held, read), (False, True)):
        other = sharded(built(schemes.INT8_DYNAMIC), mesh)
        other.load_state_dict(given, assign=assign)
        local = other[0].weight.to_local()
        assert type(local) is MasterWeight and local.gathering.owner() is other[0]
        x = batch(8, 32, 1)
        with Gathered() as seen:
            assert torch.equal(other(x), many(x))
        assert seen.bytes < 2 * 1200  # both models


def wire(mesh: Any, rank: int) -> None:
    """A layer of 1024 x 1024: what is really given to the collective, of the bytes of float32."""
    bounds = {"INT8_DYNAMIC": 0.27, "FP8_HYBRID": 0.27, "FP8_BLOCKWISE": 0.27}
    bounds |= {"NVFP4_TRAINING": 0.16, "INT8_DA_INT4_W": 0.16, "INT8_DA_TERNARY_W": 0.08}
    for name, bound in bounds.items():
        layer = nn.Linear(1024, 1024, bias=False, scheme=EVERY[name])
        nn.gather_as_codes(layer)
        described = nn.bytes_gathered(layer, mesh.size())
        fully_shard(layer, mesh=mesh)
        with Gathered() as seen, torch.no_grad():
            layer(batch(1, 1024, 0))
        assert seen.bytes * mesh.size() == described
        assert described / (4 * 1024 * 1024) <= bound, (name, described)


class Weights(torch.nn.Module):
    """A product with a weight that is a QuantizedTensor."""

    def __init__(self, weight: Tensor, requires_grad: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=requires_grad)
        self.bias = torch.nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return hop.scaled(aten.linear.default, torch.float32, x, self.weight, self.bias)


QUANTIZED = ("INT8_ROW", "INT8_TENSOR", "INT8_TENSOR_STATIC", "INT4_32", "UINT4_32_AFFINE", "FP8_TENSOR", "MXFP8")
QUANTIZED += ("MXFP4", "NVFP4", "TERNARY_TENSOR")


def quantized_parameters(mesh: Any, rank: int) -> None:
    """Frozen and with a gradient, evenly cut or not."""
    turns = [*((name, True, 10) for name in QUANTIZED), *itertools.product(QUANTIZED[:2], (False, True), (16, 3))]
    for name, grad, rows in turns:
        q = getattr(presets, name)
        given = {"scale": torch.tensor(0.05)} if q.scale.missing() else {}
        weight = hop.quantize(q, batch(rows, 32, 0), **given)
        one, many = Weights(weight, grad), Weights(copy.deepcopy(weight), grad)
        fully_shard(many, mesh=mesh)
        assert type(many.weight.to_local()) is hop.QuantizedTensor
        for step in range(2):
            x = batch(8, 32, step)
            assert torch.equal(stepped(one, x), stepped(many, x)), (name, rows)
        torch.testing.assert_close(many.bias.grad.full_tensor(), one.bias.grad)
        if grad:
            assert torch.equal(many.weight.grad.full_tensor(), one.weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that it is flattened to
        try:
            fully_shard(Weights(hop.quantize(presets.NVFP4_16X16, batch(64, 32, 0)), False), mesh=mesh)
        except ValueError as error:
            assert "blocks of several rows" in str(error)
        else:
            raise AssertionError("square blocks of a QuantizedTensor were taken")


def frozen_layers(mesh: Any, rank: int) -> None:
    """Layers of hop.nn with codes as weights, by hop.quantize_ and by convert and freeze; not packed ones."""
    x = batch(8, 64, 0)
    for scheme, frozen in itertools.product(("int8", "int4", "fp8", "nvfp4"), (False, True)):
        made = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
        one = copy.deepcopy(made)
        for parameter in one.parameters():
            torch.nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(parameter.numel()))
        if frozen:
            nn.convert(one, scheme)
            nn.freeze(one, pack=False)
        else:
            hop.quantize_(one, scheme, pack=False)
        many = sharded(copy.deepcopy(one), mesh)
        assert type(many[0].weight.to_local()) is hop.QuantizedTensor
        assert torch.equal(many(x), one(x)), (scheme, frozen)
    packed = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8", pack=True)
    if packed[0].weight.quantizer.is_tiled():
        with pytest.raises(ValueError, match="pack=False"):
            sharded(packed, mesh)


def meshes(mesh: Any, rank: int) -> None:
    """Replicas of shards, and shards of what tensor parallelism cuts: integers equal to the bit."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    x = batch(16, 128, 0)
    for name, bound in (("INT8_DYNAMIC", 0.0), ("MXFP8_TRAINING", 1e-6), ("NVFP4_TRAINING", 1e-6)):
        one = built(EVERY[name], (128, 256, 128))
        want = stepped(one, x)
        if name == "INT8_DYNAMIC":
            many = sharded(built(EVERY[name], (128, 256, 128)), hybrid)
            assert torch.equal(stepped(many, x), want)
            assert_like(one, many, gradients=True)
        many = built(EVERY[name], (128, 256, 128))
        parallelize_module(many, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        got = stepped(sharded(many, both["data"]), x)
        assert (got - want).abs().max() <= bound * want.abs().max()
        assert_like(one, many, bound, gradients=True)


def compiled(mesh: Any, rank: int) -> None:
    """Blocks compiled under FSDP2, with one cache of Inductor for several formats in turn."""
    turns = (
        ("INT8_DYNAMIC", "aot_eager", True),
        ("INT8_DYNAMIC", "inductor", False),
        ("INT4_WEIGHT_32", "inductor", False),
    )
    for name, backend, dynamic in turns:
        torch._dynamo.reset()
        one, many = (built(EVERY[name], (32, 16)) for _ in range(2))
        for layer in many:
            layer.compile(fullgraph=True, dynamic=dynamic, backend=backend)
        sharded(many, mesh)
        for rows in (16, 8) if dynamic else (16,):
            x = batch(rows, 32, rows)
            want, got = stepped(one, x), stepped(many, x)
            torch.testing.assert_close(got, want)
            assert_like(one, many, 1e-6, gradients=True)


class TestRefused(unittest.TestCase):
    """In one process: what is told before anything is sharded."""

    @parameterized.expand(
        [
            ("original", hop.Scheme(presets.INT8_ROW, presets.INT8_ROW, backward="original"), 'backward="original"'),
            ("stochastic", hop.Scheme(None, presets.NVFP4_STOCHASTIC), "rounded at random"),
        ]
    )
    def test_scheme(self, _: str, scheme: hop.Scheme, text: str) -> None:
        model = torch.nn.Sequential(nn.Linear(32, 32, scheme=scheme))
        with pytest.raises(ValueError, match=text):
            nn.gather_as_codes(model)
        assert type(model[0].weight) is torch.nn.Parameter

    def test_shared_with_floats(self):
        model = torch.nn.Sequential(nn.Linear(32, 32, scheme=schemes.INT8_DYNAMIC), torch.nn.Linear(32, 32))
        model[1].weight = model[0].weight
        with pytest.raises(ValueError, match="shares its weight"):
            nn.gather_as_codes(model)

    def test_twice(self):
        model = built(schemes.INT8_DYNAMIC)
        assert nn.gather_as_codes(model) == ["0", "2", "4"]
        with pytest.raises(ValueError, match="prepared already"):
            nn.gather_as_codes(model)

    def test_acts_as_the_float_weight(self):
        one, other = (built(recipes.MXFP8_TRAINING, (32, 32)) for _ in range(2))
        nn.gather_as_codes(other)
        x = batch(32, 32, 0)
        assert torch.equal(stepped(one, x), stepped(other, x))
        assert type(other[0].weight.grad) is Tensor and torch.equal(one[0].weight.grad, other[0].weight.grad)
        twin = copy.deepcopy(other)
        assert twin[0].weight.gathering.owner() is twin[0]
        assert nn.bytes_gathered(twin[0], 1) == 2 * (32 * 32 + 32)  # and its column-wise copy
        with pytest.raises(ValueError, match="bytes_gathered"):
            nn.bytes_gathered(one[0], 2)


class TestQuick(unittest.TestCase):
    @pytest.mark.full
    def test_wire(self):
        run(wire, 2)


@pytest.mark.full
class TestProcesses(unittest.TestCase):
    def test_one_process(self):
        """FSDP2 gathers nothing then."""
        run(every_scheme, 1)

    def test_every_scheme(self):
        run(every_scheme, 4)

    def test_data_and_state(self):
        run(data_and_state, 2)

    def test_quantized_parameters(self):
        run(quantized_parameters, 4)

    def test_frozen_layers(self):
        for processes in (1, 2, 4):
            run(frozen_layers, processes)

    def test_meshes(self):
        run(meshes, 4)

    def test_compiled(self):
        run(compiled, 2)


def data_and_state(mesh: Any, rank: int) -> None:
    own_data(mesh, rank)
    convolutions(mesh, rank)
    options_of_fsdp(mesh, rank)
    state(mesh, rank)
