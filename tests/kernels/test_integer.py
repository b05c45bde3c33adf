"""Integer products: every way to multiply gives the exact integers, modulo 2^32, whatever PyTorch's flags say."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from hop.compat import eager
from hop.impls.decompositions import decompositions
from hop.kernels.aten import choices, integer
from hop.kernels.cpu import native

aten = torch.ops.aten
DTYPES = (torch.int8, torch.uint8, torch.int16)
NATIVE = pytest.mark.skipif(native.library().declines() is not None, reason=str(native.library().declines()))
WAYS = [
    "floats",
    "int32",
    pytest.param("native", marks=NATIVE),
    pytest.param("int_mm", marks=pytest.mark.skipif(not eager.has_int_mm(), reason="torch._int_mm has no kernel here")),
]


def drawn(generator: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Integers of the whole range, or all of them at one of its ends."""
    info = torch.iinfo(dtype)
    ends = (info.min, info.max)
    if generator.random() < 0.3:
        return torch.full(shape, ends[generator.integers(2)], dtype=dtype)
    return torch.from_numpy(generator.integers(info.min, info.max + 1, shape)).to(dtype)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """The product modulo 2^32, by NumPy's int64."""
    return torch.from_numpy(a.long().numpy() @ b.long().numpy()).to(torch.int32)


@pytest.mark.parametrize("way", [None, *WAYS])
def test_every_way_is_exact(way: str | None) -> None:
    generator = np.random.default_rng(0)
    sizes = [0, 1, 2, 3, 5, 17, 33, 70]
    for a_dtype, b_dtype in itertools.product(DTYPES, DTYPES):
        for _ in range(6):
            m, n = generator.choice(sizes, 2).tolist()
            k = int(generator.choice([*sizes, 257, 515, 1025, 2100]))
            lead = [(), (), (0,), (1,), (3,), (20,)][generator.integers(6)]
            a, b = drawn(generator, a_dtype, *lead, m, k), drawn(generator, b_dtype, *lead, k, n)
            a = a.mT.contiguous().mT if generator.random() < 0.3 else a
            b = b.mT.contiguous().mT if generator.random() < 0.5 else b
            got = (integer.bmm if lead else integer.mm)(a, b, way=way)
            assert got.dtype is torch.int32
            assert torch.equal(got, exact(a, b)), (a_dtype, b_dtype, lead, m, k, n)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@NATIVE
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", ["portable", native.library().best])
@pytest.mark.quick(4)
def test_few_rows_of_an_unpacked_factor(level: str, threads: int) -> None:
    # Chunks of 1,024 k and columns, vectors of 16 columns, and four rows and k at a time.
    generator = np.random.default_rng(1)
    with native.use(level), torch_threads(threads):
        for rows in range(1, 18):
            k, n = (
                int(generator.choice(sizes)) for sizes in ((1, 3, 64, 1023, 1025, 2050), (1, 15, 33, 1023, 1040, 2100))
            )
            dtypes = [(torch.int8, torch.uint8)[i] for i in generator.integers(2, size=2)]
            a, b = drawn(generator, dtypes[0], rows, k), drawn(generator, dtypes[1], k, n)
            wide = torch.cat([b, b], 1)
            for left in (a, a.t().contiguous().t()):
                for right in (b, b.t().contiguous().t(), wide[:, :n], wide.t().contiguous().t()[:, n:]):
                    assert torch.equal(integer.mm(left, right, way="native"), exact(a, b)), (rows, k, n, dtypes)


