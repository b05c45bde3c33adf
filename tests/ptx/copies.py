"""Bulk copies between global and shared memory, which run when the habits of the machine say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ptx.access import space_of
from tests.ptx.arithmetic import unsupported
from tests.ptx.block import Block, Event, Machine
from tests.ptx.memory import PARAM, POISON, WINDOW, Fault
from tests.ptx.operands import TYPES, address, items, reader
from tests.ptx.program import Program, implements
from tests.ptx.synchronization import barrier_at
from tests.ptx.syntax import Address, Imm, Instruction, Operand
from tests.ptx.tensormap import TensorMap
from tests.ptx.warp import Mask, Run, Wait, Warp

S8 = np.dtype("i8")
KNOWN = {"cp", "async", "bulk", "tensor", "tile", "shared::cluster", "shared::cta", "global", "bulk_group"}
KNOWN |= {"mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint", *(f"{n}d" for n in range(1, 6))}


@dataclass(frozen=True)
class Box:
    """The data that a copy moves: a box of a tensor map, or a run of bytes (no map)."""

    start: tuple[int, ...]
    map: TensorMap | None
    size: int

    def offsets(self, base: int) -> np.ndarray:
        if base % (128 if self.map else 16):
            raise Fault(f"a bulk copy at {base} of shared memory is misaligned")
        return self.map.shared_offsets(base) if self.map else base + np.arange(self.size)


@dataclass
class Copy:
    """A store: it reads shared memory at one time and writes global memory at a later one."""

    reading: Event
    writing: Event


def map_at(machine: Machine, where: int) -> TensorMap:
    data = machine.parameters
    if 0 <= where - PARAM < WINDOW:
        where -= PARAM
        return TensorMap.decode(data[where : where + 128].tobytes())
    return TensorMap.decode(machine.memory.load(np.array([where]), 128).tobytes())


def box_of(operand: Operand, size: Operand | None, program: Program) -> Callable[[Warp, int], Box]:
    """Reads which box a lane means."""
    assert isinstance(operand, Address)
    where = address(Address(operand.base, operand.offset), program)
    if size is not None:
        count = reader(size, TYPES["u32"], program)
        return lambda w, lane: Box((int(where(w)[lane]),), None, int(count(w)[lane]))
    coordinates = [reader(c, TYPES["s32"], program) for c in operand.coordinates]

    def read(w: Warp, lane: int) -> Box:
        tensor = map_at(w.block.machine, int(where(w)[lane]))
        start = tuple(int(c(w)[lane]) for c in coordinates)
        if len(start) != len(tensor.dims):
            raise Fault(f"{len(start)} coordinates of a tensor map of rank {len(tensor.dims)}")
        return Box(start, tensor, tensor.size)

    return read


def lanes_that(act: str, w: Warp, mask: Mask, text: str) -> np.ndarray:
    """The lanes that load or store; that there are several is noted."""
    lanes = np.flatnonzero(mask)
    if len(lanes) > 1:
        w.block.machine.note(f"{len(lanes)} lanes {act}: {text}")
    return lanes


@implements("cp.async.bulk")
def bulk(ins: Instruction, program: Program) -> Run:
    if set(ins.parts) - KNOWN:
        raise unsupported(ins)
    loads = ins.parts.index("global") > min(i for i, p in enumerate(ins.parts) if p.startswith("shared"))
    return bulk_load(ins, program) if loads else bulk_store(ins, program)


def bulk_load(ins: Instruction, program: Program) -> Run:
    """Poisons where the data will land, in each of the blocks that the mask names, and lands it some time."""
    tensor = ins.has("tensor")
    target, source, *rest = ins.operands
    size = None if tensor else rest.pop(0)
    barrier, space = address(rest[0], program), space_of(ins)
    where, box = address(target, program), box_of(source, size, program)
    blocks = reader(rest[1], TYPES["u16"], program) if ins.has("multicast::cluster") else None
    text = f"line {ins.line}: {ins.text}"

    def run(w: Warp, mask: Mask) -> None:
        lanes = lanes_that("load", w, mask, text)
        for lane in lanes:
            piece = box(w, lane)
            block, offset = w.block.locate(int(where(w)[lane]))
            other, signal = barrier_at(w, space, int(barrier(w)[lane]))
            if other is not block and blocks is None:
                raise Fault("a load signals an mbarrier of another block than it fills")
            ranks = [i for i in range(16) if int(blocks(w)[lane]) >> i & 1] if blocks else [block.rank]
            for rank in ranks:
                if rank >= len(w.block.cluster.blocks):
                    raise Fault(f"a copy to rank {rank} of a cluster of {len(w.block.cluster.blocks)} blocks")
                land(w, w.block.cluster.blocks[rank], piece, offset, signal, f"{w}, {text}")

    return run


def land(w: Warp, block: Block, box: Box, offset: int, signal: int, text: str) -> None:
    machine, memory, offsets = w.block.machine, w.memory, box.offsets(offset)
    block.mbarrier(signal, abroad=True)
    block.shared.write_async(offsets, POISON)

    def happen() -> None:
        barrier = block.mbarrier(signal)
        if box.map is not None:
            data = box.map.load(memory, box.start)
        else:
            data = memory.load(np.array(box.start), box.size)[0]
        block.shared.write_async(offsets, data)
        barrier.expect(-box.size)

    machine.start(Event("load", text, happen, block))


@implements("st.async")
def store_async(ins: Instruction, program: Program) -> Run:
    """Registers into shared memory of the cluster, some time; each lane's bytes count for an mbarrier beside it."""
    if set(ins.parts) - {
        "st",
        "async",
        "weak",
        "shared::cluster",
        "mbarrier::complete_tx::bytes",
        "v2",
        "v4",
        ins.type,
    }:
        raise unsupported(ins)
    target, source, barrier = ins.operands
    where, signal, space = address(target, program), address(barrier, program), space_of(ins)
    reads = [reader(o, TYPES[ins.type], program) for o in items(source)]
    text = f"line {ins.line}: {ins.text}"

    def run(w: Warp, mask: Mask) -> None:
        values = np.stack([read(w) for read in reads], axis=1)
        data = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
        size = data.shape[1]
        groups: dict[tuple[Block, int], list[tuple[int, int]]] = {}
        for lane in np.flatnonzero(mask):
            block, offset = w.block.locate(int(where(w)[lane]))
            other, at = barrier_at(w, space, int(signal(w)[lane]))
            if other is not block:
                raise Fault("a store signals an mbarrier of another block than it fills")
            if offset % size:
                raise Fault(f"{size} bytes at {offset} of shared memory are misaligned")
            groups.setdefault((block, at), []).append((int(lane), offset))
        for (block, at), found in groups.items():
            lanes, starts = (np.array(x) for x in zip(*found, strict=True))
            land_sums(w, block, starts[:, None] + np.arange(size), data[lanes], at, f"{w}, {text}")

    return run


