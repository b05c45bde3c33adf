"""The registers of a Hopper kernel: what a block begins with, and how setmaxnreg shares it out."""

from unittest import mock

from cutlass_kernels.variants import WARPGROUP, Tile, Variant
from tests.support import cubin, emulated

# CUDA C++ Programming Guide, technical specifications per compute capability: of a multiprocessor of 9.0.
REGISTERS = 65536
# PTX ISA, setmaxnreg: counts are from 24 to 256, in steps of 8.
LEAST, STEP = 24, 8


def given(tile: Tile) -> int:
    """All registers of a block after setmaxnreg."""
    from cutlass_kernels.frame_sm90 import CONSUMER_REGISTERS, PRODUCER_REGISTERS

    return WARPGROUP * (PRODUCER_REGISTERS + tile.consumers * CONSUMER_REGISTERS)


def check(tile: Tile, used: cubin.Usage) -> None:
    """The assembler takes setmaxnreg as it is, and the block's pool suffices: else consumers would wait for ever."""
    from cutlass_kernels.frame_sm90 import CONSUMER_REGISTERS

    # Where it leaves setmaxnreg out, a thread begins with what the code uses.
    begins = min(CONSUMER_REGISTERS, REGISTERS // tile.threads // STEP * STEP)
    assert used.registers == begins, f"a thread begins with {used.registers} registers instead of {begins}"
    assert given(tile) <= used.registers * tile.threads <= REGISTERS


def without_setmaxnreg(variant: Variant) -> cubin.Usage:
    """What the code itself uses: counts that do not suffice for it are ignored by the assembler."""
    from cutlass_kernels import frame_sm90

    with mock.patch.multiple(frame_sm90, PRODUCER_REGISTERS=LEAST, CONSUMER_REGISTERS=LEAST):
        return cubin.usage(emulated.Compiled(variant).cubin)
