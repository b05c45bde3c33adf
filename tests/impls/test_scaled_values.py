"""hop.scaled of the operators between products against numpy: embeddings, arithmetic, views, pools, means."""

import math
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop import presets
from hop.numerics.formats import INT4, INT8, UINT4
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import MinMax
from tests.support import scaled_oracles
from tests.support.scaled_checks import (
    BOOKS,
    BOTH,
    COLUMNS,
    DTYPES,
    FLOATS,
    INTEGERS,
    OUTPUTS,
    aten,
    check,
    check_quantized,
    generator,
    plain,
)
from tests.support.scaled_oracles import Pair, Plain, array, assert_bits, f32, f64


def check_all(op: Any, y: np.ndarray, *args: Any, outputs: Sequence[str] = tuple(OUTPUTS), **kwargs: Any) -> None:
    """In every dtype, and quantized in every way."""
    for dtype in DTYPES:
        check(op, dtype, y, *args, **kwargs)
    for name in outputs:
        check_quantized(op, name, y, *args, **kwargs)


OTHERS = {**INTEGERS, **{name: FLOATS[name] for name in ("fp8_tensor", "fp8_row", "mxfp8", "mxfp4", "nvfp4")}, **BOOKS}
WEIGHT_PRESETS = [(name, q) for name, q in presets.PRESETS.items() if q.block != (1, -1, -1, -1)]


class TestEmbedding(unittest.TestCase):
    """Rows of a quantized table."""

    @parameterized.expand(WEIGHT_PRESETS)
    @pytest.mark.quick(8)
    def test_presets(self, name, q):
        rng = generator(*name.encode())
        for rows, size in [(40, 96), (33, 130), (5, 1)]:
            w = scaled_oracles.make(q, (rows, size), rng)
            for i, shape in enumerate([(), (7,), (3, 4), (0,), (2, 0), (2, 1, 3)]):
                at = rng.integers(0, rows, shape)
                with self.subTest(f"{rows, size} {shape}"):
                    want = w.values()[at]
                    wide = torch.from_numpy(np.asarray(at))
                    check(aten.embedding.default, DTYPES[(i + size) % 4], want, w, wide)
                    check(aten.embedding.default, DTYPES[(i + size + 1) % 4], want, w, wide, 3)
                    indices = torch.from_numpy(np.asarray(at, np.int32))
                    check(aten.embedding.default, torch.float32, want, w, indices, -1, False, False)

    @parameterized.expand(["int8_row", "uint8_static_rows", "nvfp4", "mxfp8", "int8_static_affine"])
    def test_quantized(self, output):
        rng = generator(1)
        for q in (presets.INT8_ROW_AFFINE, presets.INT4_32, presets.NVFP4_16X16, presets.FP8_128X128):
            w, at = scaled_oracles.make(q, (40, 64), rng), rng.integers(0, 40, (3, 5))
            check_quantized(aten.embedding.default, output, w.values()[at], w, torch.from_numpy(at))

    def test_packed_and_views(self):
        """A table in bfloat16, and one that is a view of a larger one."""
        rng = generator(2)
        at = rng.integers(0, 20, (4, 3))
        for name, q in FLOATS.items():
            with self.subTest(name):
                w = scaled_oracles.make(q, (20, 64), rng)
                check(
                    aten.embedding.default,
                    torch.float32,
                    w.values()[at],
                    Pair(hop.pack(w.t), w.e),
                    torch.from_numpy(at),
                )
        for q in (presets.INT8_ROW, presets.INT4_32, presets.MXFP8, presets.NVFP4):
            w = scaled_oracles.make(q, (40, 64), rng).view(lambda t: t[10:30], lambda a: a[10:30])
            check(aten.embedding.default, torch.float32, w.values()[at], w, torch.from_numpy(at))

    def test_one_bad_row(self):
        """A row of NaN or infinities stays where it is."""
        table = torch.randn(10, 32)
        table[3, 5], table[4, 0] = math.nan, math.inf
        for q in (presets.FP8_ROW, presets.MXFP8, presets.INT8_ROW):
            w = scaled_oracles.quantized(q, table)
            check(aten.embedding.default, torch.float32, w.values()[[3, 4, 5, 3]], w, torch.tensor([3, 4, 5, 3]))


