"""Integer and floating-point instructions, one numpy operation each."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.ptx import rounding
from tests.ptx.operands import TYPES, items, reader, writer
from tests.ptx.program import Program, implements
from tests.ptx.syntax import SINK, Instruction, Pair
from tests.ptx.warp import Mask, Run, Warp

Function = Callable[..., NDArray]


def elementwise(ins: Instruction, program: Program, function: Function, out: np.dtype, *sources: np.dtype) -> Run:
    write = writer(ins.operands[0], out)
    reads = [reader(o, t, program) for o, t in zip(ins.operands[1:], sources, strict=True)]

    def run(w: Warp, mask: Mask) -> None:
        write(w, function(*[read(w) for read in reads]), mask)

    return run


def unsupported(ins: Instruction) -> NotImplementedError:
    return NotImplementedError(f"PTX line {ins.line}: {ins.text}")


def shift(function: Function, a: NDArray, b: NDArray) -> NDArray:
    """Amounts past the width shift everything out."""
    bits = 8 * a.itemsize
    last = function(a, np.minimum(b, bits - 1).astype(a.dtype))
    return np.where(b < bits, last, last >> 1 if a.dtype.kind == "i" else a.dtype.type(0)).astype(a.dtype)


def left(a: NDArray, b: NDArray) -> NDArray:
    bits = 8 * a.itemsize
    return np.where(b < bits, a << np.minimum(b, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def quotient(a: NDArray, b: NDArray) -> NDArray:
    """Towards zero; of a division by zero all bits are set."""
    if a.dtype.kind == "u":
        return np.where(b == 0, np.iinfo(a.dtype).max, a // np.where(b == 0, 1, b)).astype(a.dtype)
    whole = np.abs(a.astype(object)) // np.where(b == 0, 1, np.abs(b.astype(object)))
    return np.where(b == 0, -1, whole * np.sign(a) * np.sign(b)).astype(object).astype(np.int64).astype(a.dtype)


def high(a: NDArray, b: NDArray) -> NDArray:
    bits = 8 * a.itemsize
    if bits <= 32:
        wide = np.dtype(f"{a.dtype.kind}8")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
    product = np.array([(int(x) * int(y) >> bits) % (1 << bits) for x, y in zip(a, b, strict=True)], np.uint64)
    return product.view(a.dtype)


def narrow(x: NDArray, like: NDArray) -> NDArray:
    return x.astype(like.dtype)


FLOATS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "fma": rounding.fma, "mad": rounding.fma,
    "rcp": lambda a: 1 / a, "rsqrt": lambda a: narrow(1 / np.sqrt(a.astype("f8")), a),
    "ex2": lambda a: narrow(np.exp2(a.astype("f8")), a), "lg2": lambda a: narrow(np.log2(a.astype("f8")), a),
    "tanh": lambda a: narrow(np.tanh(a.astype("f8")), a),
}  # fmt: skip
INTEGERS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mul24": np.multiply, "div": quotient, "min": np.minimum,
    "max": np.maximum, "neg": np.negative, "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "shl": left, "shr": lambda a, b: shift(np.right_shift, a, b),
    "rem": lambda a, b: a - quotient(a, b) * b, "mad": lambda a, b, c: a * b + c,
}  # fmt: skip
MODIFIERS = {"rn", "lo", "ftz", "approx", "full", "uni", "wrap"}


ODD: dict[str, Function] = {
    "add": rounding.odd_sum, "sub": lambda a, b: rounding.odd_sum(a, -b),
    "fma": lambda a, b, c: rounding.odd_sum(a * b, c),
}  # fmt: skip


def packed(function: Function, ins: Instruction) -> Function:
    """On the halves of 32-bit registers, or on 16-bit codes: in float64, exact or rounded to odd, and rounded once."""
    brain = ins.type.startswith("bf16")
    decode = rounding.from_bf16 if brain else lambda c: c.view(np.float16)
    encode = rounding.bf16_of_double if brain else lambda x: x.astype(np.float16).view(np.uint16)
    half = lambda *c: encode(np.asarray(function(*[decode(x).astype(np.float64) for x in c])))  # noqa: E731
    if not ins.type.endswith("x2"):
        return half

    def both(*values: NDArray) -> NDArray:
        low, top = ([(v >> np.uint32(s)).astype(np.uint16) for v in values] for s in (0, 16))
        return half(*low).astype(np.uint32) | half(*top).astype(np.uint32) << 16

    return both


def halves(function: Function, dtype: np.dtype) -> Function:
    """Apply an operation to the two 16-bit integers in each register."""
    return lambda *c: function(*[x.view(dtype) for x in c]).view(np.uint32)


def canonical(function: Function) -> Function:
    """NaN results of float32 are all the same one: payloads and signs are not kept."""

    def found(*values: NDArray) -> NDArray:
        result = function(*values)
        return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32)).view(np.float32)

    return found


NAN: dict[str, Function] = {"min": np.minimum, "max": np.maximum}  # which give NaN where one operand is it


@implements(*FLOATS, *INTEGERS, "copysign")
def arithmetic(ins: Instruction, program: Program) -> Run:
    count, modifiers = len(ins.operands) - 1, set(ins.parts[1:-1])
    if ins.type in ("s16x2", "u16x2") and ins.parts[0] in ("min", "max", "add") and not modifiers:
        function = halves(INTEGERS[ins.parts[0]], TYPES[ins.type[:3]])
        return elementwise(ins, program, function, TYPES["b32"], *[TYPES["b32"]] * count)
    base, dtype = ins.parts[0], TYPES[ins.type]
    floats = FLOATS | NAN if "NaN" in modifiers and base in NAN else FLOATS
    modifiers = modifiers - {"NaN"} if base in NAN else modifiers
    if ins.type in ("f16", "f16x2", "bf16", "bf16x2"):
        if modifiers - {"rn"} or base not in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs"):
            raise unsupported(ins)
        dtype = TYPES["b32" if ins.type.endswith("x2") else "b16"]
        function = packed((floats | ODD)[base], ins)
        return elementwise(ins, program, function, dtype, *[dtype] * count)
    if dtype.kind == "f":
        if modifiers - MODIFIERS or base not in floats:
            raise unsupported(ins)
        function = floats[base] if base in ("neg", "abs") or dtype.itemsize == 8 else canonical(floats[base])
        function = rounding.fma_of_doubles if base == "fma" and dtype.itemsize == 8 else function
        if "ftz" in modifiers:
            inner = function
            function = lambda *v: rounding.flush(inner(*map(rounding.flush, v)))  # noqa: E731
        return elementwise(ins, program, function, dtype, *[dtype] * count)
    sources = [dtype, np.dtype("u4")] if base in ("shl", "shr") else [dtype] * count
    if "hi" in modifiers or "wide" in modifiers:
        return _product(ins, program, dtype)
    if modifiers - MODIFIERS or base not in INTEGERS:
        raise unsupported(ins)
    return elementwise(ins, program, INTEGERS[base], dtype, *sources)


def _product(ins: Instruction, program: Program, dtype: np.dtype) -> Run:
    """mul and mad with .hi or .wide."""
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if ins.has("wide") else dtype
    product = high if ins.has("hi") else lambda a, b: a.astype(wide) * b.astype(wide)
    if ins.parts[0] == "mul":
        return elementwise(ins, program, product, wide, dtype, dtype)
    return elementwise(ins, program, lambda a, b, c: product(a, b) + c, wide, dtype, dtype, wide)


@implements("dp4a")
def dp4a(ins: Instruction, program: Program) -> Run:
    """The sum of the products of the bytes of two registers, and a third."""
    kinds = [{"s32": "i1", "u32": "u1"}[part] for part in ins.parts[1:]]
    result = TYPES["s32" if "s32" in ins.parts else "u32"]

    def total(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
        bytes_a, bytes_b = (
            np.ascontiguousarray(x).view(k).reshape(-1, 4).astype("i4") for x, k in zip((a, b), kinds, strict=True)
        )
        return ((bytes_a * bytes_b).sum(1) + c.astype(np.int64)).astype(result)

    return elementwise(ins, program, total, result, TYPES["b32"], TYPES["b32"], result)


@implements("mov")
def mov(ins: Instruction, program: Program) -> Run:
    dtype = TYPES[ins.type]
    target, source = (items(o) for o in ins.operands)
    if len(target) == len(source):
        return elementwise(ins, program, lambda a: a, dtype, dtype)
    many = target if len(target) > 1 else source
    part = TYPES[f"b{8 * dtype.itemsize // len(many)}"]
    reads = [reader(o, dtype if len(source) == 1 else part, program) for o in source]
    writes = [writer(o, dtype if len(target) == 1 else part) for o in target]

    def run(w: Warp, mask: Mask) -> None:
        values = np.stack([read(w) for read in reads], axis=1)
        values = np.ascontiguousarray(values).view(part if len(target) > 1 else dtype)
        for i, write in enumerate(writes):
            write(w, np.ascontiguousarray(values[:, i]), mask)

    return run


COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, dtype: np.dtype) -> Function:
    if dtype.kind == "f" and name.endswith("u"):  # true also of NaN
        ordered = COMPARE[name[:-1]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    if dtype.kind == "f" and name == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    return COMPARE[name]


@implements("setp")
def setp(ins: Instruction, program: Program) -> Run:
    if ins.type not in TYPES or ins.type in ("bf16", "f16x2", "bf16x2"):
        raise unsupported(ins)
    dtype = TYPES[ins.type]
    compare, target = comparison(ins.parts[1], dtype), ins.operands[0]
    outs = target.items if isinstance(target, Pair) else (target, SINK)
    positive, negative = (writer(o, TYPES["pred"]) for o in outs)
    a, b = (reader(o, dtype, program) for o in ins.operands[1:3])
    combine = next((COMBINE[p] for p in ins.parts[2:] if p in COMBINE), None)
    other = reader(ins.operands[3], TYPES["pred"], program) if combine else None
    ftz = ins.has("ftz")

    def run(w: Warp, mask: Mask) -> None:
        x, y = (rounding.flush(a(w)), rounding.flush(b(w))) if ftz else (a(w), b(w))
        result = compare(x, y)
        inverse = ~result
        if combine is not None and other is not None:
            result, inverse = combine(result, other(w)), combine(inverse, other(w))
        positive(w, result, mask)
        negative(w, inverse, mask)

    return run


@implements("selp")
def selp(ins: Instruction, program: Program) -> Run:
    dtype = TYPES[ins.type]
    return elementwise(ins, program, lambda a, b, p: np.where(p, a, b), dtype, dtype, dtype, TYPES["pred"])
