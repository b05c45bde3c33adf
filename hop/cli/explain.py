"""hop explain: show which kernel runs a call."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import hop
from hop import QuantizedTensor, Quantizer
from hop.cli import arguments
from hop.cli.output import show, show_json
from hop.compat.pytree import Kwargs, tree_leaves, tree_map_only
from hop.numerics.spelling import JsonObject


def explain(
    op: Annotated[str, typer.Argument(help="An operator, such as aten.linear.default or aten.linear.")],
    output: Annotated[str, typer.Argument(help="The dtype or the preset of the result.")],
    arg: Annotated[list[str], typer.Argument(help="The operator's arguments, in order.")],
    device: Annotated[str, typer.Option(help="The device of the tensors, such as cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which kernel runs a call, and why each one before it declined.

    An ARG is a tensor, such as int8:128x256 (a dtype and sizes) or INT8_ROW:128x256 (random floats quantized with a
    preset of hop.presets); a number; a list such as [1,1]; none, true or false; or a keyword argument such as
    stride=[2,2]. After the sizes, .t transposes the tensor, .pack packs a weight with hop.pack, and .channels_last
    selects that memory format. The call is one of hop.scaled if it has a preset, and of hop.out_dtype otherwise.

    Examples:
        hop explain aten.mm int32 int8:128x1024 int8:1024x256
        hop explain aten.linear bf16 INT8_ROW:16x1024 INT8_ROW:256x1024.pack f32:256
        hop explain aten.linear.default bf16 bf16:1x1024 INT4_32:256x1024
        hop explain aten.conv2d f32 INT8_TENSOR:1x8x9x9 INT8_CONV:16x8x3x3 stride=[2,2]
    """
    where = _device(device)
    operator, result = arguments.operator(op), arguments.output(output)
    args, kwargs = arguments.values(arg, where)
    if isinstance(result, Quantizer):
        kwargs = {f"output_{name}": x for name, x in arguments.static_arguments(result, where).items()} | kwargs
    asked = kernels(operator, result, args, kwargs)
    tensors = _result_type(operator, result, args, kwargs)
    if as_json:
        given = [*map(arguments.described, args), *(f"{k}={arguments.described(v)}" for k, v in kwargs.items())]
        show_json({"op": str(operator), "output": output, "arguments": given, "result": tensors, "kernels": asked})
        return
    for kernel in asked:
        show(f"{kernel['name']}: {kernel['reason'] or 'chosen'}", style=None if kernel["reason"] else "green")


def kernels(op: object, result: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[JsonObject]:
    """The kernels tried for a call, in order; the last one accepts it and has no reason to decline."""
    lines = [line.split(": ", 1) for line in hop.explain(op, result, *args, **kwargs).splitlines()]
    return [
        {"name": name, "chosen": words == "chosen", "reason": None if words == "chosen" else words}
        for name, words in lines
    ]


def _result_type(op: object, result: object, args: list[object], kwargs: Kwargs) -> str | None:
    """The type and shape of the call's result, from meta tensors; None if the operator cannot tell without running.

    Raises the operator's errors for shapes that do not fit, which kernels do not check.
    """
    is_scaled = isinstance(result, Quantizer) or any(
        isinstance(x, QuantizedTensor) for x in tree_leaves((args, kwargs))
    )
    args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
    call: Any = hop.scaled if is_scaled else hop.out_dtype
    try:
        return arguments.described(call(op, result, *args, **kwargs))
    except NotImplementedError:
        return None


def _device(name: str) -> torch.device:
    try:
        result = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(
            f"{name!r} is not a device of PyTorch; use one such as cpu, cuda or cuda:1", param_hint="'--device'"
        ) from error
    try:
        torch.empty(0, device=result)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # PyTorch without CUDA asserts
        raise typer.BadParameter(f"{name!r} is not available: {error}", param_hint="'--device'") from error
    return result
