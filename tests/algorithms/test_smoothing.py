"""smoothquant and awq: factors against their formulas, where they fold, and models that keep what they compute."""

import copy
import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn import functional

import hop
from hop import presets
from hop.algorithms import AWQ, SmoothQuant, awq, gptq, smoothquant
from hop.algorithms.flow import Flow, NotFoldable
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

GROUPS = Scheme(None, presets.INT4_32)


def outliers(seed: int) -> Tensor:
    """(4, 10, 64) with some large channels."""
    x = randn(4, 10, 64, seed=seed)
    x[..., ::13] *= 30
    return x


BATCHES = [outliers(seed) for seed in (1, 2, 3)]


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, added: float = 0.0) -> None:
        super().__init__()
        self.weight, self.added = nn.Parameter(torch.rand(size) + 0.5), added

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight + self.added if self.added else self.weight) * wide.to(x.dtype)


class Block(nn.Module):
    """A layer of a transformer.

    Args:
        norm: "layer", "rms", "rms_module", "gemma".
        post: whether the residual reads the norm's result, as in BERT.
        attention: "sdpa", "matmul", "grouped".
        mlp: "relu", "gelu", "gated"."""

    def __init__(self, norm: str = "layer", post: bool = False, attention: str = "sdpa", mlp: str = "relu") -> None:
        super().__init__()
        torch.manual_seed(0)
        size, self.post, self.attention, self.kind = 64, post, attention, mlp
        make = {"layer": nn.LayerNorm, "rms": RMSNorm, "rms_module": nn.RMSNorm, "gemma": lambda n: RMSNorm(n, 1.0)}
        self.norm1, self.norm2 = make[norm](size), make[norm](size)
        for module in (self.norm1, self.norm2):
            with torch.no_grad():
                module.weight.copy_(torch.rand(size) + 0.5)
        kv = 32 if attention == "grouped" else size
        self.q, self.k, self.v = nn.Linear(size, size), nn.Linear(size, kv), nn.Linear(size, kv)
        self.o, self.up, self.down = nn.Linear(size, size), nn.Linear(size, 96), nn.Linear(96, size)
        self.gate = nn.Linear(size, 96) if mlp == "gated" else None

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, 16).transpose(1, 2)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if self.attention == "matmul":
            y = torch.matmul(torch.softmax(q @ k.transpose(-1, -2) / 4, -1), v)
        elif self.attention == "grouped":
            y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(x.shape))

    def mlp(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(functional.silu(self.gate(x)) * self.up(x))
        return self.down(
            functional.dropout((torch.relu if self.kind == "relu" else functional.gelu)(self.up(x)), 0.1, False)
        )

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        x = self.attend(n) + (n if self.post else x)
        n = self.norm2(x)
        return self.mlp(n) + (n if self.post else x)


def source(block: nn.Module, name: str) -> Any:
    found = Flow(block, (BATCHES[0],), {}).source(name)
    return found.name, set(found.readers)


def in_floats(model: Any, x: Tensor) -> Tensor:
    with hop.nn.scheme(lambda role: None), torch.no_grad():
        return model(x)


class TestFlow(unittest.TestCase):
    """Sources by the graph alone: no name is looked at."""

    @parameterized.expand(["layer", "rms", "rms_module"])
    @pytest.mark.quick(2)
    def test_norms(self, norm):
        block = Block(norm, mlp="gated").eval()
        assert source(block, "q") == source(block, "v") == ("norm1", {"q", "k", "v"})
        assert source(block, "gate") == ("norm2", {"gate", "up"})

    @parameterized.expand(["sdpa", "matmul"])
    def test_values(self, attention):
        block = Block(attention=attention).eval()
        assert source(block, "o") == ("v", {"o"})
        assert Flow(block, (BATCHES[0],), {}).source("o").head == 16

    @parameterized.expand(["relu", "gated"])
    def test_functions(self, mlp):
        assert source(Block(mlp=mlp).eval(), "down") == ("up", {"down"})

    @parameterized.expand(
        [
            ("post", Block(post=True), "q", "aten.add"),
            ("gemma", Block("gemma"), "q", "a product of channels with something other than a Parameter"),
            ("gelu", Block(mlp="gelu"), "down", "aten.gelu"),
            ("grouped", Block(attention="grouped"), "o", "aten.scaled_dot_product_attention"),
            ("input", nn.Sequential(nn.Linear(64, 8)), "0", "an input of the model"),
            ("output", nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 8)}), "b", "the output"),
            ("twice", nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}), "b", "calls it 2 times"),
            ("square", nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}), "b", "aten.mul"),
            ("bare", nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 8)), "1", "has no weight"),
        ]
    )
    @pytest.mark.quick(3)
    def test_reasons(self, name, model, layer, said):
        if name == "output":
            model.forward = lambda x: (model["b"](y := model["a"](x)), y)
        if name == "twice":
            model.forward = lambda x: model["b"](model["b"](model["a"](x)))
        if name == "square":
            model.forward = lambda x: model["b"]((y := model["a"](x)) * y)
        with pytest.raises(NotFoldable, match=said):
            source(model.eval(), layer)

    def test_shared_norm(self):
        """A weight that two norms share takes no factor."""
        model: Any = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).eval()
        model[2].weight = model[0].weight
        with pytest.raises(NotFoldable, match="it alone reads"):
            source(model, "3")

    def test_no_graph(self):
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * float(x.sum().item() > 0)

        with pytest.raises(NotFoldable, match=r"torch\.export cannot trace the model"):
            Flow(Model(), (BATCHES[0],), {})


