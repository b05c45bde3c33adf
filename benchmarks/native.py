"""The native kernels against PyTorch's best kernels, with weights of both prepacked before timing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import hop
from benchmarks.cases import compare, integers
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product

aten = torch.ops.aten
linear = torch.nn.functional.linear
_LINEAR = aten.linear.default
_NONE = (None, None)


def at_most(tiles: float | None, others: float | None, floats: float | None = None) -> str:
    """The target for CPUs with matrix tiles, for others, or for those whose peer is float32; none without a number."""
    most = tiles if native.library().path == "amx" else floats if torch.float32 == FLOAT else others
    return f"<= {most}" if most else ""


def peak_tops() -> float:
    """The current tera-operations per second of the matrix unit on int8; 0 if there is none."""
    functions = native.library().functions
    return 0.0 if functions is None else native_product.peak()


def limits() -> dict[str, float]:
    """The maxima of several measurements of both limits of a roofline; 0 without the native kernels.

    They are the matrix unit's int8 rate, and the bandwidth of repeatedly reading a 4096x4096 int8 weight, as the
    products here do.
    """
    if native.library().functions is None:
        return {"peak_tops": 0.0, "bandwidth_gbs": 0.0}
    weight, times = torch.ones(4096, 4096, dtype=torch.int8), range(25)
    return {
        "peak_tops": max(native_product.peak() for _ in times),
        "bandwidth_gbs": max(native_product.bandwidth(weight) for _ in times),
    }


def counted(rows: Iterable[Row], sizes: tuple[int, int, int], ours: int, peers: Sequence[int]) -> Iterator[Row]:
    """`rows` with the operations of a product of (m, k, n) and the bytes of each side."""
    m, k, n = sizes
    for row, peer in zip(rows, peers, strict=True):
        yield replace(row, operations=2 * m * k * n, bytes=ours, peer_bytes=peer)


def moved(result: int, *factors: Tensor) -> int:
    """The bytes of a result and of all buffers of its factors."""
    return result + sum(factor.nbytes for factor in factors)


# (m, k, n): the target with matrix tiles, relative to the better of oneDNN's uint8 and bfloat16 linear; without tiles,
# at most the time of the former; and relative to float32 linear.
_INT8: dict[tuple[int, int, int], tuple[float | None, float]] = {
    (1, 4096, 4096): (0.7, 0.17),
    (16, 4096, 4096): (0.85, 0.3),
    (128, 4096, 4096): (0.55, 0.53),
    (512, 1024, 1024): (None, 0.53),
    (1024, 4096, 4096): (0.6, 0.53),
    (1024, 4096, 14336): (0.6, 0.53),
}


def int8() -> Iterator[Row]:
    """Row x channel scales, a zero point per row, bias; out in the peer's dtype."""
    for (m, k, n), (most, of_floats) in _INT8.items():
        w, bias = torch.randn(n, k), torch.randn(n)
        x = hop.quantize(hop.presets.INT8_ROW_AFFINE, torch.randn(m, k))
        packed = hop.pack(hop.quantize(hop.presets.INT8_ROW, w))
        plain, plain_w, plain_bias = torch.randn(m, k).to(FLOAT), w.to(FLOAT), bias.to(FLOAT)
        codes, scales = integers(n, k), torch.rand(n) * 0.01
        prepacked = torch.ops.onednn.qlinear_prepack(codes, [m, k])
        unsigned, zeros = integers(m, k, dtype=torch.uint8), torch.zeros(n, dtype=torch.int32)

        def ours(x: Tensor = x, packed: Tensor = packed, bias: Tensor = bias) -> Tensor:
            return hop.scaled(_LINEAR, FLOAT, x, packed, bias)

        def onednn(a: Tensor = unsigned, b: Tensor = prepacked, s: Any = (scales, zeros, bias)) -> Tensor:
            out = (1.0, 0, FLOAT, "none", [], "")
            return torch.ops.onednn.qlinear_pointwise(a, 0.1, 3, b, *s, *out)

        def floats(x: Tensor = plain, w: Tensor = plain_w, bias: Tensor = plain_bias) -> Tensor:
            return linear(x, w, bias)

        peers = [
            ("onednn.qlinear, uint8", onednn, at_most(most, 1.0)),  # at avx2 its sums saturate
            (f"{NAME} linear", floats, at_most(most, most, of_floats)),
        ]
        rows = compare("int8 linear", f"{m}x{k}x{n}, affine row x channel, packed", ours, peers)
        result = FLOAT.itemsize * m * n
        of_peers = [moved(result, unsigned, codes, scales), moved(result, plain, plain_w)]
        for row in counted(rows, (m, k, n), moved(result, x, packed), of_peers):
            tops = 2 * m * k * n / row.ours_ms / 1e9
            yield row
            if m >= 128 and row.peer.startswith("onednn") and (top := peak_tops()):
                full = 2 * m * k * n / top / 1e9
                yield Row(
                    "int8 linear",
                    f"{m}x{k}x{n}, of {top:.1f} TOPS: {tops / top:.0%}",
                    row.ours_ms,
                    "peak",
                    full,
                    "<= 2",
                )


