"""Blocks: split, merge, spread and gather are one story for blocks of every kind."""

import itertools
import unittest

import pytest
import torch
from parameterized import parameterized

from hop.numerics import blocks

SHAPES = [(), (7,), (4, 6), (3, 1, 5), (2, 3, 4, 5), (1, 1), (0, 4), (4, 0)]
BLOCKS = [
    *[(-1,), (1,), (2,), (-1, -1), (1, -1), (-1, 1), (1, 1), (1, 4), (3, 2), (2, -1), (1, -1, -1, -1)],
    *[(-1, 1, -1, -1), (-1, 1, 2, 1), (32, -1)],
]


def by_hand(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """The sum of each block, element by element."""
    sizes = blocks.per_dimension(block, x.dim())
    found = torch.zeros(blocks.counts(x.shape, block), dtype=x.dtype)
    for place in itertools.product(*map(range, x.shape)):
        found[tuple(0 if b == -1 else i // b for i, b in zip(place, sizes, strict=True))] += x[place]
    return found


class TestBlocks(unittest.TestCase):
    @parameterized.expand([(str((s, b)), s, b) for s in SHAPES for b in BLOCKS])
    @pytest.mark.quick(3)
    def test_there_and_back(self, _name, shape, block):
        x = torch.randint(-50, 50, shape)
        cut, dims = blocks.split(x, block)
        assert torch.equal(blocks.merge(cut, shape), x)
        sums = cut.sum(dims, keepdim=True)
        gathered = blocks.gather(sums, len(shape))
        assert torch.equal(gathered, by_hand(x, block))
        assert blocks.spread(gathered, block).shape == sums.shape
        places = blocks.places(block, len(shape))
        counted = [1 if len(shape) == 0 else n for n in (blocks.counts(shape, block) or [1])]
        assert [sums.shape[d] for d in places] == counted

    @parameterized.expand([(str(b), b) for b in BLOCKS if all(n in (1, -1) for n in b)])
    def test_whole_dimensions_are_not_cut(self, _name, block):
        """So that a tensor of four dimensions has at most five where it is quantized."""
        cut, _ = blocks.split(torch.ones(2, 3, 4, 5), block)
        assert cut.dim() == (5 if set(blocks.per_dimension(block, 4)) == {1} else 4)

    def test_fill(self):
        cut, dims = blocks.split(torch.ones(3), (2,), fill=5.0)
        assert cut.tolist() == [[1, 1], [1, 5]] and dims == [1]
        with pytest.raises(RuntimeError):
            blocks.merge(cut, (9,))
