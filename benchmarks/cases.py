"""The timed cases. Each function yields rows; both sides get the same tensors and allocate their results."""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved, per_call

aten = torch.ops.aten
stock = torch.ops.higher_order.out_dtype


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


def compare(group: str, case: str, ours: Any, peers: list[tuple[str, Any, str]], **options: Any) -> Iterator[Row]:
    """A row for each (name, function, target) of `peers`."""
    for name, peer, target in peers:
        ours_ms, peer_ms = interleaved([ours, peer], **options)
        yield Row(group, case, ours_ms, name, peer_ms, target)


def mm() -> Iterator[Row]:
    for m, k, n in [(1, 4096, 4096), (16, 4096, 4096), (128, 1024, 1024), (512, 1024, 1024), (1024, 4096, 4096)]:
        a, w = integers(m, k), integers(n, k)
        target = "<= 1.05" if m >= 128 else ""
        for layout, b in (("B row-major", w.t().contiguous()), ("B transposed", w.t())):
            peers = [("torch._int_mm", lambda a=a, b=b: torch._int_mm(a, b), target)]
            if (m, k) == (128, 1024):
                peers.append(
                    ("stock out_dtype", lambda a=a, b=b: stock(aten.mm.default, torch.int32, a, b), "<= 0.0125")
                )
            yield from compare(
                "int8 mm",
                f"{m}x{k}x{n}, {layout}",
                lambda a=a, b=b: hop.out_dtype(aten.mm.default, torch.int32, a, b),
                peers,
            )


def products() -> Iterator[Row]:
    x8, w8, bias = integers(128, 1024), integers(1024, 1024), integers(1024, dtype=torch.int16).int()
    xu = integers(128, 1024, dtype=torch.uint8)
    # The operands in Q/DQ reference representations: 8-bit codes minus a zero point.
    xq, wq = xu.short() - 77, w8.short()
    x16, w16 = integers(128, 1024, dtype=torch.int16), integers(1024, 1024, dtype=torch.int16)
    linear = aten.linear.default
    for case, x, w, target in [
        ("int8", x8, w8, ""),
        ("uint8 x int8", xu, w8, ""),
        ("int16 of Q/DQ", xq, wq, "<= 0.04"),
        ("int16, full range", x16, w16, ""),
    ]:
        yield from compare(
            "linear",
            f"{case}, 128x1024x1024, bias",
            lambda x=x, w=w: hop.out_dtype(linear, torch.int32, x, w, bias),
            [("stock out_dtype", lambda x=x, w=w: stock(linear, torch.int32, x, w, bias), target)],
        )
    for batch, m, k, n in [(96, 128, 64, 128), (12, 512, 64, 512)]:
        a, b = integers(batch, m, k), integers(batch, k, n)
        a32, b32 = a.float(), b.float()
        yield from compare(
            "int8 bmm",
            f"{batch}x{m}x{k}x{n}",
            lambda a=a, b=b: hop.out_dtype(aten.bmm.default, torch.int32, a, b),
            [
                ("torch.bmm in int32", lambda a=a, b=b: torch.bmm(a.int(), b.int()), ""),
                ("torch.bmm in float32", lambda a=a32, b=b32: torch.bmm(a, b), ""),
            ],
        )


def convolution() -> Iterator[Row]:
    args = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    op = aten.convolution.default
    for layout, memory_format in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
        x, w = (integers(*s).contiguous(memory_format=memory_format) for s in ((1, 64, 56, 56), (64, 64, 3, 3)))
        x32, w32 = x.float(), w.float()
        yield from compare(
            "int8 conv2d",
            f"64->64, 3x3, 56x56, {layout}",
            lambda x=x, w=w: hop.out_dtype(op, torch.int32, x, w, *args),
            [
                ("stock out_dtype", lambda x=x, w=w: stock(op, torch.int32, x, w, *args), "<= 0.033"),
                (f"float32, {layout}", lambda x=x32, w=w32: op(x, w, *args), "<= 0.5"),
            ],
        )


def stock_operators() -> Iterator[Row]:
    """The inner operators of PyTorch's own out_dtype, on square matrices and small images."""
    for dtype, n in itertools.product((torch.int8, torch.int16, torch.int32), (64, 256, 1024, 2048)):
        a, b = integers(n, n, dtype=dtype), integers(n, n, dtype=dtype)
        operators: list[tuple[Any, tuple[Any, ...]]] = [
            *((aten.mul.Tensor, (a, b)), (aten.mul.Scalar, (a, 3))),
            *((aten.div.Tensor, (a, b)), (aten.div.Scalar, (a, 3))),
        ]
        if n < 2048:
            operators += [(aten.mm.default, (a, b)), (aten.linear.default, (a, b))]
        if n < 1024:
            x, w = integers(1, n, 28, 28, dtype=dtype), integers(n, n, 3, 3, dtype=dtype)
            lists = ([1, 1], [1, 1], [1, 1])
            operators += [(aten.conv2d.default, (x, w, None, *lists))]
            operators += [(aten.convolution.default, (x, w, None, *lists, False, [0, 0], 1))]
        for op, args in operators:
            yield from compare(
                "stock",
                f"{op.name().removeprefix('aten::')}, {str(dtype).removeprefix('torch.')}, {n}",
                lambda op=op, args=args: hop.out_dtype(op, torch.int32, *args),
                [("stock out_dtype", lambda op=op, args=args: stock(op, torch.int32, *args), "<= 1.05")],
                budget_s=1.5,
            )


