"""Groups of cases for benchmarks.isolated: quantizing on a GPU, compared with the CPU's bits, and timed against a copy.

The bandwidth of a copy is that of x.clone(), read and written; a kernel's bytes are those that it must read and write
once.
"""

import unittest
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import hop
from benchmarks.isolated import Cases
from cutlass_kernels import dequantize, quantize, tune
from cutlass_kernels.dequantize import Codes
from cutlass_kernels.quantizing import Request
from hop import Quantizer, presets
from hop.kernels.gpu import quantize as gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = (
    *("INT8_ROW", "FP8_ROW", "FP8_1X128", "FP8_128X128", "MXFP8", "NVFP4", "MXFP4", "INT8_TENSOR", "FP8_TENSOR"),
    *("INT8_ROW_AFFINE", "INT4_32", "UINT4_128_AFFINE", "FP8_E5M2_1X128", "FP8_COLUMN"),
)
COMPUTED = ("INT8_ROW", "FP8_ROW", "MXFP8", "FP8_1X128", "INT8_ROW_AFFINE", "MXFP4")
TRANSPOSED = ("FP8_128X128", "FP8_1X128", "MXFP8", "NVFP4", "INT8_ROW", "FP8_TENSOR")
SHAPES = ((384, 4096), (130, 1040), (77, 333), (3, 40000))
TIMED = ((8192, 4096), (4096, 14336), (16384, 8192))


@dataclass(frozen=True)
class Case:
    """A preset quantizer by name, and a tensor to quantize."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    copies: str = "rowwise"

    def __str__(self) -> str:
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}, {self.shape}, {self.copies}"

    @property
    def quantizer(self) -> Quantizer:
        return getattr(presets, self.name)

    @property
    def usages(self) -> tuple[str, ...]:
        return ("rowwise", "columnwise") if self.copies == "both" else (self.copies,)

    def numbers(self, device: str = "cpu") -> Tensor:
        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        g = torch.Generator().manual_seed(self.shape[0] + self.shape[1])
        x = torch.randn(self.shape, generator=g) * torch.exp2(torch.randint(-6, 7, self.shape, generator=g).float())
        x[: len(x) // 3, 5] = torch.nan
        x[len(x) // 2 :, 7] = torch.inf
        return x.to(self.dtype)

    def request(self, x: Tensor) -> Request:
        words, found = gpu.described(str(self.quantizer), False), gpu.matrix_of(self.quantizer, x.shape)
        assert not isinstance(words, str) and not isinstance(found, str)
        return Request(x, block=found[1], copies=self.copies, **words)

    def variants(self) -> list[Any]:
        """The kernels that it needs, including those that dequantize."""
        found = quantize.kernels_of(self.request(self.numbers("meta")))
        return found if self.copies == "columnwise" else [*found, dequantize.variant_of(self.codes("meta"))]

    def codes(self, device: str) -> Codes:
        with torch.device(device):
            made = {
                name: torch.empty(shape, dtype=dtype)
                for name, (shape, dtype) in self.quantizer.buffers(self.shape).items()
            }
        words, found = gpu.described(str(self.quantizer), False), gpu.matrix_of(self.quantizer, self.shape)
        assert not isinstance(words, str) and not isinstance(found, str)
        codes, scale, *rest = made.values()
        return Codes(codes, scale, rest[0] if rest else None, words["format"], found[1], self.shape[1], self.dtype)

    def check(self) -> str:
        """Check that codes, scales and values from our kernels equal the CPU's bit for bit."""
        x, q = self.numbers(), self.quantizer
        wanted = hop.quantize(q, x, usages=self.usages)
        on_gpu = x.to("cuda")
        said = self.said(on_gpu)
        if not said.endswith("GPU: chosen"):
            raise unittest.SkipTest(said)
        found = hop.quantize(q, on_gpu, usages=self.usages)
        for name, own in wanted.buffers().items():
            a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (own, found.buffers()[name].cpu()))
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {len(a)} bytes differ from the CPU's"
        back, numbers = hop.dequantize(found).cpu(), hop.dequantize(wanted)
        assert torch.equal(back.nan_to_num(7e7), numbers.nan_to_num(7e7)), "the numbers of the codes differ"
        return said.splitlines()[-1]

    def said(self, x: Tensor) -> str:
        return hop.explain(hop.quantize, self.quantizer, x, usages=self.usages)

    def timed(self) -> dict[str, Any]:
        """Microseconds, against those of a copy, and the fraction of its bandwidth."""
        x = self.numbers().nan_to_num(1.0, 1.0).to("cuda")
        if not self.said(x).endswith(("GPU: chosen", "GPU rows: chosen")):
            raise unittest.SkipTest("another kernel takes it")
        xs, r = tune.in_turns(x), self.request(x)
        made = quantize.run(r)
        calls = [
            lambda i: quantize.run(Request(**(vars(r) | {"x": xs[i % len(xs)]}))),
            lambda i: xs[i % len(xs)].clone(),
        ]
        us, copied = tune.microseconds(calls, rounds=5)
        moved = x.nbytes + sum(t.nbytes for t in made)
        share = (moved / us) / (2 * x.nbytes / copied)
        return {"us": round(us, 3), "copy_us": round(copied, 3), "bytes": moved, "share": round(share, 3)}


