"""Products of floats by weights as files of quantized models hold them, by the native kernel: against float64 and
dequantize at every level, one row and many rows alike. Those of codes are in test_native_group_integers.py."""

import itertools
import math
import re

import pytest
import torch
from torch import Tensor

import hop
from hop import Quantizer
from hop.interchange.gguf import buffers_from_parts
from hop.interchange.gguf_types import TYPES, BlockType
from hop.kernels.cpu import native
from hop.numerics.formats import E2M1, E4M3, INT6, INT8, INT16, IQ4_NL, UINT4, UINT5, UINT6, UTERNARY, Integer
from hop.numerics.layouts import Planes
from hop.numerics.stored_scales import UE4M3_HALF, StoredScales
from hop.tensor import QuantizedTensor
from tests import levels
from tests.interchange.test_gguf import random_blocks

pytestmark = pytest.mark.skipif(not levels.HERE, reason="needs the native kernels")

LINEAR = torch.ops.aten.linear.default
BY_NAME = {t.name: t for t in TYPES.values()}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Beside those of GGUF: scales in other dtypes, larger groups, pairs of scales for each, floats that divide.
OTHERS = {
    "bfloat16 scales": Quantizer(IQ4_NL, (1, 64), StoredScales(torch.bfloat16)),
    "float32 scales": Quantizer(UINT5, (1, 128), StoredScales(torch.float32, offset=True), layout=Planes()),
    "pairs": Quantizer(UINT4, (1, 16), StoredScales(UINT6, (1, 48), torch.float32, offset=True)),
    "pairs of bytes": Quantizer(INT8, (1, 16), StoredScales(UINT6, (1, 64))),
    "divided": Quantizer(INT6, (1, 32), StoredScales(UINT6, (1, 64), divided=True), layout=Planes()),
    "one float for all, that divides": Quantizer(
        E2M1, (1, 16), StoredScales(E4M3, (-1, -1), torch.float32, divided=True)
    ),
    "codes of few numbers": Quantizer(UTERNARY, (1, 32), StoredScales(UE4M3_HALF, (1, 64), torch.bfloat16)),
    "unsigned codes of 3 bits": Quantizer(
        Integer("uint3", 3, torch.uint8, 0, 7), (1, 32), StoredScales(torch.bfloat16, offset=True), layout=Planes()
    ),
    "one float for a long row": Quantizer(UINT4, (1, 32), StoredScales(UINT6, (1, 4096), torch.bfloat16)),
}


def weight(t: BlockType, rows: int, size: int, seed: int = 0, finite: bool = True) -> QuantizedTensor:
    """A tensor of random blocks."""
    raw = torch.from_numpy(random_blocks(t, (rows, size), seed, finite)).reshape(-1, t.bytes)
    parts = buffers_from_parts(t.quantizer, t.read(raw))
    if t.name == "MXFP4":
        parts["scale"] = parts["scale"] % 40 + 100  # of whose numbers float32 holds sums
    buffers = {name: parts[name].reshape(shape) for name, (shape, _) in t.quantizer.buffers((rows, size)).items()}
    return QuantizedTensor(buffers, t.quantizer, (rows, size), torch.float32)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, output: torch.dtype = torch.float32) -> Tensor:
    assert "native group product: chosen" in hop.explain(LINEAR, output, x, w, bias), hop.explain(LINEAR, output, x, w)
    return hop.scaled(LINEAR, output, x, w, bias)


def check(x: Tensor, w: Tensor, bias: Tensor | None = None, output: torch.dtype = torch.float32) -> None:
    """At each level, for one thread and two: within the bound of docs/scaled.md, and each row by itself."""
    terms = x.double().flatten(0, -2)[:, None] * hop.dequantize(w).double()
    want, sizes = terms.sum(-1), terms.abs().sum(-1)
    if bias is not None:
        want, sizes = want + bias.double(), sizes + bias.double().abs()
    bound = (w.shape[1] + 8) * 2.0**-24 * sizes + 2.0**-126
    for level in levels.OWN_HERE:
        with native.use(level):
            y = linear(x, w, bias, output)
            assert y.shape == (*x.shape[:-1], w.shape[0]) and y.dtype == output
            got = y.flatten(0, -2)
            low, high = ((want + sign * bound).float().to(output) for sign in (-1, 1))
            within = (got >= low) & (got <= high) | (want.isnan() & got.isnan()) | (want.isinf() & (got == want))
            assert within.all(), f"{level}: {int((~within).sum())} of {within.numel()} are beyond the bound"
            rows = x.flatten(0, -2)
            for count in (1, 2, 3, 4, 5, 7):
                part = linear(rows[-count:], w, bias, output)
                assert same(part, got[-count:]), f"{level}: {count} rows by themselves"
            torch.set_num_threads(2)
            try:
                assert same(linear(x, w, bias, output), y), f"{level}: two threads"
            finally:
                torch.set_num_threads(1)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.quick(2)
