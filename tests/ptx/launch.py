"""Runs a kernel's PTX on the CPU: `launch`."""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

# Each of these registers its instructions.
from tests.ptx import access, arithmetic, bits, conversions, copies, products, synchronization  # noqa: F401
from tests.ptx.block import Block, Cluster, Coordinate, Machine
from tests.ptx.habits import Habits
from tests.ptx.memory import RESERVED, Bytes, Fault, Memory
from tests.ptx.products import Group
from tests.ptx.program import Program
from tests.ptx.syntax import parse
from tests.ptx.tensormap import TensorMap
from tests.ptx.warp import LANES, Warp

Parameter = TensorMap | bytes | int | float


@dataclass
class Report:
    """The record of a launch."""

    instructions: Counter[str] = field(default_factory=Counter)  # by opcode, one per warp
    unexecuted: list[str] = field(default_factory=list)  # instructions that no warp came to
    shared_bytes: int = 0  # up to the highest that was touched, without the system's own
    notes: dict[str, int] = field(default_factory=dict)  # setmaxnreg; copies of several lanes; with how often


def launch(
    ptx: str | Program,
    entry: str | None,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    parameters: Sequence[Parameter],
    memory: Memory,
    cluster: Sequence[int] = (1, 1, 1),
    dynamic_shared_bytes: int = 0,
    seed: int = 0,
    habits: Habits | None = None,
    resident: int = 1,
    registers: int | None = None,
    programmatic: bool = False,
) -> Report:
    """Runs all blocks of a grid; raises Fault or Deadlock, which say who did what where.

    `habits` decide what the hardware leaves open: which warp runs, when copies land, when products run; without them
    they are drawn, by `seed`. `resident` is how many clusters run at once; `registers`, how many each thread has at
    first, without which setmaxnreg is not checked against the block's pool; a `programmatic` launch may begin before
    the kernel before it has ended. A parameter that is an int or float fills its declared size; bytes are taken as they
    are, so that an aggregate may hold `TensorMap.encode()`."""
    program = ptx if isinstance(ptx, Program) else prepare(ptx, entry)
    check(program, block, grid, cluster)
    program.counts = [0] * len(program.steps)
    machine = Machine(program, memory, lay_out(program, parameters), seed, habits)
    machine.on_leave.append(check_end)
    report = Report()
    clusters = place(machine, *(pad(x) for x in (grid, block, cluster)), dynamic_shared_bytes, registers)
    machine.programmatic = programmatic
    with np.errstate(all="ignore"):
        while wave := list(itertools.islice(clusters, resident)):
            blocks = [b for c in wave for b in c.blocks]
            machine.run(blocks)
            report.shared_bytes = max(report.shared_bytes, *(b.shared.touched - RESERVED for b in blocks))
    for step, count in zip(program.steps, program.counts, strict=True):
        if count:
            report.instructions[step.instruction.opcode] += count
        else:
            report.unexecuted.append(f"line {step.instruction.line}: {step.instruction.text}")
    report.notes = machine.notes
    return report


def prepare(ptx: str, entry: str | None = None) -> Program:
    """A kernel that can be launched many times; `entry` may be None if the module has one kernel."""
    entries = parse(ptx)
    if entry is None and len(entries) != 1:
        raise ValueError(f"which kernel of {sorted(entries)}?")
    return Program(next(iter(entries.values())) if entry is None else entries[entry])


def pad(shape: Sequence[int]) -> Coordinate:
    x, y, z = (*shape, 1, 1, 1)[:3]
    return x, y, z


def check(program: Program, block: Sequence[int], grid: Sequence[int], cluster: Sequence[int]) -> None:
    """The rules of a launch."""
    attributes = program.entry.attributes
    if pad(attributes.get("reqntid", block)) != pad(block):
        raise ValueError(f"launch: a block of {tuple(block)}; the kernel requires {attributes['reqntid']}")
    if "maxntid" in attributes and math.prod(block) > math.prod(attributes["maxntid"]):
        raise ValueError(f"launch: a block of {tuple(block)}; the kernel allows {attributes['maxntid']}")
    if pad(attributes.get("reqnctapercluster", cluster)) != pad(cluster):
        raise ValueError(f"launch: a cluster of {tuple(cluster)}; the kernel has {attributes['reqnctapercluster']}")
    if any(g % c for g, c in zip(pad(grid), pad(cluster), strict=True)) or math.prod(cluster) > 16:
        raise ValueError(f"launch: a grid of {tuple(grid)} in clusters of {tuple(cluster)}")


