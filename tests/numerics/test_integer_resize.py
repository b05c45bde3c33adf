"""Bilinear resizes of codes, against Python's own integers, one pixel at a time, and against PyTorch's floats."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop.numerics.formats import INT8
from hop.numerics.integer.functions import Pt2eResizeBilinear, TfliteResizeBilinear, TosaResizeBilinear
from hop.numerics.integer.resize import TosaStep
from hop.numerics.interpolation import interpolated
from tests.support import integer_functions as exact

aten = torch.ops.aten
FORMATS: dict[torch.dtype, Any] = {torch.int8: INT8, torch.int16: torch.int16}
SIZES = [(1, 1), (1, 6), (4, 8), (4, 9), (5, 3), (7, 7), (6, 21), (9, 1), (3, 40)]
CASES = [(rows, columns, align) for rows, columns in zip(SIZES, SIZES[::-1], strict=True) for align in (False, True)]

RESTS: list[Any] = [
    *(([18, 22], False), ([18, 22], False, 2.0, 2.0), ([12, 30], False, 1.37, 2.8), ([9, 25], True), ([1, 4], True)),
    ([9, 11], False),
    # Of larger ones torch 2.15 rounds places twice; which version began is not known.
    *((([70, 80], False), ([101, 33], True), ([140, 11], False)) if torch.__version__.startswith("2.13.") else ()),
]


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, shape).to(dtype)
    x.flatten()[:2] = torch.tensor([info.min, info.max])
    return x


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor(v) for v in values]


def tflite(x: list[list[int]], sizes: tuple[int, int], align: bool) -> list[list[int]]:
    """TFLite's loop."""
    n = (len(x), len(x[0]))
    scales, starts = [], []
    for before, after in zip(n, sizes, strict=True):
        scale = (1024 * before + after // 2) // after
        if align and after > 1:
            scale = (1024 * (before - 1) + (after - 1) // 2) // (after - 1)
        scales.append(scale)
        starts.append(0 if align else scale // 2 - 512)
    found = []
    for i in range(sizes[0]):
        row = []
        for j in range(sizes[1]):
            places = [k * s + start for k, s, start in zip((i, j), scales, starts, strict=True)]
            low = [max(exact.c_divide(p, 1024), 0) for p in places]
            high = [min(exact.c_divide(p + 1023, 1024), m - 1) for p, m in zip(places, n, strict=True)]
            (a, b), (c, d) = ((1024 - (p - 1024 * k), p - 1024 * k) for p, k in zip(places, low, strict=True))
            total = x[low[0]][low[1]] * a * c + x[high[0]][low[1]] * b * c
            total += x[low[0]][high[1]] * a * d + x[high[0]][high[1]] * b * d
            row.append(exact.c_divide(total + (2**19 if total > 0 else -(2**19)), 2**20))
        found.append(row)
    return found


def places(before: int, after: int, align: bool) -> list[Fraction]:
    """Where the elements of the result lie, as PyTorch has it."""
    if align:
        return [Fraction(i * (before - 1), after - 1) if after > 1 else Fraction(0) for i in range(after)]
    return [max((i + Fraction(1, 2)) * before / after - Fraction(1, 2), Fraction(0)) for i in range(after)]


def mean(x: list[list[int]], at: tuple[Fraction, Fraction]) -> Fraction:
    low = [int(p) for p in at]
    high = [min(k + 1, n - 1) for k, n in zip(low, (len(x), len(x[0])), strict=True)]
    b, d = (p - k for p, k in zip(at, low, strict=True))
    upper = x[low[0]][low[1]] * (1 - d) + x[low[0]][high[1]] * d
    return upper * (1 - b) + (x[high[0]][low[1]] * (1 - d) + x[high[0]][high[1]] * d) * b


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize(("rows", "columns", "align"), CASES)
def test_tflite(rows: tuple[int, int], columns: tuple[int, int], align: bool, dtype: torch.dtype) -> None:
    sizes = (rows[1], columns[1])
    x, (s,) = drawn(dtype, 1, 2, rows[0], columns[0]), numbers(0.02)
    given: Any = {"op": aten.upsample_bilinear2d.vec, "rest": (list(sizes), align, None), "dims": [2, 3]}
    found = TfliteResizeBilinear().codes(x, s, 0, s, 0, FORMATS[dtype], **given)
    assert found.tolist() == [[tflite(c.tolist(), sizes, align) for c in x[0]]]
    given = {"op": aten.upsample_bilinear2d.default, "rest": (list(sizes), align), "dims": [2, 3]}
    assert torch.equal(TfliteResizeBilinear().codes(x, s, 0, s, 0, FORMATS[dtype], **given), found)


@pytest.mark.parametrize(("rows", "columns", "align"), CASES)
def test_tosa(rows: tuple[int, int], columns: tuple[int, int], align: bool) -> None:
    """A mean of whole numbers, times a reciprocal of 31 bits; then other units."""
    x, (own, out) = drawn(torch.int8, 1, 2, rows[0], columns[0]), numbers(0.021, 0.0093)
    given: Any = {"op": aten.upsample_bilinear2d.vec, "rest": ([rows[1], columns[1]], align, None), "dims": [2, 3]}
    steps = [TosaStep.of(*pair, align) for pair in (rows, columns)]
    parts = steps[0].parts * steps[1].parts
    m, other = exact.tosa_multiplier(1 / parts), exact.tosa_multiplier(float(own) / float(out))
    wanted, scaled = [], []
    for channel in x[0].tolist():
        for at in itertools.product(places(*rows, align), places(*columns, align)):
            total = mean(channel, at) * parts
            assert total.denominator == 1, "its parts are whole"
            wanted.append(exact.tosa_scale(int(total), *m))
            scaled.append(exact.within(exact.tosa_scale(wanted[-1] - 11, *other) - 4, -128, 127))
    assert TosaResizeBilinear().codes(x, own, 11, own, 11, INT8, **given).flatten().tolist() == wanted
    assert TosaResizeBilinear().codes(x, own, 11, out, -4, INT8, **given).flatten().tolist() == scaled


@pytest.mark.parametrize(("before", "after"), [*SIZES, (8, 2000)])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.quick(2)
def test_places_of_tosa(before: int, after: int, align: bool) -> None:
    step = TosaStep.of(before, after, align)
    own = [Fraction(i * step.step + step.offset, step.parts) for i in range(after)]
    inside = [min(max(p, Fraction(0)), Fraction(before - 1)) for p in own]
    assert inside == [min(p, Fraction(before - 1)) for p in places(before, after, align)]
    assert (before - 1) * step.parts - step.offset + step.border(before, after) == (after - 1) * step.step


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one, PyTorch resizes three channels another way."""
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="needs PyTorch's kernels for x86 with AVX2",
)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 3, 4, 8, 13, 24])
@pytest.mark.quick(12)
def test_pt2e(form: torch.memory_format, channels: int) -> None:
    """The codes of PyTorch's float32, where many results lie halfway between two."""
    zero, (own, out) = 5, numbers(0.03125, 0.0371)
    x = drawn(torch.int8, 2, channels, 9, 11).contiguous(memory_format=form)
    values = ((x.float() - zero) * own).contiguous(memory_format=form)
    compared = 0
    for rest in RESTS:
        real = aten.upsample_bilinear2d.default(values, *rest)
        for scale in (own, out):
            given: Any = {"op": aten.upsample_bilinear2d.default, "rest": rest, "dims": [2, 3]}
            found = Pt2eResizeBilinear().codes(x, own, zero, scale, -3, INT8, **given)
            wanted = ((real * (1 / scale)).round() - 3).clamp(-128, 127).to(torch.int8)
            assert torch.equal(found, wanted), (rest, scale)
            compared += found.numel()
    assert compared == 2 * 2 * channels * sum(rows * columns for (rows, columns), *_ in RESTS)


@pytest.mark.parametrize("op", [aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d])
def test_of_float64(op: Any) -> None:
    """Within a few roundings of PyTorch's, and equal where a factor of two makes weights exact."""
    n = int(str(op)[-2])
    x = torch.randn(2, 3, *(6, 5, 4)[:n], dtype=torch.float64)
    dims = list(range(2, 2 + n))
    for rest in (([9, 13, 2][:n], False, None), ([9, 1, 7][:n], True, None), (None, False, [1.3, 2.7, 0.6][:n])):
        torch.testing.assert_close(interpolated(x, op.vec, rest, dims), op.vec(x, *rest), rtol=1e-14, atol=1e-14)
    whole = (None, False, [2.0] * n)
    x = torch.randint(-(2**15), 2**15, x.shape).double()
    assert torch.equal(interpolated(x, op.vec, whole, dims), op.vec(x, *whole))


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ((None, False, None), "one of output_size and scale_factors must be given, got None and None"),
        (([3, 4], False, [1.0, 2.0]), "one of output_size and scale_factors must be given"),
        (([3], False, None), r"output_size or scale_factors must be 2 numbers, got \[3\]"),
        ((None, False, [0.01, 2.0]), r"sizes must be 1 or more, got \[0, 8\] of a tensor with \[3, 4\]"),
    ],
)
def test_wrong_calls(rest: Any, message: str) -> None:
    x = hop.quantize(hop.presets.INT8_TENSOR, torch.randn(1, 2, 3, 4))
    with pytest.raises(ValueError, match=message):
        hop.scaled(aten.upsample_bilinear2d.vec, torch.float32, x, *rest)


def test_factors_of_no_sizes() -> None:
    x, (s,) = drawn(torch.int8, 1, 2, 3, 4), numbers(0.02)
    for convention in (TfliteResizeBilinear(), TosaResizeBilinear()):
        given: Any = {"op": aten.upsample_bilinear2d.vec, "rest": (None, False, [1.5, 2.0]), "dims": [2, 3]}
        with pytest.raises(ValueError, match=rf"{type(convention).__name__}: scale_factors must be those of the sizes"):
            convention.codes(x, s, 0, s, 0, INT8, **given)
