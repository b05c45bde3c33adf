"""hop.scaled in numpy, element by element.

A quantized tensor is read from its buffers: one integer (code less zero point) or number, one scale and the name of one
block for each element. Sums are those of Python's integers or of float64, and every operation on them is one of numpy
in float32. Nothing of the library's own arithmetic is called; a quantizer is read for its fields alone.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

import hop
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from tests.support import numerics, oracles

f32, f64 = np.float32, np.float64
KINDS: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
# Bits of the significand, and the exponent of the least normal number.
PRECISION = {
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
    torch.float64: (53, -1022),
}


# ---- numpy and torch


def array(t: Tensor) -> np.ndarray:
    """The elements of t, contiguous."""
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if t.dtype.is_floating_point and t.itemsize == 1:
        return t.view(torch.uint8).numpy().view(KINDS[t.dtype])
    return t.numpy()


def tensor(a: Any) -> Tensor:
    """The inverse of `array`."""
    a = np.array(a, order="C")
    for dtype, kind in KINDS.items():
        if a.dtype == kind and kind not in (np.float16, np.float32, np.float64):
            return torch.from_numpy(a.view(f"i{a.itemsize}" if a.itemsize == 2 else "u1")).view(dtype)
    return torch.from_numpy(a)


def cast(y: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """y rounded to dtype; from float64 to 16 bits through float32, as PyTorch does."""
    y = np.asarray(y)
    return (y.astype(f32) if y.dtype == f64 and dtype.itemsize == 2 else y).astype(KINDS[dtype])


def bits(a: np.ndarray) -> np.ndarray:
    """The bits of each element, one NaN for all."""
    if a.dtype.kind in "iub":
        return a
    wide = np.where(np.isnan(a), np.array(np.nan, a.dtype), a)
    return np.ascontiguousarray(wide).view(f"u{a.itemsize}")


def assert_bits(got: Any, want: np.ndarray, what: str = "result") -> None:
    found = array(got) if isinstance(got, Tensor) else np.asarray(got)
    want = np.asarray(want)
    assert found.shape == want.shape, f"{what}: shape {found.shape}, not {want.shape}"
    assert found.dtype == want.dtype, f"{what}: {found.dtype}, not {want.dtype}"
    wrong = (bits(found) != bits(want)).reshape(want.shape)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} differ; at {first} {found[first]}, not {want[first]}"
        )


def assert_buffers(got: Any, q: Quantizer, want: dict[str, np.ndarray], what: str = "result") -> None:
    """A quantized result, with the codes, scales and zero points that numpy makes."""
    assert isinstance(got, hop.QuantizedTensor), f"{what}: {type(got).__name__} is not quantized"
    assert got.quantizer == q, f"{what}: {got.quantizer}, not {q}"
    buffers = got.buffers()
    assert list(buffers) == list(want), f"{what}: {list(buffers)}, not {list(want)}"
    for name, buffer in buffers.items():
        assert_bits(buffer, want[name], f"{what}: {name}")


# ---- quantized tensors, element by element


class Elements(NamedTuple):
    """A quantized tensor: arrays of its shape."""

    n: np.ndarray  # the code less the zero point, int64; the number, float32, of other formats than integers
    step: np.ndarray  # float32
    block: np.ndarray  # the same for elements that share a scale

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Elements":
        return Elements(*map(change, self))

    def values(self) -> np.ndarray:
        """n · step, float32."""
        with np.errstate(all="ignore"):
            return self.n.astype(f32) * self.step


def read(t: Any, usage: str = copies.ROWWISE) -> Elements:
    """One of the copies of a quantized tensor."""
    q, fmt = t.quantizer, t.quantizer.format.name
    buffers = {name: array(b) for name, b in t.buffers().items()}
    as_columns = usage == copies.COLUMNWISE

    def buffer(name: str) -> np.ndarray:
        return buffers[f"columnwise_{name}"] if as_columns and f"columnwise_{name}" in buffers else buffers[name]

    shape = tuple(t.shape)
    rows: tuple[int, ...] = (math.prod(shape),) if q.flat else shape
    if as_columns:
        rows = (shape[-1], math.prod(shape[:-1]))
    codes = buffer("codes")
    if q.format.bits in (2, 4):
        kind = numerics.INTEGERS[fmt][4] if fmt in numerics.INTEGERS else np.uint8
        codes = numerics.unpack(codes, q.format.bits, rows[-1] if rows else 1, kind)
    codes = codes.reshape(rows)

    def spread(of_blocks: np.ndarray, block: Sequence[int]) -> np.ndarray:
        at = [np.arange(n) // (n + 1 if b == -1 else b) for n, b in zip(rows, numerics.sizes(rows, block), strict=True)]
        return np.broadcast_to(of_blocks.reshape(numerics.grid(rows, block))[np.ix_(*at)], rows)

    scale = buffer("scale")
    names = np.arange(scale.size).reshape(scale.shape)
    match type(q.scale).__name__:
        case "Microscaling":
            powers = np.ldexp(f32(1), np.minimum(scale, 254).astype(np.int32) - 127)
            step = spread(np.where(scale == 255, f32(np.nan), powers), q.block)
        case "TwoLevel":
            top = spread(buffer("global_amax"), q.scale.outer)
            with np.errstate(all="ignore"):
                step = spread(scale.astype(f32), q.block) * top * (f32(1) / (f32(448) * numerics.MAX[fmt]))
        case _:
            step = spread(scale, q.block)
    if fmt in numerics.INTEGERS:
        zero = np.array(numerics.INTEGERS[fmt][2])
        if numerics.has_zero_point(q):
            zero = spread(buffer("zero_point"), q.block).astype(np.int64)
        n = codes.astype(np.int64) - zero
    else:
        n = numerics.decode(codes, fmt, getattr(q.format, "book", ()), 0)
    found = Elements(n, step, spread(names, q.block))
    return found.map(lambda a: (a.T if as_columns else a).reshape(shape))


class Pair(NamedTuple):
    """A tensor, and what it holds."""

    t: Any
    e: Elements

    def view(self, of_tensor: Callable[[Any], Any], of_array: Callable[[np.ndarray], np.ndarray]) -> "Pair":
        return Pair(of_tensor(self.t), self.e.map(of_array))

    @property
    def mT(self) -> "Pair":
        return self.view(lambda t: t.transpose(-1, -2), lambda a: np.swapaxes(a, -1, -2))

    def values(self) -> np.ndarray:
        return self.e.values()


class Plain(NamedTuple):
    """A plain tensor, like a Pair."""

    t: Tensor

    @property
    def mT(self) -> "Plain":
        return Plain(self.t.mT)

    def values(self) -> np.ndarray:
        return array(self.t)


def random_codes(q: Quantizer, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Any codes of the format, the outermost ones often."""
    fmt = q.format.name
    if fmt in numerics.INTEGERS:
        low, high, _, _, kind = numerics.INTEGERS[fmt]
        codes = rng.integers(low, high + 1, shape)
        ends = rng.integers(0, 8, shape)
        return np.where(ends == 0, low, np.where(ends == 1, high, codes)).astype(kind)
    if fmt in numerics.FLOATS and q.format.bits == 8:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        largest = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt]
        return ((codes & 0x80) | np.minimum(codes & 0x7F, largest)).astype(np.uint8)
    count = 16 if fmt == "e2m1" else len(getattr(q.format, "book", ()))
    return rng.integers(0, count, shape).astype(np.uint8)


