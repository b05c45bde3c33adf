"""quantize_, packed layers, layers that draw nothing, inputs that are shared."""

import copy
import io
import itertools
import logging
import os
import tempfile
import unittest
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hop
from hop import presets, recipes, schemes
from hop.kernels.cpu import native
from hop.nn.layers.sharing import SharedInput
from hop.numerics.layout import sums_of
from hop.numerics.layouts import Tiled
from hop.numerics.schemes import SHORT, Scheme
from tests.support.layers import randn
from tests.support.schemes import EVERY
from tests.support.tensors import plain

DYNAMIC = {name: scheme for name, scheme in EVERY.items() if "STATIC" not in name}
INDEX = torch.arange(12).reshape(3, 4)


class Net(nn.Module):
    """A layer of each kind, whose sizes all blocks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 256)
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 128)
        self.conv = nn.Conv2d(8, 32, 3, padding=1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.embed(index)).relu())
        return self.conv(x.reshape(-1, 8, 4, 16))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 32) for _ in range(3))
        self.dense = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        other = x if other is None else other
        scores = torch.softmax(self.query(x) @ self.key(other).mT, -1)
        return self.dense(scores @ self.value(other))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def quantized(scheme: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        return hop.quantize_(net(), scheme, **options)


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict, written and read."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def quantizers(model: nn.Module) -> list[hop.Quantizer]:
    return [p.quantizer for p in model.parameters() if isinstance(p, hop.QuantizedTensor)]


class TestQuantize(unittest.TestCase):
    def test_by_a_name_a_scheme_a_quantizer_and_patterns(self):
        by_name = quantized("int8")
        assert all(p.quantizer.plain in (presets.INT8_ROW, presets.INT8_CONV) for p in (by_name.first.weight,))
        want = by_name(INDEX)
        assert torch.equal(quantized(schemes.INT8_DYNAMIC)(INDEX), want)
        assert torch.equal(quantized({"*": "int8"})(INDEX), want)
        assert torch.equal(quantized([("*", schemes.INT8_DYNAMIC)])(INDEX), want)
        weights = quantized(presets.INT8_ROW)
        assert weights.first.scheme == Scheme(None, presets.INT8_ROW) == schemes.INT8_WEIGHT
        mixed = quantized({"first": "int4", "conv": None, "*": "fp8"})
        assert mixed.first.scheme == schemes.INT4_WEIGHT_32 and mixed.second.scheme == schemes.FP8_DYNAMIC_ROW
        assert type(mixed.conv) is nn.Conv2d

    def test_filter(self):
        for filter in (nn.Linear, "*st", lambda name, module: name == "first"):
            model = quantized("int8", filter=filter)
            assert isinstance(model.first, hop.nn.Linear) and type(model.embed) is nn.Embedding
        assert "all but filter=" in str(model.hop_report)
        model = net()
        with pytest.raises(ValueError, match="filter='third' matches no layer; the layers of the model are embed"):
            hop.quantize_(model, "int8", filter="third")
        assert type(model.first) is nn.Linear

    def test_layers_of_one_form_are_checked_once(self):
        from hop.nn.layers import base as layer

        with (
            mock.patch.object(layer, "_runs", set()),
            mock.patch.object(layer, "quantized", wraps=layer.quantized) as ran,
        ):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 48))
            hop.nn.convert(model, "int8")
            assert ran.call_count == 2
            hop.nn.convert(nn.Linear(64, 64), "int4")
            assert ran.call_count == 3

    def test_a_filter_may_select_every_layer(self):
        model = quantized("int8", filter="*")
        assert model.hop_report.converted == 4 and not model.hop_report.unused

    def test_says_what_it_did_to_the_logger_alone(self):
        with self.assertLogs("hop", logging.INFO) as log, mock.patch("builtins.print") as printed:
            model = quantized("int8")
        assert not printed.called
        (line,) = log.output
        assert line.endswith(f"quantize_: 4 layers; {model.hop_report.summary}")
        of = sum(p.numel() for p in net().parameters())
        biases = 256 + 128 + 32
        assert model.hop_report.summary == f"{of - biases:,} of {of:,} parameters quantized (99.6 %)"

    def test_static_scales(self):
        model = net()
        with pytest.raises(ValueError, match="calibrate=None"):
            hop.quantize_(model, schemes.INT8_STATIC)
        assert type(model.first) is nn.Linear, "an error leaves the model as it was"
        model = quantized("int8_static", calibrate=[INDEX])
        assert model.first.scales.input.ready and model.first.frozen
        torch.testing.assert_close(model(INDEX), net()(INDEX), rtol=0.0, atol=0.1)

    def test_is_the_steps(self):
        model = hop.nn.freeze(hop.nn.convert(net(), "int8"), pack=True)
        assert torch.equal(model(INDEX), quantized("int8")(INDEX))

    def test_little_memory_is_taken_beside_the_model(self):
        """The float weights go while the codes come: never more than a tenth above the float model."""
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        floats = sum(p.nbytes for p in model.parameters())
        most = 0

        def watched(*args: Any, **options: Any) -> Any:
            nonlocal most
            codes = quantize(*args, **options)
            most = max(most, sum(p.nbytes for p in model.parameters()) + codes.nbytes)
            return codes

        from hop.nn.models import freezing

        quantize = freezing.quantize_weight
        with mock.patch.object(freezing, "quantize_weight", watched):
            hop.quantize_(model, "int8")
        assert 0 < most <= 1.1 * floats
        assert sum(p.nbytes for p in model.parameters()) < 0.3 * floats

    @parameterized.expand(DYNAMIC.items())
    @pytest.mark.quick(11)
    def test_every_scheme(self, name, scheme):
        """Eval, frozen, packed, trained further: the same bits, from the same input."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(12, 256), nn.Linear(256, 128), nn.Linear(128, 64)).eval()
        hop.nn.convert(model, scheme)
        state = torch.get_rng_state()
        want = model(INDEX)
        assert torch.equal(model(INDEX), want)
        hop.nn.freeze(model)
        for module in (model, model.train(), hop.nn.freeze(model, pack=True), model.eval()):
            assert torch.equal(module(INDEX), want)
        assert torch.equal(torch.get_rng_state(), state), "no random number was drawn"
        program = torch.export.export(model, (INDEX,))
        assert torch.equal(program.module()(INDEX), want)
        assert not [n for n in program.graph.nodes if "rand" in str(n.target)]

    @pytest.mark.full
    def test_says_once_that_freeze_was_forgotten(self):
        model = hop.nn.convert(net(), "int8")
        with mock.patch("hop.nn.layers.reminder._said", False), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(INDEX)  # something may learn from it
            hop.nn.calibrate(model, [INDEX])
            with torch.no_grad():
                torch.compile(model, backend="aot_eager")(INDEX)
                model.train()(INDEX)
                assert not found
                model.eval()(INDEX)
                model(INDEX)
            assert len(found) == 1 and "call hop.nn.freeze(model)" in str(found[0].message)
        with mock.patch("hop.nn.layers.reminder._said", False), torch.no_grad():
            hop.nn.freeze(model)(INDEX)

    def test_recipes_draw_in_training_alone(self):
        layer = hop.nn.Linear(64, 32, scheme=recipes.INT8_TRAINING)
        for training, frozen in ((True, False), (False, False), (True, True)):
            layer.train(training)
            if frozen:
                hop.nn.freeze(layer)
            found = []
            for _ in range(2):
                x = randn(4, 64).requires_grad_()
                (layer(x) * randn(4, 32, seed=1)).sum().backward()
                found.append(x.grad)
            assert torch.equal(*found) == (not training or frozen)


