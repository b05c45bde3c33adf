"""What hop.scaled refuses: each error names the argument, what it is, and the rule."""

import itertools
import re
import unittest
from typing import Any

import torch
from parameterized import parameterized

import hop
from hop import presets
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FixedPoint, FloatMultiplier
from hop.numerics.scale_rules import Static
from tests.support import scaled_oracles
from tests.support.errors import assert_refused
from tests.support.scaled_checks import COLUMNS, aten, conv2d, generator, linear, mm


def q8(*shape: int, q: Quantizer = presets.INT8_TENSOR, **options: Any) -> Any:
    return scaled_oracles.make(q, shape, generator(0), **options).t


X, W, FP8, BOOK = q8(2, 8), q8(4, 8), q8(4, 8, q=presets.FP8_ROW), q8(4, 8, q=presets.STATE8)
INT_BIAS = torch.zeros(4, dtype=torch.int32)
STATIC, STATIC_AFFINE = presets.INT8_TENSOR_STATIC, presets.INT8_TENSOR_STATIC_AFFINE
ONE = torch.tensor(1.0)
PLAIN_X = torch.randn(2, 8)
IMAGE, KERNEL = q8(1, 4, 5, 5), q8(6, 4, 3, 3)
FLOAT = torch.float32
# name, error, words that it must hold, positional arguments, keywords
ERRORS: list[tuple[str, type[Exception], list[str], tuple[Any, ...], dict[str, Any]]] = [
    ("operator", ValueError, ["op", "aten.tan.default", " mm, "], (aten.tan.default, FLOAT, X), {}),
    ("in_place", ValueError, ["op", "aten.add_.Tensor"], (aten.add_.Tensor, FLOAT, X, X), {}),
    ("packet", ValueError, ["op", "aten.mm"], (aten.mm, FLOAT, X, W), {}),
    ("function", ValueError, ["op", "mm"], (torch.mm, FLOAT, X, W), {}),
    ("output_int32", TypeError, ["output", "torch.int32", "Quantizer", "out_dtype"], (linear, torch.int32, X, W), {}),
    ("output_int8", TypeError, ["output", "torch.int8"], (linear, torch.int8, X, W), {}),
    ("output_fp8", TypeError, ["output", "torch.float8_e4m3fn"], (linear, torch.float8_e4m3fn, X, W), {}),
    ("output_e5m2", TypeError, ["output", "torch.float8_e5m2"], (linear, torch.float8_e5m2, X, W), {}),
    ("output_none", TypeError, ["output", "None", "Quantizer"], (linear, None, X, W), {}),
    ("output_number", TypeError, ["output", "8"], (linear, 8, X, W), {}),
    ("output_complex", TypeError, ["output", "torch.complex64"], (linear, torch.complex64, X, W), {}),
    ("stochastic", ValueError, ["output", "stochastic", "random", "noise"], (linear, presets.NVFP4_STOCHASTIC, X, W),
        {}),
    ("plain_alone", TypeError, ["QuantizedTensor", "aten.linear"], (linear, FLOAT, PLAIN_X, PLAIN_X), {}),
    ("plain_values", TypeError, ["QuantizedTensor", "aten.relu"], (aten.relu.default, FLOAT, PLAIN_X), {}),
    ("plain_list", TypeError, ["QuantizedTensor", "aten.cat"], (aten.cat.default, FLOAT, [PLAIN_X, PLAIN_X]), {}),
    ("int8_fp8", ValueError, ["int8", "e4m3", "integers with integers", "aten.linear"], (linear, FLOAT, X, FP8), {}),
    ("fp8_int8", ValueError, ["int8", "e4m3", "integers with integers"], (linear, FLOAT, FP8, W), {}),
    ("int4_mx", ValueError, ["int4", "e2m1"], (linear, FLOAT, q8(2, 64, q=presets.MXFP4),
        q8(4, 64, q=presets.INT4_64)), {}),
    ("codebooks", ValueError, ["dynamic8", "plain floats with codebooks"], (linear, FLOAT, BOOK, BOOK), {}),
    ("int8_codebook", ValueError, ["int8", "dynamic8"], (linear, FLOAT, X, BOOK), {}),
    ("codebook_fp8", ValueError, ["dynamic8", "e4m3"], (linear, FLOAT, FP8, BOOK), {}),
    ("conv_pair", ValueError, ["int8", "e4m3", "conv2d"], (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=presets.FP8_TENSOR)),
        {}),
    ("scale_of_each_lhs", ValueError, ["input", "change with each element", "aten.linear", "block=(-1, 1)"],
        (linear, FLOAT, q8(2, 8, q=presets.INT8_COLUMN), W), {}),
    ("scale_of_each_rhs", ValueError, ["weight", "change", "linear"],
        (linear, FLOAT, X, q8(4, 8, q=presets.INT8_COLUMN)), {}),
    ("scale_of_each_mm", ValueError, ["mat2", "change", "columnwise"], (mm, FLOAT, X, q8(8, 4, q=presets.INT8_ROW)),
        {}),
    ("scale_of_each_copy", ValueError, ["weight", "change"],
        (linear, FLOAT, X, q8(4, 8, q=presets.INT8_ROW, usages=COLUMNS)), {}),
    ("flat", ValueError, ["flat=True"], (linear, FLOAT, X, q8(4, 8, q=Quantizer(INT8, (16,), flat=True))), {}),
    ("input_channels", ValueError, ["weight", "output channel", "(-1, 1, -1, -1)"],
        (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=Quantizer(INT8, (-1, 1, -1, -1)))), {}),
    ("channels_of_the_input", ValueError, ["input", "example", "(-1, 1, -1, -1)"],
        (conv2d, FLOAT, q8(1, 4, 5, 5, q=Quantizer(INT8, (-1, 1, -1, -1))), KERNEL), {}),
    ("channels_without_a_batch", ValueError, ["input", "(1, -1, -1)"],
        (conv2d, FLOAT, q8(4, 5, 5, q=Quantizer(INT8, (1, -1, -1))), KERNEL), {}),
    ("transposed_channels", ValueError, ["weight", "output channel", "(1, -1, -1, -1)"],
        (aten.conv_transpose2d.input, FLOAT, IMAGE, q8(4, 6, 3, 3, q=presets.INT8_CONV)), {}),
    ("kernel_rows", ValueError, ["weight"], (conv2d, FLOAT, IMAGE, q8(6, 4, 3, 3, q=presets.INT8_ROW)), {}),
    ("int32_bias_of_floats", ValueError, ["int32 bias", "integers"], (linear, FLOAT, PLAIN_X, W, INT_BIAS), {}),
    ("int32_bias_of_fp8", ValueError, ["int32 bias", "integers"], (linear, FLOAT, FP8, FP8, INT_BIAS), {}),
    ("int32_bias_of_groups", ValueError, ["int32 bias", "groups"],
        (linear, FLOAT, q8(2, 64), q8(4, 64, q=presets.INT4_32), INT_BIAS), {}),
    ("int32_bias_of_groups_of_lhs", ValueError, ["int32 bias", "groups"],
        (linear, FLOAT, q8(2, 64, q=Quantizer(INT8, (1, 16))), q8(4, 64), INT_BIAS), {}),
    ("int32_bias_alpha", ValueError, ["int32 bias", "alpha", "2"], (aten.addmm.default, FLOAT, INT_BIAS, X, W.t()),
        {"alpha": 2}),
    ("int32_bias_beta", ValueError, ["int32 bias", "beta"], (aten.addmm.default, FLOAT, INT_BIAS, X, W.t()),
        {"beta": 0.5}),
    ("int64_bias", TypeError, ["'bias'", "int32", "torch.int64"], (linear, FLOAT, X, W, INT_BIAS.long()), {}),
    ("int8_bias", TypeError, ["'self'", "torch.int8"], (aten.addmm.default, FLOAT, INT_BIAS.char(), X, W.t()), {}),
    ("quantized_bias", ValueError, ["'bias'", "bias", "cannot be quantized"], (linear, FLOAT, X, W, q8(4)), {}),
    ("quantized_addend", ValueError, ["'self'", "cannot be quantized"], (aten.addmm.default, FLOAT, q8(4), X, W.t()),
        {}),
    ("quantized_indices", ValueError, ["'indices'", "cannot be quantized"], (aten.embedding.default, FLOAT, W, q8(4)),
        {}),
    ("int8_operand", TypeError, ["'input'", "torch.int8", "out_dtype"], (linear, FLOAT, X.codes, W), {}),
    ("int32_operand", TypeError, ["'mat2'", "torch.int32"], (mm, FLOAT, X, W.codes.t().int()), {}),
    ("fp8_operand", TypeError, ["'weight'", "torch.float8_e4m3fn"], (linear, FLOAT, PLAIN_X.bfloat16(), FP8.codes), {}),
    ("int8_addend", TypeError, ["'other'", "torch.int8"], (aten.add.Tensor, FLOAT, X, X.codes), {}),
    ("bool_in_cat", TypeError, ["'tensors'", "torch.bool"], (aten.cat.default, FLOAT, [X, PLAIN_X > 0]), {}),
    ("scale_without_quantizer", ValueError, ["output_scale", "torch.float32"], (linear, FLOAT, X, W),
        {"output_scale": ONE}),
    ("zero_without_quantizer", ValueError, ["output_zero_point"], (linear, FLOAT, X, W), {"output_zero_point": ONE}),
    ("given_without_scale", ValueError, ["output_scale="], (linear, STATIC, X, W), {}),
    ("given_without_both", ValueError, ["output_scale=", "output_zero_point="], (linear, STATIC_AFFINE, X, W), {}),
    ("scale_alone", ValueError, ["output_zero_point", "needs"], (linear, STATIC_AFFINE, X, W), {"output_scale": ONE}),
    ("zero_alone", ValueError, ["output_zero_point", "output_scale"], (linear, STATIC_AFFINE, X, W),
        {"output_zero_point": ONE}),
    ("zero_for_symmetric", ValueError, ["no zero point"], (linear, STATIC, X, W),
        {"output_scale": ONE, "output_zero_point": ONE}),
    ("scale_is_text", TypeError, ["output_scale", "0.5"], (linear, STATIC, X, W), {"output_scale": "0.5"}),
    ("scale_of_integers", TypeError, ["output_scale", "torch.int64"], (linear, STATIC, X, W),
        {"output_scale": torch.tensor(1)}),
    ("scale_of_a_wrong_shape", ValueError, ["output_scale", "(1, 1)", "(3,)"], (linear, STATIC, X, W),
        {"output_scale": torch.ones(3)}),
    ("scale_of_a_wrong_shape_by_sum", ValueError, ["output_scale", "(1, 1)", "(3,)"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), X, W), {"output_scale": torch.ones(3)}),
    ("exact_of_groups", ValueError, ["exact integer sum", "groups", "Division"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), q8(2, 64), q8(4, 64, q=presets.INT4_32)),
        {"output_scale": ONE}),
    ("exact_of_floats", ValueError, ["exact integer sum", "not integers"],
        (linear, Quantizer(INT8, scale=Static(requantize=FixedPoint())), FP8, FP8), {"output_scale": ONE}),
    ("exact_of_a_plain_factor", ValueError, ["exact integer sum", "is not quantized"],
        (linear, Quantizer(INT8, scale=Static(requantize=FloatMultiplier())), PLAIN_X, W), {"output_scale": ONE}),
    ("exact_sum_of_two", ValueError, ["exact integer sum", "aten.add.Tensor"],
        (aten.add.Tensor, Quantizer(INT8, scale=Static(requantize=FixedPoint())), X, X), {"output_scale": ONE}),
    ("exact_with_alpha", ValueError, ["exact integer sum", "alpha"],
        (aten.addmm.default, Quantizer(INT8, scale=Static(requantize=FixedPoint())), torch.zeros(4), X, W.t()),
        {"output_scale": ONE, "alpha": 2}),
    ("exact_of_rows", ValueError, ["exact integer sum", "one scale"],
        (aten.relu.default, Quantizer(INT8, scale=Static(requantize=FixedPoint())), q8(2, 8, q=presets.INT8_ROW)),
        {"output_scale": ONE}),
    ("devices", RuntimeError, ["'weight'", "meta", "cpu"], (linear, FLOAT, X, PLAIN_X.to("meta")), {}),
    ("too_few", RuntimeError, ["'weight'", "aten.linear"], (linear, FLOAT, X), {}),
    ("too_many", RuntimeError, ["aten.mm.default", "2 positional"], (mm, FLOAT, X, W, X), {}),
    ("unknown_argument", RuntimeError, ["'gain'"], (linear, FLOAT, X, W), {"gain": 2}),
    ("twice", RuntimeError, ["'weight'"], (linear, FLOAT, X, W), {"weight": W}),
]  # fmt: skip
# Calls that the operator itself refuses, whatever its operands are: its own words.
MISFITS: list[tuple[str, Any, list[Any]]] = [
    ("linear", linear, [(2, 8), (4, 7)]),
    ("linear_vector", linear, [(8,), (4, 7)]),
    ("linear_weight", linear, [(2, 8), (3, 4, 8)]),
    ("mm", mm, [(2, 8), (4, 8)]),
    ("mm_rank", mm, [(2, 3, 8), (8, 4)]),
    ("mm_vector", mm, [(2, 8), (8,)]),
    ("bmm", aten.bmm.default, [(2, 3, 8), (3, 8, 4)]),
    ("bmm_inner", aten.bmm.default, [(2, 3, 8), (2, 7, 4)]),
    ("bmm_rank", aten.bmm.default, [(3, 8), (8, 4)]),
    ("matmul", aten.matmul.default, [(2, 3, 8), (3, 8, 4)]),
    ("matmul_inner", aten.matmul.default, [(3, 8), (7, 4)]),
    ("matmul_vectors", aten.matmul.default, [(8,), (7,)]),
    ("conv_channels", conv2d, [(1, 4, 5, 5), (6, 3, 3, 3)]),
    ("conv_kernel", conv2d, [(1, 4, 2, 2), (6, 4, 3, 3)]),
    ("conv_rank", conv2d, [(1, 4, 5), (6, 4, 3)]),
    ("add", aten.add.Tensor, [(2, 8), (3, 8)]),
    ("mul", aten.mul.Tensor, [(2, 8), (2, 7)]),
]