def lay_out(program: Program, parameters: Sequence[Parameter]) -> Bytes:
    """The bytes of the parameter space."""
    declared = program.entry.parameters
    if len(parameters) != len(declared):
        raise ValueError(f"launch: {len(parameters)} parameters of {len(declared)}")
    data = np.zeros(program.parameter_bytes, np.uint8)
    for variable, start, value in zip(declared, program.parameters, parameters, strict=True):
        if isinstance(value, TensorMap):
            value = value.encode()
        elif isinstance(value, float):
            value = struct.pack("<f" if variable.size == 4 else "<d", value)
        elif isinstance(value, int):
            value = (value % (1 << 8 * variable.size)).to_bytes(variable.size, "little")
        if len(value) != variable.size:
            raise ValueError(f"launch: {variable.name} has {variable.size} bytes, not {len(value)}")
        data[start : start + len(value)] = np.frombuffer(value, np.uint8)
    data.flags.writeable = False
    return data


def place(
    machine: Machine, grid: Coordinate, block: Coordinate, shape: Coordinate, dynamic: int, registers: int | None
) -> Iterator[Cluster]:
    """The clusters of a grid, with the first dimension fastest."""
    size = machine.program.shared_bytes + dynamic
    for where in order((grid[0] // shape[0], grid[1] // shape[1], grid[2] // shape[2])):
        cluster = Cluster(where)
        for rank, inner in enumerate(order(shape)):
            x, y, z = (c * s + i for c, s, i in zip(where, shape, inner, strict=True))
            one = Block(machine, cluster, (x, y, z), rank, size)
            cluster.blocks.append(one)
            values = vectors("%ctaid", one.index) | vectors("%nctaid", grid) | vectors("%ntid", block)
            values |= (
                vectors("%clusterid", where) | vectors("%cluster_ctaid", inner) | vectors("%cluster_nctaid", shape)
            )
            values |= vectors("%nclusterid", tuple(g // s for g, s in zip(grid, shape, strict=True)))
            values |= {"%cluster_ctarank": rank, "%cluster_nctarank": math.prod(shape), "%smid": 0, "%nsmid": 132}
            values |= {"%dynamic_smem_size": dynamic, "%total_smem_size": size - RESERVED, "%clock": 0, "%clock64": 0}
            values |= {"%globaltimer": 0, "%is_explicit_cluster": math.prod(shape) > 1, "%gridid": 0}
            one.warps = [warp(one, index, block, values) for index in range(-(-math.prod(block) // LANES))]
            for each in one.warps:
                each.registers_given, each.is_alone = registers, not machine.programmatic
        yield cluster


def order(shape: Sequence[int]) -> Iterator[Coordinate]:
    return ((x, y, z) for z in range(shape[2]) for y in range(shape[1]) for x in range(shape[0]))


def vectors(name: str, values: Sequence[int]) -> dict[str, int]:
    return {f"{name}.{axis}": value for axis, value in zip("xyz", values, strict=True)}


def warp(block: Block, index: int, shape: Coordinate, values: dict[str, int]) -> Warp:
    lane = np.arange(LANES)
    thread = index * LANES + lane
    x, rest = thread % shape[0], thread // shape[0]
    own = {"%tid.x": x, "%tid.y": rest % shape[1], "%tid.z": rest // shape[1], "%laneid": lane}
    own |= {"%warpid": np.full(LANES, index), "%nwarpid": np.full(LANES, -(-math.prod(shape) // LANES))}
    own |= {"%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1}
    own |= {
        "%lanemask_gt": ((1 << 32) - 1) ^ own["%lanemask_le"],
        "%lanemask_ge": ((1 << 32) - 1) ^ own["%lanemask_lt"],
    }
    special = own | {name: np.full(LANES, value) for name, value in values.items()}
    made = Warp(block, index, block.machine.program, special, thread < math.prod(shape))
    made.products.append(Group())
    return made


def check_end(w: Warp) -> None:
    """Check that nothing is pending when a warp ends."""
    if w.inflight:
        raise Fault(f"{w} ends with a wgmma that is not waited for")
    if w.cluster_generation is not None:
        raise Fault(f"{w} ends after it arrived at the barrier of the cluster without waiting there")
    check_registers(w)
    if w.block.done:
        for event in w.block.machine.events:
            if event.block is w.block:
                raise Fault(f"block {w.block.index} ends before this is done with its shared memory: {event.what}")


def check_registers(w: Warp) -> None:
    """The warps of a warpgroup, once all have ended, have executed the same setmaxnreg."""
    group = w.block.warps[w.index // 4 * 4 :][:4]
    changes = w.block.registers.get(w.index // 4, [])
    if not any(x.groups for x in group) and len({tuple(n for i, n in changes if i == x.index) for x in group}) > 1:
        raise Fault(f"{w} ends, and the warps of its warpgroup differ in setmaxnreg: (warp, registers) {changes}")
