"""Views, copies and padding of codes in a .tflite file."""

import torch

from hop.export.targets.integer.arguments import permutation, slice_range
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import Codes, Order, common_order, new, tensor
from hop.export.targets.tflite.file import File

_MOST_PADDED = 5  # dimensions: kernels/internal/reference/pad.h, PadKernelMaxDimensionCount


def viewed(step: Step) -> None:
    x, name = step.arg(0), step.op._schema.name.removeprefix("aten::")
    if name in ("clone", "contiguous", "alias", "detach"):
        order = common_order([x])
        _as_is(step, x, order)
    elif name in ("permute", "transpose", "t", "movedim"):
        by = permutation(step, x)
        if x.is_alike(step.result) and (step.low, step.high) == (None, None):  # the same tensors, relabeled
            step.result.tensors.update({tuple(by.index(d) for d in order): i for order, i in x.tensors.items()})
            return
        inputs = [tensor(step.file, x), step.file.integers(f"{step.result.name}_order", by)]
        step.write_alike(x, "TRANSPOSE", inputs, step.result.plain, "TransposeOptions")
    elif name in ("slice", "narrow", "select"):
        _slice(step, x, name)
    else:
        shape = step.file.integers(f"{step.result.name}_shape", step.result.shape)
        step.write_alike(
            x,
            "RESHAPE",
            [tensor(step.file, x), shape],
            step.result.plain,
            "ReshapeOptions",
            newShape=list(step.result.shape),
        )


def reshaped(file: File, index: int, codes: Codes, order: Order) -> int:
    """Reshape a tensor of the file for `codes` in a layout."""
    shape = [codes.shape[d] for d in order]
    inputs = [index, file.integers(f"{codes.name}_shape", shape)]
    return file.operator("RESHAPE", inputs, new(file, codes, order), "ReshapeOptions", {"newShape": shape})


def _as_is(step: Step, x: Codes, order: Order) -> None:
    if x.is_alike(step.result) and (step.low, step.high) == (None, None):
        step.result.tensors.update(x.tensors)
        return
    index = tensor(step.file, x, order)
    output = step.file.operator("QUANTIZE", [index], new(step.file, step.result, order), "QuantizeOptions")
    if (step.low, step.high) != (None, None):
        output = step.bounded(output, order)
    step.result.tensors[order] = output


def _slice(step: Step, x: Codes, name: str) -> None:
    dim, start, stop, stride = slice_range(step, x, name)
    order = x.plain if name == "select" else common_order([x])
    ranges = [(start, stop, stride) if d == dim else (0, x.shape[d], 1) for d in order]
    begin, end, strides = (
        step.file.integers(f"{step.result.name}_{what}", values)
        for what, values in zip(("begin", "end", "strides"), zip(*ranges, strict=True), strict=True)
    )
    result = step.result.plain if name == "select" else order
    mask = 1 << dim if name == "select" else 0
    inputs = [tensor(step.file, x, order), begin, end, strides]
    step.write_alike(x, "STRIDED_SLICE", inputs, result, "StridedSliceOptions", shrinkAxisMask=mask)


def padded(step: Step) -> None:
    """Pad codes with a constant code."""
    x, flat, fill = step.arg(0), list(step.arg(1)), int(step.arg(2, 0))
    if any(n < 0 for n in flat):
        raise NotImplementedError(f"TFLite's padding must be 0 or more, got {flat}; slice instead")
    order, rank = common_order([x]), len(x.shape)
    if rank > _MOST_PADDED:
        raise NotImplementedError(f"TFLite pads at most {_MOST_PADDED} dimensions, got {rank}; merge some by reshape")
    sides = [(0, 0)] * (rank - len(flat) // 2) + list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    given = torch.tensor([sides[d] for d in order], dtype=torch.int32)
    name = step.result.name
    inputs = [tensor(step.file, x, order), step.file.tensor(f"{name}_sides", given.shape, torch.int32, data=given)]
    if fill == x.zero:
        step.write("PAD", inputs, order, "PadOptions")
        return
    units = ([x.scale], [x.zero], 0)
    inputs.append(step.file.tensor(f"{name}_fill", (1,), x.dtype, units, torch.tensor([fill])))
    step.write("PADV2", inputs, order, "PadV2Options")
