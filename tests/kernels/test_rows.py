"""A row of a native product has the same bits alone and among others: any rows, place, threads, and weight's layout."""

import itertools
import math
import os
import subprocess
import sys
import unittest
from dataclasses import replace

import pytest
import torch
from parameterized import parameterized

import hop
from hop import presets
from hop.kernels.cpu import native
from tests import levels

aten = torch.ops.aten
MISSING = native.library().missing
BUILT = unittest.skipIf(MISSING is not None, MISSING or "")
PAIRS = [
    ("FP8_ROW", "FP8_ROW"),
    ("FP8_E5M2_ROW", "FP8_TENSOR"),
    ("FP8_1X128", "FP8_128X128"),
    ("MXFP8", "MXFP8"),
    ("MXFP8", "MXFP4"),
    ("NVFP4", "NVFP4"),
    (torch.bfloat16, "INT8_ROW"),
    (torch.bfloat16, "INT4_32"),
    (torch.bfloat16, "UINT4_32_AFFINE"),
    (torch.bfloat16, "MXFP8"),
    (torch.bfloat16, "NVFP4"),
    (torch.float32, "INT8_ROW"),
    (torch.float16, "INT8_ROW"),
    (torch.float32, "MXFP4"),
    (torch.bfloat16, "INT4_64"),
    (torch.bfloat16, "UINT4_128_AFFINE"),
    ("INT8_ROW_AFFINE", "INT4_32"),
    ("INT8_ROW_AFFINE", "INT4_128"),
    ("INT8_ROW_AFFINE", "UINT4_32_AFFINE"),
    ("INT8_ROW", "UINT4_64_AFFINE"),
    ("INT8_ROW", "INT8_ROW"),
    ("UINT8_ROW_AFFINE", "UINT8_ROW_AFFINE"),
    ("INT8_ROW_AFFINE", "INT4_ROW"),
    ("INT8_ROW_AFFINE", "INT8_32"),
    (torch.bfloat16, "INT8_32"),
    (torch.bfloat16, "FP8_128X128"),
    (torch.float32, "INT4_32"),
    (torch.float32, "FP8_ROW"),
    (torch.float32, "NVFP4"),
    (torch.float16, "UINT4_32_AFFINE"),
    ("INT8_32", "INT4_32"),
]
PARTIAL = [
    (torch.float32, "INT8_ROW"),
    (torch.float32, "INT4_32"),
    (torch.float16, "UINT4_32_AFFINE"),
    ("INT8_ROW", "INT8_ROW"),
    ("UINT8_ROW_AFFINE", "UINT8_ROW_AFFINE"),
    ("INT8_ROW_AFFINE", "INT4_32"),
    ("INT8_ROW", "UINT4_64_AFFINE"),
]
QUANTIZERS = presets.PRESETS | {
    "INT4_ROW": replace(presets.INT4_32, block=(1, -1)),
    "INT8_32": replace(presets.INT8_ROW, block=(1, 32)),
}


def linear(x, w, output=torch.float32):
    return hop.scaled(aten.linear.default, output, x, w, None)


def bits(y):
    """Those of each number, and the same for each NaN."""
    y = torch.where(y.isnan(), math.nan, y)
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


