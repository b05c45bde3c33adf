"""A kernel, each instruction of which is prepared once as a Python function."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.ptx.memory import RESERVED
from tests.ptx.operands import items, reader, touched
from tests.ptx.syntax import Entry, Instruction, Vector
from tests.ptx.warp import FULL, Mask, Run, Warp

Build = Callable[[Instruction, "Program"], Run]
Lanes = Callable[[Warp, Mask], NDArray]
BUILDERS: dict[str, Build] = {}

# What other threads may see, or see otherwise: after these it may be another warp's turn.
COMMUNICATES = {"ld", "st", "atom", "red", "mbarrier", "cp", "fence", "bar", "barrier", "wgmma", "elect", "stmatrix"}
# Of them those that change nothing.
IDLE = {"ld", "fence", "elect"}
# Those that all lanes of a warp execute together.
ALIGNED = {"bar", "barrier", "wgmma", "setmaxnreg", "stmatrix", "ldmatrix"}
# Where the operand is that says which lanes an instruction synchronizes.
MEMBERS = {"shfl": -1, "elect": -1, "vote": -1, "redux": -1, "match": -1, "activemask": -1}


def implements(*names: str) -> Callable[[Build], Build]:
    """Registers how instructions whose names start so are prepared; the longest start wins."""

    def register(build: Build) -> Build:
        BUILDERS.update(dict.fromkeys(names, build))
        return build

    return register


@dataclass(eq=False)
class Step:
    instruction: Instruction
    run: Run
    guard: int | None
    negated: bool
    target: int
    ends: bool
    lanes: Lanes | None  # which lanes it synchronizes; None: each for itself
    registers: frozenset[int]
    in_matrices: frozenset[int]  # of them those that some wgmma uses, if this is none
    communicates: bool
    progress: bool  # others may have waited for it


def matrices(ins: Instruction) -> frozenset[int]:
    """The registers of a wgmma's accumulators, and of a factor that is in registers."""
    if not ins.opcode.startswith("wgmma.mma_async"):
        return frozenset()
    return touched(ins.operands[:2] if isinstance(ins.operands[1], Vector) else ins.operands[:1])


def unused(w: Warp, mask: Mask) -> None:
    raise AssertionError("branches are the warp's")


class Program:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.symbols: dict[str, int] = {}
        self.parameters: list[int] = []
        self._place()
        self.matrix_registers = frozenset[int]().union(*map(matrices, entry.instructions))
        self.steps = [self._step(instruction) for instruction in entry.instructions]
        self.counts = [0] * len(self.steps)

    def _place(self) -> None:
        """Parameters, shared and local variables one after another; shared memory of the launch's size comes last."""
        ends = {"param": 0, "shared": RESERVED, "local": 0}
        sized = sorted(self.entry.variables, key=lambda v: v.size == 0)
        for variable in [*self.entry.parameters, *sized]:
            start = -(-ends[variable.space] // variable.align) * variable.align
            self.symbols[variable.name] = start
            ends[variable.space] = start + variable.size
            if variable.space == "param":
                self.parameters.append(start)
        self.parameter_bytes, self.shared_bytes, self.local_bytes = ends["param"], ends["shared"], ends["local"]

    def symbol(self, name: str) -> int:
        if name not in self.symbols:
            raise SyntaxError(f"PTX: {name} is not declared")
        return self.symbols[name]

    def _step(self, ins: Instruction) -> Step:
        base = ins.parts[0]
        ends = base in ("ret", "exit")
        run = unused if ends or base == "bra" else self._builder(ins)(ins, self)
        registers = touched(ins.operands if ins.guard is None else (*ins.operands, ins.guard))
        # wgmma looks after its own accumulators.
        registers = registers - touched(items(ins.operands[0])) if base == "wgmma" and ins.operands else registers
        in_matrices = registers & self.matrix_registers
        # Compilers place accumulators by mov, also between a fence and its wgmma: those the assembler orders.
        if base == "wgmma" or (base == "mov" and touched(ins.operands[:1]) & self.matrix_registers):
            in_matrices = frozenset()
        guard = None if ins.guard is None else ins.guard.index
        negated = ins.guard is not None and ins.guard.negated
        communicates = base in COMMUNICATES
        progress = communicates and base not in IDLE and not {"try_wait", "test_wait"} & set(ins.parts)
        lanes, target = self._lanes(ins), ins.target
        return Step(ins, run, guard, negated, target, ends, lanes, registers, in_matrices, communicates, progress)

    def _builder(self, ins: Instruction) -> Build:
        for n in range(len(ins.parts), 0, -1):
            if build := BUILDERS.get(".".join(ins.parts[:n])):
                return build
        raise NotImplementedError(f"PTX line {ins.line}: {ins.text}")

    def _lanes(self, ins: Instruction) -> Lanes | None:
        if ins.parts[0] in ALIGNED or ins.opcode == "bar.warp.sync":
            return lambda w, mask: w.live
        if ins.parts[0] not in MEMBERS or not ins.operands:
            return None
        read = reader(ins.operands[MEMBERS[ins.parts[0]]], np.dtype("u4"), self)
        bits = np.arange(32, dtype=np.uint32)
        return lambda w, mask: w.live & ((read(w)[np.argmax(mask)] >> bits) & 1).astype(bool) & FULL
