"""Trials of GPU kernels that quantize and dequantize, for cutlass_kernels.trials.

A kernel is tried on tensors for which the library would choose it, and compared with the reference in plain ATen on the
CPU, bit for bit.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutlass_kernels import dequantize, quantize
from cutlass_kernels.quantizing import NORMS, Columns, Largest, Numbers, Request, Rows, Tiles
from cutlass_kernels.trials import Judged
from hop.dispatch.operators import aten
from hop.dispatch.own_operators import GELU_MUL, SILU_MUL
from hop.impls.scaled import gpu_rows, meaning
from hop.impls.scaled.calls import Call
from hop.kernels.gpu import quantize as gpu
from hop.kernels.gpu import rows as gpu_operations
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.rule import Rule
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel

T = TypeVar("T")
_MOST = 4  # tensors that a kernel is tried on
_COLUMNS = {True: (272, 16, 2064, 9216, 20_000, 40_000), False: (77, 1, 2061, 9217, 20_001, 40_001)}  # by `vector`
_ROWS = (37, 144, 3)
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_USAGES = ((copies.ROWWISE,), (copies.ROWWISE, copies.COLUMNWISE), (copies.COLUMNWISE,))
_FORMATS = {name: f for f, name in gpu.FORMATS.items()}


class Arguments(NamedTuple):
    """Arguments of quantize, on the CPU."""

    quantizer: Quantizer
    x: Tensor
    usages: Sequence[str] = (copies.ROWWISE,)
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    noise: Tensor | None = None

    @property
    def given(self) -> tuple[Tensor | None, ...]:
        return self.scale, self.zero_point, self.noise

    def requests(self, device: torch.device) -> list[Request]:
        words = gpu.described(str(self.quantizer), self.scale is not None)
        given = (None if t is None else t.to(device) for t in self.given)
        return list(gpu.requests(self.quantizer, self.x.to(device), self.usages, words, *given))


def numbers(dtype: torch.dtype, rows: int, columns: int, odd: bool = True) -> Tensor:
    """Rows of several magnitudes, with zeros, ties, NaN, infinities, subnormal and huge numbers if `odd`."""
    g = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=g)
    x *= torch.exp2(torch.randint(-3, 4, (rows, columns), generator=g).float())
    if not odd:
        return x.to(dtype)
    info = torch.finfo(dtype)
    scales = [1.0, 1e-30, 1e30, 0.0, 1.0, 1.0, info.smallest_normal / 8, 1.0, info.max / 40]
    for row in range(rows):
        x[row] = (x[row] * scales[row % len(scales)]).clamp(-info.max, info.max)
    x[:: len(scales), :40] = (torch.arange(-20, 20) / 2)[:columns]  # ties, by a scale of 1 / 2
    x[:: len(scales), 7:8] = 63.5
    for row, found in ((4, (torch.nan, -torch.nan)), (5, (torch.inf, -torch.inf, torch.nan)), (7, (-0.0, 1e-45))):
        for i, value in enumerate(found):
            x[row :: len(scales), 3 + 29 * i :: 150] = value
    return x.to(dtype)


def quantizing(kernel: Any, device: torch.device) -> Judged:
    """The judge of the kernels of cutlass_kernels.quantize and cutlass_kernels.dequantize."""
    if isinstance(kernel, Numbers):
        checks = (functools.partial(_dequantized, kernel, *c, device) for c in _blocks(kernel))
        return Judged(lambda: dequantize.compiled(kernel), itertools.islice(checks, _MOST))
    tried: Iterator[Callable[[], None]]
    if isinstance(kernel, Largest | Columns):
        tried = (functools.partial(_largest, kernel, x, device) for x in _tensors(kernel))
    elif isinstance(kernel, Rows) and kernel.operation:
        tried = (functools.partial(_operation, c, device) for c in _operations(kernel))
    else:
        tried = (functools.partial(_quantized, c, device) for c in _calls(kernel))
    return Judged(lambda: quantize.compiled(kernel), itertools.islice(tried, _MOST))


def _tensors(kernel: Any, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Tensors to quantize: odd ones first, of few rows where these are long."""
    for columns in _COLUMNS[kernel.vector]:
        for rows in _ROWS if columns < 2000 else _ROWS[2:]:
            yield numbers(dtype or kernel.x, rows, columns)


