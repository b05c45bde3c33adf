"""Helpers for tests of hop.scaled: operands, quantizers by name, and checks against numpy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hop
from hop import presets
from hop.dispatch.operand import encode
from hop.impls.scaled import scaled_buffers
from hop.numerics.formats import E2M1, E4M3, E5M2, INT4, INT8, TERNARY, UINT4, UINT8
from hop.numerics.layouts import Decoded
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel
from hop.tensor.quantized import operand
from tests.support import numerics, scaled_oracles
from tests.support.scaled_oracles import Geometry, Pair, Plain, array, assert_bits, assert_buffers, cast, f32

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COLUMNS, BOTH = ("columnwise",), ("rowwise", "columnwise")


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng([1, *seed])


def plain(shape: Sequence[int], rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return scaled_oracles.tensor(cast(rng.standard_normal(tuple(shape)), dtype))


def reference(op: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """The meaning, without plans and kernels."""
    if isinstance(output, Quantizer):
        raise TypeError("buffers")
    return scaled_buffers.reference(op, output, None, None, *encode([operand(a) for a in args]), **kwargs)


def unwrapped(args: Sequence[Any]) -> list[Any]:
    """Arguments for the library."""
    return [
        a.t if isinstance(a, Pair | Plain) else unwrapped(a) if isinstance(a, list) and _holds(a) else a for a in args
    ]


def _holds(a: list[Any]) -> bool:
    return any(isinstance(x, Pair | Plain) for x in a)


def decoded(t: Any) -> Any:
    """A tensor of floats as the numbers that they stand for; any other as it is."""
    return hop.pack(t, Decoded()) if t.quantizer.format.name in numerics.FLOATS and not t.quantizer.flat else t


def run(op: Any, output: torch.dtype, *args: Any, exact: bool = True, **kwargs: Any) -> Tensor:
    """The result; the second call, by a plan, has the same bits, and so has the meaning itself where it is `exact`."""
    given = unwrapped(args)
    first = hop.scaled(op, output, *given, **kwargs)
    assert type(first) is Tensor, type(first)
    assert first.dtype == output, f"{first.dtype}, not {output}"
    assert_bits(hop.scaled(op, output, *given, **kwargs), array(first), "the second call")
    if exact:
        assert_bits(reference(op, output, *given, **kwargs), array(first), "the reference")
    return first


def check(op: Any, output: torch.dtype, want: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """`want` is float32, or float64 where a plain operand is."""
    with np.errstate(all="ignore"):
        rounded = cast(want, output)
    assert_bits(run(op, output, *args, **kwargs), rounded, f"{op} in {output}")


AFFINE = {"scale": MinMax()}
INTEGERS = {
    "int8_tensor": Quantizer(INT8),
    "int8_row": Quantizer(INT8, (1, -1)),
    "int8_groups_32": Quantizer(INT8, (1, 32)),
    "int8_groups_20": Quantizer(INT8, (1, 20)),
    "int8_tiles": Quantizer(INT8, (3, 16)),
    "int8_tensor_affine": Quantizer(INT8, **AFFINE),
    "int8_row_affine": Quantizer(INT8, (1, -1), **AFFINE),
    "int8_groups_32_affine": Quantizer(INT8, (1, 32), **AFFINE),
    "int8_static": Quantizer(INT8, scale=Static(affine=True)),
    "uint8_tensor": Quantizer(UINT8),
    "uint8_row": Quantizer(UINT8, (1, -1)),
    "uint8_tensor_affine": Quantizer(UINT8, **AFFINE),
    "uint8_row_affine": Quantizer(UINT8, (1, -1), **AFFINE),
    "int4_row": Quantizer(INT4, (1, -1)),
    "int4_groups_32": presets.INT4_32,
    "uint4_groups_32_affine": presets.UINT4_32_AFFINE,
    "uint4_groups_16": Quantizer(UINT4, (1, 16)),
    "ternary_tensor": presets.TERNARY_TENSOR,
    "ternary_row": presets.TERNARY_ROW,
    "ternary_groups": Quantizer(TERNARY, (1, 24), AbsMean()),
}
# The sizes (M, K, N). K is a multiple of no group, of one, of all; and N is a group, as K might be taken for.
SIZES = [(5, 70, 9), (3, 64, 32), (1, 33, 7), (17, 96, 20), (2, 1, 3), (4, 16, 1)]


def sizes(i: int) -> tuple[int, int, int]:
    return SIZES[i % len(SIZES)]


def _each(rank: int, v: Any) -> list[int]:
    """A number for each dimension."""
    return [v] * rank if isinstance(v, int) else list(v)


def conv(rank: int, x: Sequence[int], w: Sequence[int], stride=1, padding: Any = 0, dilation=1, groups=1) -> Any:
    """The operator, the shapes of input and weight, the arguments behind the bias, and the oracle's."""
    each = partial(_each, rank)
    op = {1: aten.conv1d, 2: aten.conv2d, 3: aten.conv3d}[rank]
    if isinstance(padding, str):
        g = Geometry(each(stride), [0] * rank, each(dilation), False, [0] * rank, groups)
        return op.padding, x, w, [each(stride), padding, each(dilation), groups], g
    g = Geometry(each(stride), each(padding), each(dilation), False, [0] * rank, groups)
    return op.default, x, w, [each(stride), each(padding), each(dilation), groups], g