@dataclass(frozen=True)
class Computed(Case):
    """A norm of the last dimension, with a weight, whose result is quantized in the same kernel."""

    operation: str = "rms_norm"

    def __str__(self) -> str:
        return f"{self.operation} to {super().__str__()}"

    def vectors(self) -> list[Tensor]:
        """The weight and, for layer norm, the bias."""
        weight = torch.randn(self.shape[1], generator=torch.Generator().manual_seed(self.shape[1])).to(self.dtype)
        return [weight] if self.operation == "rms_norm" else [weight, weight.flip(0)]

    def scaled(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments of hop.scaled and hop.explain."""
        op = getattr(torch.ops.aten, self.operation).default
        return op, self.quantizer, x, [self.shape[1]], *(t.to(x.device) for t in self.vectors()), 1e-6

    def request(self, x: Tensor) -> Request:
        named: dict[str, Any] = dict(zip(("weight", "bias"), (t.to(x.device) for t in self.vectors()), strict=False))
        return replace(super().request(x), operation=self.operation, eps=1e-6, **named)

    def variants(self) -> list[Any]:
        return quantize.kernels_of(self.request(self.numbers("meta")))

    def check(self) -> str:
        """Check that codes and scales equal the CPU's bit for bit, NaN matching NaN."""
        x = self.numbers()
        wanted, on_gpu = hop.scaled(*self.scaled(x)), x.to("cuda")
        said = self.said(on_gpu)
        if not said.endswith("GPU rows: chosen"):
            raise unittest.SkipTest(said)
        found = hop.scaled(*self.scaled(on_gpu))
        assert isinstance(wanted, hop.QuantizedTensor) and isinstance(found, hop.QuantizedTensor)
        for name, own in wanted.buffers().items():
            a, b = (t.float().nan_to_num(7e7) for t in (own, found.buffers()[name].cpu()))
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ from the CPU's"
        return said.splitlines()[-1]

    def said(self, x: Tensor) -> str:
        return hop.explain(*self.scaled(x))


@dataclass(frozen=True)
class Gated(Computed):
    """A function of one half of the columns times the other half, quantized in the same kernel."""

    operation: str = "silu"

    def scaled(self, x: Tensor) -> tuple[Any, ...]:
        op = torch.ops.hop.silu_mul if self.operation == "silu" else torch.ops.hop.gelu_mul
        return op.default, self.quantizer, x, x.flip(1)

    def request(self, x: Tensor) -> Request:
        return replace(Case.request(self, x), operation=self.operation, other=x.flip(1))


def checked() -> Iterator[Case]:
    """The cases that are compared with the CPU's bits: every preset with each dtype, with rotating shapes."""
    for i, name in enumerate(NAMES):
        for j, dtype in enumerate((BF16, F32, F16)):
            yield Case(name, dtype, SHAPES[(i + j) % len(SHAPES)])
    for i, name in enumerate(TRANSPOSED):
        yield Case(name, (BF16, F32)[i % 2], SHAPES[i % 3], "both")
        yield Case(name, (BF16, F32)[i % 2], SHAPES[i % 3], "columnwise")
    for i, name in enumerate(COMPUTED):
        for j, operation in enumerate(("rms_norm", "layer_norm")):
            yield Computed(name, (BF16, F32)[(i + j) % 2], SHAPES[(i + j) % 3], operation=operation)
        for j, operation in enumerate(("silu", "gelu")):
            yield Gated(name, (BF16, F32)[(i + j) % 2], SHAPES[(i + j) % 4], operation=operation)


def timings_of() -> Iterator[Case]:
    for shape in TIMED:
        for name in NAMES[:9]:
            yield Case(name, BF16, shape)
        for name in TRANSPOSED[:3]:
            yield Case(name, BF16, shape, "both")
        for name in COMPUTED[:3]:
            yield Computed(name, BF16, shape)
            yield Gated(name, BF16, shape)


def variants() -> list[Any]:
    """The kernels of the checks and timings."""
    return list(dict.fromkeys(v for case in (*checked(), *timings_of()) for v in case.variants()))


def checks() -> Cases:
    for case in checked():
        yield str(case), case.check


def timings() -> Cases:
    for case in timings_of():
        yield str(case), case.timed
