"""The leaf operators that quantize and dequantize matrices on a GPU, by our own kernels.

    cutlass_kernels::quantize(x, format, rule, block, ...) -> Tensor[]
    cutlass_kernels::dequantize(codes, scale, second, format, block, columns, dtype) -> Tensor

They stand in graphs as any operator of PyTorch, have no gradient of their own, and are captured in CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import cache, dequantize, missing, quantize, trust
from cutlass_kernels.dequantize import Codes
from cutlass_kernels.devices import capability_of
from cutlass_kernels.product import number, without_data
from cutlass_kernels.quantizing import Request, check

_library = torch.library.Library("cutlass_kernels", "FRAGMENT")
_library.define(
    "quantize(Tensor x, str format, str rule, int[] block, *, str copies='rowwise', Tensor? scale=None, "
    "Tensor? zero_point=None, Tensor? noise=None, int stream=-1, float floor=0., bool power_of_two=False, "
    "bool most_of_dtype=False, str rounding='', str operation='', Tensor? weight=None, Tensor? bias=None, "
    "Tensor? other=None, float eps=0.) -> Tensor[]"
)
_library.define(
    "dequantize(Tensor codes, Tensor scale, Tensor? second, str format, int[] block, int columns, ScalarType dtype) "
    "-> Tensor"
)


def declines(r: "Request | Codes", capability: tuple[int, int]) -> str | None:
    """Why no kernel takes a request, or codes, on a GPU of a compute capability; or None."""
    if capability != (9, 0):
        return f"for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    asked = quantize.declines(r) if isinstance(r, Request) else dequantize.declines(r)
    if asked is not None or (missing() is None and trust.mode() == "all"):
        return asked
    try:
        kernels = _kernels(r)
    except ValueError as error:  # an unknown size, in a trace
        return str(error)
    if (reason := cache.declines(*kernels)) is not None:
        return reason
    device = r.x.device if isinstance(r, Request) else r.codes.device
    untrusted = (trust.declines(kernel, device) for kernel in kernels)
    return next(filter(None, untrusted), None) if device.type == "cuda" else None


def _kernels(r: "Request | Codes") -> list[Any]:
    """The kernels that a request, or codes, take; sizes may be symbols."""
    if isinstance(r, Request):
        return quantize.kernels_of(r if _is_known(r.x) else replace(r, x=without_data(r.x)))
    return [dequantize.variant_of(replace(r, columns=number(r.columns)))]


def _is_known(x: Tensor) -> bool:
    return all(isinstance(size, int) for size in x.shape)


def quantized(r: Request) -> list[Tensor]:
    """The codes, the scales, and the zero points or the outer amax, where there are such: those of `Request.results`,
    contiguous. They equal what hop's reference gives, bit for bit.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or device that Request does not describe.
        NotImplementedError: no kernel takes it.
    """
    given = {name: value for name, value in vars(r).items() if name not in ("x", "format", "rule", "block")}
    return torch.ops.cutlass_kernels.quantize.default(r.x, r.format, r.rule, list(r.block), **given)


def dequantized(c: Codes) -> Tensor:
    """The numbers, (R, C) in `c.dtype`, contiguous: hop's, bit for bit, but for what bits a NaN has.

    Raises:
        TypeError, ValueError: an argument is not what Codes describes. NotImplementedError: no kernel takes it.
    """
    return torch.ops.cutlass_kernels.dequantize.default(
        c.codes, c.scale, c.second, c.format, list(c.block), c.columns, c.dtype
    )


def _quantize(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> list[Tensor]:
    r = _checked(x, format, rule, block, **given)
    _taken("quantize", r, x)
    with torch.cuda.device(x.device):
        return quantize.run(r)


def _taken(name: str, r: "Request | Codes", x: Tensor) -> None:
    reason = declines(r, capability_of(x.device))
    if reason is not None:
        raise NotImplementedError(f"{name}: no kernel takes this: {reason}")


def _describe(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> list[Tensor]:
    r = _checked(x, format, rule, block, **given)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in r.results()]


def _checked(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> Request:
    r = Request(x, format, rule, tuple(block), **given)
    check(r)
    return r


def _dequantize(codes: Tensor, *rest: Any) -> Tensor:
    c = _checked_codes(codes, *rest)
    _taken("dequantize", c, codes)
    with torch.cuda.device(codes.device):
        return dequantize.run(c)


def _describe_numbers(codes: Tensor, *rest: Any) -> Tensor:
    c = _checked_codes(codes, *rest)
    return codes.new_empty((codes.shape[0], c.columns), dtype=c.dtype)


def _checked_codes(codes: Tensor, scale: Tensor, second: Any, format: str, block: Any, *rest: Any) -> Codes:
    c = Codes(codes, scale, second, format, tuple(block), *rest)
    dequantize.check(c)
    return c


_library.impl("quantize", _quantize, "CUDA")
_library.impl("dequantize", _dequantize, "CUDA")
torch.library.register_fake("cutlass_kernels::dequantize", _describe_numbers, lib=_library)
torch.library.register_fake("cutlass_kernels::quantize", _describe, lib=_library)
