"""Random calls of the operators hop_native::* whose arguments were changed: one line for each that breaks the rule

    a call raises an error, or gives what PyTorch's own operators give of the same tensors.

    python -m tests.fuzz_operators --first 0 --count 1000 [--report FILE]

A call and its changes follow from its seed alone. Where its description was changed too, which can give it another
meaning, the result has the shapes and dtypes that tensors without data have. FILE says which seed ended the process.
"""

import math
import random
import re
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hop
from hop import QuantizedTensor, Quantizer
from hop import presets as P
from hop.compat import memory
from hop.kernels.cpu import native
from hop.kernels.cpu.quantizers import Description, describe
from hop.numerics.formats import INT8
from tests.fuzz import SANE, guarded, main

Rng = random.Random
_GIGABYTES = 3  # that a call may take: results of huge sizes are refused, and not written
_HUGE = (-1, 0, 3, 2**31 - 1, 2**31, 2**32, 2**48, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8, torch.float64]
_DTYPES += [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


class UnspecifiedError(Exception):
    """Tiles hold other codes than zero behind the last column, where any result will do."""


class Case(NamedTuple):
    op: str
    args: list[Any]  # the last is a description
    oracle: Callable[[list[Any]], Any]


def integers(rng: Rng, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    made = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))).to(dtype)
    return guarded(made) if rng.random() < 0.5 else made


def powers(rng: Rng, *shape: int) -> Tensor:
    """Scales, by which numbers are multiplied exactly."""
    return torch.exp2(integers(rng, -2, 3, *shape).float())


# ---- factors and outputs in words, and what they mean