def land_sums(w: Warp, block: Block, offsets: np.ndarray, data: np.ndarray, at: int, text: str) -> None:
    """Poisons where the data will land, and lands it some time."""
    block.mbarrier(at, abroad=block is not w.block)
    block.shared.write_abroad(offsets, POISON)

    def happen() -> None:
        barrier = block.mbarrier(at)
        block.shared.write_abroad(offsets, data)
        barrier.expect(-data.size)

    w.block.machine.start(Event("load", text, happen, block))


def bulk_store(ins: Instruction, program: Program) -> Run:
    tensor = ins.has("tensor")
    first, second, *rest = ins.operands
    box = box_of(first, None if tensor else rest[0], program)
    where = address(second, program)
    text = f"line {ins.line}: {ins.text}"

    def run(w: Warp, mask: Mask) -> None:
        lanes = lanes_that("store", w, mask, text)
        done: dict[tuple[Box, int], Copy] = {}  # lanes that store the same share one copy
        for lane in lanes:
            piece, base = box(w, lane), int(where(w)[lane])
            if (piece, base) not in done:
                done[piece, base] = depart(w, piece, base, f"{w}, {text}")
            w.copies.setdefault(int(lane), [[]])[-1].append(done[piece, base])

    return run


def depart(w: Warp, box: Box, base: int, text: str) -> Copy:
    block, machine, memory = w.block, w.block.machine, w.memory
    offsets = box.offsets(base)
    block.shared.check_async(offsets, "a bulk store reads")

    def read() -> None:
        block.shared.check_async(offsets, "a bulk store reads")
        copy.writing.happen = lambda data=block.shared.data[offsets]: write(data)
        machine.start(copy.writing)

    def write(data: np.ndarray) -> None:
        if box.map is not None:
            box.map.store(memory, box.start, data)
        else:
            memory.store(np.array(box.start), data[None])

    copy = Copy(Event("read", text, read, block), Event("write", text, lambda: None))
    machine.start(copy.reading)
    return copy


@implements("cp.async.bulk.commit_group")
def commit(ins: Instruction, program: Program) -> Run:
    def run(w: Warp, mask: Mask) -> None:
        for lane in np.flatnonzero(mask):
            w.copies.setdefault(int(lane), [[]]).append([])

    return run


@implements("cp.async.bulk.wait_group")
def wait(ins: Instruction, program: Program) -> Run:
    """All but the last groups have read their source (.read), or are done."""
    last, reads = ins.operands[0], ins.has("read")
    assert isinstance(last, Imm)
    keep = int(last.value)

    def run(w: Warp, mask: Mask) -> Wait:
        lanes = [int(lane) for lane in np.flatnonzero(mask)]
        return Wait(lambda: "bulk copies", lambda: True, lambda success: finish(w, lanes, keep, reads), lazy=True)

    return run


def finish(w: Warp, lanes: list[int], keep: int, reads: bool) -> None:
    machine = w.block.machine
    for groups in (w.copies.get(lane, [[]]) for lane in lanes):
        old = groups[: max(0, len(groups) - 1 - keep)]
        for copy in (c for group in old for c in group):
            machine.happen(copy.reading)
            if not reads:
                machine.happen(copy.writing)
        if not reads:
            del groups[: len(old)]
