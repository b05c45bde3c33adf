"""Layers whose weight hooks or parametrizations compute in each call: quantized as computed, or refused before anything
changes."""

import copy
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import hop
from hop import algorithms
from tests.support.layers import randn


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


def pruned_twice(layer: nn.Module) -> None:
    pruned(layer)
    prune.ln_structured(layer, "weight", 0.25, n=2, dim=0)


def pruned_bias(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "bias", 0.5)


def normed(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        nn.utils.weight_norm(layer)


def halved(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Halved())


def frozen_parts(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)
    layer.requires_grad_(False)


def unknown(layer: Any) -> None:
    """A hook of somebody's own."""
    layer.raw = layer._parameters.pop("weight")
    layer.weight = layer.raw * 2
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.raw * 2))


HOOKS = [pruned, pruned_twice, pruned_bias, normed, nn.utils.spectral_norm]
PARAMETRIZATIONS = [
    *(parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, halved, frozen_parts)
]
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(32, 16), (4, 32)),
    "conv": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
}
CASES = [(f"{kind}_{f.__name__}", *LAYERS[kind], f) for kind in LAYERS for f in (*HOOKS, *PARAMETRIZATIONS)]


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """The model after one step, in eval mode."""
    if any(p.requires_grad for p in model.parameters()):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval()


def plain(make: Callable[[], nn.Module], computed: Any) -> nn.Module:
    """A model with the weight and bias that a layer computes with."""
    result: Any = nn.Sequential(make()).eval()
    with torch.no_grad():
        result[0].weight.copy_(computed.weight)
        result[0].bias.copy_(computed.bias)
    return result


def report(model: nn.Module) -> Any:
    return model.hop_report


class TestRecomputed(unittest.TestCase):
    @parameterized.expand(CASES)
    def test_quantize_(self, _name, make, shape, compute):
        """As the model whose weight has the computed values."""
        x, model = randn(*shape), nn.Sequential(make())
        compute(model[0])
        trained(model, x)
        with torch.no_grad():
            model(x)
            want = hop.quantize_(plain(make, model[0]), "int8")
            hop.quantize_(model, "int8")
            assert torch.equal(model(x), want(x))
        assert type(model[0]) is type(want[0])
        assert model.state_dict().keys() == want.state_dict().keys()
        assert model.hop_report.summary == want.hop_report.summary
        copy.deepcopy(model).load_state_dict(want.state_dict())

    @parameterized.expand(CASES)
    @pytest.mark.quick(3)
    def test_freeze(self, _name, make, shape, compute):
        """A converted layer trains what computes its weight; frozen it gives the bits of eval mode."""
        for first in (True, False):
            x, model = randn(*shape), nn.Sequential(make())
            if first and compute in PARAMETRIZATIONS:
                continue
            if first:
                compute(model[0])
            hop.nn.convert(model, "int8")
            if not first:
                compute(model[0])
            else:
                assert report(model).quantized > 0.9 * report(model).parameters
            parts = [p.detach().clone() for p in model.parameters()]
            trained(model, x)
            assert compute is frozen_parts or not all(map(torch.equal, parts, model.parameters()))
            with torch.no_grad():
                want = model(x)
                hop.nn.freeze(model, pack=True)
                assert torch.equal(model(x), want)
            assert set(model.state_dict()) == {"0.weight", "0.bias"}

    def test_parts_that_others_share_keep_their_values(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        for layer in model:
            halved(layer)
        kept, x = model[1].parametrizations.weight.original.detach().clone(), randn(3, 8)
        with torch.no_grad():
            want = [layer(x) for layer in model]
        hop.nn.models.quantizing.settle_weights(model, {"0": "int8", "1": None})
        assert torch.equal(model[1].parametrizations.weight.original, kept)
        assert all(torch.equal(layer(x), y) for layer, y in zip(model, want, strict=True))

    def test_attention(self):
        """Both of its weights; convert, which cannot keep their hooks, leaves it and says what to call."""
        x = randn(2, 5, 16)
        for compute in (prune.identity, parametrizations.weight_norm):
            model = nn.Sequential(nn.MultiheadAttention(16, 2, batch_first=True)).eval()
            compute(model[0], "in_proj_weight")
            compute(model[0].out_proj, "weight")
            with torch.no_grad():
                want = model[0](x, x, x)[0]
            with pytest.warns(
                UserWarning, match=r"in_proj_weight is computed in each call by .* call torch\.nn\.utils\."
            ):
                hop.nn.convert(model, "int8")
            hop.quantize_(model, "int8")
            with torch.no_grad():
                assert (model[0](x, x, x)[0] - want).abs().max() < 0.05 * want.abs().max()
            assert model.hop_report.quantized == 4 * 16 * 16

    def test_left_alone(self):
        """Layers without a scheme, and models that are refused, keep their hooks and parametrizations."""
        for compute in (pruned, parametrizations.weight_norm):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            compute(model[0])
            keys = list(model.state_dict())
            with pytest.raises(ValueError, match="no layer matches"):
                hop.quantize_(model, {"nobody": "int8"})
            hop.quantize_(model, {"0": None, "1": "int8"})
            assert list(model.state_dict()) == keys

    def test_parametrized_layers_are_left_by_convert(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parametrizations.weight_norm(model[0])
        hop.nn.convert(model, "int8")
        reason = report(model).rows[0].reason
        assert "call torch.nn.utils.parametrize.remove_parametrizations(module, 'weight') before" in reason
        assert model(randn(2, 8)).shape == (2, 8)


class TestUnknownHooks(unittest.TestCase):
    def test_a_float_layer_is_left(self):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), randn(2, 8)
        unknown(model[0])
        want = model[0](x)
        hop.quantize_(model, "int8")
        assert "remove the hook" in report(model).rows[0].reason
        assert torch.equal(model[0](x), want)

    def test_a_converted_layer_is_refused(self):
        """Nothing is changed then."""
        model, x = hop.nn.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "int8").eval(), randn(2, 8)
        unknown(model[1])
        want = model(x)
        for function in (hop.nn.freeze, lambda m: hop.quantize_(m, "fp8"), lambda m: algorithms.gptq(m, "fp8", [x])):
            with pytest.raises(ValueError, match=r"layer '1': its weight is computed .* remove the hook"):
                function(model)
        assert not model[0].frozen and torch.equal(model(x), want)