class TestFactors(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{norm}_{attention}_{mlp}_{post}", norm, attention, mlp, post)
            for norm, attention, mlp, post in (
                ("layer", "sdpa", "relu", False),
                ("rms", "matmul", "gated", False),
                ("rms_module", "grouped", "gelu", False),
                ("layer", "sdpa", "gelu", True),
                ("gemma", "matmul", "relu", True),
            )
        ]
    )
    @pytest.mark.quick(4)
    def test_the_model_computes_the_same(self, _name, norm, attention, mlp, post):
        """In floats, whatever folds; and no error of a layer grows."""
        for algorithm, scheme in ((smoothquant, "int8_static"), (awq, GROUPS)):
            block = Block(norm, post, attention, mlp).eval().requires_grad_(False)
            model = algorithm(copy.deepcopy(block), scheme, BATCHES)
            wanted = block(BATCHES[0])
            assert torch.allclose(in_floats(model, BATCHES[0]), wanted, atol=1e-4 * float(wanted.abs().max()))
            rows = {row.name: row for row in model.smoothing_report}
            assert set(rows) == {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
            assert all(row.after <= row.before for row in rows.values())
            for name, row in rows.items():
                has = model.get_submodule(name).input_transform is not None
                assert has == (row.alpha is not None and not row.folded_into), row
                assert (row.alpha is None or not row.folded_into) == bool(row.note), row
            done = hop.quantize_(model, scheme, calibrate=BATCHES)
            plain = hop.quantize_(copy.deepcopy(block), scheme, calibrate=BATCHES)
            if algorithm is smoothquant:
                assert (done(BATCHES[0]) - wanted).norm() < (plain(BATCHES[0]) - wanted).norm()

    def test_smoothquant_is_its_formula(self):
        """s = max|x|^α / max|W|^(1 - α) over the layers that read x; the norm is divided by it."""
        block = Block().eval().requires_grad_(False)
        model = smoothquant(copy.deepcopy(block), "int8_static", BATCHES, settings=SmoothQuant((0.5,)))
        x = torch.cat([block.norm1(b) for b in BATCHES]).flatten(0, 1).double().abs().amax(0)
        w = torch.stack([layer.weight.double().abs().amax(0) for layer in (block.q, block.k, block.v)]).amax(0)
        s = (x / w).sqrt()
        assert torch.allclose(model.norm1.weight.double(), block.norm1.weight.double() / s, rtol=1e-5)
        assert torch.allclose(model.norm1.bias.double(), block.norm1.bias.double() / s, rtol=1e-5)
        assert torch.allclose(model.q.weight.double(), block.q.weight.double() * s, rtol=1e-5)
        rows = {row.name: row for row in model.smoothing_report}
        assert rows["q"].alpha == 0.5 and rows["q"].folded_into == "norm1"

    def test_awq_is_its_formula(self):
        """s = mean|x|^α, by the root of its largest times its least; an explicit factor is 1 / s."""
        layer: Any = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
        model = awq(copy.deepcopy(layer), GROUPS, BATCHES, settings=AWQ((0.5,)))
        mean = torch.cat(BATCHES).flatten(0, 1).double().abs().mean(0)
        s = mean.sqrt() / (mean.max() * mean.min()) ** 0.25
        assert torch.allclose(model[0].input_transform.factor.double(), 1 / s, rtol=1e-5)
        assert torch.allclose(model[0].weight.double(), layer[0].weight.double() * s, rtol=1e-5)
        (row,) = model.smoothing_report
        x, w = torch.cat(BATCHES).flatten(0, 1).double(), layer[0].weight
        rounded = GROUPS.rhs.fake_quantize(model[0].weight)
        y = x @ w.double().t()
        for said, got in (
            (row.after, (x / s) @ rounded.double().t()),
            (row.before, x @ GROUPS.rhs.fake_quantize(w).double().t()),
        ):
            assert said == pytest.approx(float((got - y).square().sum() / y.square().sum()), rel=1e-3)
        assert row.after < row.before and row.note == "not folded: it reads an input of the model"

    def test_search_takes_the_least(self):
        layer: Any = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
        found = {}
        for alpha in (0.1, 0.4, 0.7):
            (row,) = smoothquant(copy.deepcopy(layer), "int8", BATCHES, settings=SmoothQuant((alpha,))).smoothing_report
            found[alpha] = row.after
        (row,) = smoothquant(
            copy.deepcopy(layer), "int8", BATCHES, settings=SmoothQuant((0.1, 0.4, 0.7))
        ).smoothing_report
        assert row.alpha == min(found, key=found.__getitem__) and row.after == min(found.values())

    def test_static_error_is_that_of_the_layer(self):
        """What the search says of a static scheme is what the calibrated layer does."""
        layer: Any = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
        model = smoothquant(copy.deepcopy(layer), "int8_static", BATCHES)
        done = hop.quantize_(model, "int8_static", calibrate=BATCHES)
        x = torch.cat(BATCHES)
        lost = (done(x) - layer(x)).double().square().sum() / (layer(x) - layer[0].bias).double().square().sum()
        assert model.smoothing_report[0].after == pytest.approx(float(lost), rel=1e-3)

    def test_then_gptq(self):
        block = Block(post=True, mlp="gelu").eval().requires_grad_(False)
        model = gptq(smoothquant(copy.deepcopy(block), "int8_static", BATCHES), "int8_static", BATCHES)
        assert all(row.error <= row.nearest for row in model.gptq_report)
        plain = hop.quantize_(copy.deepcopy(block), "int8_static", calibrate=BATCHES)
        wanted = block(BATCHES[0])
        assert (model(BATCHES[0]) - wanted).norm() < (plain(BATCHES[0]) - wanted).norm()

    def test_without_explicit_factors(self):
        model = smoothquant(Block(post=True).eval(), "int8_static", BATCHES, explicit=False)
        rows = {row.name: row for row in model.smoothing_report}
        assert rows["q"].note == "no factor: its input is also read by aten.add" and rows["o"].folded_into == "v"
        assert all(m.input_transform is None for m in model.modules() if isinstance(m, hop.nn.Linear))

    def test_channels_without_inputs(self):
        batches = [b * (torch.arange(64) > 7) for b in BATCHES]
        layer: Any = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
        layer[0].weight[:, 9] = 0
        for algorithm, scheme in ((smoothquant, "int8"), (awq, GROUPS)):
            model = algorithm(copy.deepcopy(layer), scheme, batches)
            assert torch.allclose(in_floats(model, batches[0]), layer(batches[0]), atol=1e-3)


class TestFallbacks(unittest.TestCase):
    def test_notes(self):
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.embed, self.first, self.bad = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)
                self.other, self.head = nn.Linear(64, 8), nn.Linear(64, 8, bias=False)
                self.head.weight = self.embed.weight
                with torch.no_grad():
                    self.bad.weight[0, 0] = math.inf

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = self.first(self.embed(x)).tanh()
                return self.head(y), self.bad(y)

        model = awq(Model().eval(), GROUPS, [torch.arange(8)])
        notes = {row.name: row.note for row in model.smoothing_report}
        assert "Embedding is no" in notes["embed"] and "2 layers share" in notes["head"]
        assert "no batch reaches it" in notes["other"] and "NaN or an infinity" in notes["bad"]

    def test_no_graph(self):
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x * float(x.sum().item() != 0))

        (row,) = smoothquant(Model().eval(), "int8", BATCHES).smoothing_report
        assert row.alpha is not None and "torch.export cannot trace" in row.note

    def test_errors(self):
        frozen = hop.quantize_(Block().eval(), "int8")
        for call, error, said in (
            (lambda: smoothquant(Block(), "int8", []), ValueError, "smoothquant: batches is empty"),
            (lambda: awq(Block(), GROUPS, BATCHES[0]), TypeError, "awq: batches must be an iterable"),
            (lambda: awq(3, GROUPS, BATCHES), TypeError, "awq: model must be"),
            (lambda: awq(Block(), GROUPS, BATCHES, settings=SmoothQuant()), TypeError, "settings must be a AWQ"),
            (lambda: awq(Block(), GROUPS, BATCHES, explicit=1), TypeError, "explicit must be"),
            (lambda: awq(Block(), "int7", BATCHES), ValueError, "no scheme is called"),
            (lambda: awq(Block(), GROUPS, [BATCHES[0] * math.nan]), ValueError, "the input of layer 'q' has NaN"),
            (lambda: smoothquant(frozen, "int8", BATCHES), ValueError, "is frozen"),
            (lambda: SmoothQuant(()), ValueError, "alphas must be"),
            (lambda: AWQ((2.0,)), ValueError, "alphas must be"),
        ):
            with pytest.raises(error, match=said):
                call()
