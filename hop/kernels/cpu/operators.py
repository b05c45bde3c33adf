"""Register the operators hop_native::* of the native library (native/torch/library.cpp): fake rules and autograd.

The operators take tensors, sizes, and a textual description of everything that is fixed (native/torch/factor.h,
output.h). They check shapes, strides, dtypes and memory before reading, and raise RuntimeError if these do not match
the description. They may occur in compiled, exported and packaged programs. The functions here call them below
autograd, because our own operators have derivative rules; calling torch.ops.hop_native directly with a tensor that
requires a gradient raises an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from hop.compat import eager, inductor
from hop.compat.eager import OpOverload
from hop.numerics import spelling
from hop.numerics.blocks import counts
from hop.numerics.packing import PACKED, packed_size

R = TypeVar("R")
_below_autograd = eager.below_autograd
_library: torch.library.Library | None = None  # keeps the registrations alive


def _result(description: str) -> torch.dtype:
    words = description.split()
    return spelling.dtype(words[words.index("output") + 1])


def _product(lhs: Tensor, *rest: Any) -> Tensor:
    n, description = rest[10:12]
    return lhs.new_empty([*lhs.shape[:-1], n], dtype=_result(description))


def _pack(codes: Tensor, description: str) -> Tensor:
    words = description.split()[description.split().index("rhs") + 1 :]
    narrow, columns = words[0] in ("int4", "uint4", "e2m1"), "columns" in words
    rows, k = reversed(codes.shape) if columns else (codes.shape[0], codes.shape[1] * (2 if narrow else 1))
    return codes.new_empty([(rows + 31) // 32, (k + 63) // 64, 2, 8 if narrow else 16, 64])


def _convolution(x: Tensor, *rest: Any) -> Tensor:
    n, description = rest[-2:]
    dtype = _result(description)
    words = description.split(" output")[0].split()
    read = dict(word.split("=") for word in words if "=" in word)
    lists = [[int(v) for v in read[name].split(",")] for name in ("kernel", "stride", "before", "after", "dilation")]
    sizes = [
        (size + before + after - d * (k - 1) - 1) // s + 1
        for size, k, s, before, after, d in zip(x.shape[2:], *lists, strict=True)
    ]
    if "channels_last" in words:
        return x.new_empty([x.shape[0], *sizes, n], dtype=dtype).movedim(-1, 1)
    return x.new_empty([x.shape[0], n, *sizes], dtype=dtype)


def _words(description: str) -> dict[str, str]:
    parts = (word.partition("=") for word in description.split())
    return {name: value for name, _, value in parts}


def _buffers(x: Tensor, description: str) -> list[Tensor]:
    """Empty buffers of the quantized x."""
    words = _words(description)
    flat, bits = "flat" in words, int(words["bits"])
    rows = [x.numel()] if flat else list(x.shape)
    codes, dtype = list(x.shape), _STORED[words["codes"]]
    if bits in PACKED:
        rows_or_one = rows or [1]
        codes, dtype = [*rows_or_one[:-1], packed_size(rows_or_one[-1], bits)], torch.uint8
    result = [x.new_empty(codes, dtype=dtype)]
    scale = _STORED[words.get("scale", "float32")]
    result.append(x.new_empty(counts(rows, _sizes(words["block"])), dtype=scale))
    if "outer" in words:
        result.append(x.new_empty(counts(rows, _sizes(words["outer"])), dtype=torch.float32))
    elif int(words.get("affine", 0)):
        result.append(x.new_empty(result[1].shape, dtype=_STORED[words["codes"]]))
    return result


_STORED = {"int8": torch.int8, "uint8": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_STORED["float32"] = torch.float32


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _quantize(x: Tensor, *rest: Any) -> list[Tensor]:
    return _buffers(x, rest[-1])


def _dequantize(codes: Tensor, *rest: Any) -> Tensor:
    shape, description = rest[-2:]
    return codes.new_empty(shape, dtype=spelling.dtype(_words(description).get("result", "float32")))


_FAKES: dict[str, Callable[..., object]] = {"product": _product, "convolution": _convolution, "pack": _pack}


def _noise(seed: Tensor, shape: Sequence[int], stream: int, bits: int = 8) -> Tensor:
    return seed.new_empty(shape, dtype=torch.uint8 if bits == 8 else torch.int32)


def _function(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _rows(x: Tensor, *rest: Any) -> list[Tensor]:
    words, _, quantizer = rest[-1].partition(" quantizer ")
    known = _words(words)
    dtype = known.get("floats") or (None if quantizer else known.get("result", "float32"))
    floats = [] if dtype is None else [x.new_empty(x.shape, dtype=spelling.dtype(dtype))]
    return floats + (_buffers(x, quantizer) if quantizer else [])


def _attention(q: Tensor, *rest: Any) -> Tensor:
    v = rest[3]
    return q.new_empty([*q.shape[:-1], v.shape[-1]], dtype=spelling.dtype(_words(rest[-1])["result"]))


def _group_product(x: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    words = rest[6]
    return x.new_empty([*x.shape[:-1], codes.shape[0]], dtype=spelling.dtype(_words(words)["result"]))


def _search_scales(x: Tensor, scale: Tensor, zero_point: Tensor | None, *rest: object) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (scale, zero_point) if t is not None]


_FAKES["search_scales"] = _search_scales
_FAKES |= {"attention": _attention, "step_": lambda *args: None, "noise": _noise, "function": _function, "rows": _rows}
_FAKES["group_product"] = _group_product
_FAKES |= {"quantize": _quantize, "quantize_product": _quantize, "dequantize": _dequantize}


def load(path: str) -> None:
    """Load the library, which defines the operators, and register their rules. Raises OSError
    if it cannot be loaded.
    """
    global _library
    torch.ops.load_library(path)
    _library = torch.library.Library("hop_native", "FRAGMENT")
    for name, fake in _FAKES.items():
        op = getattr(torch.ops.hop_native, name).default
        torch.library.register_fake(f"hop_native::{name}", _described(name, fake), lib=_library)
        _library.impl(name, _guarded(op), "Autograd")
        inductor.stores_results(op)
        globals()[name] = _called(op)


def _described(name: str, fake: Callable[..., R]) -> Callable[..., R]:
    def described(*args: object) -> R:
        devices = {x.device for x in _tensors(args)}
        if len(devices) > 1:  # PyTorch runs the fake rule as soon as one tensor has no data
            raise RuntimeError(f"hop_native::{name}: tensors are on several devices, {sorted(map(str, devices))}")
        try:
            return fake(*args)
        except (LookupError, ValueError) as error:
            given = spelling.shown(args[-1])
            raise RuntimeError(f"hop_native::{name}: {given} is not a valid description for these tensors") from error

    return described


def _called(op: OpOverload) -> Callable[..., object]:
    def call(*args: object) -> object:
        with _below_autograd():
            return op(*args)

    return call


def _guarded(op: OpOverload) -> Callable[..., object]:
    def guarded(*args: object) -> object:
        watched = torch.is_grad_enabled() or eager.is_dual_level_open() or eager.is_forward_ad_active()
        for x in _tensors(args) if watched else ():
            if (x.requires_grad and torch.is_grad_enabled()) or eager.has_tangent(x):
                raise RuntimeError(
                    f"{op.name()}: an operand needs a gradient or has a tangent, and the operator has no derivative; "
                    "call hop.scaled, hop.quantize or similar functions, which have one, or pass detached tensors"
                )
        with _below_autograd():
            return op(*args)

    return guarded


def _tensors(args: Sequence[object]) -> list[Tensor]:
    return [x for v in args for x in (v if isinstance(v, list | tuple) else (v,)) if isinstance(x, Tensor)]


def _missing(*args: object) -> NoReturn:
    raise RuntimeError("the native operators are not loaded")


product: Callable[..., Tensor] = _missing
"""hop_native::product(lhs, lhs_scale, lhs_zero_point, lhs_block_scale, rhs, rhs_scale, rhs_zero_point, rhs_block_scale,
bias, output_scale, output_zero_point, n, description[, rhs_code_sums]).
"""
convolution: Callable[..., Tensor] = _missing
"""(x, x_scale, x_zero_point, weight, weight_scale, bias, output_scale, output_zero_point, n, description)."""
quantize: Callable[..., list[Tensor]] = _missing
"""(x, scale, zero_point, noise, description): codes, scales, and zero points or the amax of two-level scales."""
quantize_product: Callable[..., list[Tensor]] = _missing
"""(x, factor, noise, stream, description): quantize x times a factor. With a stream of at least 0, noise is a seed."""
dequantize: Callable[..., Tensor] = _missing
"""(codes, scale, second, shape, description)."""
step_: Callable[..., None] = _missing
"""(p, grad, buffers, numbers, seed, stream, description): an optimizer step; native/torch/update.cpp."""
noise: Callable[..., Tensor] = _missing
"""(seed, shape, stream, bits=8): random integers, 8 bits in uint8 or 24 bits in int32."""
function: Callable[..., Tensor] = _missing
"""(x, name): apply a function of hop.numerics.functions to float32, bfloat16 or float16; returns float32."""
rows: Callable[..., list[Tensor]] = _missing
"""(x, other, weight, bias, scale, zero_point, description): a function, gated product, norm or softmax of rows.

Returns floats, or codes, scales, and zero points or the amax of two-level scales; native/torch/rows.cpp.
"""
attention: Callable[..., Tensor] = _missing
"""(q, q_scale, k, k_scale, v, v_scale, mask, scale, is_causal, description): 4-D int8 attention with float results;
native/torch/attention.cpp.
"""
group_product: Callable[..., Tensor] = _missing
"""(x, codes, high_codes, scale, offset, outer_scale, outer_offset, bias, description): a product with a weight that has
a scale per group of its rows; native/torch/groups.cpp.
"""
search_scales: Callable[..., list[Tensor]] = _missing
"""(x, scale, zero_point, outer, values, description): scales of least squared error, and zero points in float32;
native/torch/search.cpp.
"""
pack: Callable[..., Tensor] = _missing
"""(codes, description): pack a matrix of codes as hop.layouts.Tiled does."""
