"""Linear layers that transform their input before it is quantized: against float64, saved, exported, compiled."""

import copy
import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.nn.scales.transforms import InputTransform
from hop.numerics.hadamard import Hadamard
from hop.numerics.schemes import Scheme
from tests.support.layers import randn

FACTOR = torch.linspace(0.25, 4, 64)
TRANSFORMS: dict[str, Any] = {
    "factor": lambda: InputTransform(FACTOR),
    "hadamard": lambda: InputTransform(None, Hadamard()),
    "both": lambda: InputTransform(FACTOR, Hadamard()),
}
EACH = parameterized.expand([*TRANSFORMS.items()])
BATCHES = [randn(6, 64, seed=seed) for seed in (1, 2)]


def matrix(name: str) -> Tensor:
    """diag(f) · R in float64, by its definition."""
    signs, n = Hadamard().signs, 16
    block = torch.tensor([[signs[i] * (-1) ** bin(i & j).count("1") / 4 for j in range(n)] for i in range(n)])
    rotation = torch.block_diag(*[block] * 4).double() if name != "factor" else torch.eye(64).double()
    return torch.diag(FACTOR.double()) @ rotation if name != "hadamard" else rotation


def model(scheme: Any = "int8") -> Any:
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)).eval().requires_grad_(False)
    return hop.nn.convert(floats, scheme)


def transformed(make: Any, scheme: Any = "int8") -> Any:
    result = model(scheme)
    result[0].transform_input(make())
    return result


def floats() -> Any:
    return hop.nn.scheme(lambda role: None)