# ---- from a kernel to calls for which it is chosen


def _rule(kernel: Rows | Tiles) -> Rule:
    name, power = kernel.rule, kernel.power_of_two
    if name == "current":
        return BlockScaling(power_of_two=power) if kernel.most_of_dtype else CurrentScaling(power_of_two=power)
    if name == "mx":
        return Microscaling(rounding=kernel.rounding)
    if name == "given":
        return Static(affine=isinstance(kernel, Rows) and kernel.zero)
    return {"amax": Amax, "minmax": MinMax, "two_level": TwoLevel}[name]()


def _quantizer(kernel: Rows | Tiles) -> Quantizer:
    """A quantizer with the kernel's format, rule and blocks."""
    if isinstance(kernel, Rows):
        whole = kernel.reads and kernel.rule != "two_level"
        block = (-1, -1) if whole else (1, kernel.span or -1)
    elif kernel.square:
        block = (128, 128)
    elif kernel.straight:
        block = (-1, 1)
    else:
        block = (-1, -1) if kernel.reads and kernel.rule != "two_level" else (1, kernel.span or -1)
    noisy = isinstance(kernel, Rows) and kernel.noise != ""
    return Quantizer(_FORMATS[kernel.format.name], block, _rule(kernel), stochastic=noisy)


def _calls(kernel: Rows | Tiles) -> Iterator[Arguments]:
    """Calls of quantize for which the library chooses the kernel."""
    q = _quantizer(kernel)
    for x in _tensors(kernel):
        for usages in _USAGES if isinstance(kernel, Tiles) else _USAGES[:1]:
            call = (
                Arguments(q, x, usages, *_given(kernel, q, x)) if isinstance(kernel, Rows) else Arguments(q, x, usages)
            )
            chosen = (k for r in call.requests(torch.device("cpu")) for k in quantize.kernels_of(r))
            if kernel in chosen:
                yield call


