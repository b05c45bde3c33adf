"""32 lanes that run one program: registers, divergence, and what a lane waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptx.memory import Fault, Memory

if TYPE_CHECKING:
    from tests.ptx.block import Block
    from tests.ptx.copies import Copy
    from tests.ptx.products import Group
    from tests.ptx.program import Program, Step

Mask = NDArray[np.bool_]
LANES = 32
FULL = np.ones(LANES, bool)
STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(eq=False)
class Wait:
    """Why lanes cannot go on; `done` is told whether it came true, or the time ran out."""

    what: Callable[[], str]
    ready: Callable[[], bool]
    done: Callable[[bool], None] | None = None
    timed: bool = False  # gives up some time
    lazy: bool = False  # lets others run first, if that is a habit


# An instruction runs on a warp under the mask of its active lanes.
Run = Callable[["Warp", Mask], "Wait | None"]


@dataclass(eq=False)
class Lanes:
    """Lanes at the same instruction."""

    pc: int
    mask: Mask
    wait: Wait | None = None


@dataclass(eq=False)
class Warp:
    """Lanes are grouped by their next instruction, and the group with the smallest runs: structured code reconverges.

    An instruction that names the lanes it synchronizes waits until the others of the warp have come to it."""

    block: Block
    index: int
    program: Program
    special: dict[str, NDArray]
    exists: Mask
    groups: list[Lanes] = field(default_factory=list)
    cluster_generation: int | None = None  # of the cluster's barrier, after it arrived there
    inflight: set[int] = field(default_factory=set)  # accumulators that only wgmma may touch
    unfenced: set[int] = field(default_factory=set)  # registers of wgmma's that others used since the last wgmma.fence
    given_up: set[int] = field(default_factory=set)  # lines of the waits that gave up when they last ran
    registers_given: int | None = None  # of each thread, where the launch says how many
    is_alone: bool = True  # whether the kernel before has ended
    products: list[Group] = field(default_factory=list)  # of wgmma; the last is not committed
    product_count: int = 0
    copies: dict[int, list[list[Copy]]] = field(default_factory=dict)  # bulk groups of stores, of each lane

    def __post_init__(self) -> None:
        self.groups = [Lanes(0, self.exists)]
        self.unfenced |= self.program.matrix_registers
        poison = {size: np.full(LANES, 0xDEADBEEFDEADBEEF).astype(t) for size, t in STORAGE.items()}
        self.registers = [FULL ^ FULL if r.predicate else poison[r.size] for r in self.program.entry.registers]
        self.local = np.full((LANES, self.program.local_bytes), 0xFF, np.uint8)

    @property
    def live(self) -> Mask:
        return np.logical_or.reduce([g.mask for g in self.groups]) if self.groups else ~FULL

    def runnable(self) -> bool:
        return any(self._can_run(g) for g in self.groups)

    def waits(self) -> Iterator[tuple[Step, Wait | None]]:
        """The positions of its groups, and what they wait for (None: the other lanes)."""
        return ((self.program.steps[g.pc - (g.wait is not None)], g.wait) for g in self.groups)

    def _can_run(self, group: Lanes) -> bool:
        if group.wait is not None:
            return group.wait.ready()
        step = self.program.steps[group.pc]
        return len(self.groups) == 1 or step.lanes is None or bool(group.mask[step.lanes(self, group.mask)].all())

    def run(self) -> None:
        """Until all groups wait, or by habit it is another warp's turn."""
        while ready := [g for g in self.groups if self._can_run(g)]:
            group = min(ready, key=lambda g: g.pc)
            if group.wait is not None:
                self.finish(group, True)
            turn = self.advance(group)
            if len(self.groups) > 1:
                self._merge()
            if turn:
                return

    def _merge(self) -> None:
        """Lanes that have met go on together."""
        met: dict[int, Lanes] = {}
        for group in [g for g in self.groups if g.wait is None]:
            first = met.setdefault(group.pc, group)
            if first is not group:
                first.mask = first.mask | group.mask
                self.groups.remove(group)

    def finish(self, group: Lanes, success: bool) -> None:
        wait, group.wait = group.wait, None
        if wait is None or wait.done is None:
            return
        try:
            wait.done(success)
        except Fault as fault:
            self.fault(self.program.steps[group.pc - 1], str(fault))

    def advance(self, group: Lanes) -> bool:
        """Runs a group until it waits, splits, merges or ends; whether another warp should run now."""
        alone = len(self.groups) == 1
        others = {g.pc for g in self.groups if g is not group and g.wait is None}
        spin = self.block.machine.idle + 10_000  # then others should run, lest it wait for them
        steps, registers, counts, machine = self.program.steps, self.registers, self.program.counts, self.block.machine
        while True:
            if not alone and (group.pc in others or not self._can_run(group)):
                return False
            step = steps[group.pc]
            counts[group.pc] += 1
            machine.idle += 1
            mask = group.mask
            if step.guard is not None:
                mask = mask & (registers[step.guard] ^ step.negated)
                if not mask.any():
                    group.pc += 1
                    continue
            if self.inflight and not self.inflight.isdisjoint(step.registers):
                self.fault(step, "a register of a wgmma that is not waited for is used")
            if step.in_matrices:
                self.unfenced |= step.in_matrices
            if step.target >= 0 or step.ends:
                if self._leave(group, mask, step):
                    return False
                continue
            try:
                group.wait = step.run(self, mask)
            except Fault as fault:
                self.fault(step, str(fault))
            group.pc += 1
            if group.wait is not None:
                if group.wait.lazy and machine.chance(machine.habits.yields):
                    return True
                if not group.wait.ready():
                    return False
                self.finish(group, True)
            if step.progress:
                machine.idle = 0
            if step.communicates and machine.preempts():
                return True
            if machine.idle > spin:
                return True

    def _leave(self, group: Lanes, mask: Mask, step: Step) -> bool:
        """A branch, or the end; whether the groups changed."""
        stay, following = group.mask & ~mask, group.pc + 1
        split = bool(stay.any())
        if step.ends:
            self.groups.remove(group)
        elif split:
            group.pc, group.mask = step.target, mask
        else:
            group.pc = step.target
            return False
        if split:
            self.groups.append(Lanes(following, stay))
        if not self.groups:
            self.block.leave(self)
        return True

    def after_the_kernel_before(self, what: str) -> None:
        """What may only happen once the kernel before has ended."""
        if not self.is_alone:
            raise Fault(f"{what} before griddepcontrol.wait")

    @property
    def memory(self) -> Memory:
        """Global memory."""
        self.after_the_kernel_before("global memory is used")
        return self.block.machine.memory

    def fault(self, step: Step, message: str) -> None:
        raise Fault(f"{self}, line {step.instruction.line}: {step.instruction.text}\n    {message}")

    def __str__(self) -> str:
        return f"block {self.block.index} warp {self.index}"