def float8() -> Iterator[Row]:
    a, w = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((128, 1024), (1024, 1024)))
    one = torch.ones(())
    yield from compare(
        "fp8 mm",
        "e4m3, 128x1024x1024 -> bfloat16",
        lambda: hop.out_dtype(aten.mm.default, torch.bfloat16, a, w.t()),
        [
            ("torch._scaled_mm", lambda: torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.bfloat16), "<= 0.0033"),
            ("cast to float32, mm", lambda: (a.float() @ w.t().float()).bfloat16(), ""),
        ],
        budget_s=20.0,
    )


def overhead() -> Iterator[Row]:
    a, b = integers(1, 16), integers(16, 8)
    op, int32, out_dtype, int_mm = aten.mm.default, torch.int32, hop.out_dtype, torch._int_mm
    functions = [lambda: out_dtype(op, int32, a, b), lambda: int_mm(a, b), lambda: stock(op, int32, a, b)]
    ours, direct, other = per_call(functions)
    yield Row("call", "1x16x8, eager, plain tensors", ours, "torch._int_mm", direct, "<= 2 µs")
    yield Row("call", "1x16x8, eager, plain tensors", ours, "stock out_dtype", other)


def imports() -> Iterator[Row]:
    def seconds(code: str) -> float:
        timed = f"import time, torch; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
        return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)

    pairs = [(seconds("import hop"), seconds("pass")) for _ in range(7)]
    ours, nothing = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    yield Row("import", "import hop after import torch", ours, "nothing", nothing, "<= 0.15 s")


