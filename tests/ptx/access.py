"""Loads, stores and atomics of each lane, and addresses of the spaces."""

import functools

import numpy as np
from numpy.typing import NDArray

from tests.ptx.arithmetic import Function, unsupported
from tests.ptx.block import window
from tests.ptx.memory import LOCAL, PARAM, RANK_SHIFT, SHARED, Bytes, Fault, aligned
from tests.ptx.operands import TYPES, address, items, reader, writer
from tests.ptx.program import Program, implements
from tests.ptx.syntax import Instruction, Operand
from tests.ptx.warp import LANES, Mask, Run, Warp

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
U8, S8 = TYPES["u64"], np.dtype("i8")


def space_of(ins: Instruction) -> str:
    return next((p.split("::")[0] for p in ins.parts[1:] if p in SPACES), "generic")


def load(w: Warp, space: str, where: NDArray, lanes: NDArray, size: int) -> Bytes:
    """(n,) addresses of the lanes -> (n, size) bytes."""
    aligned(where, size)
    if space == "global":
        return w.memory.load(where, size)
    if space == "shared" and (where >> RANK_SHIFT == 0).all():
        return w.block.shared.load(where, size)
    parts = []
    for lane, each in zip(lanes, where, strict=True):
        kind, offset = window(int(each)) if space == "generic" else (space, int(each))
        at = np.array([offset])
        if kind == "shared":
            block, offset = w.block.locate(offset)
            parts.append(block.shared.load(np.array([offset]), size))
        elif kind == "global":
            parts.append(w.memory.load(at, size))
        else:
            data = w.block.machine.parameters if kind == "param" else w.local[lane]
            if not 0 <= offset <= data.size - size:
                raise Fault(f"byte {offset} of {data.size} of the space {kind} is out of bounds")
            parts.append(data[at[:, None] + np.arange(size)])
    return np.concatenate(parts)


def store(w: Warp, space: str, where: NDArray, lanes: NDArray, values: Bytes) -> None:
    aligned(where, values.shape[1])
    if space == "global":
        w.memory.store(where, values)
        return
    if space == "shared" and (where >> RANK_SHIFT == 0).all():
        w.block.shared.store(where, values, w.index)
        return
    for i, (lane, each) in enumerate(zip(lanes, where, strict=True)):
        kind, offset = window(int(each)) if space == "generic" else (space, int(each))
        if kind == "shared":
            block, offset = w.block.locate(offset)
            block.shared.store(np.array([offset]), values[i : i + 1], w.index)
        elif kind == "global":
            w.memory.store(np.array([offset]), values[i : i + 1])
        elif kind == "local" and 0 <= offset <= w.local.shape[1] - values.shape[1]:
            w.local[lane, offset : offset + values.shape[1]] = values[i]
        else:
            raise Fault(f"a store to byte {offset} of the space {kind}")


@implements("ld", "ldu")
def ld(ins: Instruction, program: Program) -> Run:
    dtype, space = TYPES[ins.type], space_of(ins)
    targets = items(ins.operands[0])
    writes = [writer(o, dtype) for o in targets]
    where = address(ins.operands[1], program)
    size = dtype.itemsize * len(targets)

    def run(w: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(mask)
        values = np.zeros((LANES, len(targets)), dtype)
        values[lanes] = load(w, space, where(w)[lanes], lanes, size).view(dtype)
        for i, write in enumerate(writes):
            write(w, values[:, i].copy(), mask)

    return run


@implements("st")
def st(ins: Instruction, program: Program) -> Run:
    dtype, space = TYPES[ins.type], space_of(ins)
    where = address(ins.operands[0], program)
    reads = [reader(o, dtype, program) for o in items(ins.operands[1])]

    def run(w: Warp, mask: Mask) -> None:
        lanes = np.flatnonzero(mask)
        values = np.stack([read(w)[lanes] for read in reads], axis=1)
        store(w, space, where(w)[lanes], lanes, values.view(np.uint8))

    return run


@implements("cvta")
def cvta(ins: Instruction, program: Program) -> Run:
    """From a space to generic addresses, or back (.to)."""
    base = {"shared": SHARED, "param": PARAM, "local": LOCAL}.get(space_of(ins), 0)
    base = -base if ins.has("to") else base
    write, source = writer(ins.operands[0], TYPES[ins.type]), _value(ins.operands[1], program)
    return lambda w, mask: write(w, (source(w) + base).astype(TYPES[ins.type]), mask)


def _value(operand: Operand, program: Program):
    read = reader(operand, U8, program)
    return lambda w: read(w).astype(S8)


@implements("mapa")
def mapa(ins: Instruction, program: Program) -> Run:
    """The address of the same byte in another block of the cluster."""
    dtype = TYPES[ins.type]
    generic = space_of(ins) == "generic"
    write = writer(ins.operands[0], dtype)
    source, rank = reader(ins.operands[1], dtype, program), reader(ins.operands[2], TYPES["u32"], program)

    def run(w: Warp, mask: Mask) -> None:
        if (rank(w)[mask] >= len(w.block.cluster.blocks)).any():
            raise Fault(f"rank {rank(w)[mask].max()} of a cluster of {len(w.block.cluster.blocks)} blocks")
        base = SHARED if generic else 0
        offset = (source(w).astype(S8) - base) & ((1 << RANK_SHIFT) - 1)
        write(w, (offset + ((rank(w).astype(S8) + 1) << RANK_SHIFT) + base).astype(dtype), mask)

    return run


ATOMICS: dict[str, Function] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new, "cas": lambda old, test, new: np.where(old == test, new, old),
    "inc": lambda old, top: np.where(old >= top, 0, old + 1),
}  # fmt: skip