class TestErrors(unittest.TestCase):
    """What cannot be done says so: the argument, what it is, and the rule."""

    @parameterized.expand(ERRORS)
    def test_words(self, _name, error, words, args, kwargs):
        for _ in range(2):  # nothing is remembered of a call that failed
            assert_refused(error, words, lambda: hop.scaled(*args, **kwargs))

    @parameterized.expand([e for e in ERRORS if e[1] is not RuntimeError])
    def test_names_the_operator(self, _name, error, _words, args, kwargs):
        with self.assertRaisesRegex(error, "^scaled: "):
            hop.scaled(*args, **kwargs)

    @parameterized.expand(MISFITS)
    def test_misfits(self, _name, op, shapes):
        """PyTorch's own error, of integers, of floats and of both outputs."""
        with self.assertRaises(RuntimeError) as own:
            op(*(torch.zeros(s) for s in shapes))
        for q, output in itertools.product(
            (presets.INT8_TENSOR, presets.INT8_TENSOR_AFFINE, presets.FP8_TENSOR),
            (torch.float32, torch.bfloat16, presets.INT8_TENSOR),
        ):
            with self.subTest(f"{q} {output}"):
                with self.assertRaises(RuntimeError) as caught:
                    hop.scaled(op, output, *(q8(*s, q=q) for s in shapes))
                words, expected = (set(re.findall(r"[a-z]{4,}|\d+", str(e.exception).lower())) for e in (caught, own))
                assert words & expected, f"{caught.exception} is nothing like {own.exception}"

    def test_bias_that_does_not_fit(self):
        for bias in (torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 3)):
            for _ in range(2):
                with self.assertRaises(RuntimeError):
                    hop.scaled(linear, FLOAT, X, W, bias)
                with self.assertRaises(RuntimeError):
                    hop.scaled(aten.addmm.default, FLOAT, bias, X, W.t())
        with self.assertRaises(RuntimeError):
            hop.scaled(conv2d, FLOAT, IMAGE, KERNEL, torch.zeros(5))

    def test_an_operator_that_is_none(self):
        """The one that is meant is named; else all, without overloads."""
        for op in (aten.linear, torch.nn.functional.linear, "aten.linear", "torch.ops.aten.linear.default"):
            with self.assertRaisesRegex(ValueError, "must be an operator overload .*use aten.linear.default$"):
                hop.scaled(op, FLOAT, X, W)

    def test_sizes_that_do_not_fit_are_named(self):
        wide = q8(3, 9)
        with self.assertRaisesRegex(
            RuntimeError, "^scaled: aten.linear.default sums over the last dimension of 'input'"
        ):
            hop.scaled(linear, FLOAT, wide, W)

    def test_index_out_of_range(self):
        for q in (presets.INT8_ROW, presets.INT4_32, presets.NVFP4, presets.STATE8, presets.FP8_128X128):
            w = q8(10, 32, q=q)
            for at in (10, -1, 2**40):
                with self.assertRaises((IndexError, RuntimeError)):
                    hop.scaled(aten.embedding.default, FLOAT, w, torch.tensor([0, at]))

    def test_what_is_allowed(self):
        """Neighbours of what is refused: a block along all of the summed dimension, of one element if that has one."""
        for x, w in [
            (q8(2, 1, q=presets.INT8_COLUMN), q8(4, 1)),
            (q8(2, 8, q=Quantizer(INT8, (1, 8))), q8(4, 8, q=Quantizer(INT8, (1, 2)))),
            (q8(2, 8, q=presets.INT8_TENSOR), q8(4, 8, q=Quantizer(INT8, (4, 8)))),
        ]:
            assert hop.scaled(linear, FLOAT, x, w).shape == (2, 4)
        assert hop.scaled(conv2d, FLOAT, q8(1, 1, 5, 5, q=presets.INT8_CONV), q8(2, 1, 3, 3)).shape == (1, 2, 3, 3)
        bias = torch.zeros(4, dtype=torch.int32)
        one_group = q8(4, 8, q=Quantizer(INT8, (1, 8)))
        assert hop.scaled(linear, FLOAT, X, one_group).shape == (2, 4)
        assert hop.scaled(aten.addmm.default, FLOAT, bias, X, W.t(), alpha=1, beta=1).shape == (2, 4)
