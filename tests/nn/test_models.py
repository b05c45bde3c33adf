"""Whole models of quantized layers: converting, calibrating and freezing them."""

import builtins
import copy
import io
import math
import re
import sys
import tempfile
import unittest
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets, recipes, schemes
from hop.nn.models import calibration
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import Scheme
from tests.support.files import read_back
from tests.support.layers import converted, randn
from tests.support.schemes import CROSSED

STATIC = Quantizer(INT8, scale=Static())
ALL_STATIC = Scheme(
    presets.INT8_TENSOR_STATIC_AFFINE, Quantizer(INT8, (1, -1), Static()), presets.INT8_TENSOR_STATIC_AFFINE
)
EXACT = {"INT8_DYNAMIC", "INT8_STATIC", "INT8_DA_INT4_W", "INT8_TRAINING", "INT8_DA_TERNARY_W"}  # integer arithmetic


class Decoder(nn.Module):
    """Tied weights, a module in two places, and one that no rule of ours knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 32)
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.norm(self.again(self.first(self.embed(index)))))


def made(kind: str) -> tuple[Any, Tensor]:
    """A float layer and an input of it."""
    torch.manual_seed(3)
    if kind == "linear":
        return nn.Linear(64, 32), randn(32, 64)
    if kind == "conv1d":
        return nn.Conv1d(4, 8, 3, padding=1), randn(2, 4, 9)
    if kind == "conv2d":
        return nn.Conv2d(4, 8, 3, padding="same", padding_mode="reflect"), randn(2, 4, 8, 8)
    return nn.Embedding(32, 64), torch.arange(32).reshape(4, 8)


def applicable() -> list[tuple[str, Scheme, str]]:
    """Each scheme with each layer that it runs."""
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        for name, scheme in CROSSED.items():
            for kind in ("linear", "conv1d", "conv2d", "embedding"):
                if hop.nn.convert(made(kind)[0], scheme).hop_report.rows[0].scheme is not None:
                    found.append((name, scheme, kind))
    return found


class TestConvert(unittest.TestCase):
    def test_keeps_what_is_shared_and_tied(self):
        model, index = Decoder(), torch.arange(12).reshape(3, 4)
        weight, optimizer = model.head.weight, torch.optim.SGD(model.parameters(), 0.1)
        same: Any = hop.nn.convert(model, schemes.INT8_DYNAMIC)
        assert same is model
        assert model.first is model.again and isinstance(model.first, hop.nn.Linear)
        assert model.head.weight is weight is model.embed.weight and isinstance(model.embed, hop.nn.Embedding)
        assert [(r.name, r.type, r.reason) for r in same.hop_report.rows] == [
            ("embed", "Embedding", ""),
            ("first", "Linear", ""),
            ("again", "Linear", "the same module as 'first'"),
            ("head", "Linear", ""),
            ("norm.weight", "LayerNorm", "not the weight of a known layer"),
            ("norm.bias", "LayerNorm", "not the weight of a known layer"),
        ]
        assert [r.parameters for r in same.hop_report.rows] == [384, 1056, 0, 0, 32, 32]
        assert same.hop_report.summary == "1,408 of 1,504 parameters quantized (93.6 %)"
        model(index).sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.param_groups[0]["params"][0], weight)

    def test_rules(self):
        model = nn.ModuleDict(
            {"a": nn.Linear(32, 8), "b": nn.Linear(32, 8), "c": nn.Conv2d(2, 2, 3), "d": nn.Linear(8, 8)}
        )
        report = hop.nn.convert(
            model,
            [
                ("a", None),
                (nn.Conv2d, recipes.MXFP8_TRAINING),
                (lambda name, module: module.in_features == 32, schemes.INT4_WEIGHT_32),
                ("b", schemes.INT8_DYNAMIC),
            ],
        ).hop_report
        a, b, c, d = report.rows
        assert (a.scheme, a.reason) == (None, "the rule for 'a' leaves it alone")
        assert b.scheme == schemes.INT4_WEIGHT_32 == model["b"].scheme
        assert c.scheme is None and "one scale for each example" in c.reason and type(model["c"]) is nn.Conv2d
        assert (d.scheme, d.reason) == (None, "no rule matches") and type(model["d"]) is nn.Linear
        lines = [line for line in str(report).splitlines() if "at CPU level" not in line]  # on some CPUs int4 is slow
        assert lines == [
            "layer  type     parameters  scheme",
            "a      Linear  264  41.4 %  - the rule for 'a' leaves it alone",
            "b      Linear  264  41.4 %  INT4_WEIGHT_32",
            f"c      Conv2d   38   6.0 %  - {c.reason}",
            "d      Linear   72  11.3 %  - no rule matches",
            "earlier rules apply to every layer that 'b' matches",
            "256 of 638 parameters quantized (40.1 %)",
        ]

    @parameterized.expand(
        [
            ("name", "z*", "'z*'"),
            ("type", nn.Embedding, "Embedding"),
            ("function", lambda name, module: module.weight.numel() < 0, "lambda"),
            ("container", "", "''"),
        ]
    )
    def test_a_selector_that_matches_nothing(self, _name, selector, shown):
        model = nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Linear(8, 8)})
        for rules in ([(selector, schemes.INT8_DYNAMIC)], [("a", schemes.INT4_WEIGHT_32), (selector, None)]):
            with pytest.raises(
                ValueError, match=r"no layer matches .*; the layers of the model are a \(Linear\), b"
            ) as e:
                hop.nn.convert(model, rules)
            assert shown in str(e.value)
        assert type(model["a"]) is nn.Linear, "an error leaves the model as it was"

    def test_selectors_of_what_earlier_rules_take(self):
        """A function is asked of what is left; projections of attention count for names and types alone."""
        model = nn.ModuleDict({"a": nn.Conv2d(3, 8, 1), "b": nn.Linear(32, 8), "c": nn.MultiheadAttention(8, 2)})
        hop.nn.convert(
            model,
            [
                (nn.Conv2d, None),
                (nn.MultiheadAttention, None),
                (lambda name, module: module.in_features == 32, schemes.INT4_WEIGHT_32),
            ],
        )
        assert isinstance(model["b"], hop.nn.Linear)

    def test_a_root(self):
        plain = nn.Linear(32, 8)
        model = hop.nn.convert(plain, schemes.INT8_DYNAMIC)
        assert isinstance(model, hop.nn.Linear) and type(plain) is nn.Linear
        assert re.search(r"\(model\)  Linear  264 100.0 %  INT8_DYNAMIC", str(model.hop_report))
        again = hop.nn.convert(model, schemes.INT4_WEIGHT_32)
        assert again is model and again.scheme == schemes.INT4_WEIGHT_32

    def test_subclasses_are_left(self):
        class Attention(nn.MultiheadAttention):
            pass

        model = Attention(8, 2)
        with pytest.warns(UserWarning, match="convert: no layer was converted"):
            whole, row = hop.nn.convert(model, schemes.INT8_DYNAMIC).hop_report.rows
        assert whole.scheme is None and whole.reason == "Attention is a subclass, which may compute something else"
        assert row.scheme is None and "its attention reads the weight" in row.reason
        assert not isinstance(model.out_proj, hop.nn.Linear)

    def test_scales_to_learn_that_are_none(self):
        with pytest.warns(UserWarning, match="learn_scales=True makes static scales Parameters, but no scheme has one"):
            hop.nn.convert(nn.Linear(4, 4), schemes.INT8_DYNAMIC, learn_scales=True)

    def test_transformer_layers_call_theirs(self):
        """In eval mode without gradients too, where torch has a fused form that reads the weights."""
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()
        hop.nn.convert(layer, schemes.INT8_DA_TERNARY_W)
        layer.linear2.register_forward_hook(lambda module, args, y: torch.ones_like(y))
        with torch.no_grad():
            got = layer(randn(2, 4, 32))
        with torch.no_grad():
            x = randn(2, 4, 32)
            after = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
            torch.testing.assert_close(got, layer.norm2(after + 1))

    def test_transformers_mask(self):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2).eval()
        converted(model, schemes.INT8_DYNAMIC)
        x, mask = randn(2, 4, 32), torch.tensor([[False] * 4, [False, False, True, True]])
        want = model(x, src_key_padding_mask=mask)
        with torch.no_grad():
            got = model(x, src_key_padding_mask=mask)
        torch.testing.assert_close(got[~mask], want[~mask], rtol=0.0, atol=0.05)

    def test_float_state_dict_of_a_frozen_model(self):
        model = Decoder()
        hop.nn.convert(model, schemes.INT8_DYNAMIC)
        hop.nn.freeze(model)
        plain = Decoder()
        plain.load_state_dict(hop.nn.float_state_dict(model))
        assert torch.equal(plain.head.weight, hop.dequantize(model.head.weight))


class TestCalibrate(unittest.TestCase):
    def test_what_is_no_calibration(self):
        """It is said which batch, which layer, and what to do; scales stay unset."""
        model, x = converted(nn.Sequential(nn.Linear(16, 8)), ALL_STATIC), randn(5, 16)
        nothing = torch.full((5, 16), math.nan)
        mse, floats = hop.calibration.mse, nn.Linear(2, 2)
        for error, words, args in (
            (TypeError, "batches must be an iterable of batches, got a tensor", (model, x)),
            (
                TypeError,
                r"batch 1 is passed as model\(\*batch\), of 2, .* leave out everything that is not",
                (model, [x, (x, 3)]),
            ),
            (TypeError, r"batch 0 is passed as model\(\*\*batch\), of \['y'\]", (model, [{"y": x}])),
            (ValueError, "the input of layer '0' has no finite number in 2 batches", (model, [nothing, nothing])),
            (ValueError, "the input of layer '0' has no finite number", (model, [nothing], mse)),
            (ValueError, "calibrate: model .* has no quantized layers; call hop.nn.convert first", (floats, [x])),
        ):
            with pytest.raises(error, match=words):
                hop.nn.calibrate(*args)
            assert not model[0].scales.input.ready
        with pytest.raises(ValueError, match="freeze: model=Linear has no quantized layers"):
            hop.nn.freeze(floats)
        with pytest.warns(UserWarning, match="the input of layer '0'.* has NaN or an infinity"):
            hop.nn.calibrate(model, [nothing, x])
        assert model[0].scales.input.ready

    @pytest.mark.full
    def test_of_a_compiled_model(self):
        """Looking at values breaks no graph, so waits for no device either."""
        for method in (hop.calibration.amax, hop.calibration.mse):
            model, batches = converted(nn.Sequential(nn.Linear(16, 8)), ALL_STATIC), [randn(5, 16), randn(5, 16)]
            other = copy.deepcopy(model)
            torch._dynamo.utils.counters.clear()
            hop.nn.calibrate(torch.compile(model, backend="eager"), batches, method)
            assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
            assert not torch._dynamo.utils.counters["graph_break"]
            hop.nn.calibrate(other, batches, method)
            assert torch.equal(model[0].scales.input.scale, other[0].scales.input.scale)

    def test_finds_what_amax_finds(self):
        model = converted(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), ALL_STATIC).train()
        model[1].eval()
        plain = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        plain.load_state_dict(hop.nn.float_state_dict(model))
        batches = [randn(5, 16, seed=s) * (s + 1) for s in range(3)]
        hop.nn.calibrate(model, batches)
        assert [m.training for m in (model, model[0], model[1], model[0].scales)] == [True, True, False, True]
        seen = {"input": batches, "output": [plain[0](x) for x in batches]}
        for role, tensors in seen.items():
            want = hop.calibration.amax(presets.INT8_TENSOR_STATIC_AFFINE, *tensors)
            state = model[0].scales[role]
            assert torch.equal(state.scale, want["scale"].flatten())
            assert torch.equal(state.zero_point, want["zero_point"].flatten().float())
        last = hop.calibration.amax(ALL_STATIC.lhs, *(plain[:2](x) for x in batches))
        assert torch.equal(model[2].scales.input.scale, last["scale"].flatten())
        assert isinstance(model[0](batches[0]), hop.QuantizedTensor)

    def test_other_methods_see_all_of_little_data(self):
        q = Quantizer(INT8, scale=Static())
        batches = [randn(50, 16, seed=s) for s in range(3)]
        for method in (hop.calibration.mse, partial(hop.calibration.percentile, percent=90)):
            layer = hop.nn.Linear(16, 4, scheme=Scheme(q, presets.INT8_ROW))
            hop.nn.calibrate(layer, batches, method)
            want = method(q, torch.cat(batches))["scale"].flatten()
            assert torch.equal(layer.scales.input.scale, want)

    def test_a_sample_is_even_and_bounded(self):
        with mock.patch.object(calibration, "KEPT", 1000):
            sample = calibration._Sample()
            start = 0
            for n in (700, 1, 4096, 13, 9000):
                sample.add(torch.arange(start, start + n, dtype=torch.float32))
                start += n
            kept = sample.values()
        assert kept.numel() <= 1000 and torch.equal(kept, torch.arange(0, start, 27, dtype=torch.float32))

    def test_kinds_of_batches_and_steps(self):
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = hop.nn.Linear(4, 4, scheme=Scheme(STATIC, None))

            def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
                return self.inner(input=x * by)

        x = torch.full((1, 4), 127.0)
        for batch, want in ((x, 1.0), ((x, 2.0), 2.0), ([x, 3.0], 3.0), ({"x": x, "by": 4.0}, 4.0)):
            model = Two()
            hop.nn.calibrate(model, iter([batch, (x, 9.0)]), steps=1)
            assert model.inner.scales.input.scale == want
            hop.nn.calibrate(model, [(x, 9.0)])
            assert model.inner.scales.input.scale == 9

    def test_in_the_scheme_that_is_active(self):
        layer, x = hop.nn.Linear(4, 4, scheme=schemes.INT8_DYNAMIC), randn(3, 4)
        with hop.nn.scheme(ALL_STATIC):
            hop.nn.calibrate(layer, [x])
            assert isinstance(layer(x), hop.QuantizedTensor)

    def test_weights_that_come_later(self):
        layer = hop.nn.Linear(4, 4, scheme=ALL_STATIC, device="meta").to_empty(device="cpu")
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
        hop.nn.calibrate(layer, [randn(3, 4)])
        want = hop.calibration.amax(ALL_STATIC.rhs, layer.weight)["scale"]
        assert torch.equal(layer.scales.weight.scale, want)

    def test_errors_leave_the_model_as_it_was(self):
        layer = hop.nn.Linear(4, 4, scheme=ALL_STATIC)
        with pytest.raises(ValueError, match="batches is empty"):
            hop.nn.calibrate(layer, [])
        with pytest.raises(ValueError, match="steps must be 1 or more"):
            hop.nn.calibrate(layer, [], steps=0)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            hop.nn.calibrate(layer, [randn(2, 4), randn(2, 5)])
        assert layer.training and not layer.in_floats and not layer._forward_hooks and not layer._forward_pre_hooks
        assert not layer.scales.input.ready

    def test_shows_a_bar_on_a_terminal_if_it_can(self):
        layer, x = hop.nn.Linear(4, 4, scheme=ALL_STATIC), randn(2, 4)

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        def shown(progress: bool = True) -> str:
            with mock.patch.object(sys, "stderr", Terminal()) as stderr:
                hop.nn.calibrate(layer, [x, x], progress=progress)
            return stderr.getvalue()

        pytest.importorskip("tqdm")
        assert "2/2" in shown() and shown(progress=False) == ""
        real = builtins.__import__

        def without(name: str, *args, **kwargs):
            if name == "tqdm":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        with mock.patch.object(builtins, "__import__", without):
            assert shown() == ""


class TestFreeze(unittest.TestCase):
    def _ready(self, kind: str, scheme: Scheme) -> tuple[Any, Tensor]:
        plain, x = made(kind)
        model = converted(plain, scheme).eval()
        hop.nn.calibrate(model, [x])
        return model, x

    @pytest.mark.full
    def test_schemes_that_apply(self):
        found = {(name, kind) for name, _, kind in applicable()}
        assert {name for name, kind in found if kind == "linear"} == set(CROSSED)
        assert {name for name, kind in found if kind == "embedding"} == set(CROSSED)
        blocks = {"INT8_DA_INT4_W", "FP8_BLOCKWISE", "MXFP8_TRAINING", "NVFP4_TRAINING"}
        assert {name for name, kind in found if kind == "conv2d"} == set(CROSSED) - blocks

    @pytest.mark.full
    def test_keeps_the_bits_in_less_memory(self):
        for name, scheme, kind in applicable():
            with self.subTest(scheme=name, kind=kind):
                model, x = self._ready(kind, scheme)
                want, before = model.train()(x).detach(), model.weight.nbytes
                hop.nn.freeze(model)
                assert isinstance(model.weight, hop.QuantizedTensor) and isinstance(model.weight, nn.Parameter)
                assert not model.weight.requires_grad and "weight" not in model.scales
                assert torch.equal(model(x), want) and model.weight.nbytes < before / 1.9
                read = read_back(model.state_dict(), weights_only=True)
                other, _ = self._ready(kind, scheme)
                hop.nn.freeze(other)
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.zero_()
                other.load_state_dict(read)
                assert torch.equal(other(x), want)

    @pytest.mark.full
    def test_goes_through_a_file(self):
        pytest.importorskip("safetensors")
        for name, scheme, kind in applicable():
            with self.subTest(scheme=name, kind=kind), tempfile.TemporaryDirectory() as folder:
                model, x = self._ready(kind, scheme)
                hop.nn.freeze(model)
                hop.storage.save_file(model.state_dict(), Path(folder) / "model")
                other = copy.deepcopy(model)
                for buffer in (b for t in other.state_dict().values() for b in self._parts(t)):
                    buffer.view(torch.uint8).zero_() if buffer.dim() else buffer.zero_()
                other.load_state_dict(hop.storage.load_file(Path(folder) / "model"))
                assert torch.equal(other(x), model(x))

    def _parts(self, t: Tensor) -> list[Tensor]:
        return list(t.buffers().values()) if isinstance(t, hop.QuantizedTensor) else [t]

    @pytest.mark.full
    def test_exports(self):
        for name, scheme, kind in applicable():
            with self.subTest(scheme=name, kind=kind):
                model, x = self._ready(kind, scheme)
                want = model.train()(x).detach()
                hop.nn.freeze(model.eval())
                program = torch.export.export(model, (x,))
                assert torch.equal(program.module()(x), want)
                lowered = program.run_decompositions(hop.decompositions())
                targets = [n.target for n in lowered.graph.nodes if n.op == "call_function"]
                assert all(isinstance(t, torch._ops.OpOverload) and t.namespace == "aten" for t in targets), targets
                got = lowered.module()(x)
                if name in EXACT or kind == "embedding":
                    assert torch.equal(got, want)
                else:  # sums of products of floats, which kernels add in an order of their own
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_ties_stay(self):
        model, index = Decoder(), torch.arange(12).reshape(3, 4)
        hop.nn.convert(model, schemes.INT8_DYNAMIC)
        want = model(index)
        hop.nn.freeze(model)
        assert torch.equal(model(index), want) and model.head.weight is model.embed.weight
        hop.nn.freeze(model)
        assert torch.equal(model(index), want)

    def test_in_the_scheme_that_is_active(self):
        layer, x = hop.nn.Linear(32, 4, scheme=schemes.INT8_DYNAMIC), randn(3, 32)
        with hop.nn.scheme(schemes.INT4_WEIGHT_32):
            want = layer(x)
            hop.nn.freeze(layer)
        assert torch.equal(layer(x), want) and layer.scheme == schemes.INT4_WEIGHT_32

    def test_only_the_input_may_change_then(self):
        for kind in ("linear", "conv2d", "embedding"):
            model, x = self._ready(kind, schemes.INT8_DYNAMIC)
            hop.nn.freeze(model)
            other = Scheme(presets.INT8_TENSOR, presets.INT8_ROW)
            assert hop.nn.convert(model, other).hop_report.rows[0].scheme == other and model(x) is not None
            with pytest.warns(UserWarning, match="no layer was converted"):
                (row,) = hop.nn.convert(model, schemes.INT4_WEIGHT_32).hop_report.rows
            assert row.scheme is None and "argument 'weight'" in row.reason and model.scheme == other
            with hop.nn.scheme(schemes.INT4_WEIGHT_32), pytest.raises(ValueError, match="argument 'weight'"):
                model(x)

    def test_learned_scales(self):
        layer, x = hop.nn.Linear(32, 4, scheme=ALL_STATIC, learn_scales=True), randn(3, 32)
        hop.nn.calibrate(layer, [x])
        with torch.no_grad():
            layer.scales.weight.scale.mul_(0.7)
        want = hop.dequantize(layer(x))
        hop.nn.freeze(layer)
        assert torch.equal(hop.dequantize(layer(x)), want)

    def test_leaves_floats(self):
        only_input = hop.nn.Linear(8, 4, scheme=Scheme(presets.INT8_ROW, None))
        hop.nn.freeze(only_input)
        assert not isinstance(only_input.weight, hop.QuantizedTensor)