@contextlib.contextmanager
def float32_matmul_precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("flags", ["none", "medium", "high", "flushed"])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_float_products_are_exact_at_the_bound(a_dtype: torch.dtype, b_dtype: torch.dtype, flags: str) -> None:
    """All operands at their extremes, at as many terms as one float32 sum holds, and at one more."""
    terms = integer.float32_terms(integer.largest_product(a_dtype, b_dtype))
    assert terms * integer.largest_product(a_dtype, b_dtype) <= 2**24
    context: Any = {"none": contextlib.nullcontext(), "flushed": flushed_denormals()}.get(flags)
    with context or float32_matmul_precision(flags):
        for k in (terms, terms + 1, 2 * terms + 1):
            for x, y in itertools.product(*([(i := torch.iinfo(d)).min, i.max] for d in (a_dtype, b_dtype))):
                a, b = torch.full((3, k), x, dtype=a_dtype), torch.full((k, 2), y, dtype=b_dtype)
                a[1, ::2], b[::3, 1] = 1, 1  # odd sums, which need the last bit
                assert torch.equal(integer.by_floats(a, b), exact(a, b))


def test_bounds_are_those_of_the_dtypes() -> None:
    largest = {(a, b): integer.largest_product(a, b) for a, b in itertools.product(DTYPES, DTYPES)}
    for (a, b), value in largest.items():
        ends = itertools.product(*((torch.iinfo(d).min, torch.iinfo(d).max) for d in (a, b)))
        assert value == max(abs(x * y) for x, y in ends)
    assert integer.float32_terms(largest[torch.int8, torch.int8]) == 1024
    assert integer.float32_terms(largest[torch.uint8, torch.int8]) == 514


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_of_int32(spatial: int, transposed: bool) -> None:
    generator = np.random.default_rng(spatial)
    op = aten.convolution.default
    for groups, stride, dilation, dtype in itertools.product((1, 2), (1, 2), (1, 2), (torch.int32, torch.int8)):
        x = drawn(generator, dtype, 2, 2 * groups, *[7] * spatial)
        w = drawn(generator, torch.int32, *((2 * groups, 3) if transposed else (3 * groups, 2)), *[3] * spatial)
        lists = [[stride] * spatial, [1] * spatial, [dilation] * spatial]
        args = (None, *lists, transposed, [0] * spatial, groups)
        assert torch.equal(hop.out_dtype(op, torch.int32, x, w, *args), op(x.long(), w.long(), *args).to(torch.int32))


# ---- choices


def test_the_table_names_ways_that_exist() -> None:
    text = choices.FILE.read_text("utf-8")
    for level, row in json.loads(text).items():
        assert level in (*native.LEVELS_OF["x86_64"], *native.LEVELS_OF["aarch64"], "off")
        for kind in choices.KINDS:
            rows = [entry[0] for entry in row[kind]]
            assert row[kind][-1][:2] == [None, None]
            assert {way for *_, way in row[kind]} <= {"native", "int_mm", "floats", "int32"}
            assert rows == sorted(rows, key=lambda r: (r is None, r))


