"""Reading and writing the operands of an instruction as arrays of 32 lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.ptx.syntax import SINK, Address, Imm, Name, Operand, Reg, Vector
from tests.ptx.warp import LANES, STORAGE, Mask, Warp

if TYPE_CHECKING:
    from tests.ptx.program import Program

Read = Callable[[Warp], NDArray]
Write = Callable[[Warp, NDArray, Mask], None]

TYPES: dict[str, np.dtype] = {f"{kind}{8 * n}": np.dtype(f"{kind}{n}") for kind in "u" for n in (1, 2, 4, 8)}
TYPES |= {f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)} | {f"b{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
TYPES |= {"bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "tf32": np.dtype("u4")}


def reader(operand: Operand, dtype: np.dtype, program: Program) -> Read:
    """Its 32 values; the low bytes of a register that is wider than `dtype`."""
    if isinstance(operand, Reg):
        return _register(operand, dtype)
    if isinstance(operand, Imm):
        constant = immediate(operand, dtype)
        return lambda w: constant
    if isinstance(operand, Name) and operand.text.startswith("%"):
        name = operand.text
        return lambda w: w.special[name].astype(dtype)
    if isinstance(operand, Name):
        constant = np.full(LANES, program.symbol(operand.text)).astype(dtype)
        return lambda w: constant
    raise NotImplementedError(f"PTX: {operand} as a source")


def _register(operand: Reg, dtype: np.dtype) -> Read:
    index = operand.index
    if operand.predicate:
        return (lambda w: ~w.registers[index]) if operand.negated else (lambda w: w.registers[index])
    if operand.size == dtype.itemsize:
        if dtype == STORAGE[operand.size]:
            return lambda w: w.registers[index]
        return lambda w: w.registers[index].view(dtype)
    if operand.size < dtype.itemsize:
        raise SyntaxError(f"PTX: a register of {operand.size} bytes as {dtype}")
    storage = STORAGE[dtype.itemsize]
    return lambda w: w.registers[index].astype(storage).view(dtype)


def immediate(operand: Imm, dtype: np.dtype) -> NDArray:
    value = operand.value
    if isinstance(value, float) and dtype.kind in "ui":
        return np.full(LANES, value, np.float32 if dtype.itemsize == 4 else np.float64).view(dtype)
    if dtype.kind in "ui" and dtype.itemsize <= 8:
        return np.full(LANES, int(value) % (1 << 8 * dtype.itemsize), STORAGE[dtype.itemsize]).view(dtype)
    return np.full(LANES, value, dtype)


def writer(operand: Operand, dtype: np.dtype) -> Write:
    """Puts 32 values into a register of the active lanes, extended by the sign of `dtype` if the register is wider."""
    if operand == SINK:
        return lambda w, value, mask: None
    if not isinstance(operand, Reg):
        raise NotImplementedError(f"PTX: {operand} as a destination")
    index = operand.index
    storage = np.dtype(bool) if operand.predicate else np.dtype(STORAGE[operand.size])
    wide = np.dtype(f"i{operand.size}") if dtype.kind == "i" else storage

    def write(w: Warp, value: NDArray, mask: Mask) -> None:
        if value.dtype != storage:
            value = value.view(storage) if value.itemsize == storage.itemsize else value.astype(wide).view(storage)
        w.registers[index] = value if mask.all() else np.where(mask, value, w.registers[index])

    return write


def items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def address(operand: Operand, program: Program) -> Read:
    """The address of each lane, in int64."""
    if not isinstance(operand, Address):
        raise SyntaxError(f"PTX: {operand} as an address")
    size = operand.base.size if isinstance(operand.base, Reg) else 8
    base = reader(operand.base, np.dtype(STORAGE[size]), program)
    offset = operand.offset
    return lambda w: base(w).astype(np.int64) + offset


def touched(operands: tuple[Operand, ...]) -> frozenset[int]:
    """The registers that operands name."""
    found: set[int] = set()
    for operand in operands:
        if isinstance(operand, Reg):
            found.add(operand.index)
        elif isinstance(operand, Address):
            found |= touched((operand.base, *operand.coordinates))
        elif not isinstance(operand, Imm | Name):
            found |= touched(operand.items)
    return frozenset(found)
