"""TensorProto against what quantize really returns, over the product of quantizers, usages, shapes and dtypes."""

import functools
import itertools
import unittest

import pytest
import torch
from parameterized import parameterized
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

import hop
from hop import formats, presets
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static, TwoLevel
from hop.tensor import QuantizedTensor
from hop.tensor.proto import TensorProto

USAGES = (("rowwise",), ("columnwise",), ("rowwise", "columnwise"))
SHAPES = ((), (0,), (1,), (7,), (32,), (5, 33), (16, 64), (0, 8), (8, 0), (2, 3, 16), (16, 2, 2, 40))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QUANTIZERS = [(name.lower(), q) for name, q in presets.PRESETS.items()] + [
    ("int8_pairs", Quantizer(formats.INT8, (2, 3))),
    ("ternary_tiles", Quantizer(formats.TERNARY, (4, 4))),
    ("nvfp4_outer_rows", Quantizer(formats.E2M1, (1, 16), TwoLevel(outer=(1, -1)))),
]


def makes(q, usages, shape):
    """Whether there is such a tensor."""
    if "columnwise" in usages and (q.flat or (isinstance(q.scale, Static) and not q.shares_scale())):
        return False
    return q.hadamard is None or "columnwise" not in usages or copies.columns(shape)[1] % len(q.hadamard.signs) == 0


def quantized(q, x, usages):
    options = {}
    if isinstance(q.scale, Static):
        size = q.buffers(x.shape)["scale"][0]
        options["scale"] = torch.full(size, 0.1)
        if q.scale.affine:
            options["zero_point"] = torch.zeros(size)
    if q.stochastic:
        options["noise"] = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    return hop.quantize(q, x, usages=usages, **options)


@functools.cache
def tensors(q):
    """Every tensor of the product, with the proto that describes it."""
    return [
        (TensorProto(shape, dtype, quantizer=q, usages=usages), quantized(q, torch.randn(shape, dtype=dtype), usages))
        for usages, shape, dtype in product(q)
    ]


def product(q):
    for usages, shape, dtype in itertools.product(USAGES, SHAPES, DTYPES):
        if makes(q, usages, shape):
            yield usages, shape, dtype


def described(t):
    return [(name, tuple(b.shape), b.dtype) for name, b in t.buffers().items()]


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


class TestProduct(unittest.TestCase):
    @parameterized.expand(QUANTIZERS)
    @pytest.mark.quick(10)
    def test_buffers_are_what_quantize_returns(self, _name, q):
        for proto, t in tensors(q):
            assert described(t) == [tuple(b) for b in proto.buffers()], proto
            assert TensorProto.of(t) == proto
            assert (t.shape, t.dtype, t.quantizer, t.usages) == (proto.shape, proto.dtype, q, proto.usages)

    @parameterized.expand(QUANTIZERS)
    @pytest.mark.quick(12)
    def test_flatten_and_unflatten(self, _name, q):
        for _, t in tensors(q):
            names, context = t.__tensor_flatten__()
            again = QuantizedTensor.__tensor_unflatten__(
                {name: getattr(t, name) for name in names}, context, t.shape, t.stride()
            )
            assert TensorProto.of(again) == TensorProto.of(t) and same(hop.dequantize(again), hop.dequantize(t))

    @parameterized.expand(QUANTIZERS)
    @pytest.mark.quick(12)
    def test_of_buffers(self, _name, q):
        for _, t in tensors(q):
            again = TensorProto.of(t).create_tensor(list(t.buffers().values()))
            assert same(hop.dequantize(again), hop.dequantize(t))

    @parameterized.expand(QUANTIZERS)
    @pytest.mark.quick(11)
    def test_made_empty(self, _name, q):
        """Real, fake and on the meta device."""
        for usages, shape, dtype in product(q):
            proto = TensorProto(shape, dtype, requires_grad=True, quantizer=q, usages=usages)
            real = proto.create_tensor()
            assert TensorProto.of(real) == proto and described(real) == [tuple(b) for b in proto.buffers()]
            assert real.nbytes == sum(b.nbytes for b in real.buffers().values())
            with FakeTensorMode():
                fake = proto.create_tensor()
                assert TensorProto.of(fake) == proto and described(fake) == described(real)
                assert fake.stride() == real.stride()
        meta = TensorProto((16, 64), device="meta", quantizer=q).create_tensor()
        assert meta.device.type == "meta" and meta.shape == (16, 64)

    def _across_a_compile_boundary(self, q, cases):
        """As an output, an input and an output again, dequantized inside and outside."""

        def make(*xs):
            return [quantized(q, x, usages) for x, (usages, _, _) in zip(xs, cases, strict=True)]

        def through(*ts):
            return [(t, hop.dequantize(t)) for t in ts]

        xs = [torch.randn(shape, dtype=dtype) for _, shape, dtype in cases]
        torch.manual_seed(1)
        eager = make(*xs)
        torch._dynamo.reset()
        torch.manual_seed(1)
        compiled = torch.compile(make, backend="aot_eager", fullgraph=True)(*xs)
        results = torch.compile(through, backend="aot_eager", fullgraph=True)(*eager)
        for want, made, (again, inside) in zip(eager, compiled, results, strict=True):
            numbers = hop.dequantize(want)
            assert TensorProto.of(made) == TensorProto.of(want) == TensorProto.of(again)
            assert same(hop.dequantize(again), numbers) and same(inside, numbers)
            assert q.stochastic or same(hop.dequantize(made), numbers)

    @parameterized.expand(QUANTIZERS[::7])
    @pytest.mark.full
    def test_across_a_compile_boundary(self, _name, q):
        self._across_a_compile_boundary(q, list(product(q))[::9])

    @parameterized.expand([(name, q, i) for i, (name, q) in enumerate(QUANTIZERS)])
    @pytest.mark.full
    @pytest.mark.sampled(6)
    def test_each_across_a_compile_boundary(self, _name, q, i):
        """Another ninth for each quantizer: graphs of whole products take minutes to compile."""
        self._across_a_compile_boundary(q, list(product(q))[i % 9 :: 9])


