"""Arguments of calls in the form that file formats have: pairs, windows, slices, permutations, integer biases."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.export.rewrite.biases import MOST, Channels, channel_rows
from hop.export.targets.integer.steps import Step, Weight
from hop.export.targets.integer.values import Codes


def bias_codes(x: Codes, weight: Weight, bias: Tensor | None, dim: int = 0) -> Tensor:
    """The bias in units of the sum: int32, or int64 with 16-bit activations. `dim` is the weight's channel dimension.

    Raises NotImplementedError if a sum cannot represent it, which to_integer rules out.
    """
    dtype, count = torch.int64 if x.dtype == torch.int16 else torch.int32, weight.codes.shape[dim]
    if bias is None:
        return torch.zeros(count, dtype=dtype)
    if bias.is_floating_point():
        info, rows = torch.iinfo(x.dtype), channel_rows(weight.codes, dim).to(torch.int32)
        reach = max(info.max - x.zero, x.zero - info.min)
        try:
            Channels(rows, weight.scales, bias, x.scale, reach, MOST[dtype]).check()
        except ValueError as error:
            raise NotImplementedError(str(error)) from error
        units = torch.tensor(x.scale, dtype=torch.float64) * weight.scales.to(torch.float64)
        bias = (bias.to(torch.float64) / units).round()
    return bias.to(dtype)


def pair(x: Any, default: int = 1) -> tuple[int, int]:
    if isinstance(x, int):
        return x, x
    sizes = list(x or [default, default])
    return (sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


class Window(NamedTuple):
    """The window of a pool. `more` is what ceil_mode adds to the padding at the end of each dimension."""

    is_maximum: bool
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    more: tuple[int, int] = (0, 0)


def no_ceil_mode(runtime: str, pools: str = "pools") -> str:
    """The error message for a pool whose last windows reach beyond the padding."""
    return (
        f"{runtime}'s {pools} do not support ceil_mode where windows reach beyond the padding; pad before, or use "
        "ceil_mode=False"
    )


def window_of(step: Step, runtime: str = "") -> Window:
    """The window of a pool. Raises if no runtime supports the pool, or if `runtime` has no ceil_mode and needs it."""
    x, name = step.arg(0), step.op._schema.name.removeprefix("aten::")
    if not name.endswith("pool2d") or len(x.shape) != 4:
        raise NotImplementedError("only batched one- or two-dimensional pools are supported")
    is_maximum = name == "max_pool2d"
    if name.startswith("adaptive"):
        kernel = pair([n // m for n, m in zip(x.shape[2:], step.result.shape[2:], strict=True)])
        return Window(is_maximum, kernel, kernel, (0, 0))
    kernel = pair(step.arg(1))
    if is_maximum and pair(step.arg(4, 1)) != (1, 1):
        raise NotImplementedError("dilated pools are not supported; use dilation=1")
    stride, pad, more = pair(step.arg(2) or kernel), pair(step.arg(3, 0), 0), (0, 0)
    if step.arg(5 if is_maximum else 4, False):
        each = zip(x.shape[2:], step.result.shape[2:], kernel, stride, pad, strict=True)
        more = pair([max((out - 1) * s + k - n - 2 * p, 0) for n, out, k, s, p in each])
    if runtime and any(more):
        raise NotImplementedError(no_ceil_mode(runtime))
    return Window(is_maximum, kernel, stride, pad, more)


def permutation(step: Step, x: Codes) -> list[int]:
    """The permutation of dimensions that a step performs, found with distinct sizes."""
    sizes = [2 + i for i in range(len(x.shape))]
    return [n - 2 for n in step.op(torch.empty(sizes, device="meta"), *step.args[1:]).shape]


def slice_range(step: Step, x: Codes, name: str) -> tuple[int, int, int, int]:
    """The dimension of a slice, narrow or select, its start, stop and stride."""
    dim = step.arg(1, 0) % len(x.shape)
    size = x.shape[dim]
    if name == "slice":
        start, stop = slice(step.arg(2) or 0, step.arg(3)).indices(size)[:2]
        return dim, start, stop, step.arg(4, 1)
    start = step.arg(2) % max(size, 1)
    return dim, start, start + (step.arg(3) if name == "narrow" else 1), 1
