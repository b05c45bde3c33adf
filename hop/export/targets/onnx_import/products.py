"""Matrix products, convolutions and pools, of values or of codes."""

from collections.abc import Callable, Container, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.dispatch.operators import aten
from hop.export.targets.onnx_import.calls import Call, Converter

_CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}
_MAXIMA = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}
_MEANS = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
Run = Callable[..., Tensor]


def _plain(op: OpOverload, *args: object) -> Tensor:
    return op(*args)


# ---- matrices


def matmul(a: Tensor, b: Tensor, run: Run = _plain) -> Tensor:
    """numpy's matmul, by the operators that integer runtimes have: linear for a matrix on the right, else bmm."""
    if b.dim() == 2 and a.dim() >= 1:
        return run(aten.linear.default, a, b.t())
    if a.dim() < 2 or b.dim() < 2:
        one, other = a.dim() == 1, b.dim() == 1
        y = matmul(a.unsqueeze(0) if one else a, b.unsqueeze(-1) if other else b, run)
        y = y.squeeze(-1) if other else y
        return y.squeeze(-1 if other else -2) if one else y
    batch = list(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    x, y = (v if list(v.shape[:-2]) == batch else v.expand([*batch, *v.shape[-2:]]) for v in (a, b))
    if len(batch) == 1:
        return run(aten.bmm.default, x, y)
    flat = run(aten.bmm.default, *(v.reshape([-1, *v.shape[-2:]]) for v in (x, y)))
    return flat.reshape([*batch, a.shape[-2], b.shape[-1]])


def gemm(a: Tensor, b: Tensor, bias: Tensor | None, a_transposed: int, b_transposed: int) -> Tensor:
    """A matrix product plus a bias that is a row, or broadcast."""
    a, b = a.t() if a_transposed else a, b if b_transposed else b.t()
    if bias is None or (bias.numel() == b.shape[0] and list(bias.shape) in ([b.shape[0]], [1, b.shape[0]])):
        return aten.linear.default(a, b, None if bias is None else bias.reshape(-1))
    return aten.linear.default(a, b) + bias


def general(call: Call) -> Tensor:
    """Gemm."""
    a, b, bias = call.tensor(0), call.tensor(1), call.optional(2)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    transposed = call.attribute("transA", 0), call.attribute("transB", 0)
    if alpha != 1.0:
        y = gemm(a, b, None, *transposed) * alpha
        return y if bias is None else y + bias * beta
    return gemm(a, b, bias if bias is None or beta == 1.0 else bias * beta, *transposed)


# ---- windows


def windows(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and the padding before and after each dimension, as ONNX lists it."""
    n = len(kernel)
    strides, dilations = (call.integers(name) or [1] * n for name in ("strides", "dilations"))
    pads, how = call.integers("pads") or [0] * (2 * n), call.attribute("auto_pad", "NOTSET")
    if len(strides) != n or len(dilations) != n or len(pads) != 2 * n or min([*strides, *dilations]) < 1:
        raise ValueError(f"its strides {strides}, dilations {dilations} or pads {pads} do not fit {n} dimensions")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * n)
        for d, (size, k, s, by) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
            total = max((-(-size // s) - 1) * s + by * (k - 1) + 1 - size, 0)
            less, more = total // 2, total - total // 2
            pads[d], pads[n + d] = (less, more) if how == "SAME_UPPER" else (more, less)
    elif how == "VALID":
        pads = [0] * (2 * n)
    elif how != "NOTSET":
        call.refuse(f"its auto_pad is {how!r}")
    if min(pads) < 0:
        call.refuse(f"its pads are {pads}, and must not be negative")
    return strides, dilations, pads


def _padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """x and the padding that remains: none if sides differ, because x is padded then."""
    n = len(pads) // 2
    if list(pads[:n]) == list(pads[n:]):
        return x, list(pads[:n])
    sides = [side for d in reversed(range(n)) for side in (pads[d], pads[n + d])]
    return aten.constant_pad_nd.default(x, sides, value), [0] * n


def _spatial(call: Call, x: Tensor, known: Container[int]) -> int:
    if (n := x.dim() - 2) not in known:
        call.refuse(f"its input has {x.dim()} dimensions, and must have 3 to 5: a batch, channels, and 1 to 3 more")
    return n


def _kernel(call: Call, sizes: Sequence[int]) -> None:
    given = call.integers("kernel_shape")
    if given is not None and given != list(sizes):
        raise ValueError(f"its kernel_shape is {given}, and its weight has {list(sizes)}")


def convolution(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, run: Run = _plain) -> Tensor:
    n, kernel = _spatial(call, x, _CONVOLUTIONS), list(w.shape[2:])
    _kernel(call, kernel)
    if len(kernel) != n:
        raise ValueError(f"its input has the shape {tuple(x.shape)}, and its weight {tuple(w.shape)}")
    strides, dilations, pads = windows(call, x.shape[2:], kernel)
    x, padding = _padded(x, pads, 0)
    return run(_CONVOLUTIONS[n], x, w, bias, strides, padding, dilations, call.attribute("group", 1))


def _convolution(call: Call) -> Tensor:
    return convolution(call, call.tensor(0), call.tensor(1), call.optional(2))


def _transposed(call: Call) -> Tensor:
    """A transposed convolution; sides with different padding are cut off its whole result."""
    x, w, bias = call.tensor(0), call.tensor(1), call.optional(2)
    n, kernel = _spatial(call, x, _TRANSPOSED), list(w.shape[2:])
    _kernel(call, kernel)
    if call.integers("output_shape") is not None or call.only("auto_pad", "NOTSET", "VALID") == "VALID":
        call.refuse("output_shape and auto_pad are not supported; give pads")
    strides, dilations, pads = windows(call, x.shape[2:], kernel)
    extra, groups = call.integers("output_padding") or [0] * n, call.attribute("group", 1)
    if pads[:n] == pads[n:]:
        return _TRANSPOSED[n](x, w, bias, strides, pads[:n], extra, groups, dilations)
    y = _TRANSPOSED[n](x, w, bias, strides, [0] * n, extra, groups, dilations)
    for d in range(n):
        y = aten.slice.Tensor(y, d + 2, pads[d], y.shape[d + 2] - pads[n + d])
    return y


def maximum_pool(call: Call, x: Tensor) -> Tensor:
    n, kernel = _spatial(call, x, _MAXIMA), call.integers("kernel_shape") or []
    call.only("storage_order", 0)
    if len(call.node.outputs) > 1:
        call.refuse("its second result, indices, is not supported")
    strides, dilations, pads = windows(call, x.shape[2:], kernel)
    x, padding = _padded(x, pads, float("-inf"))
    return _MAXIMA[n](x, kernel, strides, padding, dilations, bool(call.attribute("ceil_mode", 0)))


def average_pool(call: Call, x: Tensor) -> Tensor:
    n, kernel = _spatial(call, x, _MEANS), call.integers("kernel_shape") or []
    strides, dilations, pads = windows(call, x.shape[2:], kernel)
    counts, ceil = bool(call.attribute("count_include_pad", 0)), bool(call.attribute("ceil_mode", 0))
    if any(d != 1 for d in dilations):
        call.refuse(f"its dilations are {dilations}, and must be 1")
    x, padding = _padded(x, pads)
    if padding != pads[:n] and (ceil or not counts):
        call.refuse("different padding on opposite sides needs count_include_pad=1 and ceil_mode=0")
    return _MEANS[n](x, kernel, strides, padding, ceil, counts)


def global_average_pool(call: Call, x: Tensor) -> Tensor:
    """A mean over all positions, as an adaptive pool of one window: onnxruntime's ReduceMean has other arithmetic."""
    n = _spatial(call, x, (1, 2, 3))
    flat = x if n == 2 else x.reshape([*x.shape[:2], 1, -1])
    y = F.adaptive_avg_pool2d(flat, 1)
    return y if n == 2 else y.reshape([*x.shape[:2], *[1] * n])


def _global_maximum_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.amax(list(range(2, x.dim())), keepdim=True)


def _resize(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.only("mode", "nearest", "linear")
    n = _spatial(call, x, (1, 2, 3))
    how = call.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = call.attribute("nearest_mode", "round_prefer_floor")
    for name, default in (("cubic_coeff_a", -0.75), ("exclude_outside", 0), ("extrapolation_value", 0.0)):
        call.attribute(name, default)
    call.only("antialias", 0)
    call.only("keep_aspect_ratio_policy", "stretch")
    call.has(1)  # the region of interest of another mode
    if call.integers("axes") not in (None, list(range(x.dim()))):
        call.refuse("axes are not supported")
    if call.has(3):
        sizes = call.numbers(3)
    else:
        scales = call.constant(2).elements or ()
        sizes = [int(n * s) for n, s in zip(x.shape, scales, strict=True)]
    if sizes[:2] != list(x.shape[:2]):
        call.refuse(f"it resizes the batch or channels: {tuple(x.shape)} to {sizes}")
    whole = all(out % n == 0 for n, out in zip(x.shape[2:], sizes[2:], strict=True))
    if mode == "nearest" and ((how, rounding) == ("asymmetric", "floor") or (whole and how == "half_pixel")):
        return getattr(aten, f"upsample_nearest{n}d").vec(x, sizes[2:], None)
    if mode == "linear" and how in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        name = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[n]
        return getattr(aten, name).vec(x, sizes[2:], how == "align_corners", None)
    call.refuse(f"mode {mode} with {how} and {rounding} is not supported")
    return None


PRODUCTS: dict[str, Converter] = {
    "MatMul": lambda call: matmul(call.tensor(0), call.tensor(1)),
    "Gemm": general,
    "Conv": _convolution,
    "ConvTranspose": _transposed,
    "AveragePool": lambda call: average_pool(call, call.tensor(0)),
    "GlobalAveragePool": lambda call: global_average_pool(call, call.tensor(0)),
    "GlobalMaxPool": _global_maximum_pool,
    "Resize": _resize,
}
"""The converter of each operator; it raises NotImplementedError for an unsupported call."""
