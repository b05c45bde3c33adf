"""Views, copies and padding of codes in an ONNX file."""

import torch

from hop.export.targets.integer.arguments import permutation, slice_range
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import Codes, tensor
from hop.export.targets.qoperator.results import check_convention, give, like
from hop.numerics.requantization import Division


def viewed(step: Step) -> None:
    check_convention(step, Division)
    x, name, file = step.arg(0), step.op._schema.name.removeprefix("aten::"), step.file
    source = tensor(file, x)
    if name in ("permute", "transpose", "t", "movedim"):
        give(step, like(x, step.result.shape, step), "Transpose", [source], perm=permutation(step, x))
    elif name in ("slice", "narrow", "select"):
        _slice(step, x, name)
    elif name in ("clone", "contiguous", "alias", "detach"):
        give(step, like(x, x.shape, step), "Identity", [source])
    else:
        sizes = file.numbers(step.result.shape, torch.int64, "sizes")
        give(step, like(x, step.result.shape, step), "Reshape", [source, sizes])


def _slice(step: Step, x: Codes, name: str) -> None:
    dim, start, stop, stride = slice_range(step, x, name)
    constants = [step.file.numbers([n], torch.int64, "place") for n in (start, max(start, stop), dim, stride)]
    shape = list(x.shape)
    shape[dim] = max(0, -(-(stop - start) // stride))
    give(step, like(x, shape, step), "Slice", [tensor(step.file, x), *constants])


def padded(step: Step) -> None:
    """Pad codes with a constant code."""
    x, flat, fill = step.arg(0), list(step.arg(1)), int(step.arg(2, 0))
    sides = [(0, 0)] * (len(x.shape) - len(flat) // 2) + list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    pads = step.file.numbers([n for side in zip(*sides, strict=True) for n in side], torch.int64, "sides")
    give(step, like(x, step.result.shape, step), "Pad", [tensor(step.file, x), pads, step.file.zero(fill, x.dtype)])
