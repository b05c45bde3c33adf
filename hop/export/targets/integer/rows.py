"""One-dimensional convolutions and pools, converted as two-dimensional ones with a single row."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hop.compat.eager import OpOverload
from hop.dispatch.operators import aten
from hop.export.targets.integer.steps import Step, Weight
from hop.export.targets.integer.values import LAST, ROWS, Codes, Order, tensor

TWO_DIMENSIONAL = {
    aten.conv1d.default: aten.conv2d.default,
    aten.conv1d.padding: aten.conv2d.padding,
    aten.conv_transpose1d.default: aten.conv_transpose2d.input,
    aten.max_pool1d.default: aten.max_pool2d.default,
    aten.avg_pool1d.default: aten.avg_pool2d.default,
    aten.adaptive_avg_pool1d.default: aten.adaptive_avg_pool2d.default,
}
_NOT_SPATIAL = ("bias", "groups", "ceil_mode", "count_include_pad")


def write_as_two_dimensional(
    step: Step, write: Callable[[Step], None], reshape: Callable[[Any, Any, Codes, Order], Any]
) -> None:
    """Convert a one-dimensional call with the two-dimensional converter `write`.

    `reshape` makes a tensor of the file into one for the given codes and layout.
    """
    x, file = step.arg(0), step.file
    if len(x.shape) != len(ROWS):
        raise NotImplementedError("one-dimensional convolutions and pools must be batched")
    picture, output = (_picture(codes) for codes in (x, step.result))
    picture.tensors[LAST] = reshape(file, tensor(file, x, ROWS), picture, LAST)
    args = (picture, *_arguments(step.op, step.args[1:]))
    write(replace(step, op=TWO_DIMENSIONAL[step.op], args=args, result=output))
    step.result.tensors[ROWS] = reshape(file, tensor(file, output, LAST), step.result, ROWS)


def _picture(codes: Codes) -> Codes:
    batch, channels, size = codes.shape
    return replace(codes, name=f"{codes.name}_picture", shape=(batch, channels, 1, size), tensors={})


def _arguments(op: OpOverload, given: Sequence[object]) -> list[object]:
    """The arguments after the tensor in two-dimensional form, with no effect along the first dimension."""
    args: list[object] = []
    for argument, value in zip(op._schema.arguments[1:], given, strict=False):
        if isinstance(value, Weight):
            args.append(replace(value, codes=value.codes.unsqueeze(2)))
        elif argument.name in _NOT_SPATIAL or isinstance(value, str) or value in (None, []):
            args.append(value)
        else:
            (number,) = value if isinstance(value, list | tuple) else [value]
            args.append([0 if argument.name in ("padding", "output_padding") else 1, number])
    return args
