"""Programs as .tflite files: LiteRT's reference kernels give the program's codes, tensor by tensor."""

import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE
from hop.export.targets.tflite import TfliteModel, to_tflite

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from tests.support.tflite_chains import Chain
from tests.support.tflite_models import codes_of, differences, networks, run


def exported(model: nn.Module, *inputs: Tensor) -> Any:
    """The integer program of a model, whose ranges are found on the inputs first."""
    with torch.no_grad():
        model(*inputs)
    program = torch.export.export(model.eval(), inputs)
    return hop.export.to_integer(program, target=TFLITE).program


def compared(program: Any, *inputs: Tensor) -> tuple[TfliteModel, dict[str, tuple[int, int]]]:
    """The file of a program, and how many codes differ, node by node."""
    model, codes = to_tflite(program), codes_of(program, *inputs)
    names = [n.name for n in program.graph.nodes if n.op == "placeholder"][-len(inputs) :]
    quantized = {}
    for node in program.graph.nodes:
        if "hop_quantize_buffers" in str(node.target) and node.args[1].name in names:
            quantized[node.args[1].name] = codes[node.name]
    return model, differences(model, codes, run(model, quantized))


def assert_equal(counts: dict[str, tuple[int, int]], at_least: int = 1) -> None:
    wrong = {n: c for n, c in counts.items() if c[0]}
    assert not wrong, wrong
    assert len(counts) >= at_least and sum(size for _, size in counts.values()) > 0


class TestNetworks(unittest.TestCase):
    @parameterized.expand(["digits", "residual", "separable", "mobilenet", "transformer"])
    def test_every_tensor(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        program = exported(model, x)
        _, counts = compared(program, x)
        assert_equal(counts, 8)


class TestRandom(unittest.TestCase):
    """Programs of random operators."""

    def check(self, seeds: range) -> int:
        compared_codes = 0
        for seed in seeds:
            chain = Chain(seed)
            x = torch.randn(chain.shape) * 2
            _, counts = compared(exported(chain, x), x)
            wrong = {n: c for n, c in counts.items() if c[0]}
            self.assertFalse(wrong, f"seed {seed}: {wrong}")
            compared_codes += sum(size for _, size in counts.values())
        return compared_codes

    def test_three(self) -> None:
        self.assertGreater(self.check(range(3)), 1_000)

    @pytest.mark.full
    def test_thirty(self) -> None:
        self.assertGreater(self.check(range(30)), 10_000)

    @pytest.mark.exhaustive
    def test_thousand(self) -> None:
        self.assertGreater(self.check(range(30, 1030)), 1_000_000)
