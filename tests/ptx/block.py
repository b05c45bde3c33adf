"""The machine: blocks of warps in clusters, the asynchronous events in flight, and who goes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.habits import KINDS, Habits
from tests.ptx.memory import LOCAL, PARAM, SHARED, WINDOW, Bytes, Deadlock, Fault, Memory, Shared
from tests.ptx.program import Program
from tests.ptx.warp import Warp

# Instructions that may pass before those that spin are taken to spin for ever.
PATIENCE = 2_000_000
Coordinate = tuple[int, int, int]


@dataclass(eq=False)
class Event:
    """Something asynchronous that happens at a time which nobody knows."""

    kind: str  # of habits.KINDS
    what: str
    happen: Callable[[], None]
    block: Block | None = None  # whose shared memory it needs


@dataclass
class MBarrier:
    """Arrivals and bytes that a phase waits for; a phase ends when both are zero."""

    count: int
    pending: int
    owner: Warp  # that has initialized it
    published: bool = False  # to other blocks and to the copy engine
    bytes: int = 0
    phase: int = 0

    def __str__(self) -> str:
        return f"it is in phase {self.phase} and waits for {self.pending} of {self.count} arrivals, {self.bytes} bytes"

    def arrive(self, count: int) -> int:
        phase = self.phase
        if count > self.pending:
            raise Fault(f"{count} arrivals at an mbarrier that waits for {self.pending} of {self.count}")
        self.pending -= count
        self._settle()
        return phase

    def expect(self, size: int) -> None:
        self.bytes += size
        if abs(self.bytes) >= 1 << 20:
            raise Fault(f"an mbarrier waits for {self.bytes} bytes")
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class NamedBarrier:
    expected: int = 0
    arrived: int = 0
    generation: int = 0


@dataclass(eq=False)
class Cluster:
    index: Coordinate
    blocks: list[Block] = field(default_factory=list)
    arrived: set[Warp] = field(default_factory=set, repr=False)
    generation: int = 0

    def settle(self) -> None:
        """The barrier of the cluster opens when every warp that still runs has arrived."""
        running = {w for b in self.blocks for w in b.warps if w.groups}
        if self.arrived and running <= self.arrived:
            self.arrived, self.generation = set(), self.generation + 1


class Block:
    def __init__(self, machine: Machine, cluster: Cluster, index: Coordinate, rank: int, shared_bytes: int) -> None:
        self.machine, self.cluster, self.index, self.rank = machine, cluster, index, rank
        self.shared = Shared(shared_bytes)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier() for _ in range(16)]
        self.products: dict[int, list[tuple]] = {}  # the wgmma instructions of each warpgroup
        self.registers: dict[int, list[tuple[int, int]]] = {}  # by warpgroup, what setmaxnreg gave which warp
        self.free_registers = 0  # that warps have given up
        self.warps: list[Warp] = []

    @property
    def done(self) -> bool:
        return not any(w.groups for w in self.warps)

    def mbarrier(self, offset: int, *, abroad: bool = False) -> MBarrier:
        """The one at an offset; `abroad`: for another block or for the copy engine."""
        if self.done:
            raise Fault(f"an mbarrier of block {self.index}, which has ended, is used")
        if offset not in self.mbarriers:
            raise Fault(f"no mbarrier is initialized at {offset} of the shared memory of block {self.index}")
        barrier = self.mbarriers[offset]
        if abroad and not barrier.published:
            raise Fault(f"the mbarrier at {offset} is initialized without fence.mbarrier_init after that")
        return barrier

    def publish(self, warp: Warp) -> None:
        """Make the warp's initialized barriers visible to other blocks and the copy engine."""
        for barrier in self.mbarriers.values():
            barrier.published |= barrier.owner is warp

    def locate(self, address: int) -> tuple[Block, int]:
        """The block and its offset that an address of the shared::cluster window means."""
        rank, offset = address >> 24, address & ((1 << 24) - 1)
        if rank > len(self.cluster.blocks) or address < 0:
            raise Fault(f"{address:#x} is no address of shared memory")
        block = self.cluster.blocks[rank - 1] if rank else self
        if block is not self and block.done:
            raise Fault(f"shared memory of block {block.index}, which has ended, is used")
        return block, offset

    def leave(self, warp: Warp) -> None:
        """A warp has ended."""
        for check in self.machine.on_leave:
            check(warp)
        self.cluster.settle()


