"""Converters of nodes that rearrange, select, join or fill elements; most of them work on codes, too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hop.dispatch.operators import aten
from hop.export.targets.onnx_import.calls import Call, Converter, Numbers, Value
from hop.export.targets.onnx_import.reading import Constant


def _reshape(call: Call) -> Tensor:
    x, sizes = call.tensor(0), call.numbers(1)
    keeps = not call.attribute("allowzero", 0)
    return x.reshape([x.shape[d] if keeps and isinstance(n, int) and n == 0 else n for d, n in enumerate(sizes)])


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", 1)
    if not -x.dim() <= axis <= x.dim():
        raise IndexError(f"its axis is {axis}, and must be from {-x.dim()} to {x.dim()}")
    axis += x.dim() if axis < 0 else 0
    if axis == 1 and x.dim() > 1:
        return aten.flatten.using_ints(x, 1)
    front = 1
    for n in x.shape[:axis]:
        front = front * n
    return x.reshape([front, -1])


def _squeeze(call: Call) -> Tensor:
    x = call.tensor(0)
    axes = call.axes(x.dim())
    if axes is None:
        axes = [d for d, n in enumerate(x.shape) if n == 1]
    if any(x.shape[a] != 1 for a in axes):
        raise ValueError(f"its axes {axes} of the shape {tuple(x.shape)} are not all of size 1")
    return x.squeeze(axes)


def _unsqueeze(call: Call) -> Tensor:
    x = call.tensor(0)
    count = len(call.integers("axes") or (call.numbers(1) if call.has(1) else []))
    for axis in sorted(call.axes(x.dim() + count) or []):
        x = x.unsqueeze(axis)
    return x


def _transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.permute(call.integers("perm") or list(reversed(range(x.dim()))))


def _expand(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.expand(torch.broadcast_shapes(x.shape, tuple(call.numbers(1))))


def _tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.numbers(1))


def _concatenate(call: Call) -> Tensor:
    return torch.cat(call.tensors(), call.attribute("axis", 0))


def _split(call: Call) -> tuple[Tensor, ...]:
    x = call.tensor(0)
    axis, count = call.axis(call.attribute("axis", 0), x.dim()), len(call.node.outputs)
    sizes = call.integers("split") or (call.numbers(1) if call.has(1) else None)
    if call.attribute("num_outputs", count) != count:
        raise ValueError(f"its num_outputs is not {count}, the number of its results")
    if sizes is None:
        size = -(-x.shape[axis] // count)
        sizes = [*[size] * (count - 1), x.shape[axis] - size * (count - 1)]
    return torch.split(x, sizes, axis)


def _slice(call: Call) -> Tensor:
    x = call.tensor(0)
    starts, ends = call.numbers(1), call.numbers(2)
    axes = [call.axis(a, x.dim()) for a in call.numbers(3)] if call.has(3) else list(range(len(starts)))
    steps = call.numbers(4) if call.has(4) else [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            call.refuse(f"its step is {step}, and must be positive")
        x = aten.slice.Tensor(x, axis, start, end, step)
    return x


def _gather(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.axis(call.attribute("axis", 0), x.dim())
    places = call.inputs[1]
    if isinstance(places, Numbers):
        values = [int(v) for v in call.numbers(1)]
        if any(not -x.shape[axis] <= v < x.shape[axis] for v in values):
            raise IndexError(f"its indices {values} do not fit the size {x.shape[axis]}")
        if not places.rank:
            return aten.select.int(x, axis, values[0])
        return x.index_select(axis, torch.tensor([v % x.shape[axis] for v in values]))
    index = call.tensor(1)
    if axis == 0 and x.dim() == 2 and index.dim():
        return aten.embedding.default(x, index)
    index = torch.where(index < 0, index + x.shape[axis], index)
    sizes = [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    return x.index_select(axis, index.reshape(-1)).reshape(sizes)


def _gather_elements(call: Call) -> Tensor:
    x, index = call.tensor(0), call.tensor(1)
    axis = call.axis(call.attribute("axis", 0), x.dim())
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


def _pad(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.only("mode", "constant", "reflect", "edge")
    pads, rank = call.integers("pads") or call.numbers(1), x.dim()
    value = call.attribute("value", 0.0) if "value" in call.node.attributes else call.number(2) or 0
    axes = [call.axis(a, rank) for a in call.numbers(3)] if call.has(3) else list(range(rank))
    if len(pads) != 2 * len(axes):
        raise ValueError(f"it has {len(pads)} pads for {len(axes)} dimensions")
    before, after = (dict(zip(axes, half, strict=True)) for half in (pads[: len(axes)], pads[len(axes) :]))
    sides = [side for d in reversed(range(rank)) for side in (before.get(d, 0), after.get(d, 0))]
    if mode == "constant":
        return aten.constant_pad_nd.default(x, sides, value)
    while len(sides) > 2 and sides[-2:] == [0, 0]:
        sides = sides[:-2]
    return F.pad(x, sides, {"reflect": "reflect", "edge": "replicate"}[mode])


def _shape(call: Call) -> Numbers:
    if not call.has(0):
        call.refuse("its input is missing")
    x = call.inputs[0]
    sizes = (len(x.values),) * x.rank if isinstance(x, Numbers) else tuple(x.shape)
    start, end = call.attribute("start", 0), call.attribute("end", len(sizes))
    return Numbers(sizes[start:end], 1)


def _size(call: Call) -> Numbers:
    count: Any = 1
    for n in call.tensor(0).shape:
        count = count * n
    return Numbers((count,), 0)


def _filled(call: Call) -> Tensor:
    value = call.attribute("value", None) or Constant.of(torch.zeros(1))
    if not isinstance(value, Constant) or value.elements is None or len(value.elements) != 1:
        call.refuse("its attribute value is not a tensor with one element")
    return torch.full(call.numbers(0), value.elements[0], dtype=value.data.dtype)


def _range(call: Call) -> Tensor:
    start, end, step = (call.number(i) for i in range(3))
    if start is None or end is None or step is None:
        call.refuse("it needs three inputs")
    known = call.known[0]
    return torch.arange(start, end, step, dtype=torch.int64 if known is None else known.data.dtype)


def _triangle(call: Call) -> Tensor:
    x, k = call.tensor(0), int(call.number(1) or 0)
    return (torch.triu if call.attribute("upper", 1) else torch.tril)(x, k)


def _depth_to_space(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attribute("blocksize", 1)
    if call.only("mode", "DCR", "CRD") == "CRD":
        return F.pixel_shuffle(x, size)
    n, c, h, w = x.shape
    parts = x.reshape([n, size, size, c // (size * size), h, w]).permute([0, 3, 4, 1, 5, 2])
    return parts.reshape([n, c // (size * size), h * size, w * size])


def _space_to_depth(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attribute("blocksize", 1)
    n, c, h, w = x.shape
    parts = x.reshape([n, c, h // size, size, w // size, size]).permute([0, 3, 5, 1, 2, 4])
    return parts.reshape([n, c * size * size, h // size, w // size])


def _dropout(call: Call) -> Tensor:
    call.mark_read("ratio", "seed", 1)
    if call.number(2) or len([name for name in call.node.outputs if name]) > 1:
        call.refuse("dropout in training mode, or with its mask as a result, is not supported")
    return call.tensor(0)


def _identity(call: Call) -> Value:
    return call.inputs[0] if call.has(0) else call.refuse("its input is missing")


VIEWS: dict[str, Converter] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concatenate,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Pad": _pad,
    "Shape": _shape,
    "Size": _size,
    "ConstantOfShape": _filled,
    "Range": _range,
    "Trilu": _triangle,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Dropout": _dropout,
    "Identity": _identity,
}
"""The converter of each operator; it raises NotImplementedError for an unsupported call."""

KEEP_UNITS = frozenset(
    (
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Expand",
        "Tile",
        "Split",
        "Slice",
        "Gather",
        "Identity",
    )
)
"""Operators whose results have the scale and zero point of their first input."""
