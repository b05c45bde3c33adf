"""Norms, activations and softmax of hop.nn; and what hop.quantize_ fuses."""

import copy
import io
import unittest
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.nn.layers.functions import FUNCTIONS, Function
from tests import levels
from tests.support.files import reloaded

aten = torch.ops.aten
OUTPUT = hop.Scheme(None, None, presets.INT8_ROW)
STATIC = hop.Scheme(None, None, presets.INT8_TENSOR_STATIC_AFFINE)
MODULES: dict[str, tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]] = {
    "layer_norm": (nn.LayerNorm(64), aten.layer_norm.default, ([64],), {}),
    "layer_norm of two dimensions": (nn.LayerNorm([3, 64], 1e-3), aten.layer_norm.default, ([3, 64],), {}),
    "layer_norm without weights": (
        nn.LayerNorm(64, elementwise_affine=False),
        aten.layer_norm.default,
        ([64], None, None),
        {},
    ),
    "rms_norm": (nn.RMSNorm(64), aten.rms_norm.default, ([64],), {}),
    "gelu": (nn.GELU(), aten.gelu.default, (), {}),
    "gelu by tanh": (nn.GELU("tanh"), aten.gelu.default, (), {"approximate": "tanh"}),
    "silu": (nn.SiLU(inplace=True), aten.silu.default, (), {}),
    "sigmoid": (nn.Sigmoid(), aten.sigmoid.default, (), {}),
    "tanh": (nn.Tanh(), aten.tanh.default, (), {}),
    "hardswish": (nn.Hardswish(), aten.hardswish.default, (), {}),
    "hardsigmoid": (nn.Hardsigmoid(), aten.hardsigmoid.default, (), {}),
    "leaky_relu": (nn.LeakyReLU(0.2), aten.leaky_relu.default, (0.2,), {}),
    "softmax": (nn.Softmax(-1), aten.softmax.int, (-1,), {}),
}


