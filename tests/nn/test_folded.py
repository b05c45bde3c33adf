"""Batch norms that layers compute: training, frozen, saved, exported."""

import copy
import unittest
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop import schemes

SCHEMES = {"dynamic": schemes.INT8_DYNAMIC, "static": schemes.INT8_STATIC}


class Residual(nn.Module):
    """(images, 3, size, size) -> (images, 16, size, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(x + self.bn2(self.conv2(x)))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 1, bias=False),
        nn.BatchNorm2d(16, momentum=None),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16, affine=False),
    )


NETS = {"residual": Residual, "depthwise": depthwise}


def made(kind: str, scheme: Any) -> tuple[Any, Tensor]:
    """A net with norms folded, some steps after its beginning."""
    torch.manual_seed(0)
    model, x = NETS[kind](), torch.randn(70, 3, 32, 32)
    model = hop.nn.convert(model, scheme)
    assert hop.nn.fold_batch_norms(model).folded == 2
    hop.nn.calibrate(model, [x], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x[:8]) - 0.5).square().mean().backward()
        optimizer.step()
    return model, x


def differing(a: Tensor, b: Tensor) -> int:
    assert a.shape == b.shape
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


class TestDeployed(unittest.TestCase):
    @parameterized.expand([(f"{k}_{n}", k, s) for k in NETS for n, s in SCHEMES.items()])
    @pytest.mark.full
    def test_one_arithmetic_from_the_freeze_of_statistics_on(self, name, kind, scheme):
        model, x = made(kind, scheme)
        assert differing(model(x), copy.deepcopy(model).eval()(x)) > 0  # with the statistics of the batch
        hop.nn.freeze_statistics_(model)
        before = {k: t.clone() for k, t in model.state_dict().items()}
        y = model(x).detach()
        assert y.numel() > 10**6 and all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
        assert differing(torch.compile(model, backend="aot_eager")(x).detach(), y) == 0
        model.eval()
        with torch.no_grad():
            assert differing(model(x), y) == 0
            hop.nn.freeze(model)
            assert differing(model(x), y) == 0
            assert differing(torch.compile(model, backend="aot_eager")(x), y) == 0
            program = torch.export.export(model, (x,))
            assert differing(program.module()(x), y) == 0
            assert differing(program.run_decompositions(hop.decompositions()).module()(x), y) == 0

    def test_results_that_are_codes(self):
        torch.manual_seed(0)
        scheme = replace(schemes.INT8_STATIC, output=hop.presets.INT8_TENSOR_STATIC_AFFINE)
        model: Any = hop.nn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), scheme)
        hop.nn.fold_batch_norms(model)
        x = torch.randn(8, 3, 9, 9)
        hop.nn.calibrate(model, [x], progress=False)
        hop.dequantize(model(x)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        hop.nn.freeze_statistics_(model)
        y = hop.dequantize(model(x))
        assert torch.equal(hop.dequantize(hop.nn.freeze(model.eval())(x)), y)

    def test_near_the_unfused_model(self):
        """Phase 1 is quantization-aware training of the float model; the statistics are PyTorch's."""
        torch.manual_seed(0)
        floats, x = Residual(), torch.randn(8, 3, 16, 16)
        model: Any = hop.nn.convert(copy.deepcopy(floats), schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(model)
        want, y = [(floats(x), model(x)) for _ in range(3)][-1]
        assert (y - want).norm() < 0.05 * want.norm()
        torch.testing.assert_close(model.bn1.running_mean, floats.bn1.running_mean)
        torch.testing.assert_close(model.bn1.running_var, floats.bn1.running_var)
        assert model.bn1.num_batches_tracked == 3


def reference(layer: Any, x: Tensor, frozen: bool) -> tuple[Tensor, list[Tensor]]:
    """The result in float64 of the same formulas, straight through the roundings, and its leaves."""
    norm = layer.norm
    leaves = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias, norm.weight, norm.bias)]
    x64, w, b, gamma, beta = leaves
    running = (norm.running_var.double() + norm.eps).sqrt()
    folded = w * (gamma / running).reshape(-1, 1, 1, 1)
    q = layer.weight_quantizer(layer.scheme.rhs)
    of_w = hop.dequantize(hop.quantize(q, layer.folded_weight().detach())).double()
    of_x = hop.dequantize(hop.quantize(layer.weight_quantizer(layer.scheme.lhs), x.detach())).double()
    z = functional.conv2d(x64 + (of_x - x64).detach(), folded + (of_w - folded).detach())
    mean, sigma = norm.running_mean.double(), running
    if not frozen:
        var, mean = torch.var_mean(functional.conv2d(x64, w, b), (0, 2, 3), correction=0)
        sigma = (var + norm.eps).sqrt()
    z = z * (running / sigma).reshape(-1, 1, 1)
    return z + ((b - mean) * gamma / sigma + beta).reshape(-1, 1, 1), leaves


