"""Products of int8 codes by weights as files of quantized models hold them: the meaning against numpy, and the native
kernel against the meaning, bit for bit, at every level, for one row and many."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hop
from hop import Quantizer, presets
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import scaled_buffers
from hop.kernels.cpu import native
from hop.numerics.formats import INT4, INT8, UINT4, UINT5, UINT6, UTERNARY, Format, Integer
from hop.numerics.layouts import Planes
from hop.numerics.scale_rules import MinMax
from hop.numerics.stored_scales import UE4M3_HALF, StoredScales
from hop.tensor import QuantizedTensor
from tests import levels
from tests.kernels.test_native_groups import BY_NAME, FLOATS, LINEAR, same, weight

NATIVE = pytest.mark.skipif(not levels.HERE, reason="needs the native kernels")
INTEGERS = [name for name, t in BY_NAME.items() if t.quantizer.format.is_whole]
OTHERS = {
    "float32 scales": Quantizer(UINT5, (1, 128), StoredScales(torch.float32, offset=True), layout=Planes()),
    "pairs": Quantizer(UINT4, (1, 16), StoredScales(UINT6, (1, 48), torch.float32, offset=True)),
    "pairs of bytes": Quantizer(INT8, (1, 16), StoredScales(UINT6, (1, 64))),
    "divided": Quantizer(INT4, (1, 32), StoredScales(UINT6, (1, 64), divided=True)),
    "codes of few numbers": Quantizer(UTERNARY, (1, 64), StoredScales(UE4M3_HALF, (1, 128), torch.bfloat16)),
    "unsigned codes of 3 bits": Quantizer(
        Integer("uint3", 3, torch.uint8, 0, 7), (1, 32), StoredScales(torch.bfloat16, offset=True), layout=Planes()
    ),
}
LEFT = {
    "32": presets.INT8_32,
    "256": presets.INT8_256,
    "row": presets.INT8_ROW,
    "float16 scales": BY_NAME["Q8_0"].quantizer,
}


def operand(t: QuantizedTensor) -> Operand:
    return Operand(t.quantizer, tuple(t.buffers().values()), t.usages, tuple(t.shape))


def meaning(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, output: torch.dtype) -> Tensor:
    given = [operand(x), operand(w), *([] if bias is None else [bias])]
    return scaled_buffers.reference(LINEAR, output, None, None, *encode(given))


def oracle(x: QuantizedTensor, w: QuantizedTensor) -> np.ndarray:
    """In numpy: of each step an exact sum, and then operations of float32 one after the other."""
    q, (n, k) = w.quantizer, w.shape
    own, group = x.quantizer.block[-1], q.block[-1]
    own = k if own == -1 else own
    codes_of_x = x.codes.reshape(-1, k).numpy().astype(np.int64)
    of_x = x.scale.reshape(len(codes_of_x), -1).float().numpy()
    ones = {name: b.clone() for name, b in w.buffers().items()}
    plain = q.layout.restore(w.codes, [n, k], q.format, ones) if q.layout is not None else w.codes
    if q.per_byte() > 1 and q.layout is None:
        plain = q.format.unpack(plain, k)
    plain = plain if q.format.is_integer else q.format.decode(plain)
    codes = plain.numpy().astype(np.int64).reshape(n, k) - (q.scale.zero(q.format) if q.format.is_integer else 0)

    def numbers(name: str) -> np.ndarray:
        """Of each group, by the documented product of what is stored."""
        stored = getattr(w, name)
        number = q.scale.scale.decode(stored) if isinstance(q.scale.scale, Format) else stored.float()
        number = number.numpy()
        if q.scale.outer is None:
            return number
        outer = getattr(w, f"outer_{name}").float().numpy().repeat(q.scale.outer[-1] // group, 1)[:, : number.shape[1]]
        return number / outer if q.scale.divided else outer * number

    scale, offset = numbers("scale"), numbers("offset") if q.scale.offset else None
    y: Any = None
    edges = sorted({*range(0, k, own), *range(0, k, group), k})
    for first, last in itertools.pairwise(edges):
        total = (codes_of_x[:, first:last] @ codes[:, first:last].T).astype(np.float32)
        term = total * of_x[:, first // own, None] * scale[None, :, first // group]
        if offset is not None:
            rows = codes_of_x[:, first:last].sum(1).astype(np.float32)[:, None]
            term = term - rows * of_x[:, first // own, None] * offset[None, :, first // group]
        assert term.dtype == np.float32
        y = term if y is None else y + term
    return y


def check(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None = None, output: torch.dtype = torch.float32):
    want = meaning(x, w, bias, output)
    for level in levels.OWN_HERE:
        with native.use(level):
            said = hop.explain(LINEAR, output, x, w, bias)
            assert "native group product: chosen" in said, said
            got = hop.scaled(LINEAR, output, x, w, bias)
            assert got.dtype == output and got.shape == want.shape
            assert same(got, want) and torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan()), level
            for count in (1, 2, 3, 5):
                assert same(hop.scaled(LINEAR, output, x[-count:], w, bias), want[-count:]), f"{level}: {count} rows"


@pytest.mark.parametrize("name", [*INTEGERS, *OTHERS])
@pytest.mark.quick(6)
def test_meaning(name: str):
    """Against numpy."""
    for i, left in enumerate(LEFT.values()):
        generator = torch.Generator().manual_seed(i)
        w = weight(BY_NAME[name], 11, 768, i) if name in BY_NAME else hop.quantize(OTHERS[name], torch.randn(11, 768))
        x = hop.quantize(left, torch.randn(3, 768, generator=generator))
        assert np.array_equal(meaning(x, w, None, torch.float32).numpy(), oracle(x, w))
        near = hop.dequantize(x).double() @ hop.dequantize(w).double().t()
        assert torch.allclose(
            meaning(x, w, None, torch.float32).double(), near, rtol=1e-5, atol=1e-5 * near.abs().max()
        )


@NATIVE
@pytest.mark.parametrize("name", [*INTEGERS, *OTHERS])
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.quick(22)
def test_native(name: str, left: str):
    sizes = ((1, 1, 768), (3, 37, 768), (9, 18, 2304), (70, 23, 768))
    for seed, (m, n, k) in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        w = (
            weight(BY_NAME[name], n, k, seed)
            if name in BY_NAME
            else hop.quantize(OTHERS[name], torch.randn(n, k, generator=generator))
        )
        x = hop.quantize(LEFT[left], torch.randn(m, k, generator=generator))
        bias = torch.randn(n, generator=generator).to(FLOATS[seed % 3]) if seed % 2 else None
        check(x, w, bias, (torch.float32, torch.float32, torch.bfloat16, torch.float16)[seed])


@NATIVE
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0", "pairs", "pairs of bytes"])
@pytest.mark.parametrize("k", [128, 160, 384, 640, 1152])
@pytest.mark.quick(6)
def test_rows_that_end_within_a_register(name: str, k: int):
    """Of whole blocks, so that a register holds the end of a row and the beginning of the next, and of parts of one."""
    if "pairs" in name:
        k = math.lcm(k, 192)  # whole outer scales
    for seed, (m, n) in enumerate(((1, 16), (2, 33), (4, 40), (6, 16))):
        generator = torch.Generator().manual_seed(seed)
        q = OTHERS.get(name) or BY_NAME[name].quantizer
        w = hop.quantize(q, torch.randn(n, k, generator=generator))
        check(hop.quantize(presets.INT8_32, torch.randn(m, k, generator=generator)), w)


@NATIVE
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K"])
def test_numbers_that_are_none(name: str):
    """Scales that are infinite, NaN or 0, the lowest code, sums that are 0 under scales below it, and rows of zeros."""
    generator = torch.Generator().manual_seed(1)
    w = weight(BY_NAME[name], 40, 512, 1, finite=False)
    floats = [b for b in w.buffers().values() if b.dtype == torch.float16]
    for b, number in itertools.product(floats, (math.inf, -math.inf, math.nan, 0.0, -(2.0**-24))):
        rows = torch.randint(0, 40, (3,), generator=generator)
        b[rows, torch.randint(0, b.shape[1], (3,), generator=generator)] = number
    numbers = torch.randn(9, 512, generator=generator)
    numbers[0] = 0.0
    numbers[1, :64] = 0.0
    numbers[2] *= 1e-40
    numbers[3] *= 1e36
    x = hop.quantize(presets.INT8_32, numbers)
    check(x, w)
    x.codes[4], x.codes[5, :32] = -128, 127
    for place, number in ((0, math.inf), (3, math.nan), (5, -0.25), (7, 0.0)):
        x.scale[6, place] = number
    check(x, w)


@NATIVE
@pytest.mark.parametrize("name", [*INTEGERS, *OTHERS])
def test_largest_sums(name: str):
    """The largest codes of the weight by the lowest and largest of x: AVX2 adds some of their products in 16 bits."""
    numbers = torch.ones(17, 768)
    numbers[:, ::16] = -1  # in each group, so that the scales of all rules use the whole range
    x = hop.quantize(presets.INT8_32, torch.ones(9, 768))
    x.codes[::2] = -128
    for sign in (1, -1):
        check(x, hop.quantize(OTHERS.get(name) or BY_NAME[name].quantizer, sign * numbers))


@NATIVE
def test_shapes():
    """Dimensions before the rows, a vector, no rows at all, a row that ends within a block of codes."""
    w = weight(BY_NAME["Q5_0"], 21, 672)
    x = hop.quantize(presets.INT8_256, torch.randn(2, 5, 672, generator=torch.Generator().manual_seed(2)))
    check(x, w)
    y = hop.scaled(LINEAR, torch.float32, x, w)
    assert torch.equal(hop.scaled(LINEAR, torch.float32, hop.quantize(presets.INT8_256, hop.dequantize(x[0])), w), y[0])
    assert hop.scaled(LINEAR, torch.float32, x[:0], w).shape == (0, 5, 21)
    assert torch.equal(hop.scaled(LINEAR, torch.float32, x, w[3:17]), y[..., 3:17])
    torch.set_num_threads(2)
    assert torch.equal(hop.scaled(LINEAR, torch.float32, x, w), y)


@pytest.mark.full
def test_programs_and_gradients():
    """A program, an exported one and one of core ATen: the same bits. The gradient of x is that of the numbers."""
    w = weight(BY_NAME["Q4_K"], 24, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))

    class Product(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return hop.scaled(LINEAR, torch.float32, hop.quantize(presets.INT8_32, x), w)

    want = Product()(x)
    assert torch.equal(want, meaning(hop.quantize(presets.INT8_32, x), w, None, torch.float32))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(Product(), fullgraph=True)(x), want)
    program = torch.export.export(Product(), (x,))
    assert torch.equal(program.module()(x), want)
    assert torch.equal(program.run_decompositions(hop.decompositions()).module()(x), want)
    x.requires_grad_()
    Product()(x).sum().backward()
    assert torch.allclose(x.grad, hop.dequantize(w).sum(0).expand(3, 256), rtol=1e-5, atol=1e-3)


@NATIVE
def test_reasons():
    """What it does not take is said, and goes another way: with the same meaning."""
    w = weight(BY_NAME["Q4_K"], 5, 768)

    def said(q: Quantizer, w: QuantizedTensor = w) -> str:
        x = hop.quantize(q, torch.randn(2, 768))
        text = hop.explain(LINEAR, torch.float32, x, w)
        assert torch.equal(hop.scaled(LINEAR, torch.float32, x, w), meaning(x, w, None, torch.float32))
        return next(line for line in text.splitlines() if line.startswith("native group product"))

    for text, pattern in (
        (said(presets.INT8_ROW_AFFINE), "without zero points"),
        (said(presets.UINT8_TENSOR), "plain int8 codes"),
        (said(presets.INT8_TENSOR), "a scale per row"),
        (said(Quantizer(INT8, (1, 16))), "multiple of 32"),
        (
            said(Quantizer(INT8, (1, 96)), hop.quantize(OTHERS["codes of few numbers"], torch.randn(5, 768))),
            "one divides the other",
        ),
        (said(Quantizer(UINT4, (1, 32), MinMax())), "plain int8 codes"),
    ):
        assert re.search(pattern, text), text


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
