"""The result of a node in an ONNX file: adjust the sizes, units and range of its codes."""

from collections.abc import Sequence

import torch

from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import Codes, new, tensor
from hop.export.targets.qoperator.file import CONTRIB, File
from hop.numerics.requantization import Convention


def check_convention(step: Step, kind: type[Convention]) -> None:
    if step.convention is not None and not isinstance(step.convention, kind):
        raise NotImplementedError(
            f"its convention is {step.convention}; onnxruntime's operator computes {kind.__name__}: use the target "
            "ONNX_INTEGER"
        )


def units(file: File, x: Codes) -> list[str]:
    return [file.scale(x.scale), file.zero(x.zero, x.dtype)]


def operand(file: File, x: Codes) -> list[str]:
    """A tensor, its scale and its zero point."""
    return [tensor(file, x), *units(file, x)]


def like(x: Codes, shape: Sequence[int], step: Step) -> Codes:
    """Codes with the units of x and other sizes, as an intermediate of the step."""
    return Codes(f"{step.result.name}_of", tuple(shape), x.scale, x.zero, x.dtype)


def give(step: Step, output: Codes, op: str, inputs: Sequence[str], domain: str = "", **attributes: object) -> None:
    """Add a node that computes `output`, then reshape, requantize and clamp it to the step's result."""
    file, result = step.file, step.result
    low, high = _bounds(step)
    rest: list[tuple[str, Codes, list[str]]] = []
    if output.shape != result.shape:
        shape = file.numbers(result.shape, torch.int64, "sizes")
        rest.append(("Reshape", like(output, result.shape, step), [shape]))
    if output.dtype != result.dtype:
        raise NotImplementedError(f"its codes are {result.dtype}, but its operand's are {output.dtype}; use one dtype")
    if not output.is_alike(result):
        rest.append(("QLinearConcat", result, units(file, output)))
    if low is not None or high is not None:
        bounds = ["" if n is None else file.zero(n, result.dtype) for n in (low, high)]
        rest.append(("Clip", result, bounds))
    x = file.node(op, inputs, _output(step, output, not rest), domain, **attributes)
    for i, (name, codes, more) in enumerate(rest):
        out = _output(step, codes, i == len(rest) - 1)
        if name == "QLinearConcat":
            x = file.node(name, [*units(file, result), x, *more], out, CONTRIB, axis=0)
        else:
            x = file.node(name, [x, *more], out)
    result.tensors[result.plain] = x


def _output(step: Step, codes: Codes, is_last: bool) -> str:
    if is_last:
        return new(step.file, step.result, step.result.plain)
    return step.file.tensor(f"{step.result.name}_whole", codes.shape, codes.dtype)


def _bounds(step: Step) -> list[int | None]:
    """The range of the fused activation, in codes."""
    info, scale = torch.iinfo(step.result.dtype), torch.tensor(step.result.scale)
    codes = [None if b is None else int((torch.tensor(b) / scale).round()) for b in (step.low, step.high)]
    return [None if n is None else min(max(n + step.result.zero, info.min), info.max) for n in codes]


def sized(file: File, x: str, shape: Sequence[int], name: str) -> str:
    """x reshaped, unless it has that shape."""
    if file.sizes[x] == tuple(shape):
        return x
    output = file.tensor(name, shape, file.dtypes[x])
    return file.node("Reshape", [x, file.numbers(shape, torch.int64, "sizes")], output)
