"""How the Hopper kernels share out registers: neither less than the consumers use, nor more than a block has, nor less
than it could give them."""

from dataclasses import replace

import pytest

import cutlass_kernels
from cutlass_kernels.forms import FORMS
from cutlass_kernels.tiles import TILES
from cutlass_kernels.variants import WARPGROUP, Tile

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from cutlass_kernels.frame_sm90 import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from tests.support import cubin, emulated, registers

LARGEST = max(TILES, key=lambda t: t.threads)
# Those that need most: integers with all that may be fused, sums in float32, scales of blocks.
NEEDY = {
    "zero points": (FORMS[14], Tile(128, 256)),
    "requantized": (FORMS[17], Tile(128, 128, pingpong=True)),
    "two tiles": (FORMS[5], Tile(128, 192, cluster=(2, 1), pingpong=True)),
    "promoted": (FORMS[23], Tile(128, 192)),
    "promoted in halves": (FORMS[23], Tile(256, 128, cluster=(1, 2))),
    "blocks": (FORMS[-3], Tile(128, 192)),
    "many blocks": (FORMS[-3], Tile(128, 160)),
}


def test_counts_are_those_that_setmaxnreg_takes():
    for count in (PRODUCER_REGISTERS, CONSUMER_REGISTERS):
        assert registers.LEAST <= count <= 256 and count % registers.STEP == 0


def test_none_are_left_over():
    """With two consumers, one step more for each would not fit; the producer has at most a step too many."""
    more = 2 * registers.STEP * WARPGROUP
    assert LARGEST.consumers == 2 and registers.given(LARGEST) + more > registers.REGISTERS
    begins = registers.REGISTERS // LARGEST.threads // registers.STEP * registers.STEP
    assert 0 <= begins * LARGEST.threads - registers.given(LARGEST) < registers.STEP * WARPGROUP


@pytest.mark.full
@pytest.mark.parametrize("name", NEEDY)
def test_consumers_have_what_they_use(name):
    form, tile = NEEDY[name]
    variant = replace(form, tile=tile)
    alone = registers.without_setmaxnreg(variant)
    if variant.accumulators < registers.REGISTERS // tile.threads // registers.STEP * registers.STEP:
        assert variant.accumulators < alone.registers <= CONSUMER_REGISTERS
    else:  # the sums alone are more than a thread begins with
        assert alone.stack_bytes > 0
    assert cubin.usage(emulated.compiled(variant).cubin).stack_bytes == 0


@pytest.mark.full
def test_without_more_for_consumers_registers_would_be_spilled():
    form, tile = NEEDY["requantized"]
    assert registers.without_setmaxnreg(replace(form, tile=tile)).stack_bytes > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("producer", "consumers", "fits"), [(24, 240, True), (40, 240, False), (24, 248, False), (24, 64, False)]
)
def test_the_check_tells(monkeypatch, producer, consumers, fits):
    """More than the block has, and less than the code uses, so that the assembler leaves setmaxnreg out."""
    from cutlass_kernels import frame_sm90

    monkeypatch.setattr(frame_sm90, "PRODUCER_REGISTERS", producer)
    monkeypatch.setattr(frame_sm90, "CONSUMER_REGISTERS", consumers)
    form, tile = NEEDY["zero points"]
    used = cubin.usage(emulated.Compiled(replace(form, tile=tile)).cubin)
    if fits:
        registers.check(tile, used)
    else:
        with pytest.raises(AssertionError):
            registers.check(tile, used)
