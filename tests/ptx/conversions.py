"""Conversions between types."""

import numpy as np
from numpy.typing import NDArray

from tests.ptx import rounding
from tests.ptx.arithmetic import elementwise, unsupported
from tests.ptx.operands import TYPES
from tests.ptx.program import Program, implements
from tests.ptx.syntax import Instruction
from tests.ptx.warp import Run

U4 = TYPES["u32"]


@implements("cvt.pack")
def cvt_pack(ins: Instruction, program: Program) -> Run:
    """cvt.pack.sat.TYPE.s32[.b32] d, a, b[, c]: a and b saturated, a above b, and c above both."""
    narrow = TYPES[ins.parts[3]]
    bits = 8 * narrow.itemsize
    limits = np.iinfo(narrow)

    def pack(a: NDArray, b: NDArray, *c: NDArray) -> NDArray:
        low, top = (np.clip(x, limits.min, limits.max).astype(np.int64) & ((1 << bits) - 1) for x in (b, a))
        above = c[0].astype(np.int64) << 2 * bits if c else 0
        return (low | top << bits | above).astype(np.uint32)

    return elementwise(ins, program, pack, U4, *[TYPES["s32"]] * 2, *[U4] * (len(ins.operands) - 3))


@implements("cvt")
def cvt(ins: Instruction, program: Program) -> Run:
    *modifiers, to, of = ins.parts[1:]
    if to in PACKED and of == "f32":
        return elementwise(ins, program, PACKED[to](modifiers), PACKED_TYPE[to], TYPES["f32"], TYPES["f32"])
    if to == "f16x2" and of in ("e4m3x2", "e5m2x2"):
        table = rounding.FLOAT8[of[:4]].astype(np.float16).view(np.uint16).astype(np.uint32)
        unpack = lambda a: table[a & 255] | table[a >> np.uint16(8)] << np.uint32(16)  # noqa: E731
        return elementwise(ins, program, unpack, U4, TYPES["u16"])
    if to not in TYPES or of not in TYPES or to.endswith("x2") or of.endswith("x2"):
        raise unsupported(ins)
    source = TYPES["u16"] if of == "bf16" else TYPES[of]
    return elementwise(ins, program, _conversion(ins, modifiers, to, of), TYPES[to], source)


def _conversion(ins: Instruction, modifiers: list[str], to: str, of: str):
    """Between single values."""
    out, known = TYPES[to], {"rn", "sat", "ftz", *rounding.ROUND} | ({"rz"} if to == "bf16" else set())
    if set(modifiers) - known:
        raise unsupported(ins)
    widen = rounding.from_bf16 if of == "bf16" else lambda x: x
    if to == "bf16":
        return lambda x: rounding.bf16(widen(x).astype(np.float32), "rz" if "rz" in modifiers else "rn")
    is_float = TYPES[of].kind == "f" or of == "bf16"
    mode = next((m for m in modifiers if m in rounding.ROUND), None)
    if out.kind == "f":
        if mode:
            return lambda x: rounding.ROUND[mode](widen(x)).astype(out)
        if "sat" in modifiers:
            return lambda x: np.fmax(np.fmin(widen(x), 1), 0).astype(out)
        return lambda x: widen(x).astype(out)
    if is_float:
        return lambda x: rounding.integer(widen(x), out, mode or "rzi")
    if "sat" in modifiers:
        limits = np.iinfo(out)
        return lambda x: np.array([min(max(int(v), limits.min), limits.max) for v in x], out)
    return lambda x: x.astype(out)


def _pair(encode, bits: int, dtype: np.dtype):
    return lambda a, b: (encode(b).astype(np.uint32) | encode(a).astype(np.uint32) << np.uint32(bits)).astype(dtype)


def _half(encode):
    def choose(modifiers: list[str]):
        if set(modifiers) - {"rn", "relu"}:
            raise NotImplementedError(f"PTX: cvt.{'.'.join(modifiers)} to pairs of halves")
        clip = (lambda x: np.where(x > 0, x, np.where(np.isnan(x), x, 0)).astype("f4")) if "relu" in modifiers else None
        return _pair((lambda x: encode(clip(x))) if clip else encode, 16, U4)

    return choose


PACKED = {"bf16x2": _half(rounding.bf16), "f16x2": _half(rounding.f16)}
PACKED |= {f"{t}x2": lambda m, t=t: _pair(lambda x: rounding.float8(x, t), 8, TYPES["u16"]) for t in rounding.FLOAT8}
PACKED_TYPE = {"bf16x2": U4, "f16x2": U4, "e4m3x2": TYPES["u16"], "e5m2x2": TYPES["u16"]}