def left_factor(left, m, k):
    """Of rows of all sizes; among plain ones, some that are not finite."""
    x = torch.randn(m, k) * torch.exp2(torch.randint(-8, 9, (m, 1)).float())
    if isinstance(left, str):
        return hop.quantize(QUANTIZERS[left], x)
    x[m // 2, k // 3], x[m // 3] = math.inf, math.nan
    if left != torch.float16:
        x[m // 4] *= 2.0**70
        x[m // 5] *= 2.0**-90
    return x.to(left)


def differing(level, left, right, sizes, k, n, threads, outputs):
    """Elements of rows that differ from the rows alone, and how many were compared."""
    torch.manual_seed(0)
    if left in (torch.float32, torch.float16) and not level.startswith("a"):
        sizes = [m for m in sizes if m <= 13]  # more take no native kernel there
    most = max(sizes)
    sizes = [max(1, m - i % 3) for i, m in enumerate(sizes)] + [most]
    x, w = left_factor(left, most, k), torch.randn(n, k)
    if right.startswith("MX"):
        w[n // 2, :32] *= 2.0**-126  # scales, with which words leave the normal numbers
    w = hop.quantize(QUANTIZERS[right], w)
    wrong = count = 0
    before = torch.get_num_threads()
    try:
        with levels.at(level):
            told = hop.explain(aten.linear.default, torch.float32, x, w, None).splitlines()
            assert any(line.startswith("native product") and line.endswith(": chosen") for line in told), told
            for output in outputs:
                torch.set_num_threads(1)
                alone = bits(torch.cat([linear(x[i : i + 1], w, output) for i in range(most)]))
                for (at, m), number, form in itertools.product(enumerate(sizes), threads, (w, hop.pack(w))):
                    first = min(at % 3, most - m)
                    torch.set_num_threads(number)
                    y = bits(linear(x[first : first + m], form, output))
                    wrong += int((y != alone[first : first + m]).sum())
                    count += y.numel()
    finally:
        torch.set_num_threads(before)
    return wrong, count


@BUILT
class TestRows(unittest.TestCase):
    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in PAIRS])
    @pytest.mark.quick(10)
    def test_a_row_does_not_depend_on_its_neighbours(self, level, left, right):
        sizes, outputs = (1, 2, 3, 6, 13, 17, 40), (torch.float32, torch.bfloat16)
        wrong, count = differing(level, left, right, sizes, 704, 72, (1, 2), outputs)
        assert count and not wrong, f"{wrong} of {count}"

    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in PAIRS])
    @pytest.mark.exhaustive
    def test_any_number_of_rows(self, level, left, right):
        for k, n in ((128, 33), (832, 97)):
            wrong, count = differing(level, left, right, range(1, 257), k, n, (1, 2, 3), (torch.float32,))
            assert count and not wrong, f"{k}x{n}: {wrong} of {count}"

    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in PAIRS[3:10]])
    def test_few_rows_in_an_order_of_their_own(self, level, left, right):
        """Where it is asked for, at the level that has one; at others nothing changes."""
        torch.manual_seed(0)
        x, w = torch.randn(2, 704), hop.pack(hop.quantize(QUANTIZERS[right], torch.randn(72, 704)))
        x = hop.quantize(QUANTIZERS[left], x) if isinstance(left, str) else x.to(left)
        with levels.at(level):
            before = linear(x, w)
            with native.reordering_few_rows():
                own = linear(x, w)
            assert torch.equal(bits(linear(x, w)), bits(before))
        assert level == "amx" or torch.equal(bits(own), bits(before))
        factors = [f.dequantize() if isinstance(f, hop.QuantizedTensor) else f for f in (x, w)]
        exact = [f.double() for f in factors]
        bound = 704 * 2.0**-23 * (exact[0].abs() @ exact[1].abs().T)
        assert ((own.double() - exact[0] @ exact[1].T).abs() <= bound).all()

    @parameterized.expand([(level, *pair) for level in native.LEVELS for pair in PARTIAL])
    def test_few_rows_of_partial_tiles(self, level, left, right):
        """K and N end within a tile, and K within a group."""
        for k, n in ((130, 33), (62, 17)):
            wrong, count = differing(level, left, right, (1, 2, 3, 4, 7), k, n, (1,), (torch.float32,))
            assert count and not wrong, f"{k}x{n}: {wrong} of {count}"

    @parameterized.expand([(level, left) for level in native.LEVELS for left in (torch.bfloat16, "INT8_ROW")])
    def test_zero_points_that_are_not_codes(self, level, left):
        """A caller can write them into the buffer; few rows, many rows and packed weights treat them alike."""
        torch.manual_seed(0)
        x = torch.randn(6, 320)
        x = hop.quantize(QUANTIZERS[left], x) if isinstance(left, str) else x.to(left)
        w = hop.quantize(presets.UINT4_32_AFFINE, torch.randn(40, 320))
        w.zero_point.random_(0, 256)
        factors = [f.dequantize() if isinstance(f, hop.QuantizedTensor) else f for f in (x, w)]
        exact = [f.double() for f in factors]
        bound = 320 * 2.0**-23 * (exact[0].abs() @ exact[1].abs().T)
        with levels.at(level):
            for form in (w, hop.pack(w)):
                y = linear(x, form)
                assert ((y.double() - exact[0] @ exact[1].T).abs() <= bound).all()
                assert torch.equal(bits(torch.cat([linear(x[i : i + 2], form) for i in (0, 2, 4)])), bits(y))

    @pytest.mark.full
    def test_the_environment_says_0_or_1(self):
        """A library that is loaded reads it once."""
        for said, words in (("1", ""), ("yes", "HOP_REORDER_FEW_ROWS must be 0 or 1, got 'yes'")):
            program = "from hop.kernels.cpu import native; print(native.library().functions.hop_reorder_few_rows(0))"
            found = subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | {"HOP_REORDER_FEW_ROWS": said},
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.stdout.strip() == ("1" if not words else "") and words in found.stderr

    @parameterized.expand([("FP8_ROW", "FP8_ROW"), (torch.bfloat16, "INT8_ROW")])
    @pytest.mark.full
    def test_compiled(self, left, right):
        """A compiled program gives the same bits as eager mode, for any number of rows."""
        torch.manual_seed(0)
        x, w = left_factor(left, 9, 320), hop.pack(hop.quantize(QUANTIZERS[right], torch.randn(40, 320)))
        want = bits(linear(x, w))
        compiled = torch.compile(linear, dynamic=False)
        for first, m in ((0, 9), (2, 5)):
            assert torch.equal(bits(compiled(x[first : first + m], w)), want[first : first + m])
