"""What docs/support.md says in prose about all schemes."""

import unittest
import warnings
from typing import Any

import pytest
import torch

import hop
from tests.support.schemes import EVERY


class Layers(torch.nn.Module):
    """The sum of one linear layer in each scheme."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        found = []
        for scheme in EVERY.values():
            layer: Any = hop.nn.convert(torch.nn.Sequential(torch.nn.Linear(128, 128)), scheme)
            hop.nn.calibrate(layer, [x], progress=False)
            hop.nn.advance(layer)  # delayed scales
            found.append(hop.nn.freeze(layer.eval()))
        self.layers = torch.nn.ModuleList(found)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers])


class TestSupport(unittest.TestCase):
    @pytest.mark.exhaustive
    def test_onnx_has_every_scheme(self):
        pytest.importorskip("onnxscript")
        torch.manual_seed(0)
        x = torch.randn(4, 128)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = hop.export.to_onnx(torch.export.export(Layers(x), (x,)))
        assert len(made.model.graph.outputs) == 1