class TestToFloat(unittest.TestCase):
    def test_is_the_layer_before(self):
        """The same attributes, Parameters and hooks, whatever became of the layer meanwhile."""
        seen: list[nn.Module] = []
        for scheme in ("int8", "int8_static"):
            model = net()
            before = dict(model.named_children())
            for layer in before.values():
                layer.register_forward_hook(lambda module, *_: seen.append(module))
            hop.nn.convert(model, scheme)
            hop.nn.calibrate(model, [INDEX], progress=False)
            for name, layer in before.items():
                made = model.get_submodule(name)
                assert isinstance(made, hop.nn.Layer) and (name == "embed" or bool(made.scales) == ("static" in scheme))
                again = made.to_float()
                assert type(again) is type(layer) and vars(again).keys() == vars(layer).keys()
                assert again.weight is layer.weight and not dict(again.named_children())
                seen.clear()
                x = {"embed": INDEX, "first": randn(2, 256), "second": randn(2, 256), "conv": randn(1, 8, 4, 16)}[name]
                assert torch.equal(again(x), layer(x)) and seen == [again, layer]

    def test_of_a_frozen_weight_has_its_numbers(self):
        for pack in (True, False):
            model = quantized("int8_weight", pack=pack)
            want = model(INDEX)
            for name, layer in list(model.named_children()):
                setattr(model, name, layer.to_float())
                assert type(model.get_submodule(name).weight) is nn.Parameter
            torch.testing.assert_close(model(INDEX), want)


