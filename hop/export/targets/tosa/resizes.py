"""RESIZE in a .tosa file: nearest-neighbor and bilinear."""

import torch

from hop.dispatch.operators import aten
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import LAST, tensor
from hop.export.targets.tosa.scales import Scale, clamped, rescaled, result, same, sums
from hop.numerics.integer.resize import TosaResizeBilinear, TosaStep, sizes_of
from hop.numerics.interpolation import BILINEAR
from hop.numerics.requantization import WideFixedPoint

_NEAREST = {aten.upsample_nearest2d.default: 1, aten.upsample_nearest2d.vec: 1}


def repeated(step: Step) -> None:
    """Nearest-neighbor resizing of images by integer factors."""
    x, file = step.arg(0), step.file
    sizes = list(zip(x.shape[2:], step.result.shape[2:], strict=True)) if len(x.shape) == 4 else [(2, 1)]
    if step.op not in _NEAREST or any(out % n for n, out in sizes):
        raise NotImplementedError("nearest-neighbor resizing is supported for images and integer factors only")
    factors = [out // n for n, out in sizes]
    # The scale is 2f/2 and the offset half an element earlier, so that the nearest element is the one to the left.
    scale = [n for f in factors for n in (2 * f, 2)]
    offset = [1 - f for f in factors]
    border = [2 * (out - 1) - (n - 1) * 2 * f - (f - 1) for (n, out), f in zip(sizes, factors, strict=True)]
    shape = [step.result.shape[d] for d in LAST]
    inputs = [tensor(file, x, LAST), file.shape(scale), file.shape(offset), file.shape(border)]
    resized = file.made("RESIZE", inputs, f"{step.result.name}_near", shape, x.dtype, mode="NEAREST")
    same(step, resized, x, LAST)


def interpolated(step: Step) -> None:
    """Bilinear resizing: weighted sums of neighbors, and a RESCALE by the reciprocal of their total weight."""
    x, file = step.arg(0), step.file
    if step.op not in BILINEAR or not isinstance(step.convention, TosaResizeBilinear):
        raise NotImplementedError(
            f"{step.op} by {step.convention}: images are resized by TosaResizeBilinear: use the target TOSA_1_0"
        )
    sizes, align_corners = sizes_of(step.op, step.args[1:], x.shape[2:], "RESIZE")
    scale, offset, border, parts = [], [], [], 1
    for n, size in zip(x.shape[2:], sizes, strict=True):
        along = TosaStep.of(n, size, align_corners)
        _check_range(along, n, size)
        scale += [along.parts, along.step]
        offset.append(along.offset)
        border.append(along.border(n, size))
        parts *= along.parts
    shape = [step.result.shape[d] for d in LAST]
    inputs = [tensor(file, x, LAST), file.shape(scale), file.shape(offset), file.shape(border)]
    total = file.made("RESIZE", inputs, f"{step.result.name}_sums", shape, sums(x.dtype), mode="BILINEAR")
    one, by = torch.ones(1, dtype=torch.float64), torch.tensor([float(parts)], dtype=torch.float64)
    is_wide = x.dtype == torch.int16
    by_parts = Scale.of(WideFixedPoint(), one, one, by) if is_wide else Scale.number(one / by)
    alike = x.is_alike(step.result)
    output = result(step, LAST) if alike else file.tensor(f"{step.result.name}_mean", shape, x.dtype)
    output = rescaled(file, total, output, by_parts, most=parts * 2 ** (15 if is_wide else 7))
    if alike:
        clamped(step, output, LAST)
    else:
        same(step, output, x, LAST)


def _check_range(step: TosaStep, n: int, size: int) -> None:
    """Raise for parameters outside RESIZE's bounds, as specified for level 8K."""
    border = step.border(n, size)
    if step.parts > 2**11 or step.step >= 16 * step.parts or not -step.parts <= step.offset < 16 * step.parts:
        raise NotImplementedError(
            f"RESIZE from {n} to {size} elements needs {step.parts} parts and a step of {step.step}; TOSA allows 2048 "
            "parts and steps below 16 elements: use sizes with a larger common divisor, or closer to each other"
        )
    if not -16 * step.parts <= border < step.parts:
        raise NotImplementedError(
            f"RESIZE from {n} to {size} elements leaves a border of {border / step.parts:.1f}; TOSA allows -16 or "
            "more: use more elements"
        )