class TestTraced(unittest.TestCase):
    """In one graph, without a break, with sizes that are numbers or symbols."""

    @parameterized.expand([("static", False), ("dynamic", True)])
    @pytest.mark.quick(2)
    def test_created_in_a_graph(self, _name, dynamic):
        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
        def f(x):
            proto = TensorProto(x.shape, torch.bfloat16, x.device, quantizer=presets.MXFP8)
            t = proto.create_tensor()
            t.codes.view(torch.uint8).zero_()
            t.scale.zero_()
            return hop.dequantize(t) + x.to(torch.bfloat16)

        for rows in (3, 5):
            x = torch.randn(rows, 64)
            assert torch.equal(f(x), x.to(torch.bfloat16))

    @parameterized.expand([("static", False), ("dynamic", True)])
    @pytest.mark.quick(2)
    def test_described_and_updated_in_a_graph(self, _name, dynamic):
        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
        def f(x):
            t = hop.quantize(presets.INT8_TENSOR, x)
            proto = TensorProto.of(t).update_usage(columnwise=True)
            return hop.quantize(presets.INT8_TENSOR, x, usages=proto.usages), len(proto.buffers())

        for rows in (3, 5):
            t, count = f(torch.randn(rows, 64))
            assert count == 3 and t.usages == ("rowwise", "columnwise") and t.columnwise_codes.shape == (64, rows)

    def test_of_buffers_in_a_graph(self):
        @torch.compile(backend="aot_eager", fullgraph=True)
        def f(codes, scale):
            return TensorProto(codes.shape, quantizer=presets.INT8_ROW).create_tensor([codes, scale])

        t = hop.quantize(presets.INT8_ROW, torch.randn(4, 8))
        assert torch.equal(hop.dequantize(f(t.codes, t.scale)), hop.dequantize(t))

    @pytest.mark.full
    def test_symbolic_buffers(self):
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        x = mode.from_tensor(torch.randn(6, 100), static_shapes=False)
        assert all(isinstance(n, torch.SymInt) for n in x.shape)
        with enable_python_dispatcher():
            for name, q in QUANTIZERS[::3]:
                if not isinstance(q.scale, Static) and not q.stochastic:
                    buffers = TensorProto(tuple(x.shape), quantizer=q).buffers()
                    assert described(quantized(q, x, ("rowwise",))) == [tuple(b) for b in buffers], name


class TestProto(unittest.TestCase):
    def test_order_is_fixed(self):
        names = [b.name for b in TensorProto((32, 32), quantizer=presets.NVFP4, usages=copies.USAGES).buffers()]
        assert names == [
            *("codes", "scale", "global_amax"),
            *("columnwise_codes", "columnwise_scale", "columnwise_global_amax"),
        ]

    def test_plain(self):
        proto = TensorProto.of(torch.zeros(2, 3, dtype=torch.int16))
        assert proto == TensorProto((2, 3), torch.int16) and [tuple(b) for b in proto.buffers()] == [
            ("data", (2, 3), torch.int16)
        ]
        made = TensorProto((2, 3), torch.float16, requires_grad=True).create_tensor()
        assert (made.shape, made.dtype, made.requires_grad) == ((2, 3), torch.float16, True)
        data = torch.ones(2, 3, dtype=torch.int16)
        assert torch.equal(proto.create_tensor([data]), data)

    def test_update_usage_leaves_the_quantizer(self):
        proto = TensorProto((4, 32), quantizer=presets.MXFP8)
        both = proto.update_usage(columnwise=True)
        assert proto.usages == ("rowwise",) and both.usages == ("rowwise", "columnwise")
        assert both.quantizer is proto.quantizer and both.update_usage(rowwise=False).usages == ("columnwise",)
        assert both.update_usage(columnwise=False) == proto
        with self.assertRaisesRegex(ValueError, "usages must name"):
            proto.update_usage(rowwise=False)

    def test_errors(self):
        with self.assertRaisesRegex(TypeError, "floating point.*int8"):
            TensorProto((4,), torch.int8, quantizer=presets.INT8_ROW)
        with self.assertRaisesRegex(ValueError, "no column-wise copy"):
            TensorProto((4, 4), quantizer=presets.STATE8, usages=copies.USAGES)
        proto = TensorProto((4, 8), quantizer=presets.INT8_ROW)
        codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
        for buffers, words in (
            ([codes], "got 1; give a list of these"),
            ([codes[:3], scale], r"buffer codes must be torch.int8 of \(4, 8\), got torch.int8 of \(3, 8\)"),
            ([codes, scale.half()], "buffer scale must be torch.float32"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                proto.create_tensor(buffers)