class TestPacked(unittest.TestCase):
    def setUp(self):
        if native.library().missing is not None:
            self.skipTest("weights are packed for native kernels alone")

    def test_what_is_packed(self):
        model = quantized("int8")
        layouts = [q.layout for q in quantizers(model)]
        assert layouts[0] is None and all(isinstance(layout, Tiled) for layout in layouts[1:]) and len(layouts) == 4
        assert all(q.layout is None for q in quantizers(quantized("int8", pack=False)))
        assert all(q.layout is None for q in quantizers(hop.nn.freeze(model, pack=False)))
        assert torch.equal(model(INDEX), quantized("int8")(INDEX))

    @parameterized.expand(["int8", "int4", "fp8", "mxfp8", "nvfp4"])
    @pytest.mark.quick(2)
    def test_saved_plain_and_packed_where_it_is_loaded(self, name):
        model = quantized(name)
        want, state = model(INDEX), saved(model)
        assert all(t.quantizer.layout is None for t in state.values() if isinstance(t, hop.QuantizedTensor))
        with torch.device("meta"):
            fresh = Net().eval()
        hop.quantize_(fresh, name)
        fresh.load_state_dict(state, assign=True)
        assert quantizers(fresh) == quantizers(model) and torch.equal(fresh(INDEX), want)
        other = quantized(name)
        with torch.no_grad():
            for p in other.parameters():
                if not isinstance(p, hop.QuantizedTensor):
                    p.zero_()
        other.load_state_dict(saved(model))
        assert quantizers(other) == quantizers(model) and torch.equal(other(INDEX), want)
        plain = hop.quantize_(net(), name, pack=False)
        plain.load_state_dict(saved(model))
        assert torch.equal(plain(INDEX), want) and all(q.layout is None for q in quantizers(plain))

    def test_codes_that_are_assigned_freeze_a_layer(self):
        state, want = saved(quantized("int8")), quantized("int8")(INDEX)
        model = hop.nn.convert(net(), "int8")
        model.load_state_dict(state, assign=True)
        assert model.first.frozen and torch.equal(model(INDEX), want)
        with mock.patch("hop.impls.quantized.operands.found_scales", side_effect=hop.quantize) as quantize:
            model(INDEX)
        assert all(call.args[1].shape[0] == 3 for call in quantize.call_args_list), "activations alone"

    def test_weights_that_mean_something_else(self):
        """Floats and codes of other quantizers are refused, before anything is loaded; or quantized anew."""
        other = Net().eval()
        states = {"floats of torch.float32": other.state_dict(), "codes of .*int4": saved(quantized({"*": "int4"}))}
        for pack, (what, state), assign in itertools.product((True, False), states.items(), (True, False)):
            model = quantized("int8", pack=pack)
            before, was = saved(model), quantizers(model)
            with pytest.raises(
                RuntimeError, match=rf"'.*weight' holds {what}, .* frozen codes of .*int8.*requantize=True"
            ):
                model.load_state_dict(state, assign=assign)
            assert all(torch.equal(plain(x), plain(before[key])) for key, x in model.state_dict().items())
            hop.nn.load_state_dict(model, state, requantize=True, assign=assign)
            assert quantizers(model) == was
            floats = {k: hop.dequantize(x) if isinstance(x, hop.QuantizedTensor) else x for k, x in state.items()}
            want = Net().eval()
            want.load_state_dict(floats)
            assert torch.equal(model(INDEX), hop.quantize_(want, "int8", pack=pack)(INDEX))
        unfrozen = hop.nn.convert(net(), "int8")
        with pytest.raises(RuntimeError, match=r"holds codes of .*int4.* the layer has codes of .*int8"):
            unfrozen.load_state_dict(states["codes of .*int4"], assign=True)
        assert not any(isinstance(p, hop.QuantizedTensor) for p in unfrozen.parameters())
        unfrozen.load_state_dict(saved(quantized("int4")))  # numbers that float weights hold
        with pytest.raises(TypeError, match="load_state_dict: requantize must be True or False"):
            hop.nn.load_state_dict(unfrozen, {}, requantize=1)

    @pytest.mark.filterwarnings("ignore:aten.mul.Tensor has no rule for a QuantizedTensor")
    def test_floats_do_not_come_back(self):
        model = hop.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), "int8")
        with pytest.raises(RuntimeError, match=r"hop\.nn\.Conv2d: weight is frozen, .* fold batch norms"):
            torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])

    def test_safetensors(self):
        model = quantized("int8")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            hop.storage.save_file(model.state_dict(), path)
            state = hop.storage.load_file(path)
        fresh = quantized("int8")
        fresh.load_state_dict(state)
        assert torch.equal(fresh(INDEX), model(INDEX))

    def test_copies_moves_and_casts(self):
        model = quantized("int8")
        want = model(INDEX)
        for other in (copy.deepcopy(model), self._pickled(model)):
            assert quantizers(other) == quantizers(model) and torch.equal(other(INDEX), want)
        away = copy.deepcopy(model).to("meta")
        assert all(q.layout is None for q in quantizers(away)) and away.first.packs
        half = copy.deepcopy(model).to(torch.bfloat16)
        assert half(INDEX).dtype == torch.bfloat16 and isinstance(half.first.weight.quantizer.layout, Tiled)
        torch.testing.assert_close(half(INDEX).float(), want, rtol=0.0, atol=0.05)

    def _pickled(self, model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    @pytest.mark.full
    def test_exported_both_ways(self):
        model = quantized("int8")
        want = model(INDEX)
        for pack in (True, False):
            program = torch.export.export(hop.nn.freeze(model, pack=pack), (INDEX,))
            layouts = ["layout" in str(n.args) for n in program.graph.nodes if "hop" in str(n.target)]
            assert layouts and torch.equal(program.module()(INDEX), want)
            lowered = program.run_decompositions(hop.decompositions())
            assert torch.equal(lowered.module()(INDEX), want)

    def test_gradients_of_inputs(self):
        """As of the plain weight, bit for bit: what an adapter before the layer learns from."""
        for scheme in (schemes.INT8_DYNAMIC, recipes.INT8_TRAINING, recipes.MXFP8_TRAINING, schemes.INT4_WEIGHT_32):
            layer = hop.nn.Linear(256, 128, scheme=scheme)
            found = []
            for pack in (False, True):
                hop.nn.freeze(layer, pack=pack)
                x = randn(8, 256).requires_grad_()
                layer(x).square().sum().backward()
                found.append(x.grad)
            assert torch.equal(*found) and found[0].any()


class TestEnsembles(unittest.TestCase):
    @parameterized.expand(["int8", "int4", "8da4w", "fp8", "mxfp8", "int8_weight"])
    @pytest.mark.quick(3)
    def test_members_under_vmap(self, name):
        """torch.func.stack_module_state of frozen models: the codes of each member, and its results."""
        models = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
            models.append(hop.quantize_(model, name, pack=False))
        parameters, buffers = torch.func.stack_module_state(models)
        assert isinstance(parameters["0.weight"], hop.QuantizedTensor)
        base, x = copy.deepcopy(models[0]), randn(5, 64)

        def call(own: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(base, (own, buffers), (x,))

        want = torch.stack([model(x) for model in models])
        assert torch.equal(torch.vmap(call, (0, 0, None))(parameters, buffers, x), want)
        xs = torch.stack([x, -x, 2 * x])
        want = torch.stack([model(y) for model, y in zip(models, xs, strict=True)])
        assert torch.equal(torch.vmap(call)(parameters, buffers, xs), want)


class TestSharedInput(unittest.TestCase):
    def model(self) -> Any:
        torch.manual_seed(0)
        return hop.quantize_(Attention().eval(), "int8")

    def count(self, model: nn.Module, *args: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The result, and how often an input was quantized."""
        calls = []

        def counted(q: Any, x: Any, **options: Any) -> Any:
            calls.append(x)
            return hop.quantize(q, x, **options)

        of_layers = mock.patch("hop.impls.quantized.operands.found_scales", counted)
        of_frozen = mock.patch("hop.nn.layers.linear.quantize", counted)
        with mock.patch("hop.nn.layers.sharing.quantize", counted), of_layers, of_frozen, torch.no_grad():
            return model(*args), len(calls)

    def unshared(self, model: nn.Module) -> nn.Module:
        model = copy.deepcopy(model)
        for layer in model.modules():
            if isinstance(layer, hop.nn.Linear):
                layer.shared_input = None
        return model

    def test_quantizes_it_once(self):
        model, x = self.model(), randn(2, 5, 64)
        assert model.query.shared_input is model.key.shared_input is model.value.shared_input
        assert model.dense.shared_input is None
        want, each = self.count(self.unshared(model), x)
        for _ in range(2):
            got, calls = self.count(model, x)
            assert torch.equal(got, want) and (calls, each) == (2, 4)
        with torch.inference_mode():
            got, calls = self.count(model, x.clone())
        assert torch.equal(got, want) and calls == 2
        other = randn(2, 7, 64, seed=1)
        got, calls = self.count(model, x, other)
        want, _ = self.count(self.unshared(model), x, other)
        assert torch.equal(got, want) and calls == 3

    def test_an_input_that_changes(self):
        """In place, counted or not: each forward finds its codes anew."""
        model, x = self.model(), randn(2, 5, 64)
        plain = self.unshared(model)
        with torch.no_grad():
            model(x)
            for change in (lambda: x.mul_(3), lambda: x.data.mul_(3), lambda: x.numpy().__imul__(3)):
                change()
                assert torch.equal(model(x), plain(x))
            q = model.query(x)
            x.mul_(0.1)
            assert torch.equal(model.key(x), plain.key(x)) and not torch.equal(model.query(x), q)
            assert torch.equal(model.value(x), plain.value(x))

    def test_codes_go_with_their_input(self):
        model, x = self.model(), randn(5, 64)
        with torch.no_grad():
            model.query(x)
        assert model.query.shared_input._last is not None
        del x
        assert model.query.shared_input._last is None

    @pytest.mark.full
    def test_gradients_and_other_routes(self):
        model, plain = self.model(), self.unshared(self.model())
        grads = []
        for m in (model, plain):
            x = randn(2, 5, 64).requires_grad_()
            m(x).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
        x = randn(2, 5, 64)
        want = plain(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), want)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), want)
        assert torch.equal(torch.func.vmap(model)(x), torch.stack([plain(y) for y in x]))

    def test_groups_of_ones_own(self):
        model = nn.ModuleDict({"a": nn.Linear(64, 8), "b": nn.Linear(64, 8)})
        hop.quantize_(model, "int8")
        assert model["a"].shared_input is None
        hop.nn.share_input([model["a"], model["b"]])
        assert isinstance(model["a"].shared_input, SharedInput) and model["b"].shared_input is model["a"].shared_input


class TestNames(unittest.TestCase):
    def test_of_schemes(self):
        for name, scheme in schemes.SCHEMES.items():
            assert schemes.named(name) is schemes.named(name.lower().replace("_", "-")) is scheme
        for short, full in SHORT.items():
            assert schemes.named(short) is schemes.SCHEMES[full.upper()]
        assert schemes.named("8da4w") is schemes.INT8_DA_INT4_W
        with pytest.raises(ValueError, match="no scheme is called 'int5_weight'; use int"):
            schemes.named("int5_weight")

    def test_one_meaning(self):
        """A name that stands in several places is one value."""
        assert not set(schemes.SCHEMES) & set(recipes.RECIPES)
        assert not (set(schemes.SCHEMES) | set(recipes.RECIPES)) & set(presets.PRESETS)
        from hop.report import CANDIDATES

        assert all(schemes.named(name) == scheme for name, scheme in CANDIDATES.items())


class Allocations(TorchDispatchMode):
    """Records the most elements of a float tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // 4 for t in tree_leaves(y) if plain_floats(t)]
        self.most = max([self.most, *sizes])
        return y


def plain_floats(x: Any) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.is_floating_point()


class TestRequantize:
    @pytest.mark.parametrize("scheme", ["int8", "int4", "mxfp4", "nvfp4", "int4_weight_32"])
    @pytest.mark.parametrize("first", ["int8_weight", "8da4w"])
    @pytest.mark.quick(4)
    def test_equals_quantizing_the_values(self, first, scheme):
        """Packed weights, convolutions and embeddings too, and in parts of a few rows."""
        ours = hop.quantize_(net().eval(), first, weights="rule")
        floats = net().eval()
        for name, p in floats.named_parameters():
            frozen = ours.get_parameter(name)
            p.data = hop.dequantize(frozen) if isinstance(frozen, hop.QuantizedTensor) else frozen.detach()
        want = hop.quantize_(floats, scheme)
        with mock.patch("hop.nn.models.requantizing._AT_ONCE", 1000):
            got = hop.quantize_(ours, scheme, requantize=True)
        assert str(got.hop_report) == str(want.hop_report)
        for name, p in want.named_parameters():
            assert p.quantizer == got.get_parameter(name).quantizer if isinstance(p, hop.QuantizedTensor) else True
            assert torch.equal(plain(p), plain(got.get_parameter(name))), name
        assert torch.equal(got(INDEX), want(INDEX))

    def test_shared_weights_stay_shared(self):
        model = hop.quantize_(Tied().eval(), "int8_weight")
        hop.quantize_(model, {"*": "int4_weight_32"}, requantize=True)
        assert model.head.weight is model.embed.weight
        assert model.head.weight.quantizer.plain == presets.INT4_32

    def test_single_schemes_of_few_bits_keep_tables_at_8(self):
        """Embeddings, and layers that share their weights; not if a pattern says so, nor where there is none."""
        for first in (None, "int8", {"*": "int4"}):
            model = Tied().eval() if first is None else hop.quantize_(Tied().eval(), first)
            hop.quantize_(model, "nvfp4", requantize=first is not None)
            assert model.head.weight is model.embed.weight
            assert model.head.weight.quantizer.plain == presets.INT8_ROW
            assert model.embed.scheme == model.head.scheme == schemes.INT8_WEIGHT
        model = hop.quantize_(nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32)), "int4", filter=nn.Linear)
        assert type(model[0]) is nn.Embedding and model[1].weight.quantizer.plain == presets.INT4_32
        assert hop.quantize_(nn.Embedding(8, 32), presets.INT4_32).weight.quantizer == presets.INT8_ROW
        with pytest.warns(UserWarning, match="no layer was converted"):
            hop.quantize_(nn.Sequential(nn.ReLU()), "int4")
        model = hop.quantize_(Tied().eval(), "8da4w", exact=True)  # in which the head multiplies integers
        assert model.embed.scheme == model.head.scheme == schemes.INT8_DYNAMIC

    def test_weights_are_searched_unless_they_may_be_trained(self):
        torch.manual_seed(0)
        linear = nn.Linear(64, 48)
        rule = hop.quantize(presets.INT4_32, linear.weight)
        searched = hop.quantize_weight(presets.INT4_32, linear.weight, signed=True)
        for options, want in (({}, searched), ({"weights": "rule"}, rule)):
            got = hop.quantize_(copy.deepcopy(linear), "int4", pack=False, **options).weight
            assert torch.equal(plain(got), plain(want))
        converted = hop.nn.convert(copy.deepcopy(linear), "int4")
        assert torch.equal(plain(hop.quantize_(converted, "int4", pack=False).weight), plain(rule))

    @parameterized.expand(
        [
            ("floats", "int4", {}, True),
            ("requantized", "int4", {"requantize": True}, True),
            ("gptq", "int4", {"weights": "gptq"}, True),
            ("integers", "8da4w", {}, False),
            ("integers_requantized", "8da4w", {"requantize": True}, False),
            ("integers_gptq", "8da4w", {"weights": "gptq"}, False),
        ]
    )
    def test_searched_scales_are_negative_only_under_float_activations(self, _name, scheme, options, signed):
        torch.manual_seed(0)
        linear = nn.Linear(64, 48)
        model = nn.Sequential(copy.deepcopy(linear), nn.ReLU(), nn.Linear(48, 8)).eval()
        if "requantize" in options:
            model = hop.quantize_(model, presets.INT8_32)
        if "weights" in options:
            options = options | {"calibrate": [torch.randn(32, 64)]}
        weight = hop.quantize_(model, scheme, pack=False, **options)[0].weight
        scale = weight.buffers()["scale"]
        assert weight.quantizer == presets.INT4_32
        assert bool((scale < 0).any()) == signed and bool((scale != 0).all())
        assert (hop.dequantize(weight) - linear.weight).norm() < 0.15 * linear.weight.norm()

    def test_a_weight_shared_with_integers_has_positive_scales(self):
        torch.manual_seed(0)
        model = Tied().eval()
        hop.quantize_(model, {"embed": "int4", "head": "8da4w"})
        assert model.embed.weight is model.head.weight
        assert bool((model.head.weight.buffers()["scale"] > 0).all())

    def test_holds_few_floats(self):
        """A table of many parts: the floats of one at a time."""
        model = hop.quantize_(nn.Sequential(nn.Linear(64, 4096, bias=False)).eval(), presets.INT8_32)
        with mock.patch("hop.nn.models.requantizing._AT_ONCE", 4096), Allocations() as seen:
            hop.quantize_(model, "int8", requantize=True)
        assert model[0].weight.quantizer.plain == presets.INT8_ROW
        assert 0 < seen.most < 64 * 4096 // 8

    def test_is_asked_for(self):
        model = hop.quantize_(nn.Sequential(nn.Linear(64, 64)).eval(), "int8_weight")
        with pytest.warns(UserWarning, match="no layer was converted"):
            hop.quantize_(model, "int4_weight_32")
        assert model[0].weight.quantizer.format is presets.INT8_ROW.format
        with pytest.raises(TypeError, match="requantize must be True or False, got 1"):
            hop.quantize_(model, "int4_weight_32", requantize=1)

    def test_sums_of_many_codes(self):
        codes = torch.randint(-128, 128, (3000, 128), dtype=torch.int8)
        for columns in (False, True):
            want = codes.long().sum(0 if columns else 1, keepdim=True)
            assert torch.equal(sums_of(codes, columns)["code_sums"].long(), want)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(index))
