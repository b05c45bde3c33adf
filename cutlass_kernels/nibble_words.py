"""Codes of 4 bits as wgmma reads them from registers: a thread's part of a row, less the group's zero point, exactly.

A thread has a quarter of the codes of a row that lie side by side in 16 bytes of wgmma's operand: of every 8 a byte
with two codes, which become two bfloat16, and of every 16 two bytes with four, which become four bytes of a register.

    bfloat16   byte · 4097 -> a code in the low bits of each half     & 000f000f, ^ 4308 4308 -> 128 + 8 + code
    bytes      00 00 11 11, and these shifted by 4 -> a code a byte   & 0f0f0f0f, ^ 88888888 -> 128 + 8 + code

Then what stands for zero is subtracted, in every half or byte at once: signed codes whose highest bit is flipped are
codes + 8; of unsigned ones it is 128 and the zero point. In bytes 128 + d is left, of a whole number d of at most 15:

    int8       ^ 80 is d
    e4m3       a number of 4 bits is itself in units of 2^-9, the least that e4m3 has, so that d's magnitude and sign
               are its code. 128 + d, negated in the byte, is 128 + the magnitude; where d is not negative, ^ 80 is it.

Signed codes become e4m3 by two tables of eight instead, of which `prmt` reads four bytes at once: the lower three bits
of a code say which, and the highest one of which table.
"""

from typing import Any

import torch
from cutlass import Int32, Uint32

from cutlass_kernels.epilogue import ptx
from cutlass_kernels.variants import Variant

# The numbers from 0 to 7, and from -8 to -1, in e4m3, each four in a word.
_UPWARD, _BELOW = (0x44403800, 0x4E4C4A48), (0xCACCCED0, 0xB8C0C4C8)
_SUBTRACT = "{ .reg .b32 by; mov.b32 by, {$r1}; sub.bf16x2 {$w0}, {$r0}, by; }"  # which takes no constants
_EACH = {2: 0x00010001, 4: 0x01010101}  # one in every half, or byte, by how many a register has
_BIAS = {2: 0x43004300, 4: 0x80808080}  # two times 128 in bfloat16, whose last bits are ones; four times 128


def in_register(v: Variant) -> int:
    """Codes that become a register."""
    return 2 if v.held == torch.bfloat16 else 4


def unit_of(v: Variant) -> float:
    """The representation of 1 in the registers' dtype."""
    return 2.0**-9 if v.held == torch.float8_e4m3fn and not _has_tables(v) else 1.0


def offset_of(v: Variant, zero: Any) -> Any:
    """The offset subtracted from the codes of a group: its zero point, or 8 for signed codes."""
    count = in_register(v)
    base = _BIAS[2] if count == 2 else 0
    if zero is None:
        return Uint32(base + 8 * _EACH[count])
    return (zero.to(Uint32) & Uint32(0x7F)) * Uint32(_EACH[count]) + Uint32(base)


def constants(v: Variant, thread: Any, size: Any) -> list[Any]:
    """What `numbers` takes in registers. An instruction has room for one constant, and the assembler would write
    another into a register anew before each use; so they are made with what it does not know, the sign of a size."""
    count = in_register(v)
    found = [_BIAS[count] + (0 if v.affine else 8 * _EACH[count])]
    if _has_tables(v):
        found = [0x3210, _UPWARD[0], _BELOW[0]]
    nothing = ((thread | size) >> 31).to(Uint32)
    return [Uint32(x) | nothing for x in found]


def _has_tables(v: Variant) -> bool:
    return v.held == torch.float8_e4m3fn and not v.affine


def numbers(v: Variant, codes: Any, offset: Any, constants: list[Any]) -> Any:
    """A register of the numbers of codes, which lie in the low bits of `codes`. The last instruction is written out, so
    that none comes after the wgmma.fence before what reads the register."""
    flips, *tables = constants
    if in_register(v) == 2:
        return ptx(_SUBTRACT, Uint32, ((codes * Uint32(0x1001)) & Uint32(0x000F000F)) ^ flips, offset)
    if _has_tables(v):
        return _from_tables(codes, flips, *tables)
    twice = ptx("prmt.b32 {$w0}, {$r0}, 0, 0x1100;", Uint32, codes)
    mixed = _look_up(0xE4, twice, twice >> 4, Uint32(0x00FF00FF))  # bytes 0 and 2 of the first, 1 and 3 of the second
    biased = ((mixed & Uint32(0x0F0F0F0F)) ^ flips) - offset  # 128 and more less 15 at most: no byte takes of another
    if v.held == torch.int8:
        return ptx("xor.b32 {$w0}, {$r0}, {$r1};", Uint32, biased, Uint32(_BIAS[4]))
    whole = ptx("prmt.b32 {$w0}, {$r0}, 0, 0xba98;", Uint32, biased)  # all ones where the number is not negative
    turned = _look_up(0x4B, biased, whole, Uint32(_BIAS[4]))  # ^ ff of negative numbers, ^ 80 of others
    return ptx("add.u32 {$w0}, {$r0}, {$r1};", Uint32, turned, ~whole & Uint32(_EACH[4]))


def _from_tables(codes: Any, in_order: Any, upward: Any, below: Any) -> Any:
    """The numbers of four signed codes, in e4m3."""
    which = codes & Uint32(0x7777)
    high = _picked(upward, Uint32(_UPWARD[1]), which)
    low = _picked(below, Uint32(_BELOW[1]), which)
    return _picked(high, low, ((codes >> 1) & Uint32(0x4444)) | in_order)


def _picked(low: Any, high: Any, which: Any) -> Any:
    """Four of eight bytes."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, low, high, which)


def _look_up(table: int, a: Any, b: Any, c: Any) -> Any:
    """An operation on each bit of three."""
    return ptx(f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}}, {table};", Uint32, a, b, c)


def added(sums: Any, numbers: Any) -> Any:
    """A sum of int8 and the four of a register."""
    return ptx("dp4a.s32.s32 {$w0}, {$r0}, 0x01010101, {$r1};", Int32, numbers, sums)
