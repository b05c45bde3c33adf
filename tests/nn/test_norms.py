"""Norms of other packages as one call: which are recognized, their bits, and where their own forward runs."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hop.nn.models.norms import speed_up_norms


class PlainRMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · w."""

    shift = 0.0

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), 1e-5
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (self.weight.float() + self.shift)).type_as(x)


class ShiftedRMSNorm(PlainRMSNorm):
    """x · rsqrt(mean(x²) + eps) · (1 + w)."""

    shift = 1.0


class OtherRMSNorm(PlainRMSNorm):
    """Something else of this name."""

    shift = 0.5


class WideRMSNorm(PlainRMSNorm):
    """The same in float64, which differs in the last bits."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * self.weight).type_as(x)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if gate is None else gate)


@pytest.mark.parametrize("width", (1, 24, 256, 640, 1001))
@pytest.mark.parametrize("cls", (PlainRMSNorm, ShiftedRMSNorm))
def test_bits(cls: type[PlainRMSNorm], width: int) -> None:
    """In eager inference without the norm's own forward; after the weight or eps has changed; and of copies."""
    m = cls(width)
    assert speed_up_norms(nn.Sequential(m, nn.ReLU())) == 1
    assert speed_up_norms(m) == 0 and type(m).__name__ == cls.__name__ and isinstance(m, cls)
    for x in (
        torch.randn(5, width),
        torch.randn(1, 4, 1, width),
        1e-3 * torch.randn(width),
        torch.full((2, width), 1e30),
    ):
        for one in (m, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            one.calls = 0
            with torch.inference_mode():
                y = one(x)
            assert one.calls == 0
            assert torch.equal(y, cls.forward(one, x)) and y.stride() == cls.forward(one, x).stride()
        with torch.no_grad():
            m.weight.data = 2 * m.weight.data
            m.variance_epsilon *= 3


def test_own_forward() -> None:
    """Where autograd, a mode, another dtype or strides need it."""
    m = ShiftedRMSNorm()
    speed_up_norms(m)
    x, calls = torch.randn(3, 24, requires_grad=True), m.calls
    m(x).sum().backward()
    assert x.grad is not None and m.weight.grad is not None
    with torch.no_grad():
        m(x.bfloat16())
        m(torch.randn(24, 3).T)
        with torch.device("cpu"):
            m(x)
        assert m.calls == calls + 4
        with pytest.raises(RuntimeError, match="size"):
            m(torch.randn(3, 23))
    exported: Any = torch.export.export(m, (torch.randn(3, 24),))
    assert any(node.target is torch.ops.aten.rsqrt.default for node in exported.graph.nodes)


@pytest.mark.parametrize("cls", (OtherRMSNorm, GatedRMSNorm, WideRMSNorm))
def test_others(cls: type[PlainRMSNorm]) -> None:
    assert speed_up_norms(cls()) == 0


def test_of_pytorch() -> None:
    assert speed_up_norms(nn.Sequential(nn.RMSNorm(8), nn.LayerNorm(8))) == 0
