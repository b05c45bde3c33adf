"""Products by weights of 4 bits, of bfloat16 and of 8 bits: what they mean, their operator, and the Hopper kernels in
the emulator."""

import functools
import re
import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cutlass_kernels
import hop
from cutlass_kernels import hopper, nibble_kernel, nibbles
from cutlass_kernels.forms import FORMS
from cutlass_kernels.nibbles import Asked
from cutlass_kernels.product import INTEGERS
from cutlass_kernels.tiles import NIBBLE_TILES
from cutlass_kernels.variants import Tile, Variant
from tests.ptx import HABITS, Fault, habits
from tests.ptx.contraction import contractable
from tests.support import cubin, emulated, registers

needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
BF16, F32, S32 = torch.bfloat16, torch.float32, torch.int32
S8, U8, E4M3, E5M2 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
TILE = Tile(64, 8, swap=True)
ALL_LATE = ("late_loads", "late_stores", "late_products", "impatient")


def given(
    m: int, n: int, k: int, group: int, affine: bool, bias: bool = False, x: torch.dtype = BF16, zeros: bool = False
) -> Asked:
    """What an operator takes, of random numbers; `zeros` are those of x."""
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    zero = torch.randint(0, 16, (n, k // group)).to(torch.uint8) if affine else None
    rows = torch.randint(0, 256, (m, k)).to(torch.uint8).view(x) if x in INTEGERS else torch.randn(m, k).to(x)
    asked = Asked(rows, codes, torch.rand(n, k // group) + 0.5, zero, torch.randn(n).to(BF16) if bias else None)
    low = -128 if x == S8 else 0
    return asked._replace(
        x_scale=None if x == BF16 else torch.rand(m) + 0.5,
        x_zero=torch.randint(low, low + 256, (m,), dtype=S32) if zeros else None,
        group=group,
    )


def launched(host: Any, a: Asked, tile: Tile, names: tuple[str, ...] = ()) -> Tensor:
    """The result by emulated host code, on a GPU of two multiprocessors."""
    host.habits = habits(*names)

    def kernel(*own: Any) -> None:
        own[4].untyped_storage().copy_(torch.full((own[4].nbytes,), 0xA5, dtype=torch.uint8).untyped_storage())
        host(*own[:-1], 2)

    with mock.patch.object(nibbles, "compiled", lambda _: kernel):
        return nibbles.on_hopper(a, tile)


@functools.lru_cache(maxsize=4)
def host_of(v: Variant) -> Any:
    return emulated.compiled(v).host


def check(a: Asked, tile: Tile, out: torch.dtype = F32, names: tuple[str, ...] = ()) -> None:
    """Of integers the same bits; of floats as near as sums in float32 of exact products are."""
    a = a._replace(out=out)
    v = nibbles.variant(a, tile)
    assert v.declines() is None, v.declines()
    got = launched(host_of(v), a, tile, names)
    if v.is_integer:
        same_bits(got, nibbles.reference(a))
        return
    wanted = nibbles.reference(a._replace(out=F32)).double()
    weight = nibbles.numbers(a.codes, a.zero, a.group).abs() * a.scale.repeat_interleave(a.group, 1)
    magnitude = a.x.double().abs() @ weight.double().mT
    magnitude = magnitude if a.x_scale is None else magnitude * a.x_scale[:, None]
    magnitude += 0 if a.bias is None else a.bias.double().abs()
    error = (got.double() - wanted).abs()
    assert (error <= magnitude * (a.x.shape[1] / 16 + 8) * 2.0**-23 + wanted.abs() * torch.finfo(out).eps).all()


def same_bits(got: Tensor, wanted: Tensor) -> None:
    """Also of -0; but one NaN is as another."""
    bits = {2: torch.int16, 4: torch.int32}[got.itemsize]
    assert ((got.view(bits) == wanted.view(bits)) | (got.isnan() & wanted.isnan())).all()


def powers(*shape: int) -> Tensor:
    """Powers of two, by which whole numbers are summed exactly."""
    return torch.randint(-3, 4, shape).float().exp2()


class TestMeaning(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(q, g) for q in ("INT4", "UINT4") for g in (32, 64, 128)])
    def test_codes_are_those_of_hop(self, kind, group):
        q = getattr(hop.presets, f"{kind}_{group}{'_AFFINE' * (kind == 'UINT4')}")
        w = hop.quantize(q, torch.randn(24, 256))
        buffers = w.buffers()
        zero = buffers.get("zero_point")
        assert (zero is None) == (kind == "INT4") and (zero is None or zero.dtype == torch.uint8)
        found = nibbles.numbers(buffers["codes"], zero, group) * buffers["scale"].repeat_interleave(group, 1)
        assert torch.equal(found, w.dequantize())

    def test_decoded_is_near(self):
        for x in (BF16, E4M3, E5M2):
            a = given(7, 24, 256, 32, True, bias=True, x=x)._replace(out=F32)
            torch.testing.assert_close(nibbles.decoded(a), nibbles.reference(a), rtol=2e-2, atol=3)

    @parameterized.expand([(x, zeros) for x in (S8, U8) for zeros in (False, True)])
    def test_decoded_integers_are_exact(self, x, zeros):
        a = given(7, 24, 256, 32, True, bias=True, x=x, zeros=zeros)._replace(out=F32)
        same_bits(nibbles.decoded(a), nibbles.reference(a))

    def test_wrong_ones(self):
        a, b = given(7, 24, 256, 32, True, bias=True), given(7, 24, 256, 32, True, x=S8, zeros=True)
        for wrong, error, words in (
            (a._replace(x=a.x.float()), TypeError, "x must be bfloat16 or of"),
            (a._replace(group=48), ValueError, r"one of \(32, 64, 128\)"),
            (a._replace(x=a.x[:, :250]), ValueError, "a multiple of group"),
            (a._replace(codes=a.codes[:, :9]), ValueError, r"codes must have shape \(24, 128\)"),
            (a._replace(zero=a.zero[:3]), ValueError, r"zero must have shape \(24, 8\)"),  # type: ignore[index]
            (a._replace(zero=a.zero.int()), TypeError, "zero must be uint8"),
            (a._replace(out=torch.int32), TypeError, "out_dtype and bias"),
            (a._replace(x_scale=torch.ones(7)), TypeError, "x of 8 bits has x_scale"),
            (b._replace(x_scale=None), TypeError, "x of 8 bits has x_scale"),
            (b._replace(x=b.x.view(E4M3)), TypeError, "of integers may have x_zero"),
            (b._replace(x_scale=torch.ones(6)), ValueError, r"x_scale must have shape \(7,\) or \(1,\), got \(6,\)"),
            (b._replace(x_scale=torch.ones(7).double()), TypeError, "x_scale must be torch.float32"),
            (b._replace(x_zero=torch.ones(7)), TypeError, "x_zero must be torch.int32"),
        ):
            with self.assertRaisesRegex(error, words):
                nibbles.check(wrong)

    def test_fakes_are_as_results(self):
        a, b = given(7, 24, 256, 32, True), given(7, 24, 256, 32, True, x=S8, zeros=True)
        with FakeTensorMode() as mode:
            x, codes, scale, zero = (mode.from_tensor(t) for t in a[:4])
            got = nibbles.mm(x, codes, scale, zero, group=32)
            x, of_x = mode.from_tensor(b.x), [mode.from_tensor(t) for t in (b.x_scale, b.x_zero)]
            other = nibbles.mm(x, codes, scale, zero, None, *of_x, group=32, out_dtype=F32)
        assert got.shape == other.shape == (7, 24) and (got.dtype, other.dtype) == (BF16, F32)


@needs_dsl
class TestEmulated(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(str(t), t) for t in NIBBLE_TILES])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_tile(self, _, tile):
        for group, affine in ((32, True), (128, False)):
            check(given(tile.n + 3, 150, 4 * 128, group, affine), tile)
            check(given(tile.n + 3, 150, 4 * 128, group, affine, x=E4M3), tile)
        if tile.n <= 64:
            check(given(tile.n + 3, 150, 4 * 128, 32, False, x=S8, zeros=True), tile)

    @parameterized.expand([(g, affine, out) for g in (32, 64, 128) for affine in (False, True) for out in (BF16, F32)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_form(self, group, affine, out):
        check(given(9, 70, 2 * 128 + group, group, affine, bias=True), Tile(64, 8, swap=True), out)

    @parameterized.expand(
        [
            (x, group, affine, zeros)
            for x in (S8, U8, E4M3, E5M2)
            for group in (32, 64, 128)
            for affine in (False, True)
            for zeros in (False, True)
            if x in INTEGERS or not zeros
        ]
    )
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_form_of_8_bits(self, x, group, affine, zeros):
        a = given(9, 70, 2 * 128 + group, group, affine, bias=True, x=x, zeros=zeros)
        check(a, Tile(64, 8, swap=True), BF16 if group == 64 else F32)

    @parameterized.expand([(x, affine) for x in (E4M3, E5M2) for affine in (False, True)])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_every_code_of_4_bits_is_exact(self, x, affine):
        """Whole numbers by powers of two."""
        a = given(9, 70, 256, 32, affine, x=x)
        a = a._replace(x=torch.randint(-4, 5, (9, 256)).to(x), scale=powers(70, 8), x_scale=powers(9), out=F32)
        a.codes[:16] = (torch.arange(16) * 17).to(torch.uint8)[:, None]
        if affine:
            a.zero[:, :] = torch.arange(8)[None] * 2 + torch.arange(70)[:, None] % 2  # type: ignore[index]
        same_bits(launched(host_of(nibbles.variant(a, TILE)), a, TILE), nibbles.reference(a))

    @parameterized.expand([(S8, True), (U8, True), (E4M3, False), (BF16, False)])
    @pytest.mark.full
    def test_nasty_numbers(self, x, zeros):
        """A group that is not there, after the last one of a step, adds nothing, though that has an infinite scale."""
        a = given(9, 70, 160, 32, True, x=x, zeros=zeros)._replace(out=F32)
        odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3e38, -1e-20])
        a.scale[:9, 4], a.scale[9:18, 0] = odd, odd
        if x == BF16:
            a.x[:4, 0] = odd[1:5].to(BF16)
        else:
            a.x_scale[:7] = odd[:7]  # type: ignore[index]
            a.x.view(torch.uint8)[:, :7] = torch.tensor([0, 128, 126, 254, 1, 129, 120], dtype=U8)
            a.x.view(torch.uint8)[7, 9] = 127
        v = nibbles.variant(a, TILE)
        got, wanted = launched(host_of(v), a, TILE), nibbles.reference(a)
        if v.is_integer:
            same_bits(got, wanted)
            return
        of_x = a.x.float() if a.x_scale is None else a.x.float() * a.x_scale[:, None]
        rows, columns = (t.isfinite().all(1) for t in (of_x, a.scale))
        assert not got[~rows].isfinite().any() and not got[:, ~columns].isfinite().any()
        columns &= a.scale.abs().amax(1) < 1e30
        torch.testing.assert_close(got[rows][:, columns], wanted[rows][:, columns], rtol=1e-3, atol=1e-3)

    @pytest.mark.full
    def test_one_scale_and_zero_point_for_all_rows(self):
        a = given(9, 70, 128, 128, False, x=S8, zeros=True)
        check(a._replace(x_scale=a.x_scale[:1], x_zero=a.x_zero[:1]), TILE)  # type: ignore[index]

    @parameterized.expand([(v.name, v) for v in FORMS if v.group])
    @pytest.mark.full
    def test_instructions_and_registers(self, _, form):
        types = {BF16: "k16.f32.bf16.bf16", E4M3: "k32.f32.e4m3.e4m3", S8: "k32.satfinite.s32.s8.s8"}[form.lhs]
        for tile in (Tile(128, 64 if form.is_integer else 128, swap=True), TILE):
            made = emulated.compiled(replace(form, tile=tile, tma=False))
            assert f"wgmma.mma_async.sync.aligned.m64n{tile.n}{types}" in made.ptx
            exact = form.lhs == BF16  # its subtractions
            assert not [line for line in contractable(made.ptx) if not (exact and "sub.bf16x2" in line)]
            used = cubin.usage(made.cubin)
            assert used.stack_bytes == 0
            registers.check(tile, used)

    @pytest.mark.full
    def test_other_strides(self):
        for x in (BF16, S8):
            a = given(9, 70, 256, 32, True, x=x)
            wide = torch.zeros(70, 400, dtype=torch.uint8)
            wide[:, 3:131] = a.codes
            rows, scale = a.x.mT.contiguous().mT, a.scale.mT.contiguous().mT
            check(a._replace(x=rows, codes=wide[:, 3:131], scale=scale), Tile(64, 16, swap=True))

    @parameterized.expand([(a, x) for a in ("first_ahead", "last_ahead") for x in (BF16, S8)])
    @pytest.mark.quick(4)
    def test_when_all_is_late(self, ahead, x):
        check(given(11, 150, 400 // 32 * 32, 32, True, x=x), TILE, names=(*ALL_LATE, ahead))

    @parameterized.expand(list(HABITS))
    @pytest.mark.full
    def test_each_habit(self, name):
        for x in (BF16, E4M3, U8):
            check(given(40, 150, 640, 128, False, x=x, zeros=x == U8), Tile(128, 32, swap=True), names=(name,))

    @pytest.mark.full
    def test_waits_for_the_kernel_before(self):
        a = given(9, 70, 128, 128, False)._replace(out=F32)
        host = host_of(nibbles.variant(a, TILE))
        early = host.with_ptx(re.sub(r"\tgriddepcontrol\.\w+;\n", "", host.ptx))
        with self.assertRaisesRegex(Fault, r"before griddepcontrol\.wait"):
            launched(early, a, TILE)

    @parameterized.expand(
        [
            (
                "codes read before they come",
                r"^\tmbarrier\.try_wait.*\n\t@P1 bra\.uni DONE; *\n\tbra\.uni +LAB_WAIT; *\n",
            ),
            ("numbers that wgmma may not see yet", r"^\twgmma\.fence.*\n"),
            ("numbers replaced while wgmma reads them", r"^\twgmma\.wait_group.*\n"),
            ("products that nobody asked for", r"^\twgmma\.commit_group.*\n"),
        ]
    )
    @pytest.mark.full
    def test_mistakes_are_found(self, _, pattern):
        """The consumers' part of the kernel without one synchronization, when everything is late."""
        tile, a = TILE, given(11, 150, 384, 32, False)._replace(out=F32)
        host = host_of(nibbles.variant(a, tile))
        start = host.ptx.index("\tsetmaxnreg.inc")
        mutated = host.ptx[:start] + re.sub(pattern, "", host.ptx[start:], flags=re.MULTILINE)
        assert mutated != host.ptx
        right = launched(host, a, tile)
        try:
            got = launched(host.with_ptx(mutated), a, tile, (*ALL_LATE, "last_ahead"))
        except Fault:
            return
        assert not torch.equal(got, right)


class TestChoice(unittest.TestCase):
    def test_tiles(self):
        assert [nibbles.tile_for(m, 4096, 132).n for m in (1, 9, 64, 65, 4096)] == [8, 16, 64, 128, 128]
        assert (nibbles.tile_for(1, 4096, 132).m, nibbles.tile_for(1, 28672, 132).m) == (64, 128)
        assert [nibbles.tile_for(m, 4096, 132, S8).n for m in (1, 64, 65, 4096)] == [8, 64, 64, 64]

    def test_integers_have_no_wide_tiles(self):
        for form in (f for f in FORMS if f.group):
            reason = replace(form, tile=Tile(64, 128, swap=True), tma=False).declines()
            assert ("registers" in (reason or "")) == form.is_integer, form.name

    @needs_dsl
    def test_hopper_builds_them(self):
        with mock.patch.object(nibble_kernel, "build", lambda v, options: (v, options)):
            form = next(f for f in FORMS if f.group)
            assert hopper.build(form, "--x") == (form, "--x")