class Machine:
    """Runs the clusters of a grid, `resident` of them at a time; habits decide all that the hardware leaves open."""

    def __init__(
        self, program: Program, memory: Memory, parameters: Bytes, seed: int, habits: Habits | None = None
    ) -> None:
        self.program, self.memory, self.parameters = program, memory, parameters
        self.rng = np.random.default_rng(seed)
        self.events: list[Event] = []
        self.notes: dict[str, int] = {}
        self.on_leave: list[Callable[[Warp], None]] = []
        self.habits = habits or Habits.drawn(self.rng)
        self.programmatic = False  # whether the kernel before may still run
        self.idle = 0  # instructions since one that others may have waited for
        self._dice = np.empty(0)

    def chance(self, rate: float) -> bool:
        if rate in (0, 1):
            return rate == 1
        if not self._dice.size:
            self._dice = self.rng.random(4096)
        value, self._dice = self._dice[0], self._dice[1:]
        return bool(value < rate)

    def preempts(self) -> bool:
        return self.chance(self.habits.turns)

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def start(self, event: Event) -> None:
        """It is in flight, or happens at once."""
        self.events.append(event)
        if getattr(self.habits, event.kind) == 1:
            self.happen(event)

    def happen(self, event: Event) -> None:
        """Now, if it has not happened."""
        if event in self.events:
            self.events.remove(event)
            try:
                event.happen()
            except Fault as fault:
                raise Fault(f"{event.what}\n    {fault}") from fault

    def run(self, blocks: Iterable[Block]) -> None:
        """Until all warps have ended and nothing is in flight."""
        warps = [w for b in blocks for w in b.warps]
        order = dict(zip(warps, self.rng.permutation(len(warps)), strict=True))
        gave_up = 0
        while warps := [w for w in warps if w.groups]:
            runnable = [w for w in warps if w.runnable()]
            if event := self._due(stuck=not runnable):
                self.happen(event)
                self.idle = 0
            elif runnable and self.idle < PATIENCE:
                pick = self._next(runnable, order)
                if self.habits.warps == "turns":
                    order[pick] = max(order.values()) + 1
                pick.run()
            elif (gave_up := gave_up + 1 if self.idle else 1) > 3 or not time_out(warps):
                raise Deadlock("nobody can run:\n" + "\n".join(describe(w) for w in warps))
        while event := self._due(stuck=True):
            self.happen(event)

    def _due(self, *, stuck: bool) -> Event | None:
        """What is in flight and happens now; something does if nobody can run."""
        if not self.events:
            return None
        if self.habits.order == "any":
            event = self.events[int(self.rng.integers(len(self.events)))]
        else:
            waiting = sorted(self.events, key=lambda e: KINDS.index(e.kind))
            same = [e for e in waiting if e.kind == waiting[0].kind]
            event = same[0 if self.habits.order == "oldest" else -1]
        return event if stuck or self.chance(getattr(self.habits, event.kind)) else None

    def _next(self, runnable: list[Warp], order: dict[Warp, int]) -> Warp:
        """Of the warps that can run; `order` is at random, or who ran last comes last."""
        match self.habits.warps:
            case "first":
                return runnable[0]
            case "last":
                return runnable[-1]
            case "turns":
                return min(runnable, key=order.__getitem__)
            case "loyal" if not self.chance(0.05):
                return max(runnable, key=order.__getitem__)
        return runnable[int(self.rng.integers(len(runnable)))]


def time_out(warps: list[Warp]) -> bool:
    """Lets those give up whose instruction may; whether there is one."""
    waiting = [(w, g) for w in warps for g in w.groups if g.wait is not None and g.wait.timed]
    for warp, group in waiting:
        warp.finish(group, False)
    return bool(waiting)


def describe(warp: Warp) -> str:
    lines = []
    for step, wait in warp.waits():
        why = wait.what() if wait else "the other lanes of its warp"
        lines.append(f"    {warp} at line {step.instruction.line}, {step.instruction.text}: waits for {why}")
    return "\n".join(lines)


def window(address: int) -> tuple[str, int]:
    """The space that a generic address lies in, and where in it."""
    for name, base in (("shared", SHARED), ("param", PARAM), ("local", LOCAL)):
        if base <= address < base + WINDOW:
            return name, address - base
    return "global", address