def tracing() -> Iterator[Row]:
    a, w = torch.ones(8, 8, dtype=torch.int32), torch.ones(8, 8, dtype=torch.int32)

    def chain(call: Any, n: int) -> Any:
        def f(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(n):
                x = call(x, w)
            return x

        return f

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return hop.out_dtype(aten.mm.default, torch.int32, x, w)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return aten.mm.default(x, w)

    def trace(call: Any, n: int) -> float:
        begin = time.perf_counter()
        make_fx(chain(call, n), tracing_mode="fake")(a, w)
        return (time.perf_counter() - begin) * 1e3

    for warm in (ours, plain):
        trace(warm, 10)
    for n in (250, 1000):
        pairs = [(trace(ours, n), trace(plain, n)) for _ in range(3)]
        mine, other = (statistics.median(side) / n for side in zip(*pairs, strict=True))
        yield Row("tracing", f"a node of {n}, make_fx on fakes", mine, "aten.mm", other, "<= 2 ms")


# Targets of quantizing relative to a copy: eager, compiled.
_QUANTIZED = {
    "INT8_ROW": (1.2, 3),
    "MXFP8": (2, 9),
    "NVFP4": (3, 12),
    "FP8_ROW": (None, None),
    "FP8_1X128": (None, None),
    "FP8_128X128": (None, None),
    "UINT4_32_AFFINE": (None, None),
    "MXFP4": (None, None),
    "STATE8": (None, None),
}


def quantizing() -> Iterator[Row]:
    """Quantize a bfloat16 tensor and dequantize it, against a copy."""
    x = torch.randn(1024, 4096).to(torch.bfloat16)

    def copy() -> Tensor:
        return x.clone()

    for name, (eager, compiled) in _QUANTIZED.items():
        q = hop.presets.PRESETS[name]

        names = [b.name for b in hop.TensorProto((1024, 4096), quantizer=q).buffers()]

        def quantize(x: Tensor, q: Any = q, names: list[str] = names) -> list[Tensor]:
            t = hop.quantize(q, x)
            return [getattr(t, name) for name in names]

        torch._dynamo.reset()
        program = torch.compile(quantize, fullgraph=True)
        program(x)
        for how, call, most in (("eager", quantize, eager), ("compiled", program, compiled)):
            target = f"<= {most}" if most else ""
            yield from compare("quantize", f"{name}, {how}", lambda call=call: call(x), [("copy", copy, target)])
        t, back = hop.quantize(q, x), torch.compile(lambda t: hop.dequantize(t), fullgraph=True)
        back(t)
        for how, call in (("eager", hop.dequantize), ("compiled", back)):
            yield from compare("dequantize", f"{name}, {how}", lambda call=call, t=t: call(t), [("copy", copy, "")])


# Targets of products with results in bfloat16 relative to bfloat16 products: the quantizers of the factors, and whether
# the weight is packed beforehand.
_SCALED = {
    "int8, row x channel": ("INT8_ROW", "INT8_ROW", False, 1.0),
    "int8, affine row x channel": ("INT8_ROW_AFFINE", "INT8_ROW", False, 1.0),
    "uint8, affine tensor x channel": ("UINT8_TENSOR_AFFINE", "INT8_ROW", False, None),
    "fp8, row x row, packed": ("FP8_ROW", "FP8_ROW", True, 2.0),
    "fp8, row x row": ("FP8_ROW", "FP8_ROW", False, None),
    "fp8, 1x128 x 128x128, packed": ("FP8_1X128", "FP8_128X128", True, None),
    "MXFP8, packed": ("MXFP8", "MXFP8", True, 3.0),
    "NVFP4, packed": ("NVFP4", "NVFP4", True, 3.0),
    "int8 x int4 groups (8da4w)": ("INT8_ROW_AFFINE", "INT4_32", False, None),
    f"{NAME} x int8": (None, "INT8_ROW", False, None),
    f"{NAME} x NVFP4, packed": (None, "NVFP4", True, None),
}


def scaled() -> Iterator[Row]:
    """A linear layer with bias on quantized operands, against floats; compiled, against itself in eager mode."""
    m, k, n = 128, 4096, 4096
    x, w, bias = (torch.randn(s).to(FLOAT) for s in ((m, k), (n, k), (n,)))
    linear, presets = aten.linear.default, hop.presets.PRESETS

    def plain() -> Tensor:
        return torch.nn.functional.linear(x, w, bias)

    for case, (of_x, of_w, packed, most) in _SCALED.items():
        lhs = x if of_x is None else hop.quantize(presets[of_x], x)
        rhs = hop.quantize(presets[of_w], w)
        rhs = hop.pack(rhs) if packed else rhs

        def call(lhs: Tensor = lhs, rhs: Tensor = rhs) -> Tensor:
            return hop.scaled(linear, FLOAT, lhs, rhs, bias)

        title = f"{case}, {m}x{k}x{n}"
        yield from compare("scaled", title, call, [(f"{NAME} linear", plain, f"<= {most}" if most else "")])
        if most is None:
            continue
        torch._dynamo.reset()
        program = torch.compile(lambda lhs, rhs, bias: hop.scaled(linear, FLOAT, lhs, rhs, bias), fullgraph=True)
        program(lhs, rhs, bias)

        def compiled(lhs: Tensor = lhs, rhs: Tensor = rhs, program: Any = program) -> Tensor:
            return program(lhs, rhs, bias)

        # equally fast, up to timing noise
        yield from compare("scaled", f"{title}, compiled", compiled, [("the same in eager", call, "<= 1.05")])


def scaled_overhead() -> Iterator[Row]:
    """The overhead of a call over the operators of its kernel."""
    x, w, bias = torch.randn(4, 64), torch.randn(32, 64), torch.randn(32)
    lhs, rhs = (hop.quantize(hop.presets.INT8_ROW, t) for t in (x, w))
    a, b, of_rows, of_columns = lhs.codes, rhs.codes.t(), lhs.scale, rhs.scale
    linear, bfloat16, scaled = aten.linear.default, torch.bfloat16, hop.scaled

    def kernel() -> Tensor:
        y = torch._int_mm(a, b).to(torch.float32).mul_(of_rows).mul_(of_columns.view(-1)).add_(bias)
        return y.to(bfloat16)

    ours, direct = per_call([lambda: scaled(linear, bfloat16, lhs, rhs, bias), kernel])
    yield Row("call", "scaled, int8, 4x64x32, eager", ours, "its kernel", direct, "<= 6 µs")


def wrappers() -> Iterator[Row]:
    """The overhead of Python: prototypes, and views of quantized tensors."""
    t = hop.quantize(hop.presets.INT8_ROW, torch.randn(64, 64))

    def proto() -> object:
        return hop.TensorProto((64, 64), torch.bfloat16, quantizer=hop.presets.INT8_ROW)

    def view() -> object:
        return t.view(64, 64)

    with torch.no_grad():
        made, of, viewed, nothing = per_call([proto, lambda: hop.TensorProto.of(t), view, lambda: None])
    yield Row("proto", "TensorProto(shape, dtype, quantizer)", made, "nothing", nothing, "<= 20 µs")
    yield Row("proto", "TensorProto.of(quantized tensor)", of, "nothing", nothing, "<= 20 µs")
    yield Row("view", "QuantizedTensor.view, int8 per row", viewed, "nothing", nothing, "<= 12 µs")


GROUPS = [
    *(mm, products, convolution, stock_operators, float8, overhead, imports, tracing, quantizing, scaled),
    *(scaled_overhead, wrappers),
]
