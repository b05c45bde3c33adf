"""The kernel that transposes factors, in the emulator, and which factors it takes."""

import functools
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import cutlass_kernels
from cutlass_kernels import cache, hopper, transposing
from tests.ptx import HABITS, Fault, habits
from tests.ptx.host import Host
from tests.support import cubin

needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))


@functools.cache
def host() -> Host:
    with tempfile.TemporaryDirectory() as folder:
        made = transposing.build(options=f"--keep-ptx --keep-cubin --dump-dir {folder}")
        used = cubin.usage(next(Path(folder).glob("*.cubin")).read_bytes())
    assert used.stack_bytes == 0 and used.registers <= 64  # eight blocks of 256 threads, were they to be in step
    return Host(made, registers=used.registers)


def lying(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """(..., rows, K) bytes, with rows innermost."""
    return torch.randint(-128, 128, shape, dtype=torch.int8).mT.contiguous().mT.view(dtype)


def transposed(x: Tensor, run: Host) -> Tensor:
    def kernel(source: Tensor, target: Tensor) -> None:
        target.fill_(-1)
        run(source, target)

    with mock.patch.object(transposing, "compiled", lambda: kernel):
        return transposing.run(x)


def right(x: Tensor, y: Tensor) -> bool:
    """The same numbers, along K, and zeros after them."""
    codes, given, k = y.view(torch.uint8), x.view(torch.uint8), x.shape[-1]
    return bool(torch.equal(codes[..., :k], given) and not codes[..., k:].any() and hopper.is_ready(y))


@needs_dsl
class TestEmulated(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([((300, 260),), ((4, 2),), ((128, 128),), ((2, 140, 77),), ((3, 64, 200),)])
    @pytest.mark.quick(4)
    def test_any_sizes(self, shape):
        x = lying(*shape)
        assert transposing.declines(x) is None and right(x, transposed(x, host()))

    def test_parts_of_wider_memory(self):
        wide = lying(64, 90, dtype=torch.float8_e4m3fn)
        for x in (wide[8:44], wide[:, 3:70], wide[4:60, 1:]):
            assert transposing.declines(x) is None and right(x, transposed(x, host()))

    @parameterized.expand(list(HABITS))
    @pytest.mark.quick(6)
    def test_each_habit(self, name):
        x, own = lying(140, 200), host().with_ptx(host().ptx)
        own.habits = habits(name)
        assert right(x, transposed(x, own))

    @pytest.mark.full
    def test_without_the_barrier(self):
        x, own = lying(140, 200), host().with_ptx(host().ptx.replace("\tbar.sync \t0;\n", ""))
        assert own.ptx != host().ptx
        own.habits = habits("first_ahead")
        try:
            assert not right(x, transposed(x, own))
        except Fault:
            return

    def test_waits_for_the_kernel_before(self):
        own = host().with_ptx(re.sub(r"\tgriddepcontrol\.\w+;\n", "", host().ptx))
        assert own.ptx != host().ptx
        with self.assertRaisesRegex(Fault, r"before griddepcontrol\.wait"):
            transposed(lying(140, 200), own)

    def test_banks(self):
        """A warp's 32 words lie in 32 banks, when they are written and when they are read."""
        for i in range(32):
            for t in range(4):
                assert len({((i ^ lane) + 32 * (4 * lane + t)) % 32 for lane in range(32)}) == 32
        for row in range(128):
            assert len({(lane ^ (row // 4)) % 32 for lane in range(32)}) == 32


class TestChoice(unittest.TestCase):
    def test_what_it_declines(self):
        x = lying(64, 96)
        for given, words in (
            (torch.zeros(64, 96, dtype=torch.int8), "innermost"),
            (lying(62, 96), "whole words"),
            (lying(64, 96)[1:61], "address"),
            (x.float(), "bytes"),
            (x[:, :0], "bytes"),
        ):
            assert words in (transposing.declines(given) or ""), words
        with (
            mock.patch.object(cache, "missing", lambda: "no compiler"),
            mock.patch.object(cache.prebuilt, "pack", lambda: None),
        ):
            assert transposing.declines(x) == "no compiler"

    @needs_dsl
    def test_factors_on_a_gpu_go_through_it(self):
        x = lying(64, 96)
        with mock.patch.object(Tensor, "is_cuda", True), mock.patch.object(transposing, "run", lambda x: "transposed"):
            assert hopper.ready(x) == "transposed"
        assert torch.equal(hopper.ready(x), x)
