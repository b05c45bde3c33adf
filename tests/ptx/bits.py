"""Instructions on bits and bytes, and exchanges between lanes."""

import numpy as np
from numpy.typing import NDArray

from tests.ptx.arithmetic import elementwise, unsupported
from tests.ptx.operands import TYPES, reader, writer
from tests.ptx.program import Program, implements
from tests.ptx.syntax import SINK, Imm, Instruction, Pair
from tests.ptx.warp import LANES, Mask, Run, Warp

U4, U8, PRED = TYPES["u32"], TYPES["u64"], TYPES["pred"]


@implements("prmt.b32")
def prmt(ins: Instruction, program: Program) -> Run:
    """Each nibble of the third operand picks one of eight bytes, or copies its sign."""
    if ins.type != "b32":
        raise unsupported(ins)

    def permute(a: NDArray, b: NDArray, selector: NDArray) -> NDArray:
        source = a.astype(np.uint64) | b.astype(np.uint64) << 32
        result = np.zeros(LANES, np.uint32)
        for i in range(4):
            nibble = selector >> np.uint32(4 * i) & 15
            byte = (source >> (8 * (nibble & 7)).astype(np.uint64) & 255).astype(np.uint32)
            result |= np.where(nibble & 8, (byte >> 7) * 255, byte).astype(np.uint32) << np.uint32(8 * i)
        return result

    return elementwise(ins, program, permute, U4, U4, U4, U4)


@implements("bfi", "bfe")
def bit_field(ins: Instruction, program: Program) -> Run:
    dtype = TYPES[ins.type]
    bits = 8 * dtype.itemsize

    def field(position: NDArray, length: NDArray) -> tuple[NDArray, NDArray]:
        position, length = position.astype(object) & 255, length.astype(object) & 255
        return position, np.array([(1 << int(n)) - 1 for n in length], object)

    def insert(a: NDArray, b: NDArray, position: NDArray, length: NDArray) -> NDArray:
        start, ones = field(position, length)
        hole = ones << start
        value = (b.astype(object) & ~hole) | ((a.astype(object) & ones) << start)
        return (value & ((1 << bits) - 1)).astype(dtype)

    def extract(a: NDArray, position: NDArray, length: NDArray) -> NDArray:
        start, ones = field(position, length)
        value = (a.astype(object) >> start) & ones
        if dtype.kind == "i":
            value = np.where((value & ((ones + 1) >> 1)) != 0, value - (ones + 1), value)
        return value.astype(np.int64).astype(dtype) if dtype.kind == "i" else value.astype(dtype)

    if ins.parts[0] == "bfi":
        return elementwise(ins, program, insert, dtype, dtype, dtype, U4, U4)
    return elementwise(ins, program, extract, dtype, dtype, U4, U4)


@implements("shf")
def funnel_shift(ins: Instruction, program: Program) -> Run:
    """32 bits of the 64 of (b, a), shifted left or right."""
    is_left, wraps = ins.has("l"), ins.has("wrap")

    def funnel(a: NDArray, b: NDArray, amount: NDArray) -> NDArray:
        n = (amount & 31 if wraps else np.minimum(amount, 32)).astype(np.uint64)
        both = b.astype(np.uint64) << 32 | a
        moved = both << n >> np.uint64(32) if is_left else both >> n
        return moved.astype(np.uint32)

    return elementwise(ins, program, funnel, U4, U4, U4, U4)


@implements("lop3.b32")
def lop3(ins: Instruction, program: Program) -> Run:
    table = ins.operands[4]
    if not isinstance(table, Imm) or not isinstance(table.value, int) or ins.opcode != "lop3.b32":
        raise unsupported(ins)
    rows = [i for i in range(8) if table.value >> i & 1]

    def look_up(a: NDArray, b: NDArray, c: NDArray, _: NDArray) -> NDArray:
        result = np.zeros(LANES, np.uint32)
        for i in rows:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return elementwise(ins, program, look_up, U4, U4, U4, U4, U4)


@implements("popc", "clz", "brev")
def count_bits(ins: Instruction, program: Program) -> Run:
    dtype = TYPES[ins.type]
    width = 8 * dtype.itemsize

    def count(a: NDArray) -> NDArray:
        words = [f"{int(x):0{width}b}" for x in a]
        if ins.parts[0] == "brev":
            return np.array([int(x[::-1], 2) for x in words], dtype)
        return np.array([x.count("1") if ins.parts[0] == "popc" else len(x) - len(x.lstrip("0")) for x in words], U4)

    return elementwise(ins, program, count, dtype if ins.parts[0] == "brev" else U4, dtype)


@implements("shfl.sync")
def shfl(ins: Instruction, program: Program) -> Run:
    target = ins.operands[0]
    outs = target.items if isinstance(target, Pair) else (target, SINK)
    write, write_valid = writer(outs[0], U4), writer(outs[1], PRED)
    value, lane, clamp = (reader(o, U4, program) for o in ins.operands[1:4])
    mode, own = ins.parts[2], np.arange(LANES)

    def run(w: Warp, mask: Mask) -> None:
        b, c = lane(w).astype(np.int64) & 31, clamp(w).astype(np.int64)
        limit, segment = c & 31, c >> 8 & 31
        low, high = own & segment, (own & segment) | (limit & ~segment)
        source = {"idx": low | (b & ~segment), "up": own - b, "down": own + b, "bfly": own ^ b}[mode]
        valid = source >= high if mode == "up" else source <= high
        write(w, value(w)[np.where(valid, source, own)], mask)
        write_valid(w, valid, mask)

    return run


@implements("elect.sync")
def elect(ins: Instruction, program: Program) -> Run:
    """The lowest of the named lanes."""
    target = ins.operands[0]
    outs = target.items if isinstance(target, Pair) else (target, SINK)
    write, write_leader, members = writer(outs[0], U4), writer(outs[1], PRED), reader(ins.operands[1], U4, program)

    def run(w: Warp, mask: Mask) -> None:
        named = int(members(w)[np.argmax(mask)])
        leader = (named & -named).bit_length() - 1
        write(w, np.full(LANES, leader, np.uint32), mask)
        write_leader(w, np.arange(LANES) == leader, mask)

    return run


@implements("vote.sync")
def vote(ins: Instruction, program: Program) -> Run:
    mode = ins.parts[2]
    write = writer(ins.operands[0], U4 if mode == "ballot" else PRED)
    condition = reader(ins.operands[1], PRED, program)

    def run(w: Warp, mask: Mask) -> None:
        x = condition(w)
        ballot = np.full(LANES, sum(1 << int(i) for i in np.flatnonzero(x & mask)), np.uint32)
        answers = {"ballot": ballot, "any": np.full(LANES, (x & mask).any()), "all": np.full(LANES, x[mask].all())}
        write(w, answers[mode], mask)

    return run


@implements("redux.sync")
def redux(ins: Instruction, program: Program) -> Run:
    dtype = TYPES[ins.type]
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    function = (functions | {"xor": np.bitwise_xor})[ins.parts[2]]
    write, value = writer(ins.operands[0], dtype), reader(ins.operands[1], dtype, program)

    def run(w: Warp, mask: Mask) -> None:
        write(w, np.full(LANES, function.reduce(value(w)[mask]), dtype), mask)

    return run