def int8_signed() -> Iterator[Row]:
    """Row x channel scales without zero points, bias; out in the peer's dtype.

    The peer is oneDNN's int8 linear or, without matrix tiles, where it has no fast int8 kernel, its uint8 linear.
    """
    kind, zero = (torch.int8, 0) if native.library().best == "amx" else (torch.uint8, 128)
    for m, k, n in _INT8:
        w, bias = torch.randn(n, k), torch.randn(n)
        x = hop.quantize(hop.presets.INT8_ROW, torch.randn(m, k))
        packed = hop.pack(hop.quantize(hop.presets.INT8_ROW, w))
        codes, scales, rows_of_it = integers(n, k), torch.rand(n) * 0.01, integers(m, k, dtype=kind)
        prepacked, zeros = torch.ops.onednn.qlinear_prepack(codes, [m, k]), torch.zeros(n, dtype=torch.int32)

        def ours(x: Tensor = x, packed: Tensor = packed, bias: Tensor = bias) -> Tensor:
            return hop.scaled(_LINEAR, FLOAT, x, packed, bias)

        def onednn(a: Tensor = rows_of_it, b: Tensor = prepacked, s: Any = (scales, zeros, bias)) -> Tensor:
            out = (1.0, 0, FLOAT, "none", [], "")
            return torch.ops.onednn.qlinear_pointwise(a, 0.1, zero, b, *s, *out)

        title = f"{m}x{k}x{n}, symmetric row x channel, packed"
        rows = compare("int8 linear", title, ours, [(f"onednn.qlinear, {native_product.name(kind)}", onednn, "<= 1.0")])
        result = FLOAT.itemsize * m * n
        theirs = [moved(result, rows_of_it, codes, scales)]
        yield from counted(rows, (m, k, n), moved(result, x, packed), theirs)


def int8_sums() -> Iterator[Row]:
    """int8 -> int32 against torch._int_mm, with B packed during and before timing."""
    for (m, k, n), plain, packed in [
        ((1, 4096, 4096), 0.4, 0.3),
        ((16, 4096, 4096), None, None),
        ((128, 4096, 4096), 0.8, 0.45),
        ((1024, 4096, 4096), 0.8, 0.45),
    ]:
        a, w = integers(m, k), integers(n, k)
        tiles = native_product.tiles(w, hop.formats.INT8, hop.layouts.Tiled())
        for layout, b in (("B transposed", w.t()), ("B row-major", w.t().contiguous())):

            def int_mm(a: Tensor = a, b: Tensor = b) -> Tensor:
                return torch._int_mm(a, b)

            def ours(a: Tensor = a, b: Tensor = b) -> Tensor:
                return hop.out_dtype(aten.mm.default, torch.int32, a, b)

            def ready(a: Tensor = a, tiles: Tensor = tiles, n: int = n) -> Tensor:
                return native_product.int_mm_tiled(a, tiles, n)

            case = f"{m}x{k}x{n}, {layout}"
            target = at_most(plain, 1.05) if plain and (m > 1 or b.stride(0) == 1) else ""
            both = moved(4 * m * n, a, w)
            rows = compare("int8 sums", case, ours, [("torch._int_mm", int_mm, target)])
            yield from counted(rows, (m, k, n), both, [both])
            rows = compare(
                "int8 sums", f"{case}; ours packed", ready, [("torch._int_mm", int_mm, at_most(packed, 1.0))]
            )
            yield from counted(rows, (m, k, n), both, [both])