def made(name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    """The module, with weights of its own, its operator and what follows the input."""
    module, op, args, kwargs = copy.deepcopy(MODULES[name])
    for p in module.parameters():
        nn.init.normal_(p)
    if len(args) == 1 and isinstance(args[0], list):
        bias = (module.bias,) if isinstance(module, nn.LayerNorm) else ()
        eps: Any = module.eps
        args = (*args, module.weight, *bias, eps)
    elif args and isinstance(args[0], list):
        args = (*args, module.eps)
    return module, op, args, kwargs


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


class Block(nn.Module):
    """What norms and activations stand between in a transformer: their results are read by layers, and added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
        self.last, self.head, self.gate = nn.RMSNorm(64), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.last(self.down(self.act(self.up(y))) + y)
        return self.head(z) * torch.sigmoid(self.gate(z))


def blocks(dtype: torch.dtype = torch.float32, scheme: Any = "int8") -> tuple[Any, Any]:
    """A quantized model without fusing, and with."""
    torch.manual_seed(0)
    model = Block().to(dtype).eval()
    plain = hop.nn.freeze(hop.nn.convert(copy.deepcopy(model), scheme, functions=True), pack=True)
    return plain, hop.quantize_(model, scheme, fuse=True, weights="rule")


def wanted(model: Any) -> list[Any]:
    """What its functions will find codes by."""
    return [m.source._wanted for m in model.modules() if isinstance(m, Function) and m.source is not None]


class TestModules(unittest.TestCase):
    @parameterized.expand([(name, dtype) for name in MODULES for dtype in (torch.float32, torch.bfloat16)])
    def test_they_compute_what_scaled_does(self, name, dtype):
        module, op, args, kwargs = made(name)
        x, before = some(5, 3, 64), dict(module.named_parameters())
        layer = hop.nn.convert(copy.deepcopy(module), OUTPUT)
        layer, x = layer.to(dtype), x.to(dtype)
        args = tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in args)
        want = hop.scaled(op, presets.INT8_ROW, x, *args, **kwargs)
        got = layer(x)
        assert type(layer) in FUNCTIONS and got.quantizer == presets.INT8_ROW and got.dtype == dtype
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scale, want.scale)
        floats = hop.nn.convert(copy.deepcopy(module), "int8", functions=True).to(dtype)(x)
        assert torch.equal(floats, hop.scaled(op, dtype, x, *args, **kwargs)) and floats.dtype == dtype
        exact = copy.deepcopy(module).to(dtype).double()(x.double())
        assert torch.allclose(floats.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
        with hop.nn.scheme(lambda role: None):
            assert torch.equal(layer(x), module.to(dtype)(x.clone()))
        assert dict(layer.named_parameters()).keys() == before.keys()
        assert type(layer.to_float()) is type(module)

    def test_static_scales_are_calibrated_and_learned(self):
        for name in ("layer_norm", "gelu"):
            module, x = made(name)[0], some(40, 64)
            layer = hop.nn.convert(module, STATIC, learn_scales=True)
            with pytest.raises(RuntimeError, match="the static scale of the role 'output' is not set"):
                layer(x)
            hop.nn.calibrate(layer, [x], progress=False)
            y = layer(x)
            assert (hop.dequantize(y) - module(x)).abs().max() < 1.01 * y.scale.item() / 2 + 1e-6
            hop.dequantize(y).square().sum().backward()
            assert layer.scales["output"].scale.grad is not None
            again = hop.nn.convert(made(name)[0], STATIC, learn_scales=True)
            again.load_state_dict(layer.state_dict())
            assert torch.equal(again(x).codes, y.codes)
            assert not any(key.startswith("scales") for key in hop.nn.float_state_dict(layer))

    @pytest.mark.full
    def test_codes_in_codes_out(self):
        """A static model of 8-bit codes: what is between products is integers, too."""
        torch.manual_seed(1)
        model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)), some(100, 64)
        q = presets.INT8_TENSOR_STATIC_AFFINE
        hop.nn.convert(model, {"2": hop.Scheme(q, presets.INT8_ROW), "*": hop.Scheme(q, presets.INT8_ROW, q)})
        hop.nn.calibrate(model, [x], progress=False)
        seen: list[Any] = []
        hook = model[1].register_forward_hook(lambda module, args, y: seen.extend((args[0], y)))
        y = model(x)
        hook.remove()
        assert all(type(s) is hop.QuantizedTensor for s in seen)
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), y)
        assert torch.equal(program.run_decompositions(hop.decompositions()).module()(x), y)


class TestConvert(unittest.TestCase):
    def test_only_what_asks(self):
        model = hop.nn.convert(Block(), "int8")
        assert not any(isinstance(m, Function) for m in model.modules())
        rules = {nn.LayerNorm: OUTPUT, "act": None, "*": "int8"}
        model = hop.nn.convert(Block(), rules)
        assert [name for name, m in model.named_modules() if isinstance(m, Function)] == ["norm"]
        row = next(row for row in model.hop_report.rows if row.name == "norm")
        assert row.scheme == OUTPUT and (row.parameters, row.quantized) == (128, 0)

    def test_selectors_are_checked(self):
        with pytest.raises(ValueError, match=r"no layer matches <class .torch"):
            hop.nn.convert(Block(), {nn.SiLU: OUTPUT, "*": "int8"})

    def test_a_module_in_two_places_stays_one(self):
        act = nn.GELU()
        model = hop.nn.convert(nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act), "int8", functions=True)
        assert model[1] is model[3] and isinstance(model[1], hop.nn.GELU)

    def test_what_cannot_be_converted_is_said(self):
        model = hop.nn.convert(nn.Sequential(nn.Linear(8, 8), nn.Softmax()), "int8", functions=True)
        assert "dim must be the dimension" in next(row.reason for row in model.hop_report.rows if row.name == "1")

    def test_schemes_of_outputs_alone_are_not_for_products(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        report = hop.nn.convert(model, OUTPUT).hop_report
        assert type(model[0]) is nn.Linear and isinstance(model[1], hop.nn.GELU)
        assert "quantizes only results" in report.rows[0].reason

    def test_as_transformers_calls_them(self):
        activations = pytest.importorskip("transformers.activations")
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        norm = llama.LlamaRMSNorm(64, 1e-5)
        nn.init.normal_(norm.weight)
        model: Any = nn.Sequential(norm, activations.ACT2FN["gelu"], activations.ACT2FN["gelu_new"], nn.Linear(64, 8))
        x, floats = some(5, 64), copy.deepcopy(model)
        hop.nn.convert(model, "int8", functions=True)
        assert [type(m) for m in model[:3]] == [hop.nn.RMSNorm, hop.nn.GELU, hop.nn.GELU]
        assert model[0].weight is norm.weight and torch.allclose(model[:3](x), floats[:3](x), atol=1e-5)


class TestFused(unittest.TestCase):
    @parameterized.expand(
        [(d, s) for d in (torch.float32, torch.bfloat16, torch.float16) for s in ("int8", "8da4w", "mxfp8", "fp8")]
    )
    @pytest.mark.quick(4)
    def test_the_bits_of_the_unfused_model(self, dtype, scheme):
        plain, fused = blocks(dtype, scheme)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for shape in ((5, 64), (1, 64), (2, 7, 64), (5, 64)):
                    x = some(*shape).to(dtype)
                    for _ in range(3):
                        assert torch.equal(fused(x), plain(x))
        x = some(5, 64).to(dtype)
        assert torch.equal(fused(x), plain(x))  # parameters of norms have gradients

    @unittest.skipUnless(levels.HERE, "needs the native kernels")
    def test_codes_are_found_once(self):
        _, model = blocks()
        x = some(5, 64)
        with torch.inference_mode():
            model(x)
            assert wanted(model) == [presets.INT8_ROW] * 3
            with mock.patch("hop.nn.layers.linear.scaled", wraps=hop.scaled) as products:
                model(x)
        assert [type(call.args[2]) for call in products.call_args_list] == [hop.QuantizedTensor] * 4

    @unittest.skipUnless(levels.HERE, "needs the native kernels")
    def test_codes_that_nobody_reads_are_not_found_again(self):
        _, model = blocks()
        x = some(5, 64)
        with torch.inference_mode():
            model(x)
            model.norm(x)
            assert wanted(model)[0] == presets.INT8_ROW
            model.norm(x)
            assert wanted(model)[0] is None
            model(x)
            assert wanted(model)[0] == presets.INT8_ROW

    def test_a_result_that_was_changed_is_quantized_anew(self):
        _, model = blocks()
        x = some(5, 64)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in range(2):
                    y = model.norm(x)
                    want = model.up(y.clone())
                    assert torch.equal(model.up(y), want)
                y = model.norm(x)
                changed = y.mul_(2)
                assert torch.equal(model.up(y), model.up(changed.clone()))
                y = model.norm(x)
                y.view(-1)[:10] = 0
                assert torch.equal(model.up(y), model.up(y.clone()))

    def test_copies_have_no_codes(self):
        _, model = blocks()
        x = some(5, 64)
        with torch.no_grad():
            model(x)
            y = model.norm(x)
            y.add_(1)
            other = copy.deepcopy(y)
            assert torch.equal(model.up(other), model.up(y.clone()))
            file = io.BytesIO()
            torch.save(model.norm(x).clone(), file)
            again = copy.deepcopy(model)
            assert torch.equal(again(x), model(x)) and again.norm.source is not model.norm.source

    def test_a_gradient_passes(self):
        plain, fused = blocks()
        with torch.no_grad():
            fused(some(5, 64))
            y = fused.norm(some(5, 64))
        grads = []
        for model in (plain, fused):
            x = y.clone().requires_grad_()
            model(x).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
        y.requires_grad_()
        fused.up(y).sum().backward()
        assert y.grad is not None

    @pytest.mark.full
    def test_programs(self):
        plain, fused = blocks(torch.bfloat16)
        x = some(5, 64).bfloat16()
        with torch.no_grad():
            want = plain(x)
            assert torch.equal(torch.compile(fused, backend="aot_eager", fullgraph=True)(x), want)
            program = reloaded(torch.export.export(fused, (x,)))
            assert torch.equal(program.module()(x), want)
            assert torch.equal(program.run_decompositions(hop.decompositions()).module()(x), want)

    def test_arguments(self):
        with pytest.raises(TypeError, match="fuse must be True or False, got 1"):
            hop.quantize_(Block(), "int8", fuse=1)  # type: ignore[arg-type]
