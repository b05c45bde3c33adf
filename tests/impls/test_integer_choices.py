"""out_dtype of maximum pooling and nearest neighbors on integers, against numpy, with numbers that no float holds."""

import itertools
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from tests.support import scaled_oracles

aten = torch.ops.aten
DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool]
POOLS = [
    ("one", aten.max_pool1d.default, (2, 3, 11), ([3],)),
    ("one_all", aten.max_pool1d.default, (2, 3, 11), ([3], [2], [1], [2], True)),
    ("one_alone", aten.max_pool1d.default, (3, 11), ([2], [], [1])),
    ("two", aten.max_pool2d.default, (2, 3, 9, 8), ([3, 3], [2, 2], [1, 1])),
    ("three", aten.max_pool3d.default, (1, 2, 6, 5, 4), ([2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 1, 1], True)),
]
# The sizes of the results; each operator has two overloads and a twin that takes the centers.
SIZES = [("one", (11,), (17,)), ("two", (9, 8), (5, 20)), ("three", (3, 5, 4), (7, 5, 2))]
NAMES = [("nearest", 0.0), ("nearest_exact", 0.5)]


def draw(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.2
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(dtype)


def nearest(x: np.ndarray, sizes: Sequence[int], offset: float) -> np.ndarray:
    for i, size in enumerate(sizes, start=2):
        places = np.floor((np.arange(size) + offset) * x.shape[i] / size).astype(np.int64)
        x = x.take(places, axis=i)
    return x


class TestIntegerChoices(unittest.TestCase):
    @parameterized.expand(POOLS)
    def test_maximum(self, _name, op, shape, args):
        for dtype in DTYPES:
            x = draw(shape, dtype)
            numbers, ranks = np.unique(x.numpy(), return_inverse=True)  # the oracle computes in float64
            want = numbers[scaled_oracles.max_pool(ranks.reshape(shape), *args)]
            got = hop.out_dtype(op, dtype, x, *args)
            assert got.dtype is dtype
            assert np.array_equal(got.numpy(), want), dtype
        x = draw(shape, torch.int8)
        assert torch.equal(hop.out_dtype(op, torch.int32, x, *args), hop.out_dtype(op, torch.int8, x, *args).int())

    @parameterized.expand([(f"{a[0]}_{b[0]}", *a[1:], *b) for a, b in itertools.product(SIZES, NAMES)])
    def test_nearest(self, _name, shape, sizes, name, offset):
        overloads = getattr(aten, ("_" if offset else "") + f"upsample_{name}{len(shape)}d")
        for dtype in DTYPES:
            x = draw((2, 3, *shape), dtype)
            want = nearest(x.numpy(), sizes, offset)
            for op, args in ((overloads.default, (list(sizes),)), (overloads.vec, (list(sizes), None))):
                got = hop.out_dtype(op, dtype, x, *args)
                assert got.dtype is dtype
                assert np.array_equal(got.numpy(), want), (dtype, op)

    def test_scale_factors(self):
        """The elements that PyTorch takes of floats."""
        x = torch.arange(2 * 3 * 7 * 5, dtype=torch.int32).view(2, 3, 7, 5)
        for scales in ([1.3, 2.6], [0.51, 0.9]):
            want = aten.upsample_nearest2d.vec(x.float(), None, scales)
            got = hop.out_dtype(aten.upsample_nearest2d.vec, torch.int32, x, None, scales)
            assert torch.equal(got, want.int())

    @pytest.mark.full
    @pytest.mark.compiler
    def test_routes(self):
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return (
                    hop.out_dtype(aten.upsample_nearest1d.vec, torch.int32, x, None, [1.7]),
                    hop.out_dtype(aten.upsample_nearest2d.default, torch.int32, x[None], [5, 3]),
                    hop.out_dtype(aten.max_pool1d.default, torch.int32, x, 3, 2, 1),
                )

        x = draw((2, 3, 11), torch.int32)
        want, exported = Model()(x), torch.export.export(Model(), (x,))
        lowered = exported.run_decompositions(hop.decompositions())
        compiled = torch.compile(Model(), fullgraph=True)
        batched = torch.vmap(lambda x: Model()(x[None])[0][0])(x)
        for got in (exported.module()(x), lowered.module()(x), compiled(x), (batched, *want[1:])):
            assert all(map(torch.equal, got, want))
