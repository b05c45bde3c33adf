"""The native elementary functions: the bits of the reference, at each level."""

import math
import unittest

import numpy as np
import pytest
import torch
from parameterized import parameterized

from hop.kernels.cpu import operators
from hop.numerics import functions
from tests import levels
from tests.numerics.test_functions import bits, hard_cases

NAMES = [name for name in functions.NAMES if name not in functions.WITHOUT_KERNEL]
CASES = [(name, level) for name in NAMES for level in levels.OWN]


@unittest.skipUnless(levels.HERE, "needs the native kernels")
class TestFunctions(unittest.TestCase):
    @parameterized.expand(CASES)
    @pytest.mark.quick(4)
    def test_the_bits_of_the_reference(self, name, level):
        rng = np.random.default_rng(0)
        words = rng.integers(0, 2**32, 300_001, dtype=np.uint32).view(np.float32)
        normal = (rng.standard_normal(200_000) * rng.choice([1e-3, 1, 4, 30], 200_000)).astype(np.float32)
        special = np.array([math.inf, -math.inf, math.nan, 0, -0.0, 1, -1, 1e-45, -1e-45, 3e38], dtype=np.float32)
        x = torch.cat([hard_cases(name)[0], *map(torch.from_numpy, (words, normal, special))])
        with levels.at(level):
            found = operators.function(x, name)
        want = functions.apply(name, x)
        wrong = bits(found) != bits(want)
        assert not wrong.any(), (int(wrong.sum()), x[wrong][:5], found[wrong][:5], want[wrong][:5])

    @parameterized.expand([(name, dtype) for name in NAMES for dtype in ("bfloat16", "float16")])
    def test_numbers_of_16_bits(self, name, dtype):
        x = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(getattr(torch, dtype))
        assert torch.equal(bits(operators.function(x, name)), bits(functions.apply(name, x.float())))

    def test_shapes_strides_and_threads(self):
        x = torch.randn(7, 3000, 5)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for view in (x, x.transpose(0, 1), x[:, ::3], x[:0], x[0, 0, 0]):
                    found = operators.function(view, "gelu")
                    assert found.shape == view.shape and torch.equal(found, functions.apply("gelu", view))
        finally:
            torch.set_num_threads(before)

    def test_what_it_does_not_take(self):
        with self.assertRaisesRegex(RuntimeError, "unknown function sinh"):
            operators.function(torch.ones(3), "sinh")
        with self.assertRaisesRegex(RuntimeError, "float32, bfloat16 or float16"):
            operators.function(torch.ones(3, dtype=torch.float64), "exp")