def _given(kernel: Rows, q: Quantizer, x: Tensor) -> tuple[Tensor | None, ...]:
    """The scale, the zero point and the noise that a call gives."""
    scale = zero = noise = None
    if kernel.rule == "given":
        (shape, _), *rest = (b for name, b in q.buffers(x.shape).items() if name != "codes")
        g = torch.Generator().manual_seed(len(x))
        scale = torch.rand(shape, generator=g) + 0.1
        zero = torch.randint(-5, 6, rest[0][0], generator=g).add(q.format.zero + 5).to(rest[0][1]) if rest else None
    if kernel.noise in ("bytes", "words"):
        bits, dtype = (8, torch.uint8) if kernel.noise == "bytes" else (24, torch.int32)
        noise = torch.randint(0, 2**bits, x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return scale, zero, noise


def _operations(kernel: Rows) -> Iterator[Call]:
    """Calls of norms, functions and gated products for which the library chooses the kernel."""
    q = _quantizer(kernel)
    for x in _tensors(kernel):
        scale, zero, _ = _given(kernel, q, x)
        sizes = ((kernel.weight, 1), (kernel.bias, 1), (kernel.other, len(x)))
        others = [numbers(_DTYPES[word], rows, x.shape[1], odd=False) if word else None for word, rows in sizes]
        call = Call(*_operator(kernel.operation, q, scale, zero, x, *others))
        if quantize.kernels_of(gpu_operations.request_of(gpu_rows.asked(call)))[-1] == kernel:
            yield call


def _operator(name: str, q: Quantizer, scale: Any, zero: Any, x: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The fields of a call of scaled."""
    weight, bias, other = (t if t is None or len(t) > 1 else t[0] for t in rest)
    kwargs = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    if name in NORMS:
        vectors = (weight,) if name == "rms_norm" else (weight, bias)
        op = getattr(aten, name).default
        return op, q, scale, zero, (x, [x.shape[1]], *vectors, 1e-6), {}
    if other is not None:
        return SILU_MUL if name == "silu" else GELU_MUL, q, scale, zero, (x, other), kwargs
    return aten.silu.default if name == "silu" else aten.gelu.default, q, scale, zero, (x,), kwargs


def _blocks(kernel: Numbers) -> Iterator[tuple[Quantizer, Tensor]]:
    """Quantizers whose codes the kernel dequantizes, and tensors to quantize."""
    rule = {"mx": Microscaling(), "two_level": TwoLevel()}.get(kernel.scale) or (MinMax() if kernel.zero else Amax())
    q = Quantizer(_FORMATS[kernel.format.name], (kernel.down or -1, kernel.span or -1), rule)
    for x in _tensors(kernel, torch.float32):
        yield q, x


# ---- comparing


def _quantized(call: Arguments, device: torch.device) -> None:
    q = call.quantizer
    made = [t for r in call.requests(device) for t in quantize.run(r)]
    found = gpu.shaped(q, call.x.shape, call.usages, made)
    wanted = copies.quantize(q, call.x, tuple(call.usages), *call.given)
    _same(found, list(wanted.values()), f"{q} of {tuple(call.x.shape)}, {', '.join(call.usages)}")


def _operation(call: Call, device: torch.device) -> None:
    def moved(x: T) -> T | Tensor:
        return x.to(device) if isinstance(x, Tensor) else x

    scale, zero = moved(call.output_scale), moved(call.output_zero_point)
    rows = gpu_rows.asked(Call(call.op, call.output, scale, zero, tuple(map(moved, call.args)), call.kwargs))
    found = gpu.shaped(rows.quantizer, rows.x.shape, (copies.ROWWISE,), quantize.run(gpu_operations.request_of(rows)))
    wanted = meaning.reference(call)
    assert isinstance(wanted, list)
    _same(found, wanted, f"{call.op} to {call.output} of {tuple(rows.x.shape)}", payloads=False)


def _dequantized(kernel: Numbers, q: Quantizer, x: Tensor, device: torch.device) -> None:
    buffers = q.quantize(x)
    codes = gpu.codes_of(str(q), [b.to(device) for b in buffers.values()], _USAGES[0], x.shape, kernel.out)
    wanted = q.dequantize(buffers, x.shape).to(kernel.out)
    _same([dequantize.run(codes)], [wanted], f"the numbers of {q}, {tuple(x.shape)}", payloads=False)


def _largest(kernel: Largest | Columns, x: Tensor, device: torch.device) -> None:
    find = quantize.largest if isinstance(kernel, Largest) else quantize.columns_of
    values = x.float() if isinstance(kernel, Columns) else x.float().reshape(-1, 1)
    absent = values.isnan()
    known = values.masked_fill(absent, 0.0)
    ends = [known.clamp(min=0).amax(0), (-known).clamp(min=0).amax(0)] if kernel.both else [known.abs().amax(0)]
    if kernel.nan:
        ends[0] = ends[0].masked_fill(absent.any(0), torch.nan)
    _same(
        [find(x.to(device), kernel.both, kernel.nan)],
        [torch.cat(ends)],
        f"{kernel.name} of {tuple(x.shape)}",
        payloads=False,
    )


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str, payloads: bool = True) -> None:
    """Fail unless bits are equal; without `payloads` NaN equals NaN."""
    assert len(found) == len(wanted), f"{what}: {len(found)} results, not {len(wanted)}"
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a = a.cpu()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what}: result {i} is {a.dtype} of {tuple(a.shape)}"
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        differ = a.contiguous().view(words) != b.contiguous().view(words)
        if not payloads and a.is_floating_point():
            differ &= ~(a.float().isnan() & b.float().isnan())
        assert not bool(differ.any()), f"{what}: {int(differ.sum())} of {differ.numel()} elements of result {i} differ"
