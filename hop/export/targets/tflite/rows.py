"""Convolutions and pools of one dimension, written as those of pictures with one row."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hop.dispatch.operators import aten
from hop.export.targets.tflite.steps import Step, Weight
from hop.export.targets.tflite.values import LAST, ROWS, Codes, Order, tensor

OF_PICTURES = {
    aten.conv1d.default: aten.conv2d.default,
    aten.max_pool1d.default: aten.max_pool2d.default,
    aten.avg_pool1d.default: aten.avg_pool2d.default,
    aten.adaptive_avg_pool1d.default: aten.adaptive_avg_pool2d.default,
}
_OF_NO_DIMENSION = ("bias", "groups", "ceil_mode", "count_include_pad")


def of_rows(step: Step, write: Callable[[Step], None], reshape: Callable[[Any, Any, Codes, Order], Any]) -> None:
    """A call of one dimension: `write` writes that of two; `reshape` takes a file, a tensor of it, the codes that the
    tensor that it makes shall hold, and their layout."""
    x, file = step.arg(0), step.file
    if len(x.shape) != len(ROWS):
        raise NotImplementedError("convolutions and pools of one dimension are written in batches")
    picture, output = (_picture(codes) for codes in (x, step.result))
    picture.tensors[LAST] = reshape(file, tensor(file, x, ROWS), picture, LAST)
    args = (picture, *_arguments(step.op, step.args[1:]))
    write(replace(step, op=OF_PICTURES[step.op], args=args, result=output))
    step.result.tensors[ROWS] = reshape(file, tensor(file, output, LAST), step.result, ROWS)


def _picture(codes: Codes) -> Codes:
    batch, channels, size = codes.shape
    return replace(codes, name=f"{codes.name}_picture", shape=(batch, channels, 1, size), tensors={})


def _arguments(op: Any, given: Sequence[Any]) -> list[Any]:
    """Those after the tensor, of two dimensions: nothing happens along the first."""
    args: list[Any] = []
    for argument, value in zip(op._schema.arguments[1:], given, strict=False):
        if isinstance(value, Weight):
            args.append(replace(value, codes=value.codes.unsqueeze(2)))
        elif argument.name in _OF_NO_DIMENSION or value in (None, []):
            args.append(value)
        else:
            (number,) = value if isinstance(value, list | tuple) else [value]
            args.append([0 if argument.name == "padding" else 1, number])
    return args
