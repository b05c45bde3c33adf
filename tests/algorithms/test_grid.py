"""Grid: the numbers that elements can become, against what quantizers give."""

import unittest

import torch
from parameterized import parameterized

from hop.algorithms.grid import Grid
from hop.numerics.presets import PRESETS
from tests.support.layers import randn

MATRICES = [(name, q) for name, q in PRESETS.items() if not q.flat and not q.stochastic and q.scale.missing() is None]


class TestGrid(unittest.TestCase):
    @parameterized.expand(MATRICES)
    def test_as_quantize(self, _name, q):
        """The numbers of codes, and the codes of numbers, at sizes that cut blocks off too."""
        for seed, shape in enumerate([(48, 64), (5, 37), (1, 16), (3, 2, 3, 3)]):
            if q.block == (-1, 1) and len(shape) == 4:
                continue
            x = randn(*shape, seed=seed) * 3
            buffers = q.quantize(x)
            numbers = q.dequantize(buffers, shape)
            grid = Grid.of(q, buffers, shape)
            codes = grid.encode(numbers)
            assert torch.equal(grid.decode(codes), numbers)
            again = q.with_codes(buffers, codes)
            assert again.keys() == buffers.keys()
            for key in buffers:
                assert again[key].dtype == buffers[key].dtype
            assert torch.equal(q.dequantize(again, shape), numbers)

    @parameterized.expand(MATRICES)
    def test_nearest(self, _name, q):
        """No number of the format, by the scale, is nearer than the one that is taken."""
        x = randn(6, 32, seed=5)
        grid = Grid.of(q, q.quantize(x), x.shape)
        y = x + randn(6, 32, seed=6)
        zero = torch.tensor(0) if grid.zero_point is None else grid.zero_point
        steps = torch.tensor(q.format.numbers) - (zero.to(torch.float32).unsqueeze(-1) - 0)
        if grid.zero_point is None and q.format.is_integer:
            steps = torch.tensor(q.format.numbers) - q.format.zero
        every = (steps * grid.scale.unsqueeze(-1)).to(torch.float64)
        least = (every - y.unsqueeze(-1)).abs().amin(-1)
        taken = (grid.decode(grid.encode(y)).to(torch.float64) - y).abs()
        assert (taken <= least * (1 + 1e-5) + 1e-7).all()

    def test_scale_of_zero(self):
        """NVFP4's scale of a block of numbers that are tiny beside the largest is 0, and so are its numbers."""
        q = PRESETS["NVFP4"]
        x = torch.full((1, 32), 1e-12)
        x[0, 0] = 1.0
        grid = Grid.of(q, q.quantize(x), x.shape)
        assert grid.scale[0, 16] == 0
        assert torch.equal(grid.decode(grid.encode(x)), q.fake_quantize(x))

    def test_columns(self):
        q = PRESETS["UINT4_32_AFFINE"]
        x = randn(4, 64)
        grid = Grid.of(q, q.quantize(x), x.shape)
        assert torch.equal(grid[:, 3].encode(x[:, 3]), grid.encode(x)[:, 3])
