"""Bad data for every algorithm: an error, or a fallback that the report names; never a silently worse model."""

import math
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import algorithms as alg
from tests.support.layers import randn

STEPS = alg.AdaRound(steps=5)
Run = Callable[[Any, Any], list[str]]


class Model(nn.Module):
    """`other` is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.other = nn.Linear(32, 8)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def chosen(measure: Any) -> Run:
    return lambda m, data: [
        row.note for row in alg.choose_bits(m, ["int4", "int8"], data, size=10**6, measure=measure).layers
    ]


def corrected(model: Any, data: Any) -> list[str]:
    done = hop.quantize_(Model(), "int4", pack=False)
    return [row.note for row in alg.correct_bias(done, model, data).bias_report]


# From a model and data to the notes of its layers: first, second, other.
ALGORITHMS: dict[str, Run] = {
    "gptq": lambda m, data: [r.note for r in alg.gptq(m, "int4", data).gptq_report],
    "gptq_static": lambda m, data: [r.note for r in alg.gptq(m, "int8_static", data).gptq_report],
    "adaround": lambda m, data: [r.note for r in alg.adaround(m, "int4", data, settings=STEPS).adaround_report],
    "smoothquant": lambda m, data: [r.note for r in alg.smoothquant(m, "int8", data).smoothing_report],
    "awq": lambda m, data: [r.note for r in alg.awq(m, "int4", data).smoothing_report],
    "rotate": lambda m, data: [r.note for r in alg.rotate(m, "mxfp4", data).rotation_report],
    "correct_bias": corrected,
    "choose_bits_fisher": chosen(alg.Fisher(draws=1)),
    "choose_bits_sqnr": chosen(alg.SQNR()),
}
EACH = parameterized.expand([*ALGORITHMS.items()])


class TestBadData(unittest.TestCase):
    @EACH
    def test_no_data(self, _name, run):
        with pytest.raises(ValueError, match="batches is empty"):
            run(Model(), [])

    @EACH
    def test_data_without_elements(self, _name, run):
        assert all("no batch reaches it" in note for note in run(Model(), [torch.zeros(0, 32)]))

    @EACH
    @pytest.mark.quick(3)
    def test_a_layer_that_data_never_reaches(self, _name, run):
        first, second, other = run(Model(), [randn(16, 32)])
        assert "no batch reaches it" in other
        assert "no batch" not in first and "no batch" not in second

    @EACH
    @pytest.mark.filterwarnings("ignore:calibrate. the input of layer")
    def test_activations_that_are_not_finite(self, _name, run):
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match=r"NaN or an infinity|has seen no finite number"):
                run(Model(), [randn(4, 32), torch.full((4, 32), value)])

    def test_a_layer_whose_results_are_zero(self):
        """Neither signal nor noise: nothing is lost."""
        model = nn.Sequential(nn.Linear(32, 8, bias=False)).eval()
        x = torch.zeros(4, 32)
        (row,) = alg.choose_bits(model, ["int4"], [x], size=10**6, measure=alg.SQNR()).layers
        assert row.cost.loss == 0

    @parameterized.expand([(name, ALGORITHMS[name]) for name in ("gptq", "adaround", "smoothquant", "awq", "rotate")])
    def test_a_singular_hessian(self, _name, run):
        """Two rows for 32 channels: what is done is no worse on them than rounding to the nearest, or its note says
        that it was not done."""
        model, data = Model(), [randn(2, 32)]
        first, *_ = run(model, data)
        assert "nan" not in first
        report = getattr(model, "gptq_report", None) or getattr(model, "adaround_report", ())
        for row in report[:2]:
            assert row.error <= row.nearest or "rounded to the nearest" in row.note

    def test_an_input_that_overflows_once_layers_are_quantized(self):
        """1.69e38 is 2^127 in MXFP4: what follows is given an infinity that the float model does not make."""
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8)).eval()
        with torch.no_grad():
            model[0].weight.fill_(1.69e38)  # type: ignore[operator]
        x = torch.full((4, 64), 1 / 64)
        assert bool(model[0](x).isfinite().all())
        _, row = alg.gptq(model, "mxfp4", [x]).gptq_report
        assert "not finite once the layers before are quantized" in row.note