@implements("atom", "red")
def atomic(ins: Instruction, program: Program) -> Run:
    """Lane after lane."""
    function = next((ATOMICS[p] for p in ins.parts[1:] if p in ATOMICS), None)
    if function is None or ins.type not in TYPES or ins.type.endswith("x2") or {"v2", "v4", "v8"} & set(ins.parts):
        raise unsupported(ins)
    dtype, space = TYPES[ins.type], space_of(ins)
    operands = list(ins.operands)
    write = writer(operands.pop(0), dtype) if ins.parts[0] == "atom" else None
    where = address(operands[0], program)
    reads = [reader(o, dtype, program) for o in operands[1:]]

    def run(w: Warp, mask: Mask) -> None:
        addresses, values, old = where(w), [read(w) for read in reads], np.zeros(LANES, dtype)
        for lane in np.flatnonzero(mask):
            one = np.array([lane])
            old[one] = load(w, space, addresses[one], one, dtype.itemsize).view(dtype)[:, 0]
            new = function(old[one], *[v[one] for v in values]).astype(dtype)
            store(w, space, addresses[one], one, new[:, None].view(np.uint8))
        if write is not None:
            write(w, old, mask)

    return run


@functools.cache
def fragment(transposed: bool) -> tuple[NDArray, NDArray]:
    """The row and the byte of it of the four bytes that each lane has of an 8 × 8 matrix of 16 bits."""
    lane, byte = np.arange(LANES)[:, None], np.arange(4)[None]
    if transposed:
        return 2 * (lane % 4) + byte // 2, 2 * (lane // 4) + byte % 2
    return lane // 4 + 0 * byte, 4 * (lane % 4) + byte


@implements("stmatrix.sync.aligned.m8n8", "ldmatrix.sync.aligned.m8n8")
def matrices(ins: Instruction, program: Program) -> Run:
    """One, two or four matrices; lane 8 i + r names the address of row r of matrix i."""
    stores, count = ins.parts[0] == "stmatrix", int(ins.parts[4][1:])
    if ins.type != "b16":
        raise unsupported(ins)
    where = address(ins.operands[0 if stores else 1], program)
    registers = items(ins.operands[1 if stores else 0])
    reads = [reader(o, TYPES["b32"], program) for o in registers] if stores else []
    writes = [] if stores else [writer(o, TYPES["b32"]) for o in registers]
    row, byte = fragment(ins.has("trans"))
    lanes = np.arange(8 * count)
    space = "shared" if space_of(ins) == "shared" else "generic"

    def run(w: Warp, mask: Mask) -> None:
        addresses = where(w)[lanes]
        if stores:
            data = np.empty((count, 8, 16), np.uint8)
            for i, read in enumerate(reads):
                data[i, row, byte] = read(w).view(np.uint8).reshape(LANES, 4)
            store(w, space, addresses, lanes, data.reshape(-1, 16))
        else:
            data = load(w, space, addresses, lanes, 16).reshape(count, 8, 16)
            for i, write in enumerate(writes):
                write(w, data[i, row, byte].copy().view(np.uint32)[:, 0], mask)

    return run
