"""Quantize on GPUs with the operators of cutlass_kernels, imported when a GPU needs them.

A tensor is reshaped to a matrix whose rows contain the blocks; format and rule are described by plain words.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_kernels import trust
from cutlass_kernels.devices import capability_of
from hop.compat import eager, tracing
from hop.compat.pytree import Args
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.gpu.product import takes
from hop.numerics import blocks, copies, memory_format
from hop.numerics.format import is_equal
from hop.numerics.formats import E2M1, E4M3, E5M2, E8M0, INT4, INT8, UINT4, UINT8, Format
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Reciprocal
from hop.numerics.rule import Rule
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel

if TYPE_CHECKING:
    from cutlass_kernels.dequantize import Codes
    from cutlass_kernels.quantizing import Request

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 128
FORMATS = {INT8: "s8", UINT8: "u8", INT4: "s4", UINT4: "u4", E4M3: "e4m3", E5M2: "e5m2", E2M1: "e2m1"}


trust.JUDGES |= dict.fromkeys(("Rows", "Tiles", "Columns", "Largest", "Numbers"), "hop.impls.scaled.trials:quantizing")


@functools.cache
def kernels() -> ModuleType:
    """The module cutlass_kernels.quantize_operators, which registers cutlass_kernels::quantize."""
    from cutlass_kernels import quantize_operators

    return quantize_operators


if torch.cuda.is_available():  # a compiled program loaded from a cache contains the operator without tracing
    kernels()


# ---- descriptions


def format_name(f: Format) -> str | None:
    return next((name for known, name in FORMATS.items() if is_equal(f, known)), None)


_Words = dict[str, Any]
_RULES: dict[type[Rule], Callable[[Any], _Words]] = {
    Amax: lambda rule: {"rule": "amax", "floor": rule.floor},
    MinMax: lambda rule: {"rule": "minmax"},
    CurrentScaling: lambda rule: {"rule": "current", "floor": rule.eps, "power_of_two": rule.power_of_two},
    BlockScaling: lambda rule: {
        "rule": "current",
        "floor": rule.eps,
        "power_of_two": rule.power_of_two,
        "most_of_dtype": True,
    },
    Microscaling: lambda rule: {"rule": "mx", "rounding": rule.rounding},
    TwoLevel: lambda rule: {"rule": "two_level"},
    Static: lambda rule: {"rule": "given"},
}


@functools.lru_cache(maxsize=1024)
def described(quantizer: str, given: bool) -> _Words:
    """Describe a quantizer for the operator, with a given or computed scale. Raises Declined if it is not supported."""
    q = Quantizer.parse(quantizer)
    name, words = format_name(q.format), _RULES.get(type(q.scale))
    if type(q) is not Quantizer or q.layout is not None or name is None or words is None:
        raise Declined(f"for int8, int4, fp8 and fp4 in the plain form by {[t.__name__ for t in _RULES]}, not {q}")
    rule = q.scale
    if isinstance(rule, Microscaling) and not (is_equal(rule.exponent, E8M0) and q.format.is_float and not given):
        raise Declined(f"for floats with e8m0 exponents from the rule, not {q}")
    if isinstance(rule, TwoLevel) and not (is_equal(rule.inner, E4M3) and all(b == -1 for b in rule.outer)):
        raise Declined(f"for e4m3 scales with one amax per tensor, not {q}")
    if isinstance(rule, CurrentScaling) and (not q.format.is_float or (given and rule.power_of_two)):
        raise Declined(f"for floats, and for power-of-two scales from the rule, not {q}")
    if isinstance(rule, Static) and isinstance(rule.requantization, Reciprocal):
        raise Declined("divides by the scale, and does not multiply by its reciprocal")
    found = {"format": name} | words(rule)
    return {"format": name, "rule": "given"} if given and not isinstance(rule, TwoLevel) else found


def matrix_of(q: Quantizer, shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The sizes of the matrix for a tensor, and of its blocks. Raises Declined if the operator
    does not support them.
    """
    if q.flat:
        return (1, math.prod(shape)), (1, q.block[0])
    sizes = blocks.per_dimension(q.block, len(shape))
    if not shape or all(b == -1 for b in sizes):
        return (math.prod(shape[:-1]), shape[-1] if shape else 1), (-1, -1)
    if len(shape) > 1 and sizes[-1] == 1 and all(b == -1 for b in sizes[:-1]) and q.format.bits == 8:
        return (math.prod(shape[:-1]), shape[-1]), (-1, 1)
    first = next((i for i, (b, n) in enumerate(zip(sizes, shape, strict=True)) if b != 1 and n != 1), len(shape) - 1)
    rows, columns = math.prod(shape[:first]), math.prod(shape[first:])
    if all(b == -1 for b in sizes[first:]):
        return (rows, columns), (1, -1)
    if first == len(shape) - 1:
        return (rows, columns), (1, sizes[-1])
    if first == len(shape) - 2 == 0 and sizes == (_TILE, _TILE):
        return (shape[0], shape[1]), (_TILE, _TILE)
    raise Declined(f"for blocks within rows, tiles of {_TILE} and the whole tensor, not {q.block} of {tuple(shape)}")


