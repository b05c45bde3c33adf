"""Products of floats with weights in GGUF's formats, against reading their bytes, and against float32."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hop
from benchmarks.timing import Row, interleaved
from hop.interchange.gguf_types import TYPES
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product

aten = torch.ops.aten
QUANTIZERS: dict[str, hop.Quantizer] = {t.name: t.quantizer for t in TYPES.values()}
_N, _K = 32768, 2048  # larger than the caches


def groups() -> Iterator[Row]:
    """1 and 128 rows of float32; a weight's bytes include its scales and offsets."""
    if native.declines_here() is not None:
        return
    torch.manual_seed(0)
    x = torch.randn(128, _K)
    for name in ("Q8_0", "Q6_K", "Q5_0", "Q4_K"):
        w = hop.quantize(QUANTIZERS[name], torch.randn(_N, _K) / 8)
        plain, size = hop.dequantize(w), sum(b.nbytes for b in w.buffers().values())
        case, read = f"1x{_K}x{_N}, float32 by {name}", torch.ones(size, dtype=torch.uint8)
        own, bytes, floats = interleaved([_ours(x[:1], w), _reading(read), _theirs(x[:1], plain)])
        yield Row("groups", case, own, "reading its bytes", bytes, "<= 1.43", bytes=size, peer_bytes=size)
        yield Row("groups", case, own, "float32", floats, "<= 0.5", bytes=size, peer_bytes=plain.nbytes)
        few, plain = w[:2048], plain[:2048]
        own, floats = interleaved([_ours(x, few), _theirs(x, plain)])
        yield Row("groups", f"128x{_K}x2048, float32 by {name}", own, "float32", floats, "<= 1.2")


def _ours(x: Tensor, w: Tensor) -> Callable[[], Any]:
    return lambda: hop.scaled(aten.linear.default, torch.float32, x, w)


def _theirs(x: Tensor, w: Tensor) -> Callable[[], Any]:
    return lambda: functional.linear(x, w)


def _reading(data: Tensor) -> Callable[[], float]:
    return lambda: native_product.bandwidth(data)


GROUPS = [groups]
