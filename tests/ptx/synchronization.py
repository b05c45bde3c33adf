"""Barriers of blocks and clusters, mbarriers, fences, and hints that change no result."""

import numpy as np

from tests.ptx.access import space_of
from tests.ptx.arithmetic import unsupported
from tests.ptx.block import Block, Event, MBarrier, window
from tests.ptx.memory import Fault
from tests.ptx.operands import TYPES, address, reader, writer
from tests.ptx.program import Program, implements
from tests.ptx.syntax import SINK, Address, Imm, Instruction
from tests.ptx.warp import LANES, Mask, Run, Wait, Warp

U4 = TYPES["u32"]


def barrier_at(w: Warp, space: str, where: int) -> tuple[Block, int]:
    if space == "generic":
        kind, where = window(where)
        if kind != "shared":
            raise Fault(f"an mbarrier in the space {kind}")
    if where % 8:
        raise Fault(f"an mbarrier at {where}, no multiple of 8")
    return w.block.locate(where)


@implements("mbarrier.init", "mbarrier.inval")
def mbarrier_init(ins: Instruction, program: Program) -> Run:
    where, space = address(ins.operands[0], program), space_of(ins)
    count = reader(ins.operands[1], U4, program) if ins.has("init") else None

    def run(w: Warp, mask: Mask) -> None:
        for lane in np.flatnonzero(mask):
            block, offset = barrier_at(w, space, int(where(w)[lane]))
            block.shared.check(np.array([offset]), 8)
            block.shared.barrier[offset : offset + 8] = count is not None
            if count is None:
                block.mbarrier(offset)
                del block.mbarriers[offset]
                continue
            if offset in block.mbarriers:
                raise Fault(f"the mbarrier at {offset} is initialized again")
            n = int(count(w)[lane])
            if not 1 <= n < 1 << 20:
                raise Fault(f"an mbarrier of {n} arrivals")
            block.mbarriers[offset] = MBarrier(n, n, w)

    return run