@NATIVE
@pytest.mark.skipif("avx2" not in native.library().levels(), reason="the level's row names native for these sizes")
@pytest.mark.full
def test_compiled_programs_call_the_native_product() -> None:
    a, b = torch.ones(64, 512, dtype=torch.int8), torch.ones(512, 512, dtype=torch.int8).t()

    class Product(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return hop.out_dtype(aten.mm.default, torch.int32, a, b)

    program = torch.export.export(Product(), (a, b))
    for level, expected in (("avx2", True), ("off", False)):
        with native.use(level):
            lowered = hop.export.lower(program, native=True) if expected else hop.export.lower(program)
        targets = {str(node.target) for node in lowered.graph.nodes}
        assert ("hop_native.product.default" in targets) is expected
        assert torch.equal(lowered.module()(a, b), exact(a, b))


# ---- exported programs


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.register_buffer("weight", drawn(generator, torch.int8, 24, 1100))
        self.register_buffer("kernel", drawn(generator, torch.uint8, 6, 5, 3, 3))

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        args = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return (
            hop.out_dtype(aten.linear.default, torch.int32, x, self.weight),
            hop.out_dtype(aten.bmm.default, torch.int32, x[None, :8, :64], image[:, 0, :64, :64]),
            hop.out_dtype(aten.convolution.default, torch.int32, image[:, :5, :16, :16], self.kernel, *args),
        )


@pytest.mark.parametrize("products", ["integer", "float"])
@pytest.mark.quick(2)
def test_lowered_products(products: str) -> None:
    generator, layer = np.random.default_rng(1), Layer()
    inputs = drawn(generator, torch.int8, 9, 1100), drawn(generator, torch.int16, 1, 6, 64, 64)
    want = layer(*inputs)
    program = torch.export.export(layer, inputs).run_decompositions(decompositions(products=products))
    multiplied = {
        node.args[0].meta["val"].dtype
        for node in program.graph.nodes
        if node.target in (aten.mm.default, aten.bmm.default, aten.convolution.default)
    }
    assert multiplied <= ({torch.float32, torch.float64} if products == "float" else {torch.int32, torch.int64})
    got = program.module()(*inputs)
    assert all(map(torch.equal, got, want))
    if products == "integer":  # an autocast would return a float product in bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, program.module()(*inputs), want))


def test_lowered_products_of_a_symbolic_size() -> None:
    generator = np.random.default_rng(2)

    class Product(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return hop.out_dtype(aten.mm.default, torch.int32, a, b)

    a, b = drawn(generator, torch.int8, 5, 1500), drawn(generator, torch.int8, 1500, 4)
    sizes = torch.export.Dim("k", min=2), torch.export.Dim("m", min=2)
    program = torch.export.export(Product(), (a, b), dynamic_shapes=({0: sizes[1], 1: sizes[0]}, {0: sizes[0]}))
    module = program.run_decompositions(decompositions(products="float")).module()
    for m, k in ((5, 1500), (3, 4000)):
        a, b = drawn(generator, torch.int8, m, k), drawn(generator, torch.int8, k, 4)
        assert torch.equal(module(a, b), exact(a, b))


class Bounded(torch.nn.Module):
    """A product of operands whose bounds are narrower than their dtype, written out by operators."""

    def __init__(self, lhs: Callable[[Tensor], Tensor], k: int, codes: int) -> None:
        super().__init__()
        self.lhs = lhs
        self.register_buffer("weight", torch.full((3, k), codes, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return hop.out_dtype(aten.linear.default, torch.int32, self.lhs(x), self.weight)


def nibble(x: Tensor) -> Tensor:
    code = torch.bitwise_and(x.to(torch.int16), 15)
    return torch.where(code >= 8, code - 16, code).to(torch.int8)


def widened_in_place(x: Tensor) -> Tensor:
    """Has bounds of int16, although it is a view of what was an int8."""
    wide = x.to(torch.int16)
    view = wide.view(wide.shape)
    wide.mul_(200)
    return view


# What is multiplied, the dtype of the products, and their number: K one above the bound takes two.
BOUNDED = {
    "8 bits minus a zero point": (lambda x: x.to(torch.int16) - torch.full_like(x, 127), 255),
    "8 bits minus a number": (lambda x: x.to(torch.int16) - 100, 228),
    "4 bits": (nibble, 16),
    "4 bits, padded": (lambda x: torch.nn.functional.pad(nibble(x), (0, 0, 0, 2)), 16),
    "4 bits beside 8": (lambda x: torch.cat([nibble(x), x]), 128),
    "a remainder": (lambda x: (x.to(torch.int16) % 300).view(1, -1).view(x.shape), 299),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.quick(6)
def test_chunks_are_as_long_as_bounds_allow(name: str) -> None:
    lhs, largest = BOUNDED[name]
    terms = 2**24 // (largest * 128)
    for k in (terms, terms + 1):
        least, module = torch.full((2, k), -128, dtype=torch.int8), Bounded(lhs, k, -128)
        program = torch.export.export(module, (least,)).run_decompositions(decompositions(products="float"))
        products = [n for n in program.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
        assert [n.meta["val"].dtype for n in products] == [torch.float32] * (1 + (k > terms))
        for x in (least, torch.full_like(least, 127), drawn(np.random.default_rng(k), torch.int8, 2, k)):
            assert torch.equal(program.module()(x), exact(lhs(x), module.weight.t()))


@pytest.mark.parametrize("wrap", [lambda x: x.to(torch.int16) * 200, widened_in_place], ids=["product", "in place"])
def test_bounds_are_those_of_the_dtype_where_nothing_else_is_known(wrap: Callable[[Tensor], Tensor]) -> None:
    x, module = torch.full((2, 100), -128, dtype=torch.int8), Bounded(wrap, 100, 127)
    graph = make_fx(lambda x: integer.by_floats(wrap(x), module.weight.t()))(x)
    assert torch.equal(graph(x), exact(wrap(x), module.weight.t()))
    dtypes = {node.kwargs.get("dtype") for node in graph.graph.nodes if node.target is aten._to_copy.default}
    assert torch.float64 in dtypes and torch.float32 not in dtypes


def test_other_products_are_refused() -> None:
    with pytest.raises(ValueError, match="products must be"):
        decompositions(products="int32")


# ---- integers that pass through floats


def rounded(value: Fraction) -> int:
    """A number of 53 bits at most, rounded to float32 and then toward zero."""
    return int(np.float32(float(value)))


_F7, _F6, _F2 = (Fraction(float(np.float32(number))) for number in (0.7, 0.6, 0.2))


def through_floats() -> list[tuple[Any, list[Any], dict[str, Any], Any]]:
    """Operators, arguments, and what exact arithmetic says of them."""
    generator = np.random.default_rng(3)
    x, y = (drawn(generator, torch.int8, 16, 70).clamp(-100, 100) for _ in range(2))
    x[0], y[0] = torch.arange(70) - 35, 10  # many results next to an integer
    a, b, c = drawn(generator, torch.int8, 8, 40), drawn(generator, torch.int8, 40, 6), x[:8, :6]
    wide = torch.from_numpy(generator.integers(-(2**22), 2**22, (30, 1100))).to(torch.int32)
    add = np.vectorize(lambda p, q: rounded(int(p) + _F7 * int(q)))(x.numpy(), y.numpy())
    product = exact(a, b).numpy()
    scaled = np.vectorize(lambda p, q: rounded(_F6 * int(p) + _F2 * int(q)))(product, c.numpy())
    mean = np.array([rounded(Fraction(int(row.sum()), row.size)) for row in wide.long().numpy()])
    whole = rounded(Fraction(int(wide.long().sum()), wide.numel()))
    sqrt = np.floor(np.sqrt(np.abs(wide.numpy()).astype(np.float32)))
    return [
        (aten.add.Tensor, [x, y], {"alpha": 0.7}, add),
        (aten.addmm.default, [c, a, b], {"beta": 0.2, "alpha": 0.6}, scaled),
        (aten.mean.dim, [wide, [1]], {}, mean),
        (aten.mean.default, [wide], {}, whole),
        (aten.sqrt.default, [wide.abs()], {}, sqrt),
        (aten.div.Tensor, [x, y.clamp(1)], {}, np.trunc(x.numpy() / y.clamp(1).numpy())),
    ]


@pytest.mark.full
def test_integers_through_floats_are_exact_on_every_route() -> None:
    cases = through_floats()
    want = [torch.as_tensor(result).to(torch.int32) for *_, result in cases]
    calls = [(op, kwargs) for op, _, kwargs, _ in cases]
    tensors = [[x for x in args if isinstance(x, Tensor)] for _, args, *_ in cases]
    rest = [[x for x in args if not isinstance(x, Tensor)] for _, args, *_ in cases]

    class Model(torch.nn.Module):
        def forward(self, operands: list[list[Tensor]]) -> list[Tensor]:
            return [
                hop.out_dtype(op, torch.int32, *some, *more, **kwargs)
                for (op, kwargs), some, more in zip(calls, operands, rest, strict=True)
            ]

    model = Model()
    program = torch.export.export(model, (tensors,))
    routes = {
        "eager": model(tensors),
        "compiled": torch.compile(model, fullgraph=True)(tensors),
        "lowered": program.run_decompositions(decompositions()).module()(tensors),
    }
    for route, got in routes.items():
        for (op, *_), one, right in zip(cases, got, want, strict=True):
            assert torch.equal(one, right), (route, op)