def whole(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """A block with a size for each dimension of `shape`."""
    first = -1 if block[0] == -1 else 1
    return [*[first] * (len(shape) - len(block)), *block[max(len(block) - len(shape), 0) :]]


def counts(shape: Sequence[int], block: Sequence[int]) -> list[int]:
    return [1 if b == -1 else -(-n // b) for n, b in zip(shape, whole(shape, block), strict=True)]


def spread(x: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """The number of its block for each element."""
    assert list(x.shape) == counts(shape, block)
    for d, (n, b) in enumerate(zip(shape, whole(shape, block), strict=True)):
        x = x.repeat_interleave(n if b == -1 else b, d).narrow(d, 0, n)
    return x.double()


def nibbles(codes: Tensor, signed: bool) -> Tensor:
    both = torch.stack([codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4], -1).flatten(-2).to(torch.int16)
    return (both ^ 8) - 8 if signed else both


def tiles(codes: Tensor, narrow: bool) -> Tensor:
    """(rows, k) as of HOP_TILED."""
    rows, k = codes.shape
    r, s = -(-rows // 32), -(-k // 64)
    made = torch.nn.functional.pad(codes, (0, 64 * s - k, 0, 32 * r - rows))
    made = made.reshape(r, 2, 16, s, 16, 4).permute(0, 3, 1, 4, 2, 5).reshape(r, s, 2, 16, 64)
    if narrow:
        low, high = made.to(torch.uint8).reshape(r, s, 2, 8, 2, 64).unbind(4)
        made = (low & 15) | (high & 15) << 4
    return made


def untiled(x: Tensor, rows: int, k: int, narrow: bool, signed: bool) -> Tensor:
    r, s = x.shape[:2]
    if narrow:
        byte = x.view(torch.uint8).to(torch.int16)
        x = torch.stack([byte & 15, byte >> 4], 4).reshape(r, s, 2, 16, 64)
        x = (x ^ 8) - 8 if signed else x
    whole = x.reshape(r, s, 2, 16, 16, 4).permute(0, 2, 4, 1, 3, 5).reshape(32 * r, 64 * s)
    if whole[:, k:].any():
        raise UnspecifiedError
    return whole[:rows, :k]


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def words_of(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def sizes_of(text: str) -> list[int]:
    return [int(v) for v in text.split(",")]


def decoded(words: str, buffers: Sequence[Any], tiled: tuple[int, int]) -> Tensor:
    """The numbers of a factor in float64; `tiled` are its rows and k if it lies so."""
    format, *_ = words.split()
    given = words_of(words)
    codes, scale, zero, fold = buffers
    narrow, signed = format in ("int4", "uint4"), format == "int4"
    if "tiled" in given:
        x = untiled(codes, *tiled, narrow, signed)
    else:
        x = nibbles(codes, signed) if narrow else codes.view(torch.float8_e4m3fn) if format == "e4m3" else codes
    shape, x = x.shape, x.double()
    if "zero" in given:
        x = x - (spread(zero, shape, sizes_of(given["scale"])) if given["zero"] == "stored" else int(given["zero"]))
    if "scale" in given:
        x = x * spread(scale, shape, sizes_of(given["scale"]))
    if "block_scale" in given:
        exponents = fold.view(torch.uint8).double() - 127
        x = x * spread(torch.exp2(exponents), shape, sizes_of(given["block_scale"].split(":")[1]))
    return x.mT if "columns" in given else x


def written(y: Tensor, dtype: torch.dtype, words: str, scale: Any, zero: Any) -> Tensor:
    """Exact numbers as a result."""
    given = words_of(words)
    if "requantize" not in given:
        return y.to(dtype)
    block = sizes_of(given["scale"])
    codes = torch.round(y / spread(scale, y.shape, block)) + (0 if zero is None else spread(zero, y.shape, block))
    return codes.clamp(int(given["low"]), int(given["high"])).to(dtype)


LHS = ["int8", "uint8 zero=7", "int8 scale=1,-1", "int8 scale=-1,-1 zero=3", "uint8 zero=stored scale=1,-1"]
LHS += ["bfloat16", "float32", "float16", "e4m3 scale=1,-1", "e4m3 block_scale=e8m0:1,32"]
RHS = ["int8", "int8 scale=1,-1", "int8 scale=1,32", "int4 scale=1,32", "uint4 zero=stored scale=1,32", "int4 zero=-1"]
RHS += ["e4m3 scale=1,-1", "e4m3 block_scale=e8m0:1,32"]


def factor(rng: Rng, words: str, shape: Sequence[int]) -> list[Any]:
    """Codes, scale, zero point and block scale of one of `shape`."""
    format, given = words.split()[0], words_of(words)
    if format in ("int4", "uint4"):
        codes = integers(rng, 0, 256, *shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    elif format == "e4m3":
        codes = integers(rng, -4, 5, *shape, dtype=torch.float8_e4m3fn)
    else:
        low = 0 if format == "uint8" else -9
        codes = integers(rng, low, 10, *shape, dtype=getattr(torch, format))
    block = sizes_of(given["scale"]) if "scale" in given else None
    scale = None if block is None else powers(rng, *counts(shape, block))
    zero = None
    if given.get("zero") == "stored":
        assert block is not None
        zero = integers(rng, 0, 9, *counts(shape, block), dtype=torch.int8 if format == "int8" else torch.uint8)
    fold = None
    if "block_scale" in given:
        block = sizes_of(given["block_scale"].split(":")[1])
        fold = integers(rng, 125, 130, *counts(shape, block), dtype=torch.uint8)
    return [codes, scale, zero, fold]


def product(rng: Rng) -> Case:
    left, right = rng.choice(LHS), rng.choice(RHS)
    m, n, k = rng.choice([0, 1, 2, 5, 33]), rng.choice([0, 1, 16, 40]), rng.choice([0, 2, 32, 64, 160])
    lead = rng.choice([[], [], [2], [3]])
    batched = bool(lead) and rng.random() < 0.5
    lhs = factor(rng, left, [*lead, m, k])
    rhs = factor(rng, right, [*(lead if batched else []), n, k])
    if not batched and right.startswith("int8") and rng.random() < 0.4:
        right, rhs[0] = f"{right} tiled", tiles(rhs[0], False)
    elif not batched and right.startswith("int4") and rng.random() < 0.4:
        right, rhs[0] = f"{right} tiled", tiles(nibbles(rhs[0], True), True)
    elif right == "int8" and rng.random() < 0.4:
        right, rhs[0] = "int8 columns", rhs[0].mT.contiguous()
    sums = left in ("int8", "uint8 zero=7") and right.split()[0] == "int8" and "scale" not in right
    dtype = rng.choice([torch.int32 if sums else torch.float32, torch.float32, torch.bfloat16, torch.float16])
    bias = rng.choice([None, integers(rng, -9, 9, n, dtype=torch.int32 if dtype == torch.int32 else torch.float32)])
    output, scale, zero = "", None, None
    if rng.random() < 0.3:
        dtype = rng.choice([torch.int8, torch.uint8])
        low = -128 if dtype == torch.int8 else 0
        block = rng.choice(["-1", "1,-1", "-1,1"])
        shape = counts([*lead, m, n], sizes_of(block))
        output, scale = f"requantize=0 low={low} high={low + 255} scale={block}", powers(rng, *shape) * 8
        if rng.random() < 0.5:
            output, zero = f"{output} zero=stored", integers(rng, 0, 9, *shape, dtype=dtype)

    def oracle(args: list[Any]) -> Tensor:
        n, k = args[11], args[0].shape[-1]
        x, w = decoded(left, args[:4], (0, 0)), decoded(right, args[4:8], (n, k))
        assert w.shape[-2] == n
        y = x @ w.mT
        return written(y if args[8] is None else y + args[8].double(), dtype, output, args[9], args[10])

    words = f"1 lhs {left} rhs {right} output {named(dtype)} {output}"
    return Case("product", [*lhs, *rhs, bias, scale, zero, n, words], oracle)


def convolution(rng: Rng) -> Case:
    dim, groups = rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 4])
    c, n = groups * rng.choice([1, 2, 4]), groups * rng.choice([1, 3, 8])
    lists = [[rng.choice(choices) for _ in range(dim)] for choices in ([1, 2, 3], [1, 2], [0, 1, 2], [0, 1], [1, 2])]
    kernel, stride, before, after, dilation = lists
    size = [rng.choice([5, 6, 9]) for _ in range(dim)]
    x_format, batch = rng.choice(["int8", "uint8"]), rng.choice([0, 1, 2])
    x = integers(rng, 0, 9, batch, c, *size, dtype=getattr(torch, x_format))
    weight = integers(rng, -9, 9, n, c // groups, *kernel)
    ones = [1] * dim
    each, tiled, affine = rng.random() < 0.5, rng.random() < 0.4, rng.random() < 0.5
    x_scale = powers(rng, batch if each else 1, 1, *ones)
    zero = integers(rng, 0, 9, *x_scale.shape, dtype=x.dtype) if affine else None
    w_scale = powers(rng, rng.choice([1, n]), 1, *ones)
    bias = rng.choice([None, integers(rng, -9, 9, n, dtype=torch.float32)])
    own = tiles(weight.movedim(1, -1).flatten(1), False) if tiled else weight
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    output, scale = "", None
    if rng.random() < 0.3:
        dtype, output, scale = torch.int8, "requantize=0 low=-128 high=127 scale=-1", powers(rng, 1, 1, *ones) * 8
    text = f"1 x {x_format} {'zero=stored' if affine else ''} weight int8 {'tiled' if tiled else ''}"
    names = ("kernel", "stride", "before", "after", "dilation")
    text += "".join(f" {name}={','.join(map(str, v))}" for name, v in zip(names, lists, strict=True))
    text += f" groups={groups} {rng.choice(['', 'channels_last'])} output {named(dtype)} {output}"

    def oracle(args: list[Any]) -> Tensor:
        x, x_scale, zero, weight, w_scale, bias, scale, _, n, _ = args
        x = (x.double() - (0 if zero is None else zero.double())) * x_scale.double()
        if tiled:
            k = x.shape[1] // groups * math.prod(kernel)
            weight = untiled(weight, n, k, False, True).reshape(n, *kernel, x.shape[1] // groups).movedim(-1, 1)
        assert weight.shape[0] == n
        padding = [p for d in range(dim - 1, -1, -1) for p in (before[d], after[d])]
        x, weight = torch.nn.functional.pad(x, padding), weight.double() * w_scale.double()
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[dim - 1]
        y = convolve(x, weight, None if bias is None else bias.double(), stride, 0, dilation, groups)
        if scale is not None and scale.dim() < y.dim():
            scale = scale.unsqueeze(0)
        return written(y, dtype, output, scale, None)

    return Case("convolution", [x, x_scale, zero, own, w_scale, bias, scale, None, n, text], oracle)


# ---- tiles and quantizers


def pack(rng: Rng) -> Case:
    rows, k = rng.choice([0, 1, 31, 40]), rng.choice([0, 2, 64, 70])
    format = rng.choice(["int8", "uint8", "int4", "e4m3", "int8 columns"])
    codes = factor(rng, format, [rows, k])[0]

    def oracle(args: list[Any]) -> Tensor:
        codes = args[0].view(torch.uint8)
        if format == "int4":
            return tiles(nibbles(codes, True), True).view(args[0].dtype)
        return tiles(codes.mT if "columns" in format else codes, False).contiguous().view(args[0].dtype)

    return Case("pack", [codes, f"1 lhs int8 rhs {format}"], oracle)


QUANTIZERS = [
    *(P.INT8_TENSOR, P.INT8_ROW, P.INT8_ROW_AFFINE, P.UINT8_ROW_AFFINE, P.INT4_32, P.UINT4_32_AFFINE, P.FP8_ROW),
    *(P.MXFP8, P.MXFP4, P.NVFP4, P.NVFP4_ROW, P.STATE8, P.STATE4, P.FP8_128X128, P.INT8_TENSOR_STATIC),
    *(P.INT8_TENSOR_STATIC_AFFINE, Quantizer(INT8, (1, 32))),
]


def numbers(rng: Rng) -> Tensor:
    shape = rng.choice([(8, 64), (3, 32), (2, 3, 32), (1, 96), (128, 160), (64,), (0, 32)])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    x = x.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    return guarded(x) if rng.random() < 0.5 else x


def planned(q: Quantizer) -> Description:
    made = describe(str(q))
    assert isinstance(made, Description), made
    return made


def buffers_of(q: Quantizer, x: Tensor, options: dict[str, Any]) -> list[Tensor]:
    with native.use("off"):
        return ordered(hop.quantize(q, x, **{name: v for name, v in options.items() if v is not None}))


def ordered(t: QuantizedTensor) -> list[Tensor]:
    """The buffers in the operators' order, with scales of e8m0 as bytes."""
    buffers = t.buffers()
    names = [name for name in ("codes", "scale", "zero_point", "global_amax") if name in buffers]
    stored = {torch.float8_e8m0fnu: torch.uint8}
    return [buffers[name].view(stored.get(buffers[name].dtype, buffers[name].dtype)) for name in names]


def quantize(rng: Rng) -> Case:
    q, x = rng.choice(QUANTIZERS), numbers(rng)
    scale = zero = None
    if q in (P.INT8_TENSOR_STATIC, P.INT8_TENSOR_STATIC_AFFINE):
        shape = [1] * x.dim()
        scale = torch.full(shape, 0.125)
        if q.scale.has_zero_point():
            zero = torch.full(shape, 3, dtype=torch.int8)

    def oracle(args: list[Any]) -> list[Tensor]:
        return buffers_of(q, args[0], {"scale": args[1], "zero_point": args[2], "noise": args[3]})

    return Case("quantize", [x, scale, zero, None, planned(q).words], oracle)


def quantize_product(rng: Rng) -> Case:
    q, x = rng.choice(QUANTIZERS), numbers(rng)
    factor = powers(rng, x.shape[-1])
    stream, noise = -1, None
    if rng.random() < 0.3:
        stream, noise = rng.choice([0, 5]), torch.tensor(rng.getrandbits(40))

    def oracle(args: list[Any]) -> list[Tensor]:
        x, factor, noise, stream, _ = args
        if noise is not None and stream >= 0:
            noise = hop.noise(noise, x.shape, stream=stream)
        return buffers_of(q, x.float() * factor, {"noise": noise})

    return Case("quantize_product", [x, factor, noise, stream, planned(q).words], oracle)


def dequantize(rng: Rng) -> Case:
    q, x = rng.choice(QUANTIZERS[:-3]), numbers(rng)
    t = hop.quantize(q, x)
    names = list(t.buffers())
    codes, scale, *second = ordered(t)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])

    def oracle(args: list[Any]) -> Tensor:
        codes, scale, second, shape, _ = args
        made = dict(zip(("codes", "scale", "zero_point"), (codes, scale, second), strict=True))
        if "global_amax" in names:
            made["global_amax"] = made.pop("zero_point")
        with native.use("off"):
            own = {name: made[name].view(t.buffers()[name].dtype) for name in names}
            return hop.dequantize(QuantizedTensor(own, q, tuple(shape), torch.float32), dtype)

    second = [guarded(v.contiguous()) for v in second] or [None]
    return Case("dequantize", [codes, scale, *second, list(x.shape), planned(q).back(dtype)], oracle)


# ---- noise, and a step in place


def noise(rng: Rng) -> Case:
    def oracle(args: list[Any]) -> Tensor:
        with native.use("off"):
            return hop.noise(args[0].reshape(()), args[1], stream=args[2], bits=args[3])

    seed, shape = torch.tensor(rng.getrandbits(60)), rng.choice([[3, 7], [33], [0, 5], []])
    return Case("noise", [seed, shape, 2, rng.choice([8, 24])], oracle)


STATES = [None, P.STATE8, P.STATE4]


def step(rng: Rng) -> Case:
    rule, most = rng.choice([("adam", 3), ("adam", 2), ("lion", 1), ("sgd", 1), ("sgd", 0)])
    states = [rng.choice(STATES) for _ in range(most)]
    described = ["" if q is None else planned(q).words for q in states]
    params, grads, buffers, count = [], [], [], rng.choice([1, 1, 2])
    for _ in range(count):
        p = integers(rng, -9, 9, rng.choice([1, 64, 2049, 4096]), dtype=rng.choice([torch.float32, torch.bfloat16]))
        params.append(p)
        grads.append(integers(rng, -9, 9, p.numel(), dtype=rng.choice([torch.float32, torch.float16])))
        for q in states:
            x = integers(rng, 0, 9, p.numel(), dtype=torch.float32)
            buffers += [x] if q is None else ordered(hop.quantize(q, x))
    numbers = [0.99, 0.01, 0.9, 0.1, 0.99, 0.01, 0.1, 0.5, 1e-3][: {"adam": 9, "sgd": 5, "lion": 6}[rule]]
    words = ";".join([f"1 {rule} least={','.join('0' * most)}".removesuffix(" least="), *described])

    def oracle(args: list[Any]) -> None:
        return None  # tests/optim/test_optimizers.py says what a step is

    return Case("step_", [params, grads, buffers, numbers * count, 0, [0] * count, words], oracle)


CASES = [product, product, convolution, convolution, pack, quantize, quantize_product, dequantize, noise, step]
BY_HOP = ("quantize", "quantize_product", "dequantize")  # whose oracle refuses more than they do


# ---- changes


def near(rng: Rng, sizes: Sequence[int]) -> list[int]:
    shape = list(sizes) or [1]
    at = rng.randrange(len(shape))
    shape[at] = rng.choice([0, 1, shape[at] // 2, max(shape[at] - 1, 0), shape[at] + 1, shape[at] * 2])
    return rng.choice([shape, shape, shape[::-1], [*shape, 1], [1, *shape], shape[1:]])


def shrunk(rng: Rng, x: Tensor) -> Tensor:
    x = x.clone()
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(rng.choice([0, 1, size // 2, max(size - 1, 0)]))
    return x


TENSORS: list[Callable[[Rng, Tensor], Any]] = [
    lambda r, x: x.new_ones(near(r, x.shape)),
    lambda r, x: x.new_ones(near(r, x.shape)),
    lambda r, x: x.to(r.choice(_DTYPES)),
    lambda r, x: x.view(r.choice(_DTYPES)),
    lambda r, x: x.to("meta"),
    lambda r, x: x.to_sparse(),
    shrunk,
    shrunk,
    lambda r, x: None,
    lambda r, x: x.clone().mT.contiguous().mT,
    lambda r, x: torch.stack([x, x, x], -1)[..., r.randrange(3)],
    lambda r, x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda r, x: x[:1].expand(x.shape),
    lambda r, x: x[..., :1].expand(x.shape),
    lambda r, x: torch.cat([x, x])[x.shape[0] :],
    lambda r, x: x.unsqueeze(0),
    lambda r, x: x.squeeze(),
    lambda r, x: x[:0],
    lambda r, x: x[..., :0],
    lambda r, x: x.new_ones([1] * x.dim()).expand([r.choice([1, 2, 2**20, 2**31, 2**47]) for _ in x.shape]),
    lambda r, x: x.new_ones([r.choice([0, 2**20, 2**31, 2**62]) if d else 0 for d in range(x.dim())]),
    lambda r, x: torch.empty_strided(
        x.shape, [r.choice([1, s, 7]) if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)], dtype=x.dtype
    ).copy_(x),
    lambda r, x: guarded(x.contiguous()),
    lambda r, x: x.new_ones(()),
    lambda r, x: x.tolist(),
]
EXTRA: list[Callable[[Rng], Any]] = [
    lambda r: torch.ones(r.choice([(), (1,), (1, 1), (5, 1), (1, 1, 1, 1)])),
    lambda r: torch.ones(1, 1, dtype=r.choice(_DTYPES)),
    lambda r: torch.tensor(r.getrandbits(60)),
]


def text(rng: Rng, x: str) -> str:
    words = x.split() or [""]
    at = rng.randrange(len(words))
    kind = rng.randrange(9)
    if kind == 0:
        del words[at]
    elif kind == 1:
        words.insert(rng.randrange(len(words) + 1), words[at])
    elif kind == 2:
        rng.shuffle(words)
    elif kind == 3:
        return x[: rng.randrange(len(x) + 1)]
    elif kind in (4, 5):
        found = list(re.finditer(r"-?\d+", x))
        if not found:
            return x + "0"
        chosen = rng.choice(found)
        number = rng.choice([*_HUGE, rng.choice([1, 2, 3, 5, 31, 64, 128, 256, -128])])
        return f"{x[: chosen.start()]}{number}{x[chosen.end() :]}"
    elif kind == 6:
        letter = rng.choice([*"\0 =,:-1aé😀", ",,", "==", "  "])
        place = rng.randrange(len(x) + 1)
        return x[:place] + letter + x[place + rng.randrange(2) :]
    elif kind == 7:
        words.insert(at, rng.choice(EXTRA_WORDS))
    else:
        return rng.choice(["", " ", "1", "2", "1 lhs", "1 integer", x * 3, "=" * 4096, "1 " + "scale=1 " * 4096])
    return " ".join(words)


EXTRA_WORDS = [
    *("tiled", "columns", "zero=stored", "zero=5", "scale=1,-1", "scale=-1", "scale=3,5,7,9", "factor=0", "flat"),
    *("block_scale=e8m0:1,32", "block_scale=float32:1,16", "output", "channels_last", "groups=3", "rhs int4"),
    *("lhs e5m2", "lhs bfloat16", "weight int4", "x float32", "affine=1", "outer=1,-1", "outer=4,4", "bits=4"),
    *("rule=minmax", "rule=two_level", "rule=microscaling", "rule=given", "scale=e4m3", "scale=uint8", "codes=uint8"),
    *("block=1", "block=-1", "block=7", "block=1,1,3", "low=-300", "high=300", "requantize=5", "thresholds=1,2"),
    *("numbers=", "kernel=1", "kernel=3,3,3", "stride=0,0", "before=2147483648,2147483648", "dilation=7,7"),
]


def changed(rng: Rng, args: list[Any], at: int | None = None) -> bool:
    """Change one argument; whether it was the description."""
    at = rng.randrange(len(args)) if at is None else at
    x = args[at]
    if isinstance(x, str):
        args[at] = text(rng, x)
        return True
    if isinstance(x, Tensor):
        others = [i for i, v in enumerate(args) if isinstance(v, Tensor)]
        if rng.random() < 0.1:
            other = rng.choice(others)
            args[at], args[other] = args[other], args[at]
        elif memory.holds(x):
            try:
                args[at] = rng.choice(TENSORS)(rng, x)
            except (*SANE, NotImplementedError):
                return False
    elif x is None:
        args[at] = rng.choice(EXTRA)(rng)
    elif isinstance(x, float):
        args[at] = rng.choice([math.nan, math.inf, -x, 1e300])
    elif isinstance(x, int):
        args[at] = rng.choice([*_HUGE, x + 1, x - 1, -x, -(2**63)])
    elif x and not isinstance(x[0], int):  # tensors or numbers
        own = list(x)
        place = rng.randrange(len(own))
        if rng.random() < 0.3 or isinstance(own[place], float):
            args[at] = rng.choice(
                [own[:-1], [*own, own[place]], own[::-1], [*own[:place], math.nan, *own[place + 1 :]]]
            )
        else:
            changed(rng, own, place)
            args[at] = own
    else:
        args[at] = rng.choice([near(rng, x), [-n for n in x], [], [rng.choice(_HUGE) for _ in x], [*x[:-1], 2**62]])
    return False


# ---- outcomes


def tensors_in(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [x for v in args for x in tensors_in(v)] if isinstance(args, list) else []


def on_meta(x: Any) -> Any:
    return [on_meta(v) for v in x] if isinstance(x, list) else x.to("meta") if isinstance(x, Tensor) else x


def form(x: Any) -> Any:
    if x is None:
        return None
    return [form(v) for v in x] if isinstance(x, list | tuple) else (tuple(x.shape), x.dtype)


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a, b = a.double(), b.double()
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def broken(seed: int) -> str | None:
    """How the call with this seed breaks the rule, or None."""
    rng = Rng(seed)
    case = rng.choice(CASES)(rng)
    args, redescribed = list(case.args), False
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        redescribed |= changed(rng, args)
    op = getattr(torch.ops.hop_native, case.op)
    try:
        found = op(*args)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    tensors = tensors_in(args)
    if any(x.is_meta for x in tensors):
        return None
    if not all(map(memory.holds, tensors)):
        return f"seed {seed}: {case.op} gave a result of a tensor without its memory"
    if redescribed:
        expected = op(*on_meta(args))
        return None if form(found) == form(expected) else f"seed {seed}: {form(found)}, and not {form(expected)}"
    try:
        expected = case.oracle(args)
    except UnspecifiedError:
        return None
    except (*SANE, AssertionError) as error:
        if case.op in BY_HOP or "can't allocate memory" in str(error):
            return None
        return f"seed {seed}: {case.op} gave a result, where PyTorch's operators raise {type(error).__name__}: {error}"
    return None if same(found, expected) else f"seed {seed}: {case.op}: the result is not that of PyTorch's operators"


def bounded() -> None:
    """The memory of the process has a bound, behind what the library takes."""
    native.library()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (_GIGABYTES << 30),) * 2)


if __name__ == "__main__":
    main(broken, __doc__, bounded)
