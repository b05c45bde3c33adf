"""Requests to the quantize kernels, and the choice of a kernel, as values: no CuTe DSL, no GPU."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutlass_kernels.elements import FORMATS, Format
from cutlass_kernels.variants import TARGET

CHUNK = 16  # elements that a thread takes at a time
MEMORY = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
RULES = ("amax", "minmax", "current", "mx", "two_level", "given")
COPIES = ("rowwise", "columnwise", "both")
ROUNDINGS = ("rceil", "floor", "ceil", "even")
GROUPS = (16, 32, 64, 128, 256)
NORMS = ("rms_norm", "layer_norm")  # of rows
FUNCTIONS = ("silu", "gelu", "gelu_tanh")  # of elements
OPERATIONS = (*NORMS, *FUNCTIONS)
LONGEST = 16384  # elements of a row whose norm a block of threads finds, and keeps
THREADS, MOST_THREADS = 256, 1024  # of a block
TILE = 128  # rows and columns


@dataclass(frozen=True)
class Request:
    """A matrix to be quantized, or what is computed of it in float32.

    Args:
        x: (R, C) of float32, bfloat16 or float16, any strides.
        format: a name of cutlass_kernels.elements.FORMATS.
        rule: "amax" scale = max(amax, floor) / top; "minmax", with a zero point; "current" scale = 1 / S, S = top /
            max(amax, floor); "mx" a power of two in e8m0; "two_level" e4m3 under an amax of the tensor; "given".
        block: of each copy: (1, -1) rows, (1, b) groups of b, (-1, -1) the matrix, (128, 128) tiles;
            (-1, 1) columns, of a row-wise copy alone.
        copies: "rowwise" x, "columnwise" x transposed, (C, R), or "both", in this order.
        scale, zero_point: of "given", float32 and codes, in the shape of the results; of "two_level" the amax, (1, 1).
        noise: of stochastic rounding: uint8 or int32 of x's shape, 8 or 24 bits; or, with stream >= 0, the int64 seed
            of shape ().
        floor, power_of_two, most_of_dtype, rounding: of the rules: the least amax; whether S is rounded down to a power
            of two, and is at most the largest of x's dtype; which power a scale of "mx" is.
        operation: "" x itself; "rms_norm", "layer_norm" of its rows: x or x less its mean, times r = 1 / sqrt(mean
            square + eps), times weight, plus bias. Sums are exact in fixed point, r is found in float64 and rounded
            once, and each product and sum after it by itself. "silu", "gelu", "gelu_tanh" of its elements, correctly
            rounded, times other.
        weight, bias: (C,) of float32, bfloat16 or float16, or None: 1 and 0.
        other: (R, C) of one of them, or None: 1.
        eps: a float64.
    """

    x: Tensor
    format: str
    rule: str
    block: tuple[int, ...]
    copies: str = "rowwise"
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    noise: Tensor | None = None
    stream: int = -1
    floor: float = 0.0
    power_of_two: bool = False
    most_of_dtype: bool = False
    rounding: str = ""
    operation: str = ""
    weight: Tensor | None = None
    bias: Tensor | None = None
    other: Tensor | None = None
    eps: float = 0.0

    @property
    def elements(self) -> Format:
        return FORMATS[self.format]

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks along rows and columns of the row-wise copy."""
        return self._counts(*self.x.shape)

    def _counts(self, rows: int, columns: int) -> tuple[int, int]:
        down, across = (1 if b == -1 else -(-n // b) for n, b in zip((rows, columns), self.block, strict=True))
        return down, across

    @property
    def is_affine(self) -> bool:
        return self.rule == "minmax" or self.zero_point is not None

    @property
    def keeps_nan(self) -> bool:
        """Whether a NaN makes the scale of all that shares an amax NaN."""
        return self.rule != "two_level" and not self.elements.has_nan

    def results(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype, for each copy, of the codes, the scale, and the zero point or amax if there is one."""
        rows, columns = self.x.shape
        row_wise, transposed = self._of(rows, columns), self._of(columns, rows)
        return {"rowwise": row_wise, "columnwise": transposed, "both": row_wise + transposed}[self.copies]

    def _of(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        f, counts = self.elements, self._counts(rows, columns)
        small = {"mx": torch.uint8, "two_level": torch.float8_e4m3fn}
        found = [((rows, -(-columns // f.per_byte)), torch.uint8 if f.bits < 8 else f.dtype)]
        found.append((counts, small.get(self.rule, torch.float32)))
        if self.is_affine:
            found.append((counts, f.dtype))
        return [*found, ((1, 1), torch.float32)] if self.rule == "two_level" else found


def check(r: Request) -> None:
    """Raise TypeError or ValueError, naming the argument, for what Request does not describe."""
    if r.x.dtype not in MEMORY or r.x.dim() != 2:
        raise TypeError(
            f"quantize: x must be a matrix of float32, bfloat16 or float16, got {r.x.dtype} of {tuple(r.x.shape)}"
        )
    for name, value, known in (("format", r.format, FORMATS), ("rule", r.rule, RULES), ("copies", r.copies, COPIES)):
        if value not in known:
            raise ValueError(f"quantize: {name} must be one of {tuple(known)}, got {value!r}")
    if len(r.block) != 2 or any(b < 1 and b != -1 for b in r.block):
        raise ValueError(f"quantize: block must be two sizes, each -1 or from 1 on, got {r.block}")
    if r.rounding not in (ROUNDINGS if r.rule == "mx" else ("",)):
        raise ValueError(f"quantize: rounding must be one of {ROUNDINGS} for mx, and empty otherwise: {r.rounding!r}")
    if r.elements.is_integer == (r.rule in ("current", "mx", "two_level")) and r.rule not in ("amax", "given"):
        raise ValueError(f"quantize: rule {r.rule!r} is not for {r.format}")
    _check_given(r)
    _check_operation(r)


def _check_given(r: Request) -> None:
    if r.block == (-1, 1) and (r.copies != "rowwise" or r.elements.bits < 8 or r.rule in ("mx", "two_level")):
        raise ValueError(
            f"quantize: block (-1, 1) is for row-wise copies of 8-bit codes with scales in float32, got {r.copies!r}, "
            f"{r.format} and {r.rule}"
        )
    if r.copies != "rowwise" and (r.rule == "given" or r.noise is not None):
        raise ValueError(f"quantize: copies must be 'rowwise' for given scales and with noise, got {r.copies!r}")
    if (r.rule == "given") != (r.scale is not None) and r.rule != "two_level":
        raise ValueError(f"quantize: scale is for rules given, which needs it, and two_level; got rule {r.rule!r}")
    shape = (1, 1) if r.rule == "two_level" else r.counts
    for name, t, dtype in (("scale", r.scale, torch.float32), ("zero_point", r.zero_point, r.elements.dtype)):
        if t is not None and (tuple(t.shape) != shape or t.dtype != dtype):
            raise ValueError(f"quantize: {name} must be {dtype} of {shape}, got {t.dtype} of {tuple(t.shape)}")
    if r.zero_point is not None and (r.rule != "given" or not r.elements.is_integer):
        raise ValueError(f"quantize: zero_point is for rule given and integers, got {r.rule!r} and {r.format}")
    shape, dtypes = ((), [torch.int64]) if r.stream >= 0 else (tuple(r.x.shape), [torch.uint8, torch.int32])
    if r.noise is not None and (tuple(r.noise.shape) != shape or r.noise.dtype not in dtypes):
        raise ValueError(
            f"quantize: noise must be {' or '.join(map(str, dtypes))} of {shape} with stream={r.stream}, got "
            f"{r.noise.dtype} of {tuple(r.noise.shape)}"
        )
    for name in ("scale", "zero_point", "noise", "weight", "bias", "other"):
        t = getattr(r, name)
        if t is not None and t.device != r.x.device:
            raise ValueError(f"quantize: {name} is on {t.device} and x on {r.x.device}; they must be on one device")


def _check_operation(r: Request) -> None:
    if r.operation not in ("", *OPERATIONS):
        raise ValueError(f"quantize: operation must be empty or one of {OPERATIONS}, got {r.operation!r}")
    if r.operation and (r.copies != "rowwise" or r.noise is not None):
        raise ValueError(
            f"quantize: copies must be 'rowwise' and noise None with operation {r.operation!r}, got {r.copies!r}"
        )
    row, whole = tuple(r.x.shape[1:]), tuple(r.x.shape)
    for name, t, users, shape in (
        ("weight", r.weight, NORMS, row),
        ("bias", r.bias, NORMS, row),
        ("other", r.other, FUNCTIONS, whole),
    ):
        if t is not None and r.operation not in users:
            raise ValueError(f"quantize: {name} is for operations {users}, got operation {r.operation!r}")
        if t is not None and (t.dtype not in MEMORY or tuple(t.shape) != shape):
            raise ValueError(
                f"quantize: {name} must be float32, bfloat16 or float16 of {shape}, got {t.dtype} of {tuple(t.shape)}"
            )


# ---- kernels


@dataclass(frozen=True)
class Rows:
    """A kernel that quantizes blocks within rows.

    x, format       what is quantized, and to what
    rule            as of a request
    span            elements of a row that share a scale; 0 for all of them
    held            chunks of a row that a thread keeps in registers; 0: rows are read twice
    threads         of a block
    reads           whether amax was found before, for the tensor, or one scale is given
    vector          whether rows begin, and end, at whole chunks, so that memory is read and written 16 bytes at a time
    noise           "" to the nearest; "bytes" or "words" that are given, or made from a "seed"
    zero            whether a zero point is given
    power_of_two, most_of_dtype, rounding   of the rules
    operation       what is computed of x before, in float32
    weight, bias, other   what memory their elements are in, or "" without
    """

    target: ClassVar[str] = TARGET

    x: torch.dtype
    format: Format
    rule: str
    span: int = 0
    held: int = 2
    threads: int = THREADS
    reads: bool = False
    vector: bool = True
    noise: str = ""
    zero: bool = False
    power_of_two: bool = False
    most_of_dtype: bool = False
    rounding: str = ""
    operation: str = ""
    weight: str = ""
    bias: str = ""
    other: str = ""

    @property
    def memory(self) -> str:
        return MEMORY[self.x]

    @property
    def encoded(self) -> "Rows":
        """The same rows as the encoder reads them: x, or the float32 results of an operation on it."""
        return replace(self, x=torch.float32) if self.operation else self

    @property
    def is_affine(self) -> bool:
        return self.rule == "minmax"

    @property
    def has_second(self) -> bool:
        """Whether codes of zero are read or written."""
        return self.is_affine or self.zero

    @property
    def in_tiles(self) -> bool:
        """Whether a block of threads has a part of a row, as no row's scale is to be found from all of it."""
        return (self.span > 0 or self.reads or self.rule == "given") and self.operation not in NORMS

    @property
    def name(self) -> str:
        """One word for it, by which it is found in the cache."""
        return _name(self, f"quantize_{self.memory}_{self.format.name}_{self.rule}", 3)


@dataclass(frozen=True)
class Tiles:
    """A kernel that quantizes tiles of 128 rows.

    square          whether blocks are 128 x 128
    span            elements of a row of each copy that share a scale; 0 for whole columns, whose amax was found before
    row_wise, transposed   which copies are made

    straight        whether codes with the scales of columns are written as x lies, after all

    The others are those of Rows; reads: whether amax was found before, for the tensor.
    """

    target: ClassVar[str] = TARGET

    x: torch.dtype
    format: Format
    rule: str
    square: bool = False
    span: int = 0
    row_wise: bool = False
    transposed: bool = True
    reads: bool = False
    straight: bool = False
    vector: bool = True
    power_of_two: bool = False
    most_of_dtype: bool = False
    rounding: str = ""

    threads: ClassVar[int] = THREADS

    @property
    def memory(self) -> str:
        return MEMORY[self.x]

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return TILE if self.square or self.x.itemsize == 2 else TILE // 2

    @property
    def words(self) -> int:
        """Words of a row of a tile."""
        return self.width * self.x.itemsize // 4

    @property
    def is_affine(self) -> bool:
        return self.rule == "minmax"

    @property
    def is_by_column(self) -> bool:
        """Whether each column of x has a scale, whose amax was found before."""
        return self.transposed and self.span == 0 and not (self.square or self.reads)

    @property
    def name(self) -> str:
        return _name(self, f"tiles_{self.memory}_{self.format.name}_{self.rule}", 3)


@dataclass(frozen=True)
class Largest:
    """A kernel that finds the largest magnitude of a tensor, or its ends; with `nan`, NaN in the place of the largest
    number if there is one."""

    target: ClassVar[str] = TARGET

    x: torch.dtype
    both: bool = False
    vector: bool = True
    nan: bool = False

    held: ClassVar[int] = 4
    threads: ClassVar[int] = THREADS

    @property
    def memory(self) -> str:
        return MEMORY[self.x]

    @property
    def name(self) -> str:
        return _name(self, f"largest_{self.memory}", 1)


@dataclass(frozen=True)
class Columns:
    """A kernel that finds the largest magnitude of each column of a matrix, or its ends; `nan` as in Largest."""

    target: ClassVar[str] = TARGET

    x: torch.dtype
    both: bool = False
    vector: bool = True
    nan: bool = False

    threads: ClassVar[int] = THREADS
    rows: ClassVar[int] = 8  # that a thread reads

    @property
    def memory(self) -> str:
        return MEMORY[self.x]

    @property
    def name(self) -> str:
        return _name(self, f"columns_{self.memory}", 1)


@dataclass(frozen=True)
class Numbers:
    """A kernel that dequantizes.

    out, format     the dtype of the numbers, and what the codes are
    scale           "" float32, "mx" a power of two, "two_level" e4m3 under an amax
    down, span      elements of a column, and of a row, that share a scale; 0 for all of them
    zero            whether blocks have codes of zero
    """

    target: ClassVar[str] = TARGET

    out: torch.dtype
    format: Format
    scale: str = ""
    down: int = 1
    span: int = 0
    zero: bool = False
    vector: bool = True

    held: ClassVar[int] = 2
    threads: ClassVar[int] = THREADS

    @property
    def memory(self) -> str:
        return MEMORY[self.out]

    @property
    def name(self) -> str:
        return _name(self, f"dequantize_{self.format.name}_{self.memory}", 2)


def _name(variant: Any, start: str, skipped: int) -> str:
    parts = [start]
    for f in fields(variant)[skipped:]:
        value = getattr(variant, f.name)
        if value != f.default:
            parts.append(f.name if value is True else f"{f.name}-{str(value).lower()}")
    return "_".join(parts)
