"""Average pooling in float64, with an order of addition, so that every route gives the same bits.

Along the last dimension, the elements of a window are added from the first to the last; then these sums along the
dimension before it, and so on. The number of elements divides the total. PyTorch's kernels have orders of their own,
and Inductor multiplies by the rounded 1/n.

Sources of the windows: PyTorch, aten/src/ATen/native/Pool.h (pooling_output_shape), AdaptivePooling.h (start_index,
end_index).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.compat.eager import OpOverload
from hop.compat.pytree import Kwargs
from hop.numerics import memory_format

_aten = torch.ops.aten
ADAPTIVE = (_aten.adaptive_avg_pool1d.default, _aten.adaptive_avg_pool2d.default, _aten.adaptive_avg_pool3d.default)

Sums = tuple[Tensor, Tensor | int]  # sums of windows along one dimension, and how many elements each has


def sizes(size: object, count: int) -> list[Any]:
    """An argument for `count` dimensions, of which all may share one number."""
    given = list(size) if isinstance(size, list | tuple) else [size]
    return given * count if len(given) == 1 else given


def has_order(op: OpOverload, rest: Sequence[object], before: Sequence[object]) -> bool:
    """Whether `averaged` adds in its order: not for adaptive pooling of sizes that a graph leaves open, whose windows
    have no largest size. `rest` are the arguments after the tensor, `before` its sizes along the pooled dimensions."""
    return op not in ADAPTIVE or all(
        n is None or (isinstance(size, int) and isinstance(n, int))
        for n, size in zip(sizes(rest[0], len(before)), before, strict=True)
    )


def averaged(x: Tensor, op: OpOverload, rest: Sequence[Any], kwargs: Kwargs, dims: Sequence[int]) -> Tensor:
    """op(x, *rest, **kwargs) for float64 x, where windows slide along `dims`, the last ones."""
    if not has_order(op, rest, [x.shape[d] for d in dims]):
        return op(x, *rest, **kwargs)
    given = dict(zip((a.name for a in op._schema.arguments[1:]), rest, strict=False)) | kwargs
    y, counts = x, []
    for i in reversed(range(len(dims))):
        y, count = (
            _adaptive(y, dims[i], given, i, len(dims)) if op in ADAPTIVE else _fixed(y, dims[i], given, i, len(dims))
        )
        counts.append(count if isinstance(count, int) else count.reshape([-1, *[1] * (x.dim() - 1 - dims[i])]))
    divisor = given.get("divisor_override")
    if divisor is None:
        divisor = 1
        for count in counts:
            divisor = divisor * count
    # A tensor, because tensor / number may become a product with 1 / number.
    y = y / (torch.full_like(y, divisor) if isinstance(divisor, int) else divisor.to(y.dtype))
    return memory_format.like(y, x)


def _fixed(x: Tensor, d: int, given: Mapping[str, object], i: int, count: int) -> Sums:
    """The windows of avg_pool along a dimension, the i-th of `count`."""
    size = sizes(given["kernel_size"], count)[i]
    stride = sizes(given.get("stride") or given["kernel_size"], count)[i]
    pad = sizes(given.get("padding", 0), count)[i]
    ceil, includes_pad = given.get("ceil_mode", False), given.get("count_include_pad", True)
    n = x.shape[d]
    number = (n + 2 * pad - size + (stride - 1 if ceil else 0)) // stride + 1
    if ceil:  # windows that start in the padding behind x are left out
        number = torch.sym_min(number, (n + pad - 1) // stride + 1)
    total = _added(x, d, number, size, stride, pad)
    if not ceil and (includes_pad or pad == 0):
        return total, size
    starts = torch.arange(number, device=x.device) * stride - pad
    ends = (starts + size).clamp(max=n + pad if includes_pad else n)
    return total, ends - (starts if includes_pad else starts.clamp(min=0))


def _adaptive(x: Tensor, d: int, given: Mapping[str, object], i: int, count: int) -> Sums:
    """The windows of adaptive_avg_pool along a dimension, the i-th of `count`."""
    n, number = x.shape[d], sizes(given["output_size"], count)[i]
    if number is None or n % number == 0:
        size = 1 if number is None else n // number
        return _added(x, d, n if number is None else number, size, size, 0), size
    windows = torch.arange(number, device=x.device)
    starts, ends = windows * n // number, ((windows + 1) * n + number - 1) // number
    shape = [-1, *[1] * (x.dim() - 1 - d)]
    total = x.index_select(d, starts)
    for j in range(1, max(-(-(k + 1) * n // number) - k * n // number for k in range(number))):
        element = x.index_select(d, (starts + j).clamp(max=n - 1))
        total = total + torch.where((starts + j < ends).reshape(shape), element, 0.0)
    return total, ends - starts


def _added(x: Tensor, d: int, number: Any, size: int, stride: int, pad: int) -> Tensor:
    """The sums of `number` windows along a dimension."""
    length = (number - 1) * stride + size
    if pad or not tracing.known_equal(length, x.shape[d]):
        x = torch.constant_pad_nd(x, [*[0, 0] * (x.dim() - 1 - d), pad, length - pad - x.shape[d]])
    parts = [_aten.slice.Tensor(x, d, j, length - size + j + 1, stride) for j in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
