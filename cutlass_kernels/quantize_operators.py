"""The leaf operator that quantizes a matrix on a GPU, by our own kernel.

    cutlass_kernels::quantize(x, format, rule, block, ...) -> Tensor[]

It stands in graphs as any operator of PyTorch, has no gradient of its own, and is captured in CUDA graphs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutlass_kernels import missing, prebuilt, quantize
from cutlass_kernels.quantizing import Request, check

_library = torch.library.Library("cutlass_kernels", "FRAGMENT")
_library.define(
    "quantize(Tensor x, str format, str rule, int[] block, *, str copies='rowwise', Tensor? scale=None, "
    "Tensor? zero_point=None, Tensor? noise=None, int stream=-1, float floor=0., bool power_of_two=False, bool most_of_dtype=False, "
    "str rounding='') -> Tensor[]"
)


def declines(r: Request, capability: tuple[int, int]) -> str | None:
    """Why no kernel takes a request on a GPU of a compute capability, or None."""
    if capability != (9, 0):
        return f"for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    if (reason := missing()) is None:
        return quantize.declines(r)
    pack = prebuilt.pack()
    return reason if pack is None else quantize.declines(r) or quantize.lacks(r, pack)


def quantized(r: Request) -> list[Tensor]:
    """The codes, the scales, and the zero points or the outer amax, where there are such: those of `Request.results`,
    contiguous. They equal what hop's reference gives, bit for bit.

    Raises:
        TypeError, ValueError: an argument has a dtype, shape or device that Request does not describe.
        NotImplementedError: no kernel takes it.
    """
    given = {name: value for name, value in vars(r).items() if name not in ("x", "format", "rule", "block")}
    return torch.ops.cutlass_kernels.quantize.default(r.x, r.format, r.rule, list(r.block), **given)


def _quantize(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> list[Tensor]:
    r = _checked(x, format, rule, block, **given)
    reason = declines(r, torch.cuda.get_device_capability(x.device))
    if reason is not None:
        raise NotImplementedError(f"quantize: no kernel takes this: {reason}")
    with torch.cuda.device(x.device):
        return quantize.run(r)


def _describe(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> list[Tensor]:
    r = _checked(x, format, rule, block, **given)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in r.results()]


def _checked(x: Tensor, format: str, rule: str, block: Sequence[int], **given: Any) -> Request:
    r = Request(x, format, rule, tuple(block), **given)
    check(r)
    return r


_library.impl("quantize", _quantize, "CUDA")
torch.library.register_fake("cutlass_kernels::quantize", _describe, lib=_library)
