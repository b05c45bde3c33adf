"""NaN and infinity in inputs and weights stay in results: docs/numerics.md has the table."""

import contextlib
import unittest
import warnings

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.kernels.cpu import native
from hop.numerics import schemes
from tests import levels

NAN, INF = float("nan"), float("inf")
LEVELS = ("off", *levels.HERE)
ENDS = [(NAN,), (INF,), (-INF,)]

FOUND = {
    name: scheme
    for name, scheme in schemes.SCHEMES.items()
    if all(q is None or not (q.scale.is_static or q.scale.is_delayed) for q in (scheme.lhs, scheme.rhs))
}
"""Schemes that find their scales when they run."""

QUANTIZES_INPUTS = [name for name, scheme in FOUND.items() if scheme.lhs is not None]
WEIGHTS = [name for name, scheme in FOUND.items() if scheme.rhs is not None and not scheme.rhs.scale.is_sum]
SHARED = [
    name
    for name in QUANTIZES_INPUTS
    if any(block[0] == -1 for _, block in FOUND[name].lhs.stored().values())  # type: ignore[union-attr]
]
"""Those in which rows of a batch share a scale."""


def linear(name: str, k: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return hop.quantize_(nn.Sequential(nn.Linear(k, 32)), FOUND[name]).eval()


def inputs(value: float, shape: tuple[int, ...] = (4, 128)) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[(1, *[0] * (len(shape) - 2), 5)] = value
    return x


class TestInputs(unittest.TestCase):
    @parameterized.expand([(name, *end) for name in QUANTIZES_INPUTS for end in ENDS])
    @pytest.mark.quick(12)
    def test_linear(self, name, value):
        """A row with such an element has no finite result, at every level; the other rows are what they were."""
        model, x = linear(name), inputs(value)
        rows = [i for i in range(len(x)) if i != 1]
        with torch.no_grad():
            for level in LEVELS:
                with native.use(level):
                    y = model(x)
                    assert not y[1].isfinite().any(), level
                    if value != value or name not in SHARED:
                        assert y[rows].isfinite().all(), level
                    if name not in SHARED and level != "off":
                        assert torch.equal(y[rows], model(x[rows])), level

    @parameterized.expand([(name,) for name in QUANTIZES_INPUTS])
    @pytest.mark.quick(2)
    def test_batches(self, name):
        """mixes_rows and the report say whether a row's result depends on the others."""
        model = linear(name)
        x = inputs(3.0) * torch.tensor([1.0, 100.0, 0.01, 7.0])[:, None]
        with native.use("off"):
            q = FOUND[name].lhs
            together = hop.dequantize(hop.quantize(q, x))
            each = torch.cat([hop.dequantize(hop.quantize(q, row[None])) for row in x])
        assert torch.equal(together, each) != FOUND[name].mixes_rows()
        assert FOUND[name].mixes_rows() == (name in SHARED) == ("depends on its batch" in str(model.hop_report))

    @parameterized.expand([("INT8_DYNAMIC",), ("FP8_DYNAMIC_ROW",), ("NVFP4_DYNAMIC",)])
    @pytest.mark.quick(3)
    def test_compiled_and_lowered(self, name):
        model = linear(name)
        for value in (NAN, INF):
            x = inputs(value)
            with torch.no_grad():
                lowered = torch.export.export(model, (x,)).run_decompositions(hop.decompositions()).module()
                for call in (torch.compile(model, backend="inductor"), lowered):
                    assert not call(x)[1].isfinite().any(), value

    @parameterized.expand([("INT8_DYNAMIC", *end) for end in ENDS])
    def test_convolution(self, name, value):
        """All of an example: its elements share a scale."""
        torch.manual_seed(0)
        model = hop.quantize_(nn.Sequential(nn.Conv2d(16, 8, 3)), name).eval()
        x = inputs(value, (3, 16, 8, 8))
        with torch.no_grad(), contextlib.ExitStack():
            for level in LEVELS:
                with native.use(level):
                    assert not model(x)[1].isfinite().all(), level


class TestWeights(unittest.TestCase):
    @parameterized.expand([(name, *end) for name in WEIGHTS for end in ENDS])
    @pytest.mark.quick(12)
    def test_channel(self, name, value):
        """The results of an output channel whose weight has such an element are not finite."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 32))
        with torch.no_grad():
            model[0].get_parameter("weight")[3, 7] = value
            model = hop.quantize_(model, FOUND[name]).eval()
            assert not model(inputs(1.0))[:, 3].isfinite().any()

    @parameterized.expand(ENDS)
    def test_embedding(self, value):
        model = nn.Sequential(nn.Embedding(10, 64))
        with torch.no_grad():
            model[0].get_parameter("weight")[2, 1] = value
            model = hop.quantize_(model, "int8_weight")
            assert not model(torch.tensor([2])).isfinite().any() and model(torch.tensor([3])).isfinite().all()


class TestStatic(unittest.TestCase):
    def test_calibrate_warns(self):
        """Integers by a static scale have no NaN: calibrate says that its data has some."""
        model = hop.nn.convert(nn.Sequential(nn.Linear(64, 32)), "int8_static")
        with pytest.warns(UserWarning, match=r"the input of layer '0' has NaN or an infinity"):
            hop.nn.calibrate(model, [inputs(NAN, (4, 64))])
        assert model[0](inputs(NAN, (4, 64))).isfinite().all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hop.nn.calibrate(model, [inputs(1.0, (4, 64))])