# ---- quantize


_Given = tuple[Tensor | None, Tensor | None, Tensor | None]
_ELSEWHERE = "for tensors on GPUs, in eager mode and in programs compiled for this process"


def check(asked: object, device: torch.device) -> None:
    """Raise Declined unless a kernel supports the request on a device."""
    if not torch.cuda.is_available():
        raise Declined("there is no GPU")
    decline(kernels().declines(asked, capability_of(device)))


def _prepare(call: Args) -> Plan:
    quantizer, x, scale, zero_point, noise, usages, *product = call
    if not takes(x):
        raise Declined(_ELSEWHERE)
    if any(p is not None for p in product):
        raise Declined("x must be multiplied by its factor first")
    shape = tracing.hints(x.shape)
    if shape is None or 0 in shape or x.dtype not in _DTYPES:
        kinds = "non-empty float32, bfloat16 and float16 tensors of known sizes"
        raise Declined(f"for {kinds}, not {x.dtype} of {shape}")
    if memory_format.is_channels_last(x) or x.is_neg():
        raise Declined("for tensors that are neither channels_last nor negated views")
    q = Quantizer.parse(quantizer)
    words = described(quantizer, scale is not None)
    if scale is None:
        decline(q.scale.missing())
    if copies.COLUMNWISE in usages and q.hadamard is not None:
        raise Declined("the column-wise copy needs a Hadamard transform first")
    if isinstance(q.scale, Microscaling | TwoLevel) and q.block[-1] == 1:
        raise Declined(f"for blocks along rows, not {q}")
    for asked in requests(q, x, usages, words, scale, zero_point, noise):
        check(asked, x.device)

    return quantized


def quantized(
    quantizer: str, x: Tensor, scale: object, zero_point: object, noise: object, usages: Sequence[str], *product: None
) -> list[Tensor]:
    """Compute the buffers with the kernels."""
    q, words, made = Quantizer.parse(quantizer), described(quantizer, scale is not None), list[Tensor]()
    with eager.below_autograd():
        for asked in requests(q, x, usages, words, scale, zero_point, noise):
            made += kernels().quantized(asked)
    return shaped(q, x.shape, usages, made)


def requests(q: Quantizer, x: Tensor, usages: Sequence[str], words: _Words, *given: Any) -> "Iterator[Request]":
    """Yield the requests to the operator: a single one for both copies if it supports that."""
    found = [matrix_of(q, x.shape if usage == copies.ROWWISE else copies.columns(x.shape)) for usage in usages]
    one = words["rule"] != "given" and given[2] is None and x.dim() >= 2 and copies.COLUMNWISE in usages
    if one and q.block[-1] != 1:
        _, block = matrix_of(q, [math.prod(x.shape[:-1]), x.shape[-1]])
        if all(own == block for _, own in found):
            named = "both" if len(usages) > 1 else "columnwise"
            yield request(q, x.reshape(copies.columns(x.shape)[::-1]), block, words, given, copies=named)
            return
    for usage, (size, block) in zip(usages, found, strict=True):
        scale, zero_point, noise = given
        wise = (lambda t: t) if usage == copies.ROWWISE else _columns
        noise = None if noise is None else wise(noise).reshape(size)
        yield request(q, wise(x).reshape(size), block, words, (scale, zero_point, noise))