def test_gguf(name: str):
    t = BY_NAME[name]
    for seed, (m, n, k) in enumerate(((1, 1, 256), (3, 37, 512), (9, 50, 768), (70, 23, 256))):
        generator = torch.Generator().manual_seed(seed)
        w = weight(t, n, k, seed)
        dtype, output = FLOATS[seed % 3], (torch.float32, torch.float32, torch.bfloat16, torch.float16)[seed]
        x = torch.randn(m, k, generator=generator) * (1e-7 if output == torch.float16 else 1)
        bias = torch.randn(n, generator=generator).to(FLOATS[(seed + 1) % 3]) if seed % 2 else None
        check(x.to(dtype), w, bias, output)


@pytest.mark.parametrize("name", BY_NAME)
def test_numbers_that_are_none(name: str):
    """Scales that are infinite, NaN or 0, and such elements."""
    generator = torch.Generator().manual_seed(1)
    w = weight(BY_NAME[name], 40, 256, 1, finite=False)
    floats = [b for b in w.buffers().values() if b.dtype == torch.float16]
    for b, number in itertools.product(floats, (math.inf, -math.inf, math.nan, 0.0, 2.0**-24)):
        rows = torch.randint(0, 40, (3,), generator=generator)
        b[rows, torch.randint(0, b.shape[1], (3,), generator=generator)] = number
    x = torch.randn(6, 256, generator=generator)
    check(x, w)
    x[0, 3], x[1, 5], x[2, 7], x[3] = math.inf, math.nan, -math.inf, 0.0
    check(x, w)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str):
    generator = torch.Generator().manual_seed(2)
    for m, n, k in ((1, 5, 384), (11, 14, 384)):
        w = hop.quantize(OTHERS[name], torch.randn(n, k, generator=generator))
        check(torch.randn(m, k, generator=generator), w, torch.randn(n, generator=generator))


def test_memory():
    """Rows of a larger tensor, x that does not lie in rows, dimensions before them, and results of no elements."""
    generator = torch.Generator().manual_seed(3)
    whole = weight(BY_NAME["Q5_0"], 40, 512)
    own = {name: b.clone() for name, b in whole[3:20].buffers().items()}
    x = torch.randn(2, 512, 5, generator=generator).transpose(1, 2)
    y = linear(x, whole[3:20])
    assert torch.equal(y, linear(x.contiguous(), QuantizedTensor(own, whole.quantizer, (17, 512), torch.float32)))
    assert torch.equal(y, linear(x, whole)[..., 3:20])
    check(x, whole)
    assert torch.equal(linear(x[0, 0], whole), linear(x[0, :1], whole)[0])
    assert linear(x[:0], whole).shape == (0, 5, 40)
    assert linear(x, whole[:0]).shape == (2, 5, 0)


def test_many_rows():
    """More rows than are multiplied at once, and rows too long for many."""
    generator = torch.Generator().manual_seed(4)
    for m, n, k in ((300, 20, 1024), (40, 13, 65536)):
        w, x = weight(BY_NAME["Q4_0"], n, k), torch.randn(m, k, generator=generator)
        y = linear(x, w)
        assert torch.equal(y, torch.cat([linear(row[None], w) for row in x]))


def test_programs_and_gradients():
    """A program of such a product: the same bits. The gradient of x is that of the numbers."""
    w = weight(BY_NAME["Q4_K"], 24, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(5))
    want = linear(x, w)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: hop.scaled(LINEAR, torch.float32, x, w), fullgraph=True)
    assert torch.equal(compiled(x), want)
    x.requires_grad_()
    hop.scaled(LINEAR, torch.float32, x, w).sum().backward()
    assert torch.allclose(x.grad, hop.dequantize(w).sum(0).expand(3, 512), rtol=1e-5, atol=1e-3)


