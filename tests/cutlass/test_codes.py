"""Codes of elements in the CuTe DSL, in the emulator, against the formats of hop."""

import functools
import tempfile
import unittest

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import cutlass_kernels
from cutlass_kernels.elements import E2M1, E4M3, E5M2, FORMATS, Format
from hop.numerics import formats

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.ptx import contractable
from tests.ptx.host import Host

OURS = {"s8": "INT8", "u8": "UINT8", "s4": "INT4", "u4": "UINT4", "e4m3": "E4M3", "e5m2": "E5M2", "e2m1": "E2M1"}
FLOATS = (E4M3, E5M2, E2M1)
INTEGERS = tuple(f for f in FORMATS.values() if f.is_integer)


def ours(f: Format) -> formats.Format:
    return getattr(formats, OURS[f.name])


@functools.cache
def kernel(f: Format, what: str) -> Host:
    """Each thread makes of 16 numbers their codes, or of these the numbers."""
    import cutlass
    from cutlass import Float32, Uint32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cutlass_kernels import codes

    words = 16 // f.per_word

    class Kernel:
        @cute.jit
        def __call__(self, x: cute.Tensor, noise: cute.Tensor, scale: Float32, zero: Float32, out: cute.Tensor, stream):
            blocks = cute.size(x) // 512
            self.kernel(x, noise, scale, zero, out).launch(grid=(blocks, 1, 1), block=[32, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, x: cute.Tensor, noise: cute.Tensor, scale: Float32, zero: Float32, out: cute.Tensor):
            at = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
            own = [x[at * 16 + i] for i in range(16)]
            random = [noise[at * 16 + i] for i in range(16)]
            if cutlass.const_expr(what == "decode"):
                found = codes.decode(f, [codes.bits(own[i]) for i in range(words)], zero)
                for i in cutlass.range_constexpr(16):
                    out[at * 16 + i] = codes.bits(found[i])
            elif cutlass.const_expr(what == "noise" and f.is_integer):
                by = codes.divisor(scale)
                made = codes.words_of(
                    f, [codes.integer_with_noise(f, codes.quotient(own[i], by), random[i], zero) for i in range(16)]
                )
                for i in cutlass.range_constexpr(words):
                    out[at * words + i] = made[i]
            elif cutlass.const_expr(f.is_integer):
                values, made = cute.make_rmem_tensor(16, Float32), cute.make_rmem_tensor(words, Uint32)
                amax = Float32(0.0)
                for i in cutlass.range_constexpr(16):
                    values[i] = own[i]
                    amax = codes.larger_or_nan(amax, codes.magnitude(own[i]))
                codes.encode_integers(f, values, codes.divisor(scale), zero, amax, True, made)
                for i in cutlass.range_constexpr(words):
                    out[at * words + i] = made[i]
            else:
                own = [codes.mul(v, scale) for v in own]
                made = codes.with_noise(f, own, random) if cutlass.const_expr(what == "noise") else codes.encode(f, own)
                for i in cutlass.range_constexpr(words):
                    out[at * words + i] = made[i]

    def vector(dtype):
        return make_fake_tensor(dtype, (cute.sym_int32(),), (1,), assumed_align=16)

    arguments = (vector(Float32), vector(Uint32), Float32(0), Float32(0), vector(Uint32))
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        made = cute.compile(Kernel(), *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
        assert contractable(made.artifacts.PTX) == []
        return Host(made)


def numbers(f: Format) -> Tensor:
    """Every number of the format, what lies between, a little beside those, and what is odd; a multiple of 512."""
    known = torch.tensor(ours(f).numbers[:: 1 if f.bits < 16 else 16])
    ties = (known[1:] + known[:-1]) / 2
    near = [known, ties, *(torch.nextafter(ties, torch.tensor(end)) for end in (-1e30, 1e30))]
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 1e38, -1e38, 2.0**-126])
    random = torch.randn(1000) * torch.exp2(torch.randint(-12, 12, (1000,)).float())
    found = torch.cat([*near, odd, random, random * ours(f).max / 4])
    return torch.cat([found, found[: -len(found) % 512]])


def unpacked(f: Format, words: Tensor) -> Tensor:
    found = words.view(torch.uint8)
    return torch.stack((found & 15, found >> 4), -1).flatten() if f.bits == 4 else found


def bytes_of(f: Format, codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) & (15 if f.bits == 4 else 255)


class TestCodes(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def encoded(self, f: Format, what: str, x: Tensor, noise: Tensor, scale: float = 1.0, zero: float = 0.0) -> Tensor:
        out = torch.zeros(len(x) * f.bits // 32, dtype=torch.uint32)
        kernel(f, what)(x, noise.view(torch.uint32), scale, zero, out)
        return unpacked(f, out)

    @parameterized.expand([(f.name, f) for f in FLOATS])
    def test_floats(self, _, f):
        x = numbers(f)
        got = self.encoded(f, "nearest", x, torch.zeros(len(x), dtype=torch.int32))
        assert torch.equal(got, bytes_of(f, ours(f).encode(x)))

    @parameterized.expand([(f.name, f) for f in FLOATS])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_floats_with_noise(self, _, f):
        x = numbers(f).repeat(2)
        noise = torch.randint(0, 2**24, (len(x),), dtype=torch.int32)
        got = self.encoded(f, "noise", x, noise)
        assert torch.equal(got, bytes_of(f, ours(f).encode(x, noise)))

    @parameterized.expand([(f.name, f) for f in INTEGERS])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_integers(self, _, f):
        for scale in (1.0, 0.37, 3e-5, 1e-44, 2.0**-110, 3e38):
            x = numbers(f) * scale
            for zero in {0, f.zero, f.low, f.high - 3}:
                got = self.encoded(f, "nearest", x, torch.zeros(len(x), dtype=torch.int32), scale, float(zero))
                wanted = ours(f).encode(x / torch.tensor(scale), None, zero)
                assert torch.equal(got, bytes_of(f, wanted)), (scale, zero)

    @parameterized.expand([(f.name, f) for f in INTEGERS])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_integers_with_noise(self, _, f):
        for scale in (1.0, 0.37, 3e-5):
            x = numbers(f) * scale
            x = x[x.isfinite() & (x.abs() < 1e30)]
            x = x[: len(x) // 512 * 512]
            noise = torch.randint(0, 2**24, (len(x),), dtype=torch.int32)
            got = self.encoded(f, "noise", x, noise, scale, float(f.zero))
            wanted = ours(f).encode(x / torch.tensor(scale), noise, f.zero)
            assert torch.equal(got, bytes_of(f, wanted)), scale

    @parameterized.expand([(f.name, f) for f in FORMATS.values()])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_numbers(self, _, f):
        every = torch.arange(256, dtype=torch.uint8).repeat(16)
        x, zero = torch.zeros(len(every) * f.per_byte), float(f.zero + 2 if f.is_integer else 0)
        words = x.view(torch.uint8).view(-1, 64)  # a thread's codes come first
        words[:, : 16 // f.per_byte] = every.view(-1, 16 // f.per_byte)
        out = torch.zeros(len(x), dtype=torch.uint32)
        kernel(f, "decode")(x, torch.zeros(len(x) // 4, dtype=torch.uint32), 1.0, zero, out)
        codes = unpacked(f, every).view(ours(f).dtype if f.bits == 8 else torch.uint8)
        if f.name == "s4":
            codes = (codes ^ 8).to(torch.int8) - 8
        wanted = ours(f).decode(codes, int(zero)) if f.is_integer else ours(f).decode(codes)
        assert torch.equal(out.view(torch.float32).nan_to_num(7e7), wanted.nan_to_num(7e7))