class TestArithmetic(unittest.TestCase):
    """add, sub and mul: in float32 on the numbers, every operation rounded."""

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(6)
    def test_add_and_sub(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        others = {
            "same": scaled_oracles.make(OTHERS[name], (3, 40), rng),
            "int8": scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 40), rng),
            "row": scaled_oracles.make(presets.INT8_ROW, (2, 1, 40), rng),
            "column": scaled_oracles.make(presets.FP8_ROW, (3, 1), rng),
            "float32": Plain(plain((40,), rng)),
            "bfloat16": Plain(plain((3, 1), rng, torch.bfloat16)),
            "number": Plain(plain((), rng, torch.float16)),
        }
        for i, (kind, y) in enumerate(others.items()):
            a, b = x.values(), y.values().astype(f32)
            for alpha in (1, 2, -1, 0.1):
                with self.subTest(f"{kind} alpha={alpha}"):
                    scaled = b if alpha == 1 else b * f32(alpha)
                    kwargs = {} if alpha == 1 else {"alpha": alpha}
                    check(aten.add.Tensor, DTYPES[i % 4], a + scaled, x, y, **kwargs)
                    check(aten.sub.Tensor, DTYPES[i % 4], a - scaled, x, y, **kwargs)
                    as_columns = a if alpha == 1 else a * f32(alpha)
                    check(aten.sub.Tensor, DTYPES[i % 4], b - as_columns, y, x, **kwargs)

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(3)
    def test_mul(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        for i, y in enumerate(
            [
                scaled_oracles.make(OTHERS[name], (3, 40), rng),
                scaled_oracles.make(presets.UINT8_ROW_AFFINE, (2, 3, 1), rng),
                scaled_oracles.make(presets.NVFP4, (40,), rng),
                Plain(plain((3, 40), rng)),
                Plain(plain((), rng, torch.bfloat16)),
            ]
        ):
            want = x.values() * y.values().astype(f32)
            check(aten.mul.Tensor, DTYPES[i % 4], want, x, y)
            check(aten.mul.Tensor, DTYPES[i % 4], want, y, x)

    @parameterized.expand(["int8_row_affine", "int4_groups_32", "nvfp4", "state8"])
    def test_numbers(self, name):
        rng = generator(3)
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        a = x.values()
        for number in (0, 1, -2, 3.5, 0.1, 1e-3):
            check(aten.mul.Scalar, torch.float32, a * f32(number), x, number)
            check(aten.add.Scalar, torch.float32, a + f32(number), x, number)
            check(aten.sub.Scalar, torch.bfloat16, a - f32(number), x, number)
            check(aten.mul.Tensor, torch.float32, a * f32(number), x, Plain(torch.tensor(number, dtype=torch.float32)))
        check(aten.add.Scalar, torch.float32, a + f32(0.75), x, 1.5, 0.5)
        check(aten.sub.Scalar, torch.float32, a - f32(0.75), x, 1.5, 0.5)

    def test_float64(self):
        """Beside a plain float64 everything is float64."""
        rng = generator(4)
        for q in (presets.INT8_ROW_AFFINE, presets.FP8_TENSOR, presets.NVFP4):
            x, y = scaled_oracles.make(q, (3, 32), rng), Plain(plain((3, 32), rng, torch.float64))
            a, b = x.values().astype(f64), y.values()
            for dtype in DTYPES:
                check(aten.add.Tensor, dtype, a + b * 0.1, x, y, alpha=0.1)
                check(aten.sub.Tensor, dtype, b - a, y, x)
                check(aten.mul.Tensor, dtype, a * b, x, y)
                check(aten.cat.default, dtype, np.concatenate([a, b]), [x, y])

    @parameterized.expand(OUTPUTS)
    @pytest.mark.quick(2)
    def test_quantized(self, output):
        rng = generator(5)
        for left, right in [
            (presets.INT8_TENSOR_AFFINE, presets.UINT8_TENSOR_AFFINE),
            (presets.INT8_ROW, presets.INT4_32),
            (presets.FP8_ROW, presets.NVFP4),
        ]:
            x, y = scaled_oracles.make(left, (6, 40), rng), scaled_oracles.make(right, (6, 40), rng)
            a, b = x.values(), y.values()
            check_quantized(aten.add.Tensor, output, a + b * f32(0.3), x, y, alpha=0.3)
            check_quantized(aten.sub.Tensor, output, a - b, x, y)
            check_quantized(aten.mul.Tensor, output, a * b, x, y)
            check_quantized(aten.mul.Scalar, output, a * f32(-0.7), x, -0.7)
            check_quantized(aten.add.Tensor, output, b[0] + a, Plain(torch.from_numpy(b[0].copy())), x)


def without_negative_zero(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """PyTorch leaves the sign of a maximum of zeros open."""
    codes = scaled_oracles.random_codes(q, shape, rng)
    zero = {"e2m1": 0x08, "e4m3": 0x80, "e5m2": 0x80}.get(q.format.name)
    return codes if zero is None else np.where(codes == zero, np.uint8(0), codes).astype(np.uint8)


MAX_POOLS = {
    "one": (aten.max_pool1d.default, (2, 3, 11), [[3]]),
    "one_all": (aten.max_pool1d.default, (2, 3, 11), [[3], [2], [1], [2], True]),
    "one_alone": (aten.max_pool1d.default, (3, 11), [[2], [1]]),
    "two": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 2]]),
    "two_padded": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1]]),
    "two_ceil": (aten.max_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 3], [1, 0], [1, 2], True]),
    "two_alone": (aten.max_pool2d.default, (3, 9, 8), [[2, 2], [], [0, 0]]),
    "three": (aten.max_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 1, 1], True]),
    "three_alone": (aten.max_pool3d.default, (2, 6, 5, 4), [[2, 2, 2]]),
}
VIEWS: dict[str, tuple[Any, list[Any], Callable[[np.ndarray], np.ndarray]]] = {
    "view": (aten.view.default, [[6, 160]], lambda a: a.reshape(6, 160)),
    "view_inferred": (aten.view.default, [[-1, 40]], lambda a: a.reshape(-1, 40)),
    "reshape": (aten.reshape.default, [[4, 6, 40]], lambda a: a.reshape(4, 6, 40)),
    "reshape_cuts": (aten.reshape.default, [[16, 60]], lambda a: a.reshape(16, 60)),
    "flatten": (aten.flatten.using_ints, [], lambda a: a.reshape(-1)),
    "flatten_some": (aten.flatten.using_ints, [1, 2], lambda a: a.reshape(2, 12, 40)),
    "unflatten": (aten.unflatten.int, [3, [5, 8]], lambda a: a.reshape(2, 3, 4, 5, 8)),
    "permute": (aten.permute.default, [[3, 0, 2, 1]], lambda a: a.transpose(3, 0, 2, 1)),
    "transpose": (aten.transpose.int, [-1, 1], lambda a: a.swapaxes(-1, 1)),
    "unsqueeze": (aten.unsqueeze.default, [-1], lambda a: a[..., None]),
    "squeeze": (aten.squeeze.default, [], lambda a: a),
    "squeeze_dim": (aten.squeeze.dim, [0], lambda a: a),
    "squeeze_dims": (aten.squeeze.dims, [[0, 1]], lambda a: a),
    "expand": (aten.expand.default, [[5, 2, 3, 4, 40]], lambda a: np.broadcast_to(a, (5, 2, 3, 4, 40))),
    "slice": (aten.slice.Tensor, [3, 3, 37, 2], lambda a: a[..., 3:37:2]),
    "slice_outer": (aten.slice.Tensor, [1, 1], lambda a: a[:, 1:]),
    "slice_from_behind": (aten.slice.Tensor, [2, -3, -1], lambda a: a[:, :, -3:-1]),
    "select": (aten.select.int, [1, -1], lambda a: a[:, -1]),
    "select_last": (aten.select.int, [3, 7], lambda a: a[..., 7]),
    "narrow": (aten.narrow.default, [2, 1, 2], lambda a: a[:, :, 1:3]),
    "clone": (aten.clone.default, [], lambda a: a),
    "contiguous": (aten.contiguous.default, [], lambda a: a),
    "alias": (aten.alias.default, [], lambda a: a),
    "movedim": (aten.movedim.int, [0, 2], lambda a: np.moveaxis(a, 0, 2)),
    "movedims": (aten.movedim.intlist, [[0, 1], [2, 0]], lambda a: np.moveaxis(a, [0, 1], [2, 0])),
}


