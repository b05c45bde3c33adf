"""Compare operators of hop on a GPU with the CPU: integers, and values computed from them, bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hop
from benchmarks.isolated import Cases
from hop import Quantizer, presets

aten = torch.ops.aten
SHAPES = ((1, 64, 128), (17, 96, 160), (200, 512, 384), (1024, 768, 1024))
# Integer sums are exact, and float32 operations after them are rounded one by one, so bits are the same everywhere.
INTEGERS: dict[str, tuple[Quantizer, Quantizer]] = {
    "int8 by int8": (presets.INT8_ROW, presets.INT8_ROW),
    "int8 with zero points by int8": (presets.INT8_TENSOR_AFFINE, presets.INT8_ROW),
}
BOUND = 2.0**-10  # error bound of float sums, relative to the sum of magnitudes, as in cutlass_kernels.oracle
FLOATS: dict[str, tuple[Quantizer, Quantizer]] = {
    "fp8 by fp8": (presets.FP8_ROW, presets.FP8_ROW),
    "MXFP8": (presets.MXFP8, presets.MXFP8),
    "NVFP4": (presets.NVFP4, presets.NVFP4),
}
QUANTIZERS = ("INT8_ROW", "INT8_TENSOR_AFFINE", "INT4_32", "FP8_ROW", "MXFP8", "MXFP4", "NVFP4", "STATE8")
DTYPES = (torch.float32, torch.bfloat16)


def names() -> list[str]:
    return [f"benchmarks.gpu_operators:{group}" for group in ("quantizers", "products", "scaled")]


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def _on(device: str, function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    """The results of a function of tensors on a device, moved to the CPU."""
    found = function(*(x.to(device) for x in tensors))
    return [x.cpu() for x in (found if isinstance(found, (list, tuple)) else [found])]


def same(function: Callable[..., Any], *tensors: Tensor, device: str = "cuda") -> None:
    """Fail unless a function returns the CPU's bits on a device."""
    wanted, found = _on("cpu", function, *tensors), _on(device, function, *tensors)
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"result {i}: {b.dtype} {b.shape}, not {a.dtype} {a.shape}"
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        wrong = int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
        assert wrong == 0, f"result {i}: {wrong} of {a.numel()} elements have other bits than on the CPU"


# ---- groups


def quantizers(device: str = "cuda") -> Cases:
    """Codes and scales of quantize, and values of dequantize."""

    def buffers(q: Quantizer, x: Tensor) -> list[Tensor]:
        made = hop.quantize(q, x)
        return [*made.buffers().values(), hop.dequantize(made)]

    for name in QUANTIZERS:
        q: Quantizer = getattr(presets, name)
        for dtype in DTYPES:
            x = _drawn((2, 256) if q.flat else (48, 256), dtype, 1)
            yield f"quantize, {name}, {dtype}", lambda q=q, x=x: same(lambda x: buffers(q, x), x, device=device)


def products(device: str = "cuda") -> Cases:
    """out_dtype of integers."""
    for m, n, k in SHAPES:
        codes = torch.Generator().manual_seed(m)
        lhs, rhs = (torch.randint(-128, 128, s, generator=codes).to(torch.int8) for s in ((m, k), (k, n)))
        call = lambda a, b: hop.out_dtype(aten.mm.default, torch.int32, a, b)  # noqa: E731
        yield f"out_dtype, {m}x{n}x{k}", lambda a=lhs, b=rhs, call=call: same(call, a, b, device=device)


def scaled(device: str = "cuda") -> Cases:
    """Linear layers on quantized tensors."""
    for kinds, check in ((INTEGERS, same), (FLOATS, near)):
        for name, (of_x, of_w) in kinds.items():
            for m, n, k in SHAPES:
                x = hop.quantize(of_x, _drawn((m, k), torch.float32, 2))
                w = hop.quantize(of_w, _drawn((n, k), torch.float32, 3))
                yield (
                    f"scaled, {name}, {m}x{n}x{k}",
                    lambda x=x, w=w, check=check: check(_linear, x, w, device=device),
                )


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return hop.scaled(aten.linear.default, torch.float32, x, w)


def near(function: Callable[..., Any], x: Tensor, w: Tensor, device: str = "cuda") -> float:
    """Fail unless a product is close to float64's; returns its error relative to the bound."""
    (found,) = _on(device, function, x, w)
    lhs, rhs = (hop.dequantize(t).to(torch.float64) for t in (x, w))
    wanted, bound = lhs @ rhs.mT, BOUND * (lhs.abs() @ rhs.abs().mT) + torch.finfo(torch.float32).smallest_normal
    assert (found.dtype, found.shape) == (torch.float32, wanted.shape)
    off = float(((found.to(torch.float64) - wanted).abs() / bound).max())
    assert off <= 1, f"{off:.2f} times the bound"
    return round(off, 4)
