"""Products of rows by group (hop.nn.layers.stacks): cases that tests/integrations/test_experts.py does not meet."""

import pytest
import torch

from hop.nn.layers.stacks import Stack, chain
from hop.numerics import recipes


@pytest.mark.parametrize("scheme", [None, recipes.FP8_HYBRID, recipes.FP8_BLOCKWISE], ids=["float", "fp8", "blocks"])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("columns", [False, True])
def test_gradients_of_no_rows_in_any_group_are_zeros(scheme, rows, columns):
    x, w = torch.randn(rows, 32, requires_grad=True), torch.randn(2, 32, 32, requires_grad=True)
    bias = torch.randn(2, 32, requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64)
    y = chain(x, torch.arange(rows), none, [Stack(w, bias)], torch.relu, scheme, columns)
    assert y.shape == (rows, 32) and not y.any()
    y.sum().backward()
    for t in (x, w, bias):
        assert torch.equal(t.grad, torch.zeros_like(t))