class TestValues(unittest.TestCase):
    """cat, activations, maxima and views: numbers that the operand has."""

    @parameterized.expand(OTHERS)
    @pytest.mark.quick(2)
    def test_activations(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (6, 40), rng, codes=without_negative_zero)
        a, top = x.values(), float(np.abs(x.values()).max())
        low, high = -top / 3, top / 4
        outputs = list(OUTPUTS)[len(name) % 3 :: 3]
        check_all(aten.relu.default, np.maximum(a, f32(0)), x, outputs=outputs)
        check_all(aten.clamp.default, np.clip(a, f32(low), f32(high)), x, low, high, outputs=outputs)
        check(aten.clamp.default, torch.float32, np.maximum(a, f32(low)), x, low)
        check(aten.clamp.default, torch.float32, np.minimum(a, f32(high)), x, None, high)
        check(aten.clamp.default, torch.float32, np.minimum(a, f32(high)), x, max=high)
        check(aten.hardtanh.default, torch.bfloat16, np.clip(a, f32(-1), f32(1)), x)
        check(aten.hardtanh.default, torch.float32, np.clip(a, f32(0), f32(6)), x, 0, 6)

    @parameterized.expand([*OTHERS][::3])
    @pytest.mark.quick(2)
    def test_cat(self, name):
        rng = generator(*name.encode())
        x = scaled_oracles.make(OTHERS[name], (3, 40), rng)
        y, z = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 40), rng), Plain(plain((3, 40), rng, torch.bfloat16))
        parts = [x, y, z, x]
        arrays = [p.values().astype(f32) for p in parts]
        outputs = list(OUTPUTS)[len(name) % 3 :: 3]
        check_all(aten.cat.default, np.concatenate(arrays), parts, outputs=outputs)
        check_all(aten.cat.default, np.concatenate(arrays[1:], 1), parts[1:], 1, outputs=outputs)
        check_all(aten.cat.default, np.concatenate(arrays[::-1], -1), parts[::-1], -1, outputs=outputs)
        check(aten.cat.default, torch.float32, arrays[0], [x])

    @parameterized.expand(MAX_POOLS)
    @pytest.mark.quick(2)
    def test_max_pool(self, name):
        op, shape, args = MAX_POOLS[name]
        rng = generator(*name.encode())
        for kind in [*OTHERS][len(name) % 4 :: 4]:
            x = scaled_oracles.make(OTHERS[kind], shape, rng, codes=without_negative_zero)
            with self.subTest(kind):
                check_all(op, scaled_oracles.max_pool(x.values(), *args), x, *args, outputs=list(OUTPUTS)[:5])

    @parameterized.expand(VIEWS)
    @pytest.mark.quick(4)
    def test_views(self, name):
        """All are new tensors, of the numbers that the view has."""
        op, args, of_array = VIEWS[name]
        rng = generator(*name.encode())
        start = list(VIEWS).index(name)
        for kind in [*OTHERS][start % 5 :: 5]:
            x = scaled_oracles.make(OTHERS[kind], (2, 3, 4, 40), rng)
            with self.subTest(kind):
                check_all(op, of_array(x.values()), x, *args, outputs=list(OUTPUTS)[start % 4 :: 4])

    @parameterized.expand(["int8_row_affine", "fp8_tensor", "int4_groups_32"])
    @pytest.mark.quick(3)
    def test_views_of_ones(self, name):
        rng = generator(6)
        x = scaled_oracles.make(OTHERS[name], (1, 4, 1, 40), rng)
        a = x.values()
        for op, args, want in [
            (aten.squeeze.default, [], a.reshape(4, 40)),
            (aten.squeeze.dim, [2], a.reshape(1, 4, 40)),
            (aten.squeeze.dims, [[0, 2]], a.reshape(4, 40)),
            (aten.expand.default, [[3, -1, 2, 40]], np.broadcast_to(a, (3, 4, 2, 40))),
            (aten.t.default, [], None),
        ]:
            if op is aten.t.default:
                x = scaled_oracles.make(OTHERS[name], (6, 40), rng)
                want = x.values().T
            check_all(op, want, x, *args)

    def test_new_memory(self):
        """A view is a copy: to write to it changes no operand, be it plain."""
        x, y = hop.quantize(presets.INT8_TENSOR, torch.randn(2, 8)), torch.randn(2, 8)
        before = hop.dequantize(x), y.clone()
        for dtype in (torch.float32, torch.bfloat16):
            hop.scaled(aten.view.default, dtype, x, [16]).zero_()
            hop.scaled(aten.cat.default, dtype, [y, x]).zero_()
        for name in ("int8_row", "fp8_row"):
            made = hop.scaled(aten.alias.default, OUTPUTS[name], x)
            made.codes.view(torch.uint8).zero_()
            made.scale.zero_()
        assert_bits(hop.dequantize(x), array(before[0]))
        assert_bits(y, array(before[1]))

    @parameterized.expand([("columnwise", COLUMNS), ("both", BOTH)])
    def test_usages(self, _name, usages):
        """Tensors with column-wise copies: what is no product reads the row-wise one, if there is one."""
        rng = generator(7)
        for q in (presets.INT8_TENSOR_AFFINE, presets.INT8_ROW, presets.INT4_32, presets.MXFP8, presets.NVFP4):
            x = scaled_oracles.make(q, (32, 64), rng, usages, codes=without_negative_zero)
            a, at = x.values(), rng.integers(0, 32, 5)
            with self.subTest(f"{q}"):
                check(aten.relu.default, torch.float32, np.maximum(a, 0), x)
                check(aten.t.default, torch.float32, a.T, x)
                check(aten.add.Tensor, torch.float32, a + a, x, x)
                check(aten.embedding.default, torch.float32, a[at], x, torch.from_numpy(at))
                check_quantized(aten.mul.Scalar, "int8_row", a * f32(0.5), x, 0.5)
                y = a.mean(1, dtype=f64).astype(f32)
                if usages == BOTH:
                    y = scaled_oracles.mean_of(x.e, lambda a: a.mean(1), [1])
                check(aten.mean.dim, torch.float32, y, x, [1])

    def test_nan(self):
        """NaN and infinities are among the numbers."""
        table = torch.tensor([[math.nan, 1.0, 2.0, math.inf], [0.5, 0.0, -math.inf, 3.0]])
        x = scaled_oracles.quantized(presets.MXFP8, table)
        a = x.values()
        assert np.isnan(a).any()
        check(aten.relu.default, torch.float32, np.where(np.isnan(a), a, np.maximum(a, 0)), x)
        check(aten.clamp.default, torch.float32, np.clip(a, f32(-1), f32(1)), x, -1, 1)
        check(aten.max_pool1d.default, torch.float32, scaled_oracles.max_pool(a, [2]), x, [2])


