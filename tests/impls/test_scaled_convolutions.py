"""hop.scaled of convolutions of integers against numpy, bit for bit."""

import itertools
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop import presets
from hop.numerics.formats import INT4, INT8, TERNARY, UINT4, UINT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, MinMax
from tests.support import scaled_oracles
from tests.support.scaled_checks import CONVOLUTIONS, DTYPES, aten, check, generator, plain, whole_but
from tests.support.scaled_oracles import Elements, Geometry, Pair, array, assert_bits


class TestConvolutions(unittest.TestCase):
    """Convolutions of integers with a scale for each example and each output channel, or fewer."""

    def inputs(self, shape: Sequence[int], batched: bool, rng: np.random.Generator) -> dict[str, Pair]:
        example = whole_but(0, len(shape)) if batched else (-1,)
        quantizers = {
            "tensor": Quantizer(INT8),
            "affine": Quantizer(INT8, scale=MinMax()),
            "uint8_affine": Quantizer(UINT8, scale=MinMax()),
            "uint8": Quantizer(UINT8),
            "example": Quantizer(INT8, example),
            "example_affine": Quantizer(UINT8, example, MinMax()),
            "int4": Quantizer(INT4, example),
        }
        return {name: scaled_oracles.make(q, shape, rng) for name, q in quantizers.items()}

    def weights(self, shape: Sequence[int], transposed: bool, rng: np.random.Generator) -> dict[str, Pair]:
        channel = whole_but(1 if transposed else 0, len(shape))
        quantizers = {
            "tensor": Quantizer(INT8),
            "channel": Quantizer(INT8, channel),
            "affine": Quantizer(INT8, scale=MinMax()),
            "channel_affine": Quantizer(INT8, channel, MinMax()),
            "uint8": Quantizer(UINT8, channel),
            "uint8_affine": Quantizer(UINT8, channel, MinMax()),
            "int4": Quantizer(INT4, channel),
            "uint4_affine": Quantizer(UINT4, channel, MinMax()),
            "ternary": Quantizer(TERNARY, channel, AbsMean()),
        }
        return {name: scaled_oracles.make(q, shape, rng) for name, q in quantizers.items()}

    def expected(self, x: Elements, w: Elements, args: Sequence[Any], g: Geometry, bias: Any = None) -> np.ndarray:
        if "same" in args:
            x = x._replace(n=scaled_oracles.same_padding(x.n, w.n.shape[2:], g.dilation))
        return scaled_oracles.convolution(x, w, g, bias)

    def formats(self, name: str, every: int) -> None:
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(*name.encode())
        inputs = self.inputs(x_shape, len(x_shape) == len(w_shape), rng)
        weights = self.weights(w_shape, g.transposed, rng)
        channels = w_shape[1] * g.groups if g.transposed else w_shape[0]
        start = list(CONVOLUTIONS).index(name) % every
        for i, (a, b) in list(enumerate(itertools.product(inputs, weights)))[start::every]:
            with self.subTest(f"{a} {b}"):
                x, w = inputs[a], weights[b]
                y = self.expected(x.e, w.e, args, g)
                check(op, DTYPES[i % 4], y, x, w, None, *args)
                bias = plain((channels,), rng, DTYPES[i % 4])
                want = scaled_oracles.biased(y, scaled_oracles.of_channels(array(bias), len(w_shape) - 2))
                check(op, DTYPES[i // 2 % 4], want, x, w, bias, *args)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.quick(6)
    def test_formats(self, name):
        self.formats(name, 11)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.full
    def test_all_formats(self, name):
        self.formats(name, 1)

    @parameterized.expand(list(CONVOLUTIONS))
    @pytest.mark.quick(2)
    def test_int32_bias(self, name):
        op, x_shape, w_shape, args, g = CONVOLUTIONS[name]
        rng = generator(2, *name.encode())
        x = self.inputs(x_shape, len(x_shape) == len(w_shape), rng)["example_affine"]
        w = self.weights(w_shape, g.transposed, rng)["channel_affine"]
        bias = rng.integers(-(2**31), 2**31, w_shape[1] * g.groups if g.transposed else w_shape[0]).astype(np.int32)
        y = self.expected(x.e, w.e, args, g, bias)
        check(op, torch.float32, y, x, w, torch.from_numpy(bias), *args)

    def test_numbers_for_lists(self):
        """A stride of 2 is [2, 2], as torch.nn.functional has it, and arguments at the end may be missing."""
        rng = generator(3)
        x = scaled_oracles.make(presets.UINT8_TENSOR_AFFINE, (2, 4, 9, 8), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 2, 3, 3), rng)
        geometry = Geometry([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
        want = scaled_oracles.convolution(x.e, w.e, geometry)
        given = hop.scaled(aten.conv2d.default, torch.float32, x.t, w.t, None, 2, 1, 1, 2)
        assert_bits(given, want)
        named = hop.scaled(aten.conv2d.default, torch.float32, x.t, weight=w.t, stride=2, groups=2, padding=[1, 1])
        assert_bits(named, want)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 4, 3, 3), rng)
        plainly = Geometry([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        want = scaled_oracles.convolution(x.e, w.e, plainly)
        assert_bits(hop.scaled(aten.conv2d.default, torch.float32, x.t, w.t), want)

    def test_layouts(self):
        """Channels last, on either side, changes strides alone."""
        rng = generator(4)
        x = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (2, 4, 6, 5), rng)
        w = scaled_oracles.make(presets.INT8_CONV, (6, 4, 3, 3), rng)
        args = [[1, 1], [1, 1], [1, 1], 1]
        want = scaled_oracles.convolution(x.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))

        def last(p: Pair) -> Pair:
            buffers = p.t.buffers()
            buffers["codes"] = buffers["codes"].contiguous(memory_format=torch.channels_last)
            return Pair(hop.QuantizedTensor(buffers, p.t.quantizer, p.t.shape, p.t.dtype), p.e)

        for a, b in itertools.product((x, last(x)), (w, last(w))):
            check(aten.conv2d.default, torch.float32, want, a, b, None, *args)
        for as_columns in (x.view(lambda t: t.transpose(2, 3), lambda a: a.swapaxes(2, 3)),):
            y = scaled_oracles.convolution(as_columns.e, w.e, Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
            check(aten.conv2d.default, torch.float32, y, as_columns, w, None, *args)
