"""Products of bfloat16 by weights of 4 bits: what they mean, their operator, and the Hopper kernels in the emulator."""

import functools
import re
import unittest
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
from cutlass_kernels.tiles import NIBBLE_TILES
from cutlass_kernels.variants import Tile, Variant
from tests.ptx import HABITS, Fault, habits
from tests.support import cubin, emulated, registers

needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
BF16, F32 = torch.bfloat16, torch.float32
ALL_LATE = ("late_loads", "late_stores", "late_products", "impatient")


def given(m: int, n: int, k: int, group: int, affine: bool, bias: bool = False) -> tuple[Any, ...]:
    """What an operator takes, of random numbers."""
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    zero = torch.randint(0, 16, (n, k // group)).to(torch.uint8) if affine else None
    made = (torch.randn(m, k).to(BF16), codes, torch.rand(n, k // group) + 0.5, zero)
    return (*made, torch.randn(n).to(BF16) if bias else None, group)


def launched(host: Any, args: tuple[Any, ...], tile: Tile, out: torch.dtype, names: tuple[str, ...] = ()) -> Tensor:
    """The result by emulated host code, on a GPU of two multiprocessors."""
    host.habits = habits(*names)

    def kernel(*own: Any) -> None:
        own[4].untyped_storage().copy_(torch.full((own[4].nbytes,), 0xA5, dtype=torch.uint8).untyped_storage())
        host(*own[:-1], 2)

    with mock.patch.object(nibbles, "compiled", lambda _: kernel):
        return nibbles.on_hopper(*args, out, tile)


@functools.lru_cache(maxsize=4)
def host_of(v: Variant) -> Any:
    return emulated.compiled(v).host


def check(args: tuple[Any, ...], tile: Tile, out: torch.dtype = F32, names: tuple[str, ...] = ()) -> None:
    """As near as sums in float32 of exact products are."""
    x, codes, scale, zero, bias, group = args
    v = nibbles.variant(zero, bias, group, out, tile)
    assert v.declines() is None
    got, wanted = launched(host_of(v), args, tile, out, names), nibbles.reference(*args, F32).double()
    weight = nibbles.numbers(codes, zero, group).abs() * scale.repeat_interleave(group, 1)
    magnitude = x.double().abs() @ weight.double().mT + (0 if bias is None else bias.double().abs())
    error = (got.double() - wanted).abs()
    assert (error <= magnitude * (x.shape[1] / 16 + 8) * 2.0**-23 + wanted.abs() * torch.finfo(out).eps).all()


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
        args = given(7, 24, 256, 32, True, bias=True)
        torch.testing.assert_close(nibbles.decoded(*args, F32), nibbles.reference(*args, F32), rtol=2e-2, atol=2)

    def test_wrong_ones(self):
        x, codes, scale, zero, bias, group = given(7, 24, 256, 32, True, bias=True)
        for args, error, words in (
            ((x.float(), codes, scale, zero, bias, group, F32), TypeError, "x must be bfloat16"),
            ((x, codes, scale, zero, bias, 48, F32), ValueError, r"one of \(32, 64, 128\)"),
            ((x[:, :250], codes, scale, zero, bias, group, F32), ValueError, "a multiple of group"),
            ((x, codes[:, :9], scale, zero, bias, group, F32), ValueError, r"codes must have shape \(24, 128\)"),
            ((x, codes, scale, zero[:3], bias, group, F32), ValueError, r"zero must have shape \(24, 8\)"),
            ((x, codes, scale, zero.int(), bias, group, F32), TypeError, "zero must be uint8"),
            ((x, codes, scale, zero, bias, group, torch.int32), TypeError, "out_dtype and bias"),
        ):
            with self.assertRaisesRegex(error, words):
                nibbles.check(*args)

    def test_fakes_are_as_results(self):
        args = given(7, 24, 256, 32, True)
        with FakeTensorMode() as mode:
            x, codes, scale, zero = (mode.from_tensor(t) for t in args[:4])
            got = nibbles.mm(x, codes, scale, zero, group=32)
        assert got.shape == (7, 24) and got.dtype == BF16


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

    @parameterized.expand([(g, affine, out) for g in (32, 64, 128) for affine in (False, True) for out in (BF16, F32)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_each_form(self, group, affine, out):
        check(given(9, 70, 2 * 128 + group, group, affine, bias=True), Tile(64, 8, swap=True), out)

    @parameterized.expand([(v.name, v) for v in FORMS if v.group])
    @pytest.mark.full
    def test_instructions_and_registers(self, _, form):
        for tile in (Tile(128, 128, swap=True), Tile(64, 8, swap=True)):
            made = emulated.compiled(nibbles.variant(form.affine or None, None, form.group, BF16, tile))
            assert f"wgmma.mma_async.sync.aligned.m64n{tile.n}k16.f32.bf16.bf16" in made.ptx
            used = cubin.usage(made.cubin)
            assert used.stack_bytes == 0
            registers.check(tile, used)

    @pytest.mark.full
    def test_other_strides(self):
        x, codes, scale, zero, bias, group = given(9, 70, 256, 32, True)
        wide = torch.zeros(70, 400, dtype=torch.uint8)
        wide[:, 3:131] = codes
        check(
            (x.mT.contiguous().mT, wide[:, 3:131], scale.mT.contiguous().mT, zero, bias, group), Tile(64, 16, swap=True)
        )

    def test_when_all_is_late(self):
        for ahead in ("first_ahead", "last_ahead"):
            check(given(11, 150, 400 // 32 * 32, 32, True), Tile(64, 8, swap=True), names=(*ALL_LATE, ahead))

    @parameterized.expand(list(HABITS))
    @pytest.mark.full
    def test_each_habit(self, name):
        check(given(40, 150, 640, 128, False), Tile(128, 32, swap=True), names=(name,))

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
        tile, args = Tile(64, 8, swap=True), given(11, 150, 384, 32, False)
        host = host_of(nibbles.variant(None, None, 32, F32, tile))
        start = host.ptx.index("\tsetmaxnreg.inc")
        mutated = host.ptx[:start] + re.sub(pattern, "", host.ptx[start:], flags=re.MULTILINE)
        assert mutated != host.ptx
        right = launched(host, args, tile, F32)
        try:
            got = launched(host.with_ptx(mutated), args, tile, F32, (*ALL_LATE, "last_ahead"))
        except Fault:
            return
        assert not torch.equal(got, right)


class TestChoice(unittest.TestCase):
    def test_tiles(self):
        assert [nibbles.tile_for(m, 4096, 132).n for m in (1, 9, 64, 65, 4096)] == [8, 16, 64, 128, 128]
        assert (nibbles.tile_for(1, 4096, 132).m, nibbles.tile_for(1, 28672, 132).m) == (64, 128)

    @needs_dsl
    def test_hopper_builds_them(self):
        with mock.patch.object(nibble_kernel, "build", lambda v, options: (v, options)):
            form = next(f for f in FORMS if f.group)
            assert hopper.build(form, "--x") == (form, "--x")


if __name__ == "__main__":
    unittest.main()
