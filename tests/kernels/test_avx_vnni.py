"""The kernels of level avx_vnni on CPUs without it, whose instructions an emulator performs: the bits of the reference
and exact sums. On other CPUs the tests of each level run them."""

import os
import subprocess

import pytest

from tests import levels
from tests.support import emulation, forks

REASON = "this CPU has AVX-VNNI" if emulation.LEVEL in levels.HERE else emulation.lacks(levels.HERE)
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

# Products of the largest and the least codes, by the emulator and by level avx2, which must not need it.
EXTREMES = """
import ctypes, itertools, sys
from tests.support import emulation
emulator = emulation.load(sys.argv[1])
emulator.hop_emulated_instructions.restype = ctypes.c_int64
import torch, hop
from hop.kernels.cpu import native
from hop.numerics.formats import INT8, UINT8
from hop.numerics.scale_rules import Static
aten, library = torch.ops.aten, native.library()
assert (library.best, library.path) == (emulation.LEVEL, emulation.LEVEL), library.best
assert library.levels() == ("portable", "avx2", "avx_vnni"), library.levels()


def tensor(codes, zero):
    '''Codes with scales 1, in rows.'''
    q = hop.Quantizer(UINT8 if codes.dtype == torch.uint8 else INT8, (1, -1), Static(zero is not None))
    buffers = {"codes": codes, "scale": torch.ones(len(codes), 1)}
    if zero is not None:
        buffers["zero_point"] = torch.full((len(codes), 1), zero, dtype=codes.dtype)
    return hop.QuantizedTensor(buffers, q, codes.shape, torch.float32)


def emulated(level, x, w):
    before = emulator.hop_emulated_instructions()
    with native.use(level):
        got = hop.scaled(aten.linear.default, torch.float32, x, w, None)
    return got, emulator.hop_emulated_instructions() - before


for m, k, n in itertools.product((1, 2, 6, 33), (1, 64, 131), (1, 34)):
    for dtype, codes, zero in (
        (torch.int8, (-128,), None),
        (torch.int8, (-128, 127), -128),
        (torch.uint8, (255,), 0),
        (torch.uint8, (0, 255), 255),
    ):
        a = torch.tensor(codes, dtype=dtype).repeat(m * k)[: m * k].reshape(m, k)
        for code in (-128, 127):
            b = torch.full((n, k), code, dtype=torch.int8)
            want = (a.long() - (zero if zero is not None else 128 if dtype == torch.uint8 else 0)) @ b.long().t()
            for w in (tensor(b, None), hop.pack(tensor(b, None))):
                got, count = emulated(emulation.LEVEL, tensor(a, zero), w)
                assert count > 0 and torch.equal(got.double(), want.double()), (m, k, n, dtype, zero, code)
            got, count = emulated("avx2", tensor(a, zero), hop.pack(tensor(b, None)))
            assert count == 0 and torch.equal(got.double(), want.double()), (m, k, n, dtype, zero, code)
print("right")
"""


def emulated(code: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a process that can load the emulator, whose path is its first argument."""
    return forks.run(code, emulation.library(), *arguments, env={**os.environ, **variables})


def test_extremes():
    """Full-range codes with zero points at both ends, whose sums of two products exceed int16."""
    done = emulated(EXTREMES)
    assert done.stdout == "right\n", done.stderr


# Tests of the level, which are skipped without it.
LEVEL = """
import sys
from tests.support import emulation
emulation.load(sys.argv[1])
import pytest
options = ["--assert=plain", *("-p no:" + name for name in ("faulthandler", "cacheprovider", "xdist"))]
options += ["-rs", "-m", "not exhaustive", "-k", sys.argv[2]]
sys.exit(pytest.main([*options, *sys.argv[3:]]))
"""
QUICK = {
    "products": ("test_groups_of_the_largest_codes and avx_vnni", "tests/kernels/test_native.py"),
    "attention": ("(ties or shapes1) and avx_vnni", "tests/kernels/test_native_attention.py"),
}
WHOLE = {
    "products": ("avx_vnni", "tests/kernels/test_native.py"),
    "rows": ("avx_vnni", "tests/kernels/test_rows.py"),
    "attention": ("avx_vnni", "tests/kernels/test_native_attention.py"),
    "convolution": ("avx_vnni or test_random", "tests/kernels/test_native_convolution.py"),
    "groups": ("test", "tests/kernels/test_native_group_integers.py"),
}


def run(chosen: str, file: str) -> None:
    done = emulated(LEVEL, chosen, file, HOP_NATIVE=emulation.LEVEL)
    assert done.returncode == 0 and "skipped" not in done.stdout, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("part", QUICK)
def test_level(part: str):
    run(*QUICK[part])


@pytest.mark.full
@pytest.mark.parametrize("part", WHOLE)
def test_whole_level(part: str):
    run(*WHOLE[part])
