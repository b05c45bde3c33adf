"""Convolutions of three dimensions and transposed ones, as layers."""

import copy
import dataclasses
import unittest
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import recipes, schemes
from hop.numerics.schemes import Scheme
from tests.support.layers import randn
from tests.support.schemes import CROSSED

aten = torch.ops.aten
EXACT = {"INT8_DYNAMIC", "INT8_STATIC", "INT8_TRAINING", "INT8_DA_TERNARY_W"}  # integer arithmetic
SHAPES = {
    "conv3d": (2, 4, 4, 5, 4),
    "transpose1d": (2, 4, 7),
    "transpose2d": (2, 4, 5, 4),
    "transpose3d": (2, 4, 3, 4, 3),
}


def made(kind: str) -> tuple[Any, Tensor]:
    """A float layer and an input of it."""
    torch.manual_seed(3)
    layer: Any = {
        "conv3d": lambda: nn.Conv3d(4, 6, (2, 3, 2), padding=(0, 1, 1), groups=2),
        "transpose1d": lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1),
        "transpose2d": lambda: nn.ConvTranspose2d(4, 6, (3, 2), (1, 2), dilation=(2, 1), groups=2),
        "transpose3d": lambda: nn.ConvTranspose3d(4, 6, 2, 2, bias=False),
    }[kind]()
    return layer, randn(*SHAPES[kind])


def applicable() -> list[tuple[str, str, Scheme]]:
    """Each kind of layer in each scheme that it takes."""
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        for kind in SHAPES:
            for name, scheme in CROSSED.items():
                if hop.nn.convert(made(kind)[0], scheme).hop_report.converted:
                    found.append((f"{kind}_{name}", kind, scheme))
    return found


def ready(kind: str, scheme: Scheme) -> tuple[Any, Tensor]:
    """A quantized layer, calibrated, in eval mode."""
    layer, x = made(kind)
    layer = hop.nn.convert(layer, scheme).eval()
    hop.nn.calibrate(layer, [x], progress=False)
    return layer, x


UNBATCHED = {
    "conv1d": (lambda: nn.Conv1d(8, 4, 3, stride=2), (8, 12)),
    "conv2d": (lambda: nn.Conv2d(8, 4, 3, padding="same", padding_mode="reflect"), (8, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 2, groups=2), (4, 4, 5, 3)),
    "transpose1d": (lambda: nn.ConvTranspose1d(8, 4, 3), (8, 7)),
    "transpose2d": (lambda: nn.ConvTranspose2d(8, 4, 3, stride=2), (8, 4, 5)),
    "transpose3d": (lambda: nn.ConvTranspose3d(4, 4, 2), (4, 3, 2, 3)),
}


def trained(layer: nn.Module, x: Tensor, batched: bool = False) -> list[Tensor]:
    """The result for one example, alone or in a batch, and the gradients of its input and of the parameters."""
    torch.manual_seed(5)  # of random bits
    y = layer(x[None])[0] if batched else layer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


class TestUnbatched(unittest.TestCase):
    """An input (C, *spatial) is a batch of one example."""

    @parameterized.expand([(kind, *UNBATCHED[kind]) for kind in UNBATCHED])
    @pytest.mark.quick(6)
    def test_a_layer(self, _name, make, shape):
        """In every kind of scheme: results, gradients and frozen results, bit for bit."""
        for scheme in (*CROSSED.values(), schemes.FP8_DYNAMIC_ROW):
            torch.manual_seed(3)
            x = (randn(*shape) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))).requires_grad_()
            layer = make()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "convert: no layer was converted")
                layer = hop.nn.convert(layer, scheme)
            if not layer.hop_report.converted:
                continue
            hop.nn.calibrate(layer, [x.detach()], progress=False)
            assert all(map(torch.equal, trained(layer, x), trained(layer, x, batched=True))), scheme
            hop.nn.freeze(layer.eval())
            with torch.no_grad():
                assert torch.equal(layer(x), layer(x[None])[0]), scheme

    def test_the_operator(self):
        """Of floats and of codes, with an output and without, in programs and under vmap."""
        x, w = randn(8, 6, 7), randn(4, 8, 3, 3)
        scheme = schemes.INT8_DYNAMIC

        def product(x: Any) -> Any:
            return hop.quantized(aten.conv2d.default, scheme, x, w)

        want = product(x[None])[0]
        per_example = hop.presets.INT8_CONV
        whole = hop.quantize(dataclasses.replace(per_example, block=(-1, -1, -1)), x)
        for given in (x, whole, hop.quantize(per_example, x[None])[0]):
            assert torch.equal(product(given), want)
        assert torch.equal(torch.compile(product, fullgraph=True, backend="aot_eager")(x), want)
        assert torch.equal(torch.vmap(product)(torch.stack([x, x]))[1], want)
        coded = dataclasses.replace(scheme, output=per_example)
        got, whole = (hop.quantized(aten.conv2d.default, coded, t, w) for t in (x, x[None]))
        assert got.shape == want.shape and torch.equal(hop.dequantize(got), hop.dequantize(whole)[0])

    def test_programs(self):
        """A float program of one example, brought to a scheme."""
        model, x = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ConvTranspose2d(4, 3, 2)).eval(), randn(8, 6, 7)
        for scheme in (schemes.INT8_DYNAMIC, schemes.FP8_DYNAMIC_ROW):
            one, batch = (hop.export.to_scheme(torch.export.export(model, (t,)), scheme) for t in (x, x[None]))
            assert len(one.report.rewritten) == 1
            assert torch.equal(one.program.module()(x), batch.program.module()(x[None])[0])

    def test_wrong_shapes(self):
        """The error names the shape that was given."""
        w = randn(4, 8, 3, 3)
        for shape, words in (((7, 6, 6), r"got shape \(7, 6, 6\)"), ((6, 6), r"got shape \(6, 6\)")):
            with pytest.raises(RuntimeError, match=words):
                hop.quantized(aten.conv2d.default, schemes.INT8_DYNAMIC, randn(*shape), w)