AVERAGED = {
    "int8_tensor": presets.INT8_TENSOR,
    "int8_tensor_affine": presets.INT8_TENSOR_AFFINE,
    "uint8_tensor_affine": presets.UINT8_TENSOR_AFFINE,
    "uint8_tensor": presets.UINT8_TENSOR,
    "int8_rows": presets.INT8_ROW,
    "int8_examples": Quantizer(INT8, (1, -1, -1, -1), MinMax()),
    "int8_channels": Quantizer(INT8, (-1, 1, -1, -1)),
    "int8_groups": Quantizer(INT8, (1, 4), MinMax()),
    "int4_rows": Quantizer(INT4, (1, -1)),
    "uint4_groups": Quantizer(UINT4, (1, 3), MinMax()),
    "ternary": presets.TERNARY_TENSOR,
    "fp8_tensor": presets.FP8_TENSOR,
    "fp8_row": presets.FP8_ROW,
    "mxfp8": presets.MXFP8,
    "nvfp4": presets.NVFP4,
    "state8": presets.STATE8,
}
AVG_POOLS = {
    "one": (aten.avg_pool1d.default, (2, 3, 11), [[3]]),
    "one_all": (aten.avg_pool1d.default, (2, 3, 11), [[3], [2], [1], True, False]),
    "one_alone": (aten.avg_pool1d.default, (3, 11), [[4], [3], [2]]),
    "two": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 2]]),
    "two_padded": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1]]),
    "two_ceil": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 3], [1, 0], True]),
    "two_uncounted": (aten.avg_pool2d.default, (2, 3, 9, 8), [[4, 3], [3, 2], [2, 1], True, False]),
    "two_divisor": (aten.avg_pool2d.default, (2, 3, 9, 8), [[3, 3], [2, 2], [1, 1], False, True, 7]),
    "two_alone": (aten.avg_pool2d.default, (3, 9, 8), [[2, 2], [], [0, 0]]),
    "three": (aten.avg_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2]]),
    "three_all": (aten.avg_pool3d.default, (1, 2, 6, 5, 4), [[2, 3, 2], [2, 2, 1], [1, 1, 1], True, False]),
    "three_divisor": (aten.avg_pool3d.default, (2, 6, 5, 4), [[2, 2, 3], [2, 1, 1], [0, 1, 1], False, True, 5]),
    "adaptive_one": (aten.adaptive_avg_pool1d.default, (2, 3, 11), [[4]]),
    "adaptive_one_all": (aten.adaptive_avg_pool1d.default, (3, 11), [[1]]),
    "adaptive_two": (aten.adaptive_avg_pool2d.default, (2, 3, 9, 8), [[4, 3]]),
    "adaptive_two_all": (aten.adaptive_avg_pool2d.default, (2, 3, 9, 8), [[1, 1]]),
    "adaptive_two_alone": (aten.adaptive_avg_pool2d.default, (3, 9, 8), [[9, 5]]),
    "adaptive_three": (aten.adaptive_avg_pool3d.default, (1, 2, 6, 5, 4), [[4, 5, 3]]),
    "adaptive_three_all": (aten.adaptive_avg_pool3d.default, (2, 6, 5, 4), [[1, 1, 1]]),
}