def test_reasons():
    """What it does not take is said, and goes another way."""
    x = torch.randn(2, 64)

    def said(q: Quantizer, x: Tensor = x, *more: Tensor, op: object = LINEAR) -> str:
        w = torch.randn(5, x.shape[-1])
        text = hop.explain(op, torch.float32, x, hop.quantize(q, w) if op is LINEAR else hop.quantize(q, w.t()), *more)
        return next(line for line in text.splitlines() if line.startswith("native group product"))

    half = StoredScales()
    mm = torch.ops.aten.mm.default
    for text, pattern in (
        (said(Quantizer(INT8, (1, 8), half)), "groups of 16, 32"),
        (said(Quantizer(INT8, (1, -1), half)), "parts of a row"),
        (said(Quantizer(INT8, (2, 32), half)), "parts of a row"),
        (said(Quantizer(INT6, (1, 32), half)), "in planes"),
        (said(Quantizer(INT8, (1, 32), half), torch.randn(2, 48)), "multiple of 32"),
        (said(Quantizer(INT8, (1, 32), StoredScales(INT16, (1, 64)))), "float or one-byte scales"),
        (said(Quantizer(INT8, (1, 32), StoredScales(UINT6, (1, -1)))), "parts of a row"),
        (said(Quantizer(INT8, (1, 32), half), x.double()), "float64"),
        (said(Quantizer(INT8, (1, 32), half), x, torch.zeros(5, dtype=torch.float64)), "a float bias"),
        (said(Quantizer(INT8, (32, 1), half), op=mm), "summed along its rows"),
    ):
        assert re.search(pattern, text), text


def test_operator_refuses():
    """The operator looks at what it is given."""
    w = weight(BY_NAME["Q5_0"], 4, 64)
    x, own = torch.randn(2, 64), w.buffers()
    product = torch.ops.hop_native.group_product.default

    def call(words: str, **other: Tensor | None) -> Tensor:
        names = ("codes", "high_codes", "scale", "offset", "outer_scale", "outer_offset", "bias")
        given = {"x": x, **own, **other}
        return product(given["x"], *(given.get(name) for name in names), words, given.get("x_scale"))

    right = "1 codes=int5 scale=float16:32 result=float32"
    assert torch.equal(call(right), linear(x, w))
    for words, other, pattern in (
        ("1 codes=int7 scale=float16:32", {}, "not understood"),
        ("1 codes=int5 scale=float16", {}, "not understood"),
        ("1 codes=int5 scale=float16:24", {}, "groups of 16"),
        ("1 codes=int5 scale=uint8:32 scale_numbers=1,2", {}, "not understood"),
        ("1 codes=int5 scale=float16:-1", {}, "not understood"),
        ("1 codes=int8 scale=float16:32 offset", {}, "offsets with codes"),
        ("1 codes=int5 scale=e4m3:32", {}, "scales in floats"),
        ("1 codes=bits4 numbers=1,2 scale=float16:32", {}, "not understood"),
        ("1 codes=int5 scale=float16:32 outer=float16:48", {}, "whole groups"),
        ("1 codes=int5 scale=float16:32 offset", {}, "offset must have shape"),
        (right, {"high_codes": None}, "high_codes must have shape"),
        (right, {"offset": own["scale"]}, "offset must be omitted"),
        (right, {"scale": own["scale"][:2]}, "scale must have shape"),
        (right, {"scale": own["scale"].float()}, "scale must be float16"),
        (right, {"codes": own["codes"][:, :16]}, "codes must have shape"),
        (right, {"codes": own["codes"][0]}, "two dimensions"),
        (right, {"x": torch.randn(2, 48)}, "multiple of 32"),
        (right, {"x": x.double()}, "x must be float32"),
        (right, {"bias": torch.zeros(3)}, "bias must have shape"),
        (right, {"bias": torch.zeros(4, dtype=torch.int32)}, "bias in float32"),
        (right, {"x_scale": torch.ones(2, 2)}, "no quantizer of x"),
        (f"{right} x=32", {}, "x must be int8"),
        (f"{right} x=24", {}, "multiple of 32"),
        (f"{right} x=-1", {}, "not understood"),
        (f"{right} x=32", {"x": x.to(torch.int8)}, "x_scale must have shape"),
        (f"{right} x=32", {"x": x.to(torch.int8), "x_scale": torch.ones(2, 1)}, "x_scale must have shape"),
        (
            f"{right} x=0",
            {"x": x.to(torch.int8), "x_scale": torch.ones(2, 1, dtype=torch.float16)},
            "must be float32",
        ),
    ):
        with pytest.raises(RuntimeError, match=pattern):
            call(words, **other)