class TestGradients(unittest.TestCase):
    @parameterized.expand([("batch", False), ("frozen", True)])
    def test_those_of_the_formulas(self, name, frozen):
        torch.manual_seed(0)
        model: Any = hop.nn.convert(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(model)
        nn.init.uniform_(model[1].weight, 0.5, 2)
        x = torch.randn(8, 4, 9, 9, requires_grad=True)
        for _ in range(3):
            model(x)
        if frozen:
            hop.nn.freeze_statistics_(model)
        y = model(x)
        want, leaves = reference(model[0], x, frozen)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
        weights = torch.randn_like(y)
        (y * weights).sum().backward()
        (want * weights).sum().backward()
        for got, leaf in zip((x, *model[0].parameters(), *model[1].parameters()), leaves, strict=True):
            assert leaf.grad is not None and got.grad is not None
            if got is model[0].bias and not frozen:  # the mean of the batch takes it away
                assert got.grad.abs().max() < 1e-3
                continue
            assert (got.grad - leaf.grad).norm() < 1e-4 * leaf.grad.norm()


class Twice(Residual):
    """The first convolution feeds the skip, too."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv1(x)
        return self.bn2(self.conv2(functional.relu(self.bn1(z)))) + z


class Branching(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class TestFinding(unittest.TestCase):
    def test_report_says_why(self):
        model = hop.nn.convert(Twice(), schemes.INT8_DYNAMIC)
        report = hop.nn.fold_batch_norms(model)
        assert report.folded == 1 and "read elsewhere" in str(report) and type(model.bn1) is nn.BatchNorm2d

    def test_names_where_nothing_can_be_traced(self):
        model = hop.nn.convert(Branching(), schemes.INT8_DYNAMIC)
        with pytest.raises(ValueError, match=r"cannot trace.*give pairs"):
            hop.nn.fold_batch_norms(model)
        assert hop.nn.fold_batch_norms(model, [("conv1", "bn1"), ("conv2", "bn2")]).folded == 2

    def test_refusals(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
        assert "is not a quantized" in str(hop.nn.fold_batch_norms(model))
        hop.nn.convert(model, schemes.INT8_DYNAMIC)
        with pytest.raises(ValueError, match="track_running_stats=False"):
            hop.nn.fold_batch_norms(model, [("0", "1")])
        with pytest.raises(ValueError, match="no module 'bn'"):
            hop.nn.fold_batch_norms(model, [("0", "bn")])
        with pytest.raises(ValueError, match="no folded batch norms"):
            hop.nn.freeze_statistics_(model)

    @parameterized.expand(
        [
            (nn.Linear(6, 4), nn.BatchNorm1d(4), (8, 6)),
            (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (8, 4, 7)),
            (nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (4, 2, 4, 4, 4)),
            (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), (4, 4, 5, 5)),
        ]
    )
    def test_kinds_of_layers(self, layer, norm, shape):
        torch.manual_seed(0)
        model, x = nn.Sequential(layer, norm), torch.randn(shape)
        floats = copy.deepcopy(model)
        hop.nn.convert(model, schemes.INT8_DYNAMIC)
        assert hop.nn.fold_batch_norms(model).folded == 1
        y, want = [(model(x), floats(x)) for _ in range(3)][-1]
        assert (y - want).norm() < 0.05 * want.norm()
        y, want = model.eval()(x), floats.eval()(x)
        assert (y - want).norm() < 0.05 * want.norm()
        assert torch.equal(hop.nn.freeze(model)(x), y)


class TestFiles(unittest.TestCase):
    def test_names_are_those_of_the_unfused_model(self):
        torch.manual_seed(0)
        floats, x = Residual(), torch.randn(4, 3, 8, 8)
        floats(x)
        model = hop.nn.convert(Residual(), schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(model)
        model.load_state_dict(floats.state_dict())
        assert set(model.state_dict()) == set(floats.state_dict())
        y, want = model.eval()(x), floats.eval()(x)
        assert (y - want).norm() < 0.05 * want.norm()
        hop.nn.freeze_statistics_(model)
        Residual().load_state_dict(hop.nn.float_state_dict(model))
        other: Any = hop.nn.convert(Residual(), schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(other)
        other.load_state_dict(model.state_dict())
        assert other.bn1.statistics_frozen and torch.equal(other.train()(x), y)
        hop.nn.freeze(model)
        third = hop.nn.convert(Residual(), schemes.INT8_DYNAMIC)
        hop.nn.fold_batch_norms(third)
        third.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(third.eval()(x), y)