@implements("mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_arrive(ins: Instruction, program: Program) -> Run:
    """Each active lane arrives, after it has announced bytes where the instruction does so."""
    if ins.parts[1] == "arrive_drop" or ins.has("noComplete"):
        raise unsupported(ins)
    at = next(i for i, o in enumerate(ins.operands) if isinstance(o, Address))
    write = writer(ins.operands[0], TYPES["b64"]) if at else None
    where, space = address(ins.operands[at], program), space_of(ins)
    value = reader(ins.operands[at + 1] if len(ins.operands) > at + 1 else Imm(1), U4, program)
    arrives, sign = ins.parts[1] == "arrive", -1 if ins.parts[1] == "complete_tx" else 1
    transaction = ins.has("expect_tx") or ins.has("complete_tx")
    text = f"line {ins.line}: {ins.text}"

    def run(w: Warp, mask: Mask) -> None:
        state = np.zeros(LANES, np.uint64)
        for lane in np.flatnonzero(mask):
            block, offset = barrier_at(w, space, int(where(w)[lane]))
            barrier, n = block.mbarrier(offset, abroad=block is not w.block), int(value(w)[lane])
            if transaction and arrives:
                barrier.bytes += n  # the phase cannot end before the arrival that comes with it
            elif transaction:
                barrier.expect(sign * n)
            if arrives and block is not w.block:
                arrive = lambda block=block, offset=offset, n=n: block.mbarrier(offset).arrive(n)  # noqa: E731
                w.block.machine.start(Event("arrival", f"{w}, {text}", arrive, block))
            elif arrives:
                state[lane] = barrier.arrive(1 if transaction else n)
        if write is not None:
            write(w, state, mask)

    return run


@implements("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(ins: Instruction, program: Program) -> Run:
    """Until the phase of the parity, or of the state, has ended; it may give up, and with one habit first does."""
    write = writer(ins.operands[0], TYPES["pred"])
    where, space = address(ins.operands[1], program), space_of(ins)
    phase = reader(ins.operands[2], U4 if ins.has("parity") else TYPES["u64"], program)
    parity = ins.has("parity")

    def run(w: Warp, mask: Mask) -> Wait | None:
        spots = {(int(where(w)[i]), int(phase(w)[i])) for i in np.flatnonzero(mask)}
        waits = []
        for spot, wanted in spots:
            block, offset = barrier_at(w, space, spot)
            if block is not w.block:
                raise Fault("a wait for an mbarrier of another block")
            waits.append((block.mbarrier(offset), offset, wanted))

        def ready() -> bool:
            if parity:
                return all(b.phase & 1 != wanted & 1 for b, _, wanted in waits)
            return all(b.phase != wanted for b, _, wanted in waits)

        def what() -> str:
            return "; ".join(f"the mbarrier at {o} to leave phase {p}: {b}" for b, o, p in waits)

        if w.block.machine.habits.gives_up and not ready():
            w.given_up ^= {ins.line}
            if ins.line in w.given_up:
                return write(w, np.zeros(LANES, bool), mask)
        return Wait(what, ready, lambda success: write(w, np.full(LANES, success), mask), timed=True)

    return run


@implements("bar.sync", "bar.arrive", "bar.cta.sync", "bar.cta.arrive", "barrier.sync", "barrier.arrive")
@implements("barrier.cta.sync", "barrier.cta.arrive")
def named_barrier(ins: Instruction, program: Program) -> Run:
    """A warp counts as 32 threads, even where some have ended."""
    number = reader(ins.operands[0] if ins.operands else Imm(0), U4, program)
    count = reader(ins.operands[1], U4, program) if len(ins.operands) > 1 else None
    waits = ins.has("sync")

    def run(w: Warp, mask: Mask) -> Wait | None:
        index = int(number(w)[np.argmax(mask)])
        expected = int(count(w)[np.argmax(mask)]) if count else LANES * len(w.block.warps)
        if index > 15 or expected % LANES or not expected:
            raise Fault(f"barrier {index} of {expected} threads")
        barrier = w.block.named[index]
        if barrier.arrived and barrier.expected != expected:
            raise Fault(f"barrier {index} of {expected} threads; others expect {barrier.expected}")
        barrier.expected, barrier.arrived = expected, barrier.arrived + LANES
        generation = barrier.generation
        if barrier.arrived == expected:
            barrier.arrived, barrier.generation = 0, generation + 1
        if not waits:
            return None
        what = f"barrier {index} of {expected} threads"
        return Wait(lambda: f"{what}; {barrier.arrived} are there", lambda: barrier.generation != generation)

    return run


@implements("barrier.cluster")
def cluster_barrier(ins: Instruction, program: Program) -> Run:
    arrives, releases = ins.has("arrive"), not ins.has("relaxed")

    def run(w: Warp, mask: Mask) -> Wait | None:
        cluster = w.block.cluster
        if arrives:
            if w.cluster_generation is not None:
                raise Fault("it arrives twice at the barrier of the cluster")
            w.cluster_generation = cluster.generation
            if releases:
                w.block.publish(w)
            cluster.arrived.add(w)
            cluster.settle()
            return None
        if w.cluster_generation is None:
            raise Fault("it waits for the barrier of the cluster and has not arrived")
        generation, w.cluster_generation = w.cluster_generation, None
        what = lambda: f"the barrier of the cluster; {len(cluster.arrived)} warps are there"  # noqa: E731
        return Wait(what, lambda: cluster.generation != generation)

    return run


@implements("fence.proxy")
def proxy_fence(ins: Instruction, program: Program) -> Run:
    if not ins.parts[2].startswith("async"):
        return nothing(ins, program)

    def run(w: Warp, mask: Mask) -> None:
        w.block.shared.fence(w.index)
        w.block.publish(w)

    return run


@implements("fence.mbarrier_init", "fence.acq_rel.cluster", "fence.sc.cluster")
def publish(ins: Instruction, program: Program) -> Run:
    return lambda w, mask: w.block.publish(w)


@implements("fence", "membar", "prefetch", "prefetchu", "nanosleep", "bar.warp.sync", "applypriority")
@implements("pmevent", "createpolicy")
def nothing(ins: Instruction, program: Program) -> Run:
    """Memory is in order here, and hints change no result."""
    if ins.operands and ins.operands[0] != SINK and ins.parts[0] == "createpolicy":
        write = writer(ins.operands[0], TYPES["b64"])
        return lambda w, mask: write(w, np.zeros(LANES, np.uint64), mask)
    return lambda w, mask: None


@implements("griddepcontrol")
def kernel_before(ins: Instruction, program: Program) -> Run:
    """A launch that may begin before the kernel before it has ended waits for that before it touches global memory, and
    before it lets the next one begin, which waits for this one alone."""

    def wait(w: Warp, mask: Mask) -> None:
        w.is_alone = True

    def launch_dependents(w: Warp, mask: Mask) -> None:
        w.after_the_kernel_before("the kernel after it is launched")

    return wait if ins.has("wait") else launch_dependents


@implements("setmaxnreg")
def setmaxnreg(ins: Instruction, program: Program) -> Run:
    """Each warp gives registers to the block's pool, or waits until the pool has what it lacks; all four of a warpgroup
    do so. Where the launch does not say how many a thread begins with, the pool is not counted."""
    amount = ins.operands[0]
    assert isinstance(amount, Imm)
    count, grows = int(amount.value), ins.parts[1] == "inc"
    text = f"setmaxnreg.{ins.parts[1]} {count}"

    def run(w: Warp, mask: Mask) -> Wait | None:
        w.block.machine.note(text)
        if not 24 <= count <= 256 or count % 8:
            raise Fault(f"{count} registers: from 24 to 256 in steps of 8")
        changes = w.block.registers.setdefault(w.index // 4, [])
        changes.append((w.index, count))
        if w.registers_given is None:
            return None
        if grows != (count > w.registers_given) and count != w.registers_given:
            raise Fault(f"a thread has {w.registers_given} registers")

        def pool() -> int:
            return w.block.free_registers

        def settle(success: bool) -> None:
            w.block.free_registers -= needed
            w.registers_given = count

        needed = (count - w.registers_given) * LANES
        return Wait(lambda: f"{needed} registers; the pool has {pool()}", lambda: pool() >= needed, settle)

    return run


@implements("trap", "brkpt")
def trap(ins: Instruction, program: Program) -> Run:
    def run(w: Warp, mask: Mask) -> None:
        raise Fault("the kernel gives up")

    return run