# Formats of both factors, or the dtype of a plain left one, and for each m the target relative to that dtype with a
# decoded weight: with matrix tiles, without, and relative to float32.
_FLOATS: list[tuple[str, Any, str, dict[int, tuple[float | None, ...]]]] = [
    ("fp8 row x row", "FP8_ROW", "FP8_ROW", {1: (0.5, 0.37, 0.45), 128: (0.5, 1.05, 0.9), 1024: (0.8, 1.02, 0.95)}),
    ("fp8 1x128 x 128x128", "FP8_1X128", "FP8_128X128", {128: _NONE, 1024: _NONE}),
    ("MXFP8", "MXFP8", "MXFP8", {1: (*_NONE, 0.45), 128: (*_NONE, 0.9), 1024: (*_NONE, 0.95)}),
    ("MXFP4", "MXFP4", "MXFP4", {128: _NONE}),
    ("NVFP4", "NVFP4", "NVFP4", {1: (*_NONE, 0.45), 128: (*_NONE, 0.9), 1024: (*_NONE, 0.95)}),
    ("8da4w", "INT8_ROW_AFFINE", "INT4_32", {1: (*_NONE, 0.15), 128: (0.7, 0.6, 0.45)}),
    ("bfloat16 x int4 groups", torch.bfloat16, "INT4_32", {1: (0.3, 0.3), 128: (None, 1.05)}),
    ("bfloat16 x int8", torch.bfloat16, "INT8_ROW", {1: _NONE, 128: _NONE}),
    ("float32 x int4 groups", torch.float32, "INT4_32", {1: (*_NONE, 0.35), 128: (*_NONE, 1.1)}),
    ("float32 x int8", torch.float32, "INT8_ROW", {1: (*_NONE, 0.4), 16: (*_NONE, 0.6), 128: (*_NONE, 1.05)}),
    ("float32 x MXFP4", torch.float32, "MXFP4", {1: _NONE, 16: _NONE, 128: _NONE}),
]


def floats() -> Iterator[Row]:
    """Packed 4096x4096 weights of other formats, against the faster float dtype, and against fp8 by rows."""
    k = n = 4096
    w = torch.randn(n, k)
    presets = hop.presets.PRESETS
    most = {
        "fp8 1x128 x 128x128": 1.25,
        "MXFP8": 1.15,
        "NVFP4": 1.25,
    }  # targets relative to fp8 by rows, with matrix tiles
    for case, of_x, of_w, targets in _FLOATS:
        if of_x is torch.bfloat16 and of_x != FLOAT:
            continue
        packed = hop.pack(hop.quantize(presets[of_w], w))
        rowwise = hop.pack(hop.quantize(presets["FP8_ROW"], w))
        dtype = of_x if isinstance(of_x, torch.dtype) else FLOAT
        plain, name = w.to(dtype), str(dtype).removeprefix("torch.")
        for m, targets_of in targets.items():
            x = torch.randn(m, k).to(dtype)
            lhs = hop.quantize(presets[of_x], x) if isinstance(of_x, str) else x
            by_row = hop.quantize(presets["FP8_ROW"], x)

            def ours(lhs: Tensor = lhs, rhs: Tensor = packed, dtype: torch.dtype = dtype) -> Tensor:
                return hop.scaled(_LINEAR, dtype, lhs, rhs)

            def floats(x: Tensor = x, w: Tensor = plain) -> Tensor:
                return linear(x, w)

            def fp8(lhs: Tensor = by_row, rhs: Tensor = rowwise) -> Tensor:
                return hop.scaled(_LINEAR, FLOAT, lhs, rhs)

            result = dtype.itemsize * m * n
            mine = moved(result, lhs, packed)
            peers: list[tuple[str, Any, str]] = [(f"{name} linear", floats, at_most(*targets_of))]
            of_peers = [moved(result, x, plain)]
            if case in most:
                peers.append(("ours, fp8 row x row", fp8, at_most(most[case], 1.1 if m >= 128 else None)))
                of_peers.append(moved(result, by_row, rowwise))
            if case in (f"{NAME} x int4 groups", "8da4w"):
                target = at_most(0.75 if case != "8da4w" else 0.9, 0.9, 0.9) if m == 1 else ""
                peers.append(("aten int4pack mm", _int4_peer(w, x), target))
                of_peers.append(mine)  # two bfloat16 per group take as many bytes as our float32
            rows = compare("decoded", f"{case}, {m}x{k}x{n}, packed", ours, peers)
            yield from counted(rows, (m, k, n), mine, of_peers)


def _int4_peer(w: Tensor, x: Tensor) -> Any:
    """aten._weight_int4pack_mm_for_cpu with groups of 32."""
    n, k = w.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(k // 32, n, 2).to(x.dtype)
    return lambda: aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)


GROUPS = [int8, int8_signed, int8_sums, floats]