class TestTransform(unittest.TestCase):
    @EACH
    def test_is_its_formula(self, name, make):
        """Of the input and of the weight, and their product the same as before."""
        new, old = transformed(make), model()
        x, m = BATCHES[0], matrix(name)
        assert torch.allclose(new[0].transformed(x).double(), x.double() @ m, atol=1e-5)
        wanted = old[0].weight.double() @ torch.linalg.inv(m).t()
        assert torch.allclose(new[0].weight.double(), wanted, atol=1e-5)
        with floats():
            assert torch.allclose(new(x), old(x), atol=1e-5)

    @EACH
    def test_codes_are_of_what_is_transformed(self, _name, make):
        """What the layer computes is the product of the quantized transformed input and weight."""
        new = transformed(make)
        q, layer = presets.INT8_ROW, new[0]
        x, w = q.fake_quantize(layer.transformed(BATCHES[0])), q.fake_quantize(layer.weight)
        wanted = x.double() @ w.double().t() + layer.bias
        assert torch.allclose(layer(BATCHES[0]).double(), wanted, atol=1e-5)
        eager = layer(BATCHES[0])
        hop.nn.freeze(new)
        assert torch.equal(layer(BATCHES[0]), eager)

    @EACH
    def test_to_floats_and_back(self, _name, make):
        for freeze in (False, True):
            new, old = transformed(make, Scheme(None, presets.INT8_ROW)), model()
            if freeze:
                hop.nn.freeze(new)
            got = new[0].to_float()
            assert type(got) is nn.Linear and not hasattr(got, "input_transform")
            assert torch.allclose(got.weight, old[0].weight, atol=0.03 if freeze else 1e-6)
            assert torch.allclose(got(BATCHES[0]), new[0](BATCHES[0]), atol=1e-4 if freeze else 0.1)
            state = hop.nn.float_state_dict(new)
            assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
            assert torch.equal(state["0.weight"], got.weight)

    @EACH
    def test_saved_and_loaded(self, _name, make):
        """Into a model without a transform, and into one that has another."""
        new = hop.nn.freeze(transformed(make), pack=True)
        state = new.state_dict()
        for other in (
            model(),
            transformed(lambda: InputTransform(FACTOR * 2, Hadamard((1, -1, 1, 1)))),
            copy.deepcopy(new),
        ):
            hop.nn.freeze(other).load_state_dict(state)
            assert torch.equal(other(BATCHES[0]), new(BATCHES[0]))
        with pytest.raises(RuntimeError, match=r'Missing key.*"0\.input_transform\.'):
            copy.deepcopy(new).load_state_dict(hop.nn.freeze(model()).state_dict())
        with torch.device("meta"):
            empty: Any = model()
        empty.load_state_dict(state, assign=True)
        assert torch.equal(empty(BATCHES[0]), new(BATCHES[0]))

    @EACH
    @pytest.mark.quick(4)
    def test_exported_and_compiled(self, _name, make):
        new = hop.nn.freeze(transformed(make))
        wanted = new(BATCHES[0])
        program = torch.export.export(new, (BATCHES[0],))
        assert torch.equal(program.module()(BATCHES[0]), wanted)
        assert torch.equal(torch.compile(new, backend="eager", fullgraph=True)(BATCHES[0]), wanted)

    @EACH
    def test_calibrated_on_what_is_transformed(self, _name, make):
        new = transformed(make, "int8_static")
        hop.nn.calibrate(new, BATCHES)
        x = torch.cat([new[0].transformed(b) for b in BATCHES])
        wanted = hop.calibration.amax(presets.INT8_TENSOR_STATIC_AFFINE, x)
        assert torch.equal(new[0].scales["input"].scale, wanted["scale"].view(1))
        new[0].transform_input(InputTransform(FACTOR)) if new[0].input_transform.hadamard is None else None
        assert new[0].scales["input"].ready == (new[0].input_transform.hadamard is not None)

    def test_trains(self):
        """Gradients are those of the float64 product, by the chain rule."""
        new = transformed(TRANSFORMS["both"], Scheme(None, presets.INT8_ROW)).train().requires_grad_()
        x = BATCHES[0].clone().requires_grad_()
        new[0](x).square().sum().backward()
        layer, m = new[0], matrix("both")
        y = (x.double() @ m) @ presets.INT8_ROW.fake_quantize(layer.weight.detach()).double().t() + layer.bias.double()
        wanted = 2 * y @ presets.INT8_ROW.fake_quantize(layer.weight.detach()).double() @ m.t()
        assert torch.allclose(x.grad.double(), wanted, rtol=1e-4, atol=1e-4)

    def test_dtypes_and_copies(self):
        new = transformed(TRANSFORMS["both"]).to(torch.bfloat16)
        assert new[0].input_transform.factor.dtype == torch.float32
        assert new(BATCHES[0].to(torch.bfloat16)).dtype == torch.bfloat16
        other = copy.deepcopy(new)
        assert torch.equal(other(BATCHES[0].bfloat16()), new(BATCHES[0].bfloat16()))
        assert "factor for each channel, Hadamard transform of 16" in repr(other)

    def test_one_after_another(self):
        new = transformed(TRANSFORMS["factor"])
        new[0].transform_input(InputTransform(FACTOR.flip(0)))
        new[0].transform_input(InputTransform(None, Hadamard()))
        assert torch.allclose(new[0].input_transform.factor, FACTOR * FACTOR.flip(0))
        with floats():
            assert torch.allclose(new(BATCHES[0]), model()(BATCHES[0]), atol=1e-5)
        with pytest.raises(ValueError, match="has a Hadamard transform"):
            new[0].transform_input(InputTransform(FACTOR))

    def test_errors(self):
        frozen: Any = hop.nn.freeze(model())
        for call, said in (
            (lambda: InputTransform(), "factor and hadamard are both None"),
            (lambda: InputTransform(torch.tensor([1.0, 0.0])), "factor must be a vector of positive"),
            (lambda: InputTransform(torch.tensor([1.0, math.nan])), "factor must be a vector of positive"),
            (lambda: InputTransform(torch.ones(2, 2)), "factor must be a vector of positive"),
            (lambda: model()[0].transform_input(InputTransform(torch.ones(3))), "the factor must have the shape"),
            (lambda: frozen[0].transform_input(InputTransform(FACTOR)), "weight is frozen"),
        ):
            with pytest.raises(ValueError, match=said):
                call()
