"""Functions and gated products that are quantized in the same kernel, in the emulator, as hop.scaled asks for them: the
CPU's bits, NaN as one."""

import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import cutlass_kernels

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from cutlass_kernels import function_tables
from cutlass_kernels.elements import FORMATS
from cutlass_kernels.quantizing import Rows
from hop import presets
from hop.numerics import formats
from hop.numerics.quantizer import Quantizer
from tests.cutlass.test_quantize import code_of
from tests.cutlass.test_quantize_norms import BF16, DTYPES, F32, GIVEN, QUANTIZERS, check
from tests.numerics import polynomials
from tests.numerics.test_functions import hard_cases

aten, hops = torch.ops.aten, torch.ops.hop
FUNCTIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "silu": (aten.silu.default, hops.silu_mul.default, {}),
    "gelu": (aten.gelu.default, hops.gelu_mul.default, {}),
    "gelu_tanh": (aten.gelu.default, hops.gelu_mul.default, {"approximate": "tanh"}),
}
COLUMNS = (272, 77)  # whole chunks, and not


def numbers(dtype: torch.dtype, columns: int) -> Tensor:
    """Rows of several magnitudes, of what gives subnormal numbers and zeros, of NaN, infinities and huge numbers."""
    g = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=g)
    x *= torch.exp2(torch.randint(-4, 4, x.shape, generator=g).float())
    info = torch.finfo(dtype)
    x[1], x[2] = x[1] * info.smallest_normal, x[2].abs() * -0.5 - 0.1
    x[3], x[4] = torch.linspace(-16, -8, columns), torch.linspace(-112, -80, columns)
    x[5] = torch.linspace(-info.max, info.max, columns)
    x[6] = torch.arange(columns) % 3 - 1.0
    x[6, ::7] = -0.0
    x[7, 3::5], x[7, 4::9] = math.inf, -math.inf
    x[8, 5::11] = math.nan
    return x.to(dtype)


CASES = [
    (f"{name}, {key}", name, key, DTYPES[(i + j) % 3], COLUMNS[(i + j) % 2])
    for i, name in enumerate(FUNCTIONS)
    for j, key in enumerate(QUANTIZERS)
]


def function(name: str, q: Quantizer, x: Tensor, *given: Any) -> None:
    op, _, kwargs = FUNCTIONS[name]
    check(op, q, (x,), *given, **kwargs)


def gated(name: str, q: Quantizer, x: Tensor, other: Tensor, *given: Any) -> None:
    _, op, kwargs = FUNCTIONS[name]
    check(op, q, (x, other), *given, **kwargs)


class TestFunctions(unittest.TestCase):
    @pytest.mark.full
    def test_silu_mul(self):
        x = numbers(BF16, 272)
        gated("silu", presets.INT8_ROW, x, x.flip(1))

    @parameterized.expand(CASES)
    @pytest.mark.full
    @pytest.mark.sampled(16)
    def test_each(self, _, name, key, dtype, columns):
        x = numbers(dtype, columns)
        function(name, QUANTIZERS[key], x, *GIVEN.get(key, ()))
        gated(name, QUANTIZERS[key], x, x.flip(1).to(DTYPES[columns % 3]), *GIVEN.get(key, ()))

    @parameterized.expand(CASES)
    @pytest.mark.exhaustive
    def test_each_dtype(self, _, name, key, dtype, columns):
        for own in DTYPES:
            for columns in (*COLUMNS, 16, 2061):
                x = numbers(own, columns)
                function(name, QUANTIZERS[key], x, *GIVEN.get(key, ()))
                gated(name, QUANTIZERS[key], x, x.flip(1).to(dtype), *GIVEN.get(key, ()))

    @parameterized.expand([(name,) for name in FUNCTIONS])
    @pytest.mark.full
    def test_what_float64_does_not_decide(self, name):
        """Each alone in its block, whose scale has its bits: those of its products with several numbers."""
        found, factors = hard_cases(name)[0], torch.linspace(1, 2, 9)
        x = torch.zeros(len(found) * len(factors), 16)
        x[:, 3] = found.repeat(len(factors))
        other = factors.repeat_interleave(len(found))[:, None].expand(-1, 16)
        gated(name, Quantizer(formats.INT8, (1, 16)), x, other.contiguous())

    @pytest.mark.exhaustive
    def test_long_rows_are_computed_twice(self):
        x = torch.randn(1, 16_400, generator=torch.Generator().manual_seed(0)).bfloat16()
        gated("silu", presets.INT8_ROW_AFFINE, x, x.flip(1))

    @pytest.mark.full
    def test_other_shapes_and_strides(self):
        both = numbers(BF16, 192)[:8]
        x, other = both[:, :96], both[:, 96:]  # as a projection to both factors gives them
        gated("silu", presets.MXFP8, x, other)
        gated("silu", presets.MXFP8, x.reshape(2, 4, 96), other.reshape(2, 4, 96))
        function("silu", presets.INT8_CONV, numbers(BF16, 36)[:8].reshape(4, 2, 6, 6))


class TestCompile(unittest.TestCase):
    @parameterized.expand([
        (Rows(BF16, FORMATS["s8"], "amax", threads=512, operation="silu", other="bf16"),),
        (Rows(F32, FORMATS["u8"], "minmax", threads=512, operation="gelu", other="f32"),),
    ])  # fmt: skip
    @pytest.mark.full
    def test_registers(self, variant):
        code_of(variant)

    def test_tables(self):
        """They are those of the CPU."""
        written = polynomials.GPU_FILE.read_text()
        assert polynomials.for_gpus(polynomials.FILE.read_text()) == written
        assert len(function_tables.POWERS) == 16
