"""wgmma: products of matrices in shared memory, which run between their commit and the wait for them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptx import rounding
from tests.ptx.arithmetic import unsupported
from tests.ptx.memory import Fault
from tests.ptx.operands import TYPES, items, reader
from tests.ptx.program import Program, implements, matrices
from tests.ptx.syntax import Imm, Instruction, Reg, Vector
from tests.ptx.tensormap import swizzled
from tests.ptx.warp import LANES, Mask, Run, Wait, Warp

if TYPE_CHECKING:
    from tests.ptx.block import Block

SWIZZLES = (0, 128, 64, 32)  # bytes, by the code in a descriptor
BYTES = {"s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f16": 2, "bf16": 2}
SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@dataclass(frozen=True)
class Kind:
    """An instruction of this kind multiplies 64 × k by k × n."""

    n: int
    k: int
    out: str
    lhs: str
    rhs: str
    saturates: bool


@dataclass(frozen=True)
class Operand:
    """The location of a matrix: a descriptor of shared memory, or the fragments of the lanes."""

    descriptor: int
    transposed: bool = False
    registers: NDArray | None = None


@dataclass(frozen=True, eq=False)
class Product:
    kind: Kind
    lhs: Operand
    rhs: Operand
    accumulators: tuple[int, ...]
    accumulates: bool
    signs: int  # of the product


@dataclass(eq=False)
class Group:
    """The products between two commits."""

    products: list[Product] = field(default_factory=list)
    done: bool = False


def decode(codes: NDArray[np.uint8], name: str) -> NDArray[np.float64]:
    """Bytes -> the numbers that they stand for."""
    if name in rounding.FLOAT8:
        return rounding.FLOAT8[name][codes].astype(np.float64)
    if name == "bf16":
        return rounding.from_bf16(np.ascontiguousarray(codes).view(np.uint16)).astype(np.float64)
    return np.ascontiguousarray(codes).view({"s8": "i1", "u8": "u1", "f16": "f2"}[name]).astype(np.float64)


@functools.lru_cache(maxsize=4096)
def layout(descriptor: int, rows: range, k: int, item: int, transposed: bool) -> NDArray[np.int64]:
    """The offsets in shared memory of some rows of a matrix: (rows, k · item)."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    swizzle = SWIZZLES[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise NotImplementedError("PTX: a descriptor with a base offset")
    row = np.arange(rows.start, rows.stop)[:, None]
    if transposed:
        if swizzle != 128 or item != 2:
            raise NotImplementedError(f"PTX: a transposed operand in a swizzle of {swizzle}")
        depth = np.arange(k)[None]
        first = (row % 64) * 2 + (row // 64) * leading + (depth % 8) * 128 + (depth // 8) * stride
        offsets = (first[:, :, None] + np.arange(item)).reshape(len(row), -1)
    else:
        byte = np.arange(k * item)[None]
        across = byte if swizzle else byte % 16 + (byte // 16) * leading
        offsets = (row % 8) * (swizzle or 16) + (row // 8) * stride + across
    return swizzled(start + offsets, swizzle)


@functools.cache
def fragment(warp: int) -> tuple[NDArray, NDArray]:
    """The rows (of the warp's 16) and bytes of k that the 16 bytes of each lane are of an operand in registers."""
    lane, byte = np.arange(LANES)[:, None], np.arange(16)[None]
    register = byte // 4
    return lane // 4 + 8 * (register % 2), 4 * (lane % 4) + byte % 4 + 16 * (register // 2)


@functools.cache
def accumulator_layout(n: int) -> tuple[NDArray, NDArray]:
    """The rows (of the warp's 16) and columns of the n / 2 accumulators of each lane: (n / 2, 32)."""
    lane, i = np.arange(LANES)[None], np.arange(n // 2)[:, None]
    return lane // 4 + 8 * (i % 4 // 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


def matrix(block: Block, operand: Operand, name: str, rows: range, k: int) -> NDArray[np.float64]:
    """(rows, k) values of an operand."""
    if operand.registers is not None:
        row, byte = fragment(0)
        codes = np.empty((16, k * BYTES[name]), np.uint8)
        codes[row, byte] = operand.registers
    else:
        offsets = layout(operand.descriptor, rows, k, BYTES[name], operand.transposed)
        block.shared.check_async(offsets, "wgmma reads")
        codes = block.shared.data[offsets]
    return decode(codes, name)


def multiply(w: Warp, product: Product) -> None:
    """This warp's 16 rows of one product."""
    kind, block, part = product.kind, w.block, w.index % 4
    a = matrix(block, product.lhs, kind.lhs, range(16 * part, 16 * part + 16), kind.k)
    b = matrix(block, product.rhs, kind.rhs, range(kind.n), kind.k)
    if kind.out == "s32":
        total = np.rint(a @ b.T)  # exact: below 2^21
    else:
        with np.errstate(all="ignore"):
            total = product.signs * (a @ b.T)
    dtype = np.dtype("i4" if kind.out == "s32" else "f4")
    row, column = accumulator_layout(kind.n)
    values = total[row, column]
    if product.accumulates:
        values = values + np.stack([w.registers[i].view(dtype) for i in product.accumulators])
    if kind.out == "s32":
        low, high = -(2.0**31), 2.0**31 - 1
        values = np.clip(values, low, high) if kind.saturates else (values + 2.0**31) % 2.0**32 - 2.0**31
    values = values.astype(dtype).view(np.uint32)
    for i, index in enumerate(product.accumulators):
        w.registers[index] = values[i]


@implements("wgmma.mma_async.sync.aligned")
def wgmma(ins: Instruction, program: Program) -> Run:
    shape = SHAPE.fullmatch(ins.parts[4])
    saturates = ins.has("satfinite")
    out, lhs, rhs = ins.parts[5 + saturates :]
    if shape is None or out not in ("s32", "f32") or not {lhs, rhs} <= set(BYTES):
        raise unsupported(ins)
    kind = Kind(int(shape[1]), int(shape[2]), out, lhs, rhs, saturates)
    target, a, b, scale, *more = ins.operands
    accumulators = tuple(o.index for o in items(target) if isinstance(o, Reg))
    extra = [int(o.value) for o in more if isinstance(o, Imm)]
    if kind.k * BYTES[lhs] != 32 or len(accumulators) != kind.n // 2 or len(extra) != len(more):
        raise unsupported(ins)
    transposed = extra[2:] if isinstance(a, Reg) else [0, *extra[2:]]
    transposed = [bool(t) for t in [*transposed, 0, 0][:2]]
    signs = int(np.prod(extra[:2]))
    left = [reader(o, TYPES["b32" if isinstance(a, Vector) else "b64"], program) for o in items(a)]
    right = reader(b, TYPES["b64"], program)
    accumulates = reader(scale, TYPES["pred"], program)
    used = matrices(ins)

    def run(w: Warp, mask: Mask) -> None:
        if not mask.all():
            raise Fault("lanes are missing")
        if not w.unfenced.isdisjoint(used):
            raise Fault("its registers were used, or never ordered, since the last wgmma.fence")
        rows = None
        if isinstance(a, Vector):
            rows = np.stack([read(w) for read in left], axis=1).view(np.uint8)
        descriptors = 0 if rows is not None else uniform(left[0](w)), uniform(right(w))
        operands = Operand(descriptors[0], transposed[0], rows), Operand(descriptors[1], transposed[1])
        product = Product(kind, *operands, accumulators, bool(uniform(accumulates(w))), signs)
        agree(w, (kind, *descriptors, product.accumulates))
        w.products[-1].products.append(product)
        w.inflight.update(accumulators)

    return run


def uniform(values: NDArray) -> int:
    if (values != values[0]).any():
        raise Fault("lanes differ in an operand of wgmma that must be the same in all")
    return int(values[0])


def agree(w: Warp, what: tuple) -> None:
    """The four warps of a warpgroup multiply the same."""
    history = w.block.products.setdefault(w.index // 4, [])
    if w.product_count == len(history):
        history.append(what)
    elif history[w.product_count] != what:
        raise Fault(f"the warps of a warpgroup differ: {what} here, {history[w.product_count]} in another")
    w.product_count += 1


def complete(w: Warp, keep: int) -> None:
    """Waits for the committed groups but the last few."""
    for group in w.products[: max(0, len(w.products) - 1 - keep)]:
        compute(w, group)
        w.products.remove(group)
    w.inflight = {i for group in w.products for p in group.products for i in p.accumulators}


def compute(w: Warp, group: Group) -> None:
    if not group.done:
        group.done = True
        for product in group.products:
            multiply(w, product)


@implements("wgmma.fence")
def fence(ins: Instruction, program: Program) -> Run:
    """Of what was done with registers, and the products after it."""
    return lambda w, mask: w.unfenced.clear()


@implements("wgmma.commit_group")
def commit(ins: Instruction, program: Program) -> Run:
    """A group may run at once, after those before it; its accumulators may not be read before a wait."""

    def run(w: Warp, mask: Mask) -> None:
        if w.block.machine.chance(w.block.machine.habits.products):
            for group in w.products:
                compute(w, group)
        w.products.append(Group())

    return run


@implements("wgmma.wait_group")
def wait(ins: Instruction, program: Program) -> Run:
    keep = ins.operands[0]
    assert isinstance(keep, Imm)
    number = int(keep.value)

    def run(w: Warp, mask: Mask) -> Wait:
        return Wait(lambda: "wgmma", lambda: True, lambda success: complete(w, number), lazy=True)

    return run