def conv_transpose(
    rank: int,
    x: Sequence[int],
    w: Sequence[int],
    stride=1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups=1,
    dilation=1,
) -> Any:
    each = partial(_each, rank)
    ops = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}
    lists = [each(v) for v in (stride, padding, output_padding)]
    g = Geometry(lists[0], lists[1], each(dilation), True, lists[2], groups)
    return ops[rank], x, w, [*lists, groups, each(dilation)], g


def general(x: Sequence[int], w: Sequence[int], *rest: Any) -> Any:
    return aten.convolution.default, x, w, list(rest), Geometry(*rest)


CONVOLUTIONS = {
    "one": conv(1, (2, 3, 11), (4, 3, 3)),
    "one_all": conv(1, (2, 4, 17), (6, 2, 3), 2, 3, 2, 2),
    "one_alone": conv(1, (4, 9), (6, 4, 2)),
    "one_same": conv(1, (2, 3, 11), (4, 3, 3), padding="same"),
    "one_same_even": conv(1, (2, 3, 11), (4, 3, 4), padding="same"),
    "one_same_dilated": conv(1, (2, 4, 11), (4, 2, 2), padding="same", dilation=3, groups=2),
    "one_valid": conv(1, (2, 3, 11), (4, 3, 3), 2, "valid"),
    "two": conv(2, (2, 3, 8, 7), (5, 3, 3, 2)),
    "two_padded": conv(2, (2, 3, 8, 7), (5, 3, 3, 3), padding=1),
    "two_all": conv(2, (2, 6, 9, 8), (4, 3, 3, 2), [2, 1], [1, 2], [1, 2], 2),
    "two_depthwise": conv(2, (1, 6, 8, 7), (6, 1, 3, 3), padding=1, groups=6),
    "two_depthwise_multiplied": conv(2, (3, 3, 8, 7), (6, 1, 3, 3), 2, 1, 1, 3),
    "two_pointwise": conv(2, (2, 8, 5, 5), (4, 8, 1, 1)),
    "two_alone": conv(2, (3, 8, 7), (5, 3, 3, 2), padding=1),
    "two_same": conv(2, (2, 3, 8, 7), (5, 3, 3, 5), padding="same", dilation=[2, 1]),
    "two_same_even": conv(2, (1, 3, 8, 7), (5, 3, 2, 4), padding="same"),
    "two_valid": conv(2, (2, 3, 8, 7), (5, 3, 3, 3), [2, 1], "valid"),
    "three": conv(3, (2, 2, 5, 6, 4), (3, 2, 2, 3, 2), padding=1),
    "three_all": conv(3, (1, 4, 7, 6, 5), (4, 2, 2, 3, 2), [2, 1, 1], [1, 0, 1], [1, 2, 1], 2),
    "three_same": conv(3, (1, 2, 5, 4, 3), (3, 2, 3, 2, 1), padding="same"),
    "transposed_one": conv_transpose(1, (2, 3, 7), (3, 4, 3)),
    "transposed_one_all": conv_transpose(1, (2, 4, 7), (4, 3, 3), 3, 1, 2, 2, 2),
    "transposed_one_alone": conv_transpose(1, (3, 7), (3, 4, 2), 2),
    "transposed_two": conv_transpose(2, (2, 4, 5, 4), (4, 3, 3, 2), 2, 1, 1),
    "transposed_two_all": conv_transpose(2, (2, 4, 5, 4), (4, 3, 3, 2), [2, 3], [1, 0], [1, 2], 2, [1, 2]),
    "transposed_two_cropped": conv_transpose(2, (1, 2, 6, 6), (2, 3, 2, 2), 1, 3),
    "transposed_three": conv_transpose(3, (1, 4, 3, 4, 2), (4, 2, 2, 3, 2), [2, 1, 2], [1, 1, 0], [1, 0, 0], 2),
    "general_one": general((2, 4, 9), (6, 2, 3), [2], [1], [2], False, [0], 2),
    "general_two": general((2, 3, 8, 7), (5, 3, 3, 2), [1, 2], [2, 1], [2, 1], False, [0, 0], 1),
    "general_three": general((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), [1, 1, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    "general_transposed": general((2, 4, 5, 4), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], True, [1, 0], 2),
    "general_transposed_one": general((2, 4, 5), (4, 2, 3), [2], [0], [1], True, [1], 1),
}


def whole_but(dim: int, ndim: int) -> tuple[int, ...]:
    """A block for each index of a dimension."""
    return tuple(1 if d == dim else -1 for d in range(ndim))


def extremes(low: int, high: int) -> Callable[..., np.ndarray]:
    """Codes of the two ends of a format."""

    def codes(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.integers(0, 2, shape) == 0, low, high).astype(numerics.INTEGERS[q.format.name][4])

    return codes


def constant(value: int) -> Callable[..., np.ndarray]:
    return extremes(value, value)


PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FLOATS = {
    "fp8_tensor": presets.FP8_TENSOR,
    "fp8_row": presets.FP8_ROW,
    "fp8_1x128": presets.FP8_1X128,
    "fp8_128x128": presets.FP8_128X128,
    "fp8_static": presets.FP8_TENSOR_STATIC,
    "fp8_e5m2_tensor": presets.FP8_E5M2_TENSOR,
    "fp8_e5m2_row": presets.FP8_E5M2_ROW,
    "fp8_e5m2_1x128": presets.FP8_E5M2_1X128,
    "fp8_row_power": Quantizer(E4M3, (1, -1), CurrentScaling(power_of_two=True)),
    "fp8_1x128_float": Quantizer(E4M3, (1, 128), BlockScaling(power_of_two=False)),
    "fp8_groups": Quantizer(E5M2, (1, 50), Amax()),
    "mxfp8": presets.MXFP8,
    "mxfp8_e5m2": presets.MXFP8_E5M2,
    "mxfp4": presets.MXFP4,
    "mxfp8_tile": Quantizer(E4M3, (8, 32), Microscaling()),
    "nvfp4": presets.NVFP4,
    "nvfp4_16x16": presets.NVFP4_16X16,
    "nvfp4_row": presets.NVFP4_ROW,
    "nvfp4_hadamard": presets.NVFP4_HADAMARD,
    "nvfp4_stochastic": presets.NVFP4_STOCHASTIC,
    "nvfp4_gradient": presets.NVFP4_GRADIENT,
    "nvfp4_outer_group": Quantizer(E2M1, (1, 16), TwoLevel(outer=(-1, 16))),
    "nvfp8": Quantizer(E4M3, (1, 16), TwoLevel()),
    "fp4_row": Quantizer(E2M1, (1, -1), CurrentScaling()),
}
BOOKS = {
    name.lower(): getattr(presets, name) for name in "STATE8 STATE8_UNSIGNED STATE4 STATE4_UNSIGNED STATE_FP8".split()
}
WEIGHTS = {**INTEGERS, **FLOATS, **BOOKS}


def factor(name: str, shape: Sequence[int], rng: np.random.Generator) -> Pair | Plain:
    if name in PLAIN:
        return Plain(plain(shape, rng, PLAIN[name]))
    return scaled_oracles.make(WEIGHTS[name], shape, rng, scales=small_scales)


def small_scales(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Scales so small that most results underflow in float16."""
    return scaled_oracles.random_scales(shape, rng) * f32(2.0**-6)


OUTPUTS: dict[str, Quantizer] = {
    "int8_tensor": presets.INT8_TENSOR,
    "int8_row": presets.INT8_ROW,
    "uint8_row_affine": presets.UINT8_ROW_AFFINE,
    "int8_static": presets.INT8_TENSOR_STATIC,
    "int8_static_affine": presets.INT8_TENSOR_STATIC_AFFINE,
    "uint8_static_rows": Quantizer(UINT8, (1, -1), Static(affine=True)),
    "int4_groups": Quantizer(INT4, (1, 4)),
    "ternary": presets.TERNARY_ROW,
    "fp8_row": presets.FP8_ROW,
    "fp8_static": presets.FP8_TENSOR_STATIC,
    "mxfp8": presets.MXFP8,
    "nvfp4": presets.NVFP4,
    "state8": presets.STATE8,
}


def given_scales(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The scale and zero point that q needs from the caller."""
    if not isinstance(q.scale, Static):
        return {}
    sizes = numerics.grid(shape, q.block)
    found = {"scale": (rng.uniform(0.02, 0.2, sizes) * 2.0 ** rng.integers(0, 8)).astype(f32)}
    if q.scale.affine:
        low, high, *_ = numerics.INTEGERS[q.format.name]
        found["zero_point"] = rng.integers(low, high + 1, sizes).astype(numerics.INTEGERS[q.format.name][4])
    return found


def check_quantized(op: Any, name: str, y: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """The result, quantized as numpy quantizes `y`, which is in float32."""
    q = OUTPUTS[name]
    rng = generator(*name.encode(), y.size)
    given = given_scales(q, y.shape, rng)
    with np.errstate(all="ignore"):
        want = numerics.quantize(q, y.astype(f32), **given)
    arguments = unwrapped(args)
    scales = {f"output_{k}": torch.from_numpy(v) for k, v in given.items()}
    got = hop.scaled(op, q, *arguments, **scales, **kwargs)
    assert_buffers(got, q, want, f"{op} in {name}")
    tensors = [a for a in arguments if isinstance(a, Tensor)] or [a for a in arguments[0] if isinstance(a, Tensor)]
    assert got.shape == y.shape
    assert got.dtype == tensors[0].dtype


linear, mm, conv2d = aten.linear.default, aten.mm.default, aten.conv2d.default