class TestLayers(unittest.TestCase):
    def test_every_kind_takes_every_kind_of_scheme(self):
        names = {name for name, _, _ in applicable()}
        assert {f"{kind}_{name}" for kind in SHAPES for name in (*EXACT, "INT4_WEIGHT_32")} <= names

    @parameterized.expand(applicable())
    @pytest.mark.quick(4)
    def test_a_scheme(self, name, kind, scheme):
        """Near the float layer, as its own gradients are; frozen, saved and loaded it gives the same bits."""
        layer, x = ready(kind, scheme)
        floats, x = made(kind)[0], x.requires_grad_()
        y, want = layer(x), floats(x)
        is_ternary = "TERNARY" in name  # clips most of its weight, which gets no gradient there
        coarse = 0.6 if is_ternary else 0.25
        assert y.shape == want.shape and (y - want).norm() < coarse * want.norm()
        (y * want.detach()).sum().backward()
        got: Any = (x.grad, *(p.grad for p in layer.parameters()))
        x.grad = None
        (want * want.detach()).sum().backward()
        wanted: Any = (x.grad, *(p.grad for p in floats.parameters()))
        for mine, one in zip(got[:1] if is_ternary else got, wanted, strict=False):
            assert (mine - one).norm() < coarse * one.norm()
        with torch.no_grad():
            y = layer(x)
            hop.nn.freeze(layer, pack=True)
            assert torch.equal(layer(x), y)
            other = hop.nn.convert(made(kind)[0], scheme)
            other.load_state_dict(layer.state_dict(), assign=True)
            assert torch.equal(other.eval()(x), y) and isinstance(other.weight, hop.QuantizedTensor)

    @parameterized.expand([(kind,) for kind in SHAPES])
    def test_floats(self, kind):
        """Where the scheme is none, they are PyTorch's; and to_float brings them back."""
        (layer, x), (floats, _) = ready(kind, schemes.INT8_DYNAMIC), made(kind)
        with hop.nn.scheme(lambda role: None):
            assert torch.equal(layer(x), floats(x))
        assert type(layer.to_float()) is type(floats) and torch.equal(layer.to_float()(x), floats(x))
        assert list(layer.state_dict()) == list(floats.state_dict())

    @parameterized.expand([(kind,) for kind in SHAPES])
    @pytest.mark.full
    def test_programs(self, kind):
        layer, x = ready(kind, schemes.INT8_STATIC)
        hop.nn.freeze(layer)
        with torch.no_grad():
            y = layer(x)
            assert torch.equal(torch.compile(layer, fullgraph=True)(x), y)
            program = torch.export.export(layer, (x,))
            assert torch.equal(program.module()(x), y)
            assert torch.equal(program.run_decompositions(hop.decompositions()).module()(x), y)

    @parameterized.expand([(kind,) for kind in SHAPES])
    def test_the_operator(self, kind):
        layer, x = ready(kind, schemes.INT8_DYNAMIC)
        lists: tuple[Any, ...] = (list(layer.stride), list(layer.padding))
        if kind == "conv3d":
            op, rest = aten.conv3d.default, (*lists, list(layer.dilation), layer.groups)
        else:
            op = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}[
                x.dim() - 2
            ]
            rest = (*lists, list(layer.output_padding), layer.groups, list(layer.dilation))
        assert torch.equal(layer(x), hop.quantized(op, schemes.INT8_DYNAMIC, x, layer.weight, layer.bias, *rest))

    def test_output_size(self):
        """As PyTorch's, and its errors."""
        floats, x = nn.ConvTranspose2d(4, 6, 3, 2, 1), randn(2, 4, 5, 5)
        layer = hop.nn.convert(copy.deepcopy(floats), schemes.INT8_DYNAMIC)
        assert layer(x).shape == (2, 6, 9, 9)
        for size in ([10, 10], [9, 10], (2, 6, 10, 9)):
            assert layer(x, output_size=size).shape == floats(x, output_size=size).shape
        with pytest.raises(ValueError, match="requested an output size of"):
            layer(x, output_size=[20, 20])

    def test_scales(self):
        """One for each output channel; groups share them. Learned ones train."""
        layer, _ = made("transpose2d")
        q = hop.nn.convert(layer, schemes.INT8_DYNAMIC).weight_quantizer(hop.presets.INT8_ROW)
        assert q.buffers((4, 3, 3, 2))["scale"][0] == (1, 3, 1, 1)
        layer, x = made("transpose2d")
        layer = hop.nn.convert(layer, schemes.INT8_STATIC, learn_scales=True)
        hop.nn.calibrate(layer, [x], progress=False)
        layer(x).square().sum().backward()
        assert layer.scales.input.scale.grad.abs() > 0
        with torch.no_grad():
            assert tuple(layer._output_shape(x.shape[1:])) == layer(x).shape[1:]

    def test_a_recipe_that_multiplies_blocks(self):
        """A convolution takes one scale for each row; the report says so."""
        with pytest.warns(UserWarning, match="no layer was converted"):
            (row,) = hop.nn.convert(made("transpose2d")[0], recipes.MXFP8_TRAINING).hop_report.rows
        assert row.scheme is None and "one scale for each example at most" in row.reason