class TestMeans(unittest.TestCase):
    """mean and average pools: of integers float32(mean of code differences) · scale, of others the mean of numbers."""

    @parameterized.expand(AVERAGED)
    @pytest.mark.quick(8)
    def test_mean(self, name):
        rng = generator(*name.encode())
        for shape in [(3, 4, 7, 9), (2, 3, 5), (4, 13), (37,)]:
            if len(shape) < len(AVERAGED[name].block) > 2:
                continue
            x = scaled_oracles.make(AVERAGED[name], shape, rng)
            n = len(shape)
            every = list(range(n))
            outputs = list(OUTPUTS)[:: 4 if n == 4 else 7]
            y = scaled_oracles.mean_of(x.e, lambda a: a.mean(), every)
            check_all(aten.mean.default, y, x, outputs=[])
            for i, dims in enumerate([[0], [-1], [-1, 0], every, [], None, [n - 1, n // 2]]):
                if dims and len({d % n for d in dims}) < len(dims):
                    continue
                for keep in (False, True):
                    with self.subTest(f"{shape} {dims} {keep}"):
                        over = tuple(dims or every)
                        y = scaled_oracles.mean_of(
                            x.e, lambda a, over=over, keep=keep: a.mean(over, keepdims=keep), over
                        )
                        check_all(aten.mean.dim, y, x, dims, keep, outputs=outputs if y.ndim and i == 1 else [])

    def test_dtype_argument(self):
        """mean's own dtype has no say: the output is what scaled was asked for."""
        rng = generator(1)
        x = scaled_oracles.make(presets.INT8_TENSOR_AFFINE, (3, 8), rng)
        y = scaled_oracles.mean_of(x.e, lambda a: a.mean(1), [1])
        check(aten.mean.dim, torch.float32, y, x, [1], dtype=torch.float16)

    @parameterized.expand(AVG_POOLS)
    @pytest.mark.quick(8)
    def test_pools(self, name):
        op, shape, args = AVG_POOLS[name]
        rng = generator(*name.encode())
        windows = scaled_oracles.adaptive_avg_pool if name.startswith("adaptive") else scaled_oracles.avg_pool
        reduced = range(-len(args[0]), 0)
        kinds = {**AVERAGED, "int8_channel_rows": Quantizer(INT8, (*[1] * (len(shape) - 1), -1), MinMax())}
        kinds["int8_planes"] = Quantizer(INT8, (1,) * (len(shape) - len(args[0])) + (-1,) * len(args[0]), MinMax())
        for i, (kind, q) in enumerate(kinds.items()):
            if len(q.block) > len(shape):
                continue
            x = scaled_oracles.make(q, shape, rng)
            with self.subTest(kind):
                y = scaled_oracles.mean_of(x.e, lambda a: windows(a, *args), reduced)
                check_all(op, y, x, *args, outputs=list(OUTPUTS)[i % 5 :: 5])

    def test_exact_means(self):
        """A mean whose codes cancel is 0 exactly, whatever the scale; in float32 it would not be."""
        codes = torch.tensor([[127, -127, 3, -3, 101, -101, 77, -77, 1, -1]], dtype=torch.int8)
        scale = torch.tensor([[0.1]])
        x = hop.QuantizedTensor({"codes": codes, "scale": scale}, presets.INT8_TENSOR, (1, 10), torch.float32)
        assert hop.scaled(aten.mean.default, torch.float32, x).item() == 0
        assert hop.scaled(aten.avg_pool1d.default, torch.float32, x, [10]).item() == 0
