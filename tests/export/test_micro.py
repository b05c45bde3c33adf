"""Programs as .tflite files in TensorFlow Lite Micro: its interpreter gives the program's codes, tensor by tensor."""

import unittest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE, TFLITE_16X8, TFLITE_MICRO, TFLITE_MICRO_16X8

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")
pytest.importorskip("tflite_micro", reason="needs TensorFlow Lite Micro")

from tests.support.tflite_chains import Chain
from tests.support.tflite_models import both, networks, transformer, wide, widened


def exported(model: nn.Module, x: Tensor, target: Any) -> Any:
    with torch.no_grad():
        model(x)
    return hop.export.to_integer(torch.export.export(model.eval(), (x,)), target=target).program


def compared(model: nn.Module, x: Tensor, target: Any) -> int:
    """How many codes were compared, none of which differs."""
    program = exported(model, x, target)
    found = hop.export.verify(program, hop.export.to_tflite(program), (x,), kernels="micro")
    assert found.first is None and not found.trials, str(found)
    return sum(row.elements for row in found.rows)


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network; the transformer with another function, as TFLM has no GELU."""
    return (transformer(function=F.relu), (4, 12, 32)) if name == "transformer" else networks()[name]


class TestNetworks(unittest.TestCase):
    def check(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = model_of(name)
        assert compared(model, torch.randn(shape), TFLITE_MICRO) > 60_000

    @parameterized.expand(["transformer", "residual"])
    @pytest.mark.quick(2)
    def test_every_tensor(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["digits", "separable", "mobilenet"])
    @pytest.mark.full
    def test_every_tensor_of_others(self, name: str) -> None:
        self.check(name)

    @parameterized.expand(["residual", "separable", "mobilenet"])
    @pytest.mark.full
    def test_activations_of_16_bits(self, name: str) -> None:
        """Up to the shares, whose softmax of 16 bits is LiteRT's and not TFLM's."""
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        model = widened(model)
        model[-1].forward = lambda x, head=model[-1]: head.points[0](x.mean((2, 3)))  # type: ignore[index,union-attr]
        assert compared(model, x, TFLITE_MICRO_16X8) > 60_000

    @pytest.mark.exhaustive
    def test_ten_million_codes(self) -> None:
        total = 0
        for name in ("digits", "residual", "separable", "mobilenet", "transformer"):
            torch.manual_seed(len(name))
            model, shape = model_of(name)
            total += compared(model, torch.randn(8 * shape[0], *shape[1:]), TFLITE_MICRO)
        self.assertGreater(total, 5_000_000)


class TestRandom(unittest.TestCase):
    """Programs of random operators, the same as for LiteRT."""

    def check(self, seeds: range) -> int:
        total = 0
        for seed in seeds:
            chain = Chain(seed)
            with self.subTest(seed=seed):
                total += compared(chain, torch.randn(chain.shape) * 2, TFLITE_MICRO)
        return total

    @pytest.mark.full
    def test_three(self) -> None:
        self.assertGreater(self.check(range(5, 8)), 1_000)

    @pytest.mark.exhaustive
    def test_hundred(self) -> None:
        self.assertGreater(self.check(range(100)), 50_000)


class TestOperators(unittest.TestCase):
    @parameterized.expand(
        [
            ("product", lambda x: torch.bmm(x, wide(x, 2e-4).transpose(1, 2)), (6, 20, 50)),
            ("multiplication", lambda x: x * wide(x, 3e-4), (40, 30)),
            ("sum", lambda x: (x + wide(x, 2.5e-4)).relu(), (40, 30)),
            ("mean", lambda x: x.mean(1), (40, 30, 3)),
        ]
    )
    @pytest.mark.quick(2)
    def test_16_bits(self, _name: str, function: Any, shape: tuple[int, ...]) -> None:
        model = Function(lambda x: wide(function(wide(x, 1e-4)), 3e-4))
        assert compared(model, torch.randn(shape), TFLITE_MICRO_16X8) > 0

    @parameterized.expand([("product",), ("multiplication",)])
    @pytest.mark.quick(2)
    def test_8_bits(self, name: str) -> None:
        own = {"product": lambda x: torch.bmm(x, x.transpose(1, 2)), "multiplication": lambda x: x * both(x, 0.02, 3)}
        model = Function(lambda x: both(own[name](both(x, 0.031, -9)), 0.1, 3))
        assert compared(model, torch.randn(6, 40, 50), TFLITE_MICRO) > 0

    def test_it_is_not_litert(self) -> None:
        """A fully connected layer that rounds otherwise is found, and by which convention it is equal."""
        chain = Chain(6)
        x = torch.randn(chain.shape) * 2
        program = exported(chain, x, TFLITE)
        found = hop.export.verify(program, hop.export.to_tflite(program), (x,), kernels="micro")
        assert found.first is not None and any("TFLITE_MICRO" in t.targets for t in found.equal_with)

    def test_what_it_has_not(self) -> None:
        with pytest.raises(ValueError, match=r"target TFLITE_MICRO has no row for .*gelu"):
            exported(Function(lambda x: both(F.gelu(both(x, 0.1, 0)), 0.1, 0)), torch.randn(4), TFLITE_MICRO)
        program = exported(Function(lambda x: wide(F.gelu(wide(x, 1e-4)), 1e-4)), torch.randn(4), TFLITE_16X8)
        with pytest.raises(ValueError, match=r"verify: TFLM does not accept model"):
            hop.export.verify(program, hop.export.to_tflite(program), (torch.randn(4),), kernels="micro")