def request(q: Quantizer, x: Tensor, block: tuple[int, int], words: _Words, given: _Given, **others: Any) -> "Request":
    """Create the request for a matrix, with the given scale, zero point and noise; `others` are further fields."""
    from cutlass_kernels.quantizing import Request

    scale, zero_point, noise = given
    r = Request(x, block=block, **words, **others)
    counts = (1, 1) if words["rule"] == "two_level" else r.counts
    named = {"scale": None if scale is None else scale.to(torch.float32).reshape(counts), "noise": noise}
    if zero_point is not None:
        codes = zero_point.round() if zero_point.is_floating_point() else zero_point
        named["zero_point"] = codes.clamp(q.format.min, q.format.max).to(r.elements.dtype).reshape(counts)
    known: dict[str, object] = {n: t for n, t in named.items() if t is not None}
    return replace(r, **known)


def _columns(x: Tensor) -> Tensor:
    return x.reshape(copies.columns(x.shape)[::-1]).t()


def shaped(q: Quantizer, size: Sequence[int], usages: Sequence[str], made: list[Tensor]) -> list[Tensor]:
    """Reshape the operator's results for matrices to the buffers of a tensor."""
    result: dict[str, Tensor] = {}
    for usage in usages:
        own = list(size) if usage == copies.ROWWISE else copies.columns(size)
        for name, (shape, dtype) in q.buffers(own).items():
            buffer = made.pop(0)
            buffer = buffer if buffer.dtype == dtype else buffer.view(dtype)
            result.setdefault(copies.name_of(q, usage, name), buffer.reshape(shape))
    return list(result.values())


# ---- dequantize


def _prepare_back(call: Args) -> Plan:
    quantizer, buffers, usages, sizes, dtype = call
    if not all(takes(b) for b in buffers):
        raise Declined(_ELSEWHERE)
    shape = tracing.hints(sizes)
    if shape is None or 0 in shape or dtype not in _DTYPES or copies.ROWWISE not in usages:
        kinds = "row-wise copies of known sizes, to float32, bfloat16 and float16"
        raise Declined(f"for {kinds}; not {dtype} of {shape}")
    described(quantizer, False)
    if any(memory_format.is_channels_last(b) or b.is_neg() for b in buffers):
        raise Declined("for buffers that are neither channels_last nor negated views")
    matrix_of(Quantizer.parse(quantizer), shape)
    check(codes_of(*call), buffers[0].device)
    return dequantized


def codes_of(
    quantizer: str, buffers: Sequence[Tensor], usages: Sequence[str], sizes: Sequence[int], dtype: torch.dtype
) -> "Codes":
    """Describe codes to the kernel that dequantizes them."""
    from cutlass_kernels.dequantize import Codes

    q = Quantizer.parse(quantizer)
    (rows, columns), block = matrix_of(q, sizes)
    counts = tuple(1 if b == -1 else -(-n // b) for n, b in zip((rows, columns), block, strict=True))
    codes, scale, *rest = buffers[: 1 + len(q.stored())]
    second = rest[0].reshape((1, 1) if isinstance(q.scale, TwoLevel) else counts) if rest else None
    format = described(quantizer, False)["format"]
    return Codes(codes.reshape(rows, -1), scale.reshape(counts), second, format, block, columns, dtype)


def dequantized(*call: Any) -> Tensor:
    """Dequantize with the kernel."""
    with eager.below_autograd():
        return kernels().dequantized(codes_of(*call)).reshape(tuple(call[3]))


def _prepare_fake(call: Args) -> Plan:
    quantizer, *given, _ = call
    if Quantizer.parse(quantizer).adds_noise():
        raise Declined("noise instead of rounding")
    _prepare((quantizer, *given, (copies.ROWWISE,)))
    return fake_quantized


def fake_quantized(
    quantizer: str, x: Tensor, scale: object, zero_point: object, noise: object, gradient: str
) -> Tensor:
    """Quantize and dequantize with the kernels."""
    buffers = quantized(quantizer, x, scale, zero_point, noise, (copies.ROWWISE,))
    return dequantized(quantizer, buffers, (copies.ROWWISE,), x.shape, x.dtype)


DEQUANTIZE = Kernel("GPU", _prepare_back)
FAKE_QUANTIZE = Kernel("GPU", _prepare_fake)
QUANTIZE = Kernel("GPU", _prepare)
