"""hop.explain of an operator that a user adds."""

import unittest
from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop.dispatch import compiled
from hop.dispatch.hop import Hop, hops
from hop.dispatch.kernel import Kernel, decline


def doubling(call: Any) -> Any:
    decline("x is not float32" if call[0].dtype != torch.float32 else None)
    return lambda x: x + x


DOUBLING = Kernel("doubling", doubling)


class Double(Hop):
    def check(self, x: Tensor, /) -> Any:
        return (x,), {}

    def reference(self, x: Tensor, /) -> Tensor:
        return x * 2

    def kernels(self, x: Tensor, /) -> Any:
        return ((DOUBLING, (x,)),)


class TestOwn(unittest.TestCase):
    def setUp(self) -> None:
        self.double = Double("hop_test_double")
        self.addCleanup(hops.remove, self.double)
        self.addCleanup(compiled.operators.pop, "hop_test_double")

    def test_kernels(self):
        x = torch.ones(2)
        assert torch.equal(self.double(x), 2 * x) and hop.explain(self.double, x) == "doubling: chosen"
        assert hop.explain(self.double, x.double()) == "doubling: x is not float32\nreference: chosen"

    def test_its_errors(self):
        with pytest.raises(TypeError, match="check"):
            hop.explain(self.double, torch.ones(2), 3)

    def test_other_functions(self):
        with pytest.raises(TypeError, match=r"op must be an operator of ATen.*got .*mm.*; give the operator"):
            hop.explain(torch.mm, torch.float32, torch.ones(2, 2), torch.ones(2, 2))