def random_scales(shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    return (rng.uniform(0.5, 1, shape) * 2.0 ** rng.integers(-6, 2, shape)).astype(f32)


def make(
    q: Quantizer,
    shape: Sequence[int],
    rng: np.random.Generator,
    usages: Sequence[str] = (copies.ROWWISE,),
    dtype: torch.dtype = torch.float32,
    scales: Callable[[Sequence[int], np.random.Generator], np.ndarray] = random_scales,
    codes: Callable[[Quantizer, Sequence[int], np.random.Generator], np.ndarray] = random_codes,
    usage: str | None = None,
) -> Pair:
    """A tensor of any codes, scales and zero points; where it has several copies, each has its own. Read is `usage`."""
    buffers: dict[str, Tensor] = {}
    for name, size, kind in copies.describe(q, shape, tuple(usages)):
        as_columns = name.startswith("columnwise_")
        match name.removeprefix("columnwise_"):
            case "codes":
                rows: Sequence[int] = (shape[-1], math.prod(shape[:-1])) if as_columns else shape
                rows = (math.prod(shape),) if q.flat else rows
                own = codes(q, tuple(rows) or (1,), rng)
                if q.format.bits in (2, 4):
                    own = numerics.pack(own, q.format.bits)
            case "zero_point":
                low, high, *_ = numerics.INTEGERS[q.format.name]
                own = rng.integers(low, high + 1, size)
            case "global_amax":
                own = scales(size, rng) * f32(448)
            case _ if kind == torch.uint8:
                own = rng.integers(120, 135, size).astype(np.uint8)
            case _ if kind == torch.float8_e4m3fn:
                own = rng.integers(0x28, 0x50, size).astype(np.uint8)
            case _ if getattr(q.scale, "power_of_two", False):
                own = (2.0 ** rng.integers(-6, 2, size)).astype(f32)
            case _:
                own = scales(size, rng)
        made = torch.from_numpy(np.array(own, order="C"))
        is_bytes = kind.is_floating_point and kind.itemsize == 1
        buffers[name] = (made.view(torch.uint8).view(kind) if is_bytes else made.to(kind)).reshape(size)
    t = hop.QuantizedTensor(buffers, q, shape, dtype)
    return Pair(t, read(t, usage or usages[0]))


def quantized(q: Quantizer, x: Tensor, usages: Sequence[str] = (copies.ROWWISE,), **options: Any) -> Pair:
    """x as hop.quantize quantizes it."""
    if q.stochastic:
        options["generator"] = torch.Generator().manual_seed(0)
    t = hop.quantize(q, x, usages=usages, **options)
    return Pair(t, read(t, usages[0]))


# ---- products of integers


def wrapped(total: np.ndarray) -> np.ndarray:
    """Integers of any size modulo 2^32, int32."""
    return ((np.asarray(total) + 2**31) % 2**32 - 2**31).astype(np.int32)


def matmul(lhs: Elements, rhs: Elements, bias: np.ndarray | None = None) -> np.ndarray:
    """Σ_groups (float32(sum) · s_lhs) · s_rhs, of (..., M, K) and (..., K, N) or vectors. `bias` is int32."""
    row, column = lhs.n.ndim == 1, rhs.n.ndim == 1
    lhs = lhs.map(lambda a: a[None]) if row else lhs
    rhs = rhs.map(lambda a: a[:, None]) if column else rhs
    k = lhs.n.shape[-1]
    changes: set[int] = set()
    for block, axis in ((lhs.block, -1), (rhs.block, -2)):
        first, second = (np.moveaxis(block, axis, 0)[part] for part in (slice(None, -1), slice(1, None)))
        changes |= {i + 1 for i in range(k - 1) if (first[i] != second[i]).any()}
    edges = [0, *sorted(changes), k]
    y = np.zeros(np.matmul(lhs.n, rhs.n).shape, f32)
    for i, (start, end) in enumerate(itertools.pairwise(edges)):
        if start == end:
            continue
        total = wrapped(lhs.n[..., start:end] @ rhs.n[..., start:end, :])
        if bias is not None:
            total = wrapped(total.astype(np.int64) + bias)
        part = (total.astype(f32) * lhs.step[..., start : start + 1]) * rhs.step[..., start : start + 1, :]
        y = part if i == 0 else y + part
    if k == 0 and bias is not None:
        raise NotImplementedError("scales of nothing")
    y = y[..., 0, :] if row else y
    return y[..., 0] if column else y


def biased(y: np.ndarray, bias: np.ndarray | None, alpha: Any = 1, beta: Any = 1) -> np.ndarray:
    """y · alpha + bias · beta, each rounded to float32."""
    y = y * f32(alpha)
    return y if bias is None or beta == 0 else y + bias.astype(f32) * f32(beta)


class Geometry(NamedTuple):
    """The numbers of a convolution, each a list as long as its kernel has dimensions."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def of(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        if x.ndim < w.ndim:
            return self.of(x[None], w)[0]
        return oracles.convolution(x, w, None, *self)


def of_channels(bias: np.ndarray, rank: int) -> np.ndarray:
    return bias.reshape(-1, *[1] * rank)


def convolution(x: Elements, w: Elements, g: Geometry, bias: np.ndarray | None = None) -> np.ndarray:
    """(float32(sum) · s_input) · s_weight; one scale for each example and each output channel. `bias` is int32."""
    if x.n.ndim < w.n.ndim:
        return convolution(x.map(lambda a: a[None]), w, g, bias)[0]
    rank = w.n.ndim - 2
    total = wrapped(g.of(x.n, w.n))
    if bias is not None:
        total = wrapped(total.astype(np.int64) + of_channels(bias, rank))
    of_examples = x.step[(slice(None), 0, *[0] * rank)]
    of_outputs = w.step[(0, slice(None), *[0] * rank)] if g.transposed else w.step[(slice(None), 0, *[0] * rank)]
    if g.transposed:
        of_outputs = np.concatenate([of_outputs] * g.groups)
    return (total.astype(f32) * of_channels(of_examples, rank + 1)) * of_channels(of_outputs, rank)


def same_padding(x: np.ndarray, kernel: Sequence[int], dilation: Sequence[int]) -> np.ndarray:
    """Zeros around the last dimensions of x, so that a convolution with stride 1 keeps its size: more behind."""
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return np.pad(x, [(0, 0)] * (x.ndim - len(total)) + [(t // 2, t - t // 2) for t in total])


# ---- products of floats


def half_ulp(y: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half a unit in the last place of a number of `dtype` of magnitude y."""
    digits, least = PRECISION[dtype]
    _, exponent = np.frexp(np.asarray(y, f64))
    return np.ldexp(1.0, np.maximum(exponent - 1, least) - digits)


def ratio(
    got: Tensor,
    x: np.ndarray,
    w: np.ndarray,
    product: Callable[[np.ndarray, np.ndarray], np.ndarray],
    terms: int,
    *,
    wide: bool = False,
    bias: np.ndarray | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> float:
    """The largest error of `got`, in units of what float32 (float64, if `wide`) sums allow.

    x and w are exact, in float32. With u = 2^-24 a sum of K products in any order is off by at most K · u · Σ|x||w|;
    8 u more are for scales that are multiplied in before or after, for alpha, beta and the bias. A result in bfloat16
    may have been rounded to bfloat16 once more, before its scales. The last rounding adds half a unit in the last
    place; what is beyond the largest number may be infinite."""
    kind = np.longdouble if wide else f64
    x, w = x.astype(kind), w.astype(kind)
    exact = product(x, w)
    size = product(np.abs(x), np.abs(w)) * abs(alpha)
    early = np.abs(exact) * abs(alpha)
    exact = exact * alpha
    if bias is not None and beta != 0:
        exact = exact + bias.astype(kind) * beta
        size = size + np.abs(bias.astype(kind) * beta)
    error = (terms + 8) * (2.0**-53 if wide else 2.0**-24) * size
    if got.dtype == torch.bfloat16:
        error = error + 2.0**-8 * (early + error)
    if wide and got.dtype.itemsize == 2:  # PyTorch casts through float32
        error = error + 2.0**-24 * np.abs(exact)
    bound = error + half_ulp(np.abs(exact) + error, got.dtype)
    found = array(got)
    assert found.shape == exact.shape, f"shape {found.shape}, not {exact.shape}"
    found = found.astype(kind)
    largest = float(torch.finfo(got.dtype).max)
    beyond = np.abs(exact) + bound > largest
    assert (~np.isinf(found) | (beyond & (np.sign(found) == np.sign(exact)))).all(), "infinite"
    assert (np.isinf(found) | (np.abs(exact) - bound <= largest)).all(), "not infinite"
    off = np.where(np.isinf(found), 0, np.abs(np.where(np.isinf(found), 0, found) - exact) / bound)
    assert not np.isnan(off).any(), "NaN"
    return float(off.max(initial=0))


# ---- pools and means


def windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> list[tuple[int, int]]:
    """Where each window starts and ends, before it is cut to the input; one that starts behind it is left out."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil else room // stride) + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    starts = [i * stride - padding for i in range(count)]
    return [(s, s + dilation * (kernel - 1) + 1) for s in starts]


def _pool(x: np.ndarray, along: Sequence[Sequence[Any]], value: Callable[..., Any]) -> np.ndarray:
    lead = x.shape[: x.ndim - len(along)]
    y = np.zeros((*lead, *map(len, along)), f64)
    for index in np.ndindex(*map(len, along)):
        y[(..., *index)] = value([spans[i] for spans, i in zip(along, index, strict=True)])
    return y


def avg_pool(
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> np.ndarray:
    """Means of windows, float64."""
    n = len(kernel)
    stride, padding = stride or kernel, padding if len(padding) == n else list(padding) * n
    sizes = x.shape[x.ndim - n :]
    along = [windows(s, k, st, p, 1, ceil_mode) for s, k, st, p in zip(sizes, kernel, stride, padding, strict=True)]

    def mean(spans: list[tuple[int, int]]) -> Any:
        inside = [(max(a, 0), min(b, s)) for (a, b), s in zip(spans, sizes, strict=True)]
        padded = [(a, min(b, s + p)) for (a, b), s, p in zip(spans, sizes, padding, strict=True)]
        count = math.prod(b - a for a, b in (padded if count_include_pad else inside))
        part = x[(..., *(slice(a, b) for a, b in inside))]
        return part.sum(tuple(range(-n, 0)), dtype=f64) / (divisor_override or count)

    return _pool(x, along, mean)


def max_pool(
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> np.ndarray:
    n = len(kernel)
    stride = stride or kernel
    padding, dilation = (v if len(v) == n else list(v) * n for v in (padding, dilation))
    sizes = x.shape[x.ndim - n :]
    along = [windows(*arguments, ceil_mode) for arguments in zip(sizes, kernel, stride, padding, dilation, strict=True)]

    def largest(spans: list[tuple[int, int]]) -> Any:
        at = [[i for i in range(a, b, d) if 0 <= i < s] for (a, b), d, s in zip(spans, dilation, sizes, strict=True)]
        part = x[(..., *np.ix_(*at))]
        return part.max(tuple(range(-n, 0)))

    return _pool(x, along, largest).astype(x.dtype)


def adaptive_avg_pool(x: np.ndarray, out: Sequence[int]) -> np.ndarray:
    """Window i of n goes from floor(i · size / n) to ceil((i + 1) · size / n)."""
    n = len(out)
    sizes = x.shape[x.ndim - n :]
    along = [[(i * s // o, -(-(i + 1) * s // o)) for i in range(o)] for s, o in zip(sizes, out, strict=True)]

    def mean(spans: list[tuple[int, int]]) -> Any:
        part = x[(..., *(slice(a, b) for a, b in spans))]
        return part.mean(tuple(range(-n, 0)), dtype=f64)

    return _pool(x, along, mean)


def mean_of(x: Elements, mean: Callable[[np.ndarray], np.ndarray], reduced: Sequence[int]) -> np.ndarray:
    """float32(mean of n) · step for integers where no scale changes in what is averaged, else float32(mean of numbers);
    means in float64. `reduced` are the dimensions in which windows lie."""
    alike = all((x.block == np.take(x.block, [0], d)).all() for d in reduced) if x.n.size else True
    if x.n.dtype != np.int64 or not alike:
        return mean(x.values().astype(f64)).astype(f32)
    y = mean(x.n.astype(f64)).astype(f32)
    step = x.step
    for d in sorted((d % x.n.ndim for d in reduced), reverse=True):
        keeps = y.ndim == x.n.ndim
        step = np.take(step, [0] if keeps else 0, d)
    return y * step


# ---- requantization


def fixed_point(multiplier: float) -> tuple[int, int]:
    """mantissa · 2^(shift - 31), of 31 bits."""
    if not 0 < multiplier < math.inf:
        return 0, 0
    fraction, shift = math.frexp(multiplier)
    mantissa = math.floor(Fraction(fraction) * 2**31 + Fraction(1, 2))
    if mantissa == 2**31:
        mantissa, shift = 2**30, shift + 1
    if shift < -31:
        return 0, 0
    return (2**31 - 1, 30) if shift > 30 else (mantissa, shift)


def nearest(x: Fraction, ties: str) -> int:
    down = math.floor(x)
    rest = x - down
    if rest != Fraction(1, 2):
        return down + (rest > Fraction(1, 2))
    return down + {"up": 1, "away": int(x > 0), "even": down % 2}[ties]


def in_int32(n: int) -> int:
    return max(-(2**31), min(2**31 - 1, n))


def requantized(
    rule: Any, total: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, scale: np.ndarray, zero: np.ndarray, fmt: str
) -> np.ndarray:
    """The codes of exact sums, one by one."""
    low, high, _, _, kind = numerics.INTEGERS[fmt]
    codes = np.zeros(total.shape, kind)
    every = np.broadcast_arrays(total, lhs, rhs, scale, zero)
    for i in np.ndindex(*total.shape):
        n, a, b, s, z = (x[i] for x in every)
        code = max(low, min(high, steps(rule, int(n), a, b, s) + int(z)))
        for bound, limit in ((rule.low, max), (rule.high, min)):
            if bound is not None:
                edge = int(np.rint(f32(bound) / s)) + int(z)
                code = limit(code, max(low, min(high, edge)))
        codes[i] = code
    return codes


def steps(rule: Any, n: int, a: Any, b: Any, s: Any) -> int:
    """round(n · a · b / s), by the convention."""
    if type(rule).__name__ == "FloatMultiplier":
        return int(np.rint(f32(n) * ((a * b) / s)))
    mantissa, shift = fixed_point(float(a) * float(b) / float(s))
    if rule.rounding in ("gemmlowp", "ruy"):
        left = in_int32(n << max(shift, 0))
        high = in_int32(nearest(Fraction(left * mantissa, 2**31), "up"))
        return nearest(Fraction(high, 2 ** max(-shift, 0)), "away" if rule.rounding == "gemmlowp" else "up")
    return nearest(Fraction(n * mantissa, 2 ** (31 - shift)), {"tflite": "up"}.get(rule.rounding, rule.rounding))
