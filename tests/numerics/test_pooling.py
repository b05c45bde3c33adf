"""hop.numerics.pooling: windows as PyTorch has them, added in the order that the module says."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hop.numerics import pooling

aten = torch.ops.aten
FIXED = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)


def wild(*shape: int) -> Tensor:
    """float64 numbers whose sums depend on the order."""
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, shape, generator=g)


def a_call(rng: random.Random) -> tuple[Any, list[int], list[Any], dict[str, Any]]:
    """An operator, the sizes of the image, and arguments."""
    spatial = rng.randint(1, 3)
    shape = [rng.randint(1, 9) for _ in range(spatial)]
    if rng.random() < 0.4:
        return pooling.ADAPTIVE[spatial - 1], shape, [[rng.randint(1, 10) for _ in shape]], {}
    kernel = [rng.randint(1, min(4, n)) for n in shape]
    stride = rng.choice([[], [rng.randint(1, 4) for _ in shape]])
    options: dict[str, Any] = {"ceil_mode": rng.random() < 0.5, "count_include_pad": rng.random() < 0.5}
    if spatial > 1 and rng.random() < 0.3:
        options["divisor_override"] = rng.randint(1, 9)
    return FIXED[spatial - 1], shape, [kernel, stride, [rng.randint(0, k // 2) for k in kernel]], options


def test_windows_are_pytorchs() -> None:
    rng = random.Random(0)
    for _ in range(400):
        op, shape, rest, options = a_call(rng)
        x = torch.randn(2, 3, *shape, dtype=torch.float64)
        got = pooling.averaged(x, op, rest, options, range(2, 2 + len(shape)))
        torch.testing.assert_close(got, op(x, *rest, **options), rtol=1e-12, atol=1e-14, equal_nan=True)


def test_order() -> None:
    """Rows of a window first, from left to right, then from top to bottom."""
    x = wild(2, 3, 9, 8)
    got = pooling.averaged(x, FIXED[1], [[3, 2], [2, 2]], {}, (2, 3)).numpy()
    a = x.numpy()
    want = np.zeros_like(got)
    for i in range(got.shape[2]):
        for j in range(got.shape[3]):
            rows = [a[:, :, 2 * i + k, 2 * j] + a[:, :, 2 * i + k, 2 * j + 1] for k in range(3)]
            want[:, :, i, j] = (rows[0] + rows[1] + rows[2]) / 6
    assert (got == want).all()


@pytest.mark.parametrize(("op", "rest"), [(FIXED[1], [[3, 3], [2, 2], [1, 1]]), (pooling.ADAPTIVE[1], [[4, 3]])])
def test_batches_and_layouts(op: Any, rest: list[Any]) -> None:
    x = wild(4, 5, 9, 8)
    want = pooling.averaged(x, op, rest, {}, (2, 3))
    wide = x.to(memory_format=torch.channels_last)
    assert torch.equal(pooling.averaged(wide, op, rest, {}, (2, 3)), want)
    assert torch.equal(torch.cat([pooling.averaged(one[None], op, rest, {}, (2, 3)) for one in x]), want)