class TestFunctionsThatChangeWeights(unittest.TestCase):
    @parameterized.expand([("gptq",), ("smoothquant",), ("rotate",), ("adaround",)])
    @pytest.mark.quick(2)
    def test_algorithms(self, name):
        """As the model whose weight has the computed values."""
        settings = {"settings": algorithms.AdaRound(steps=2)} if name == "adaround" else {}
        x, function = randn(16, 32), getattr(algorithms, name)
        for compute in (pruned, parametrizations.weight_norm):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
            want = copy.deepcopy(model)
            compute(model[0])
            with torch.no_grad():
                want[0].weight.copy_(model[0].weight)
            got, want = (function(m, "int8", [x], **settings) for m in (model, want))
            assert torch.equal(got(x), want(x))

    @parameterized.expand([(f.__name__, f) for f in (pruned, parametrizations.weight_norm, unknown)])
    def test_refused(self, _name, compute):
        """What needs the weight itself says what to call."""
        model: Any = hop.nn.convert(nn.Sequential(nn.Linear(8, 8)), "int8")
        compute(model[0])
        with pytest.raises(ValueError, match="is computed in each call"):
            hop.nn.gather_as_codes(model)
        with pytest.raises(ValueError, match="is computed in each call"), hop.nn.hold_weights(model):
            pass
        with pytest.raises(ValueError, match="is computed in each call"):
            model[0].transform_input(hop.nn.scales.transforms.InputTransform(torch.ones(8)))
        floats = nn.Sequential(nn.Linear(8, 8))
        compute(floats[0])
        with pytest.raises(ValueError, match="is computed in each call"):
            algorithms.choose_bits(floats, ["int8", "int4"], [randn(2, 8)], size=100)

    def test_back_to_floats(self):
        """Hooks stay; parametrizations, which are of another class, are refused."""
        model: Any = hop.nn.convert(nn.Sequential(nn.Linear(8, 8)), "int8")
        pruned(model[0])
        floats = model[0].to_float()
        x = randn(4, 8)
        assert torch.equal(floats(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        model = hop.nn.convert(nn.Sequential(nn.Linear(8, 8)), "int8")
        halved(model[0])
        with pytest.raises(RuntimeError, match=r"remove_parametrizations\(module, 'weight'\) before"):
            model[0].to_float()
