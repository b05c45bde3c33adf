"""hop explain: which kernel a call takes."""

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import hop
from hop import QuantizedTensor, Quantizer
from hop.cli import arguments
from hop.cli.output import show, show_json
from hop.compat.pytree import tree_leaves, tree_map_only


def explain(
    op: Annotated[str, typer.Argument(help="An operator, as aten.linear.default, or aten.linear.")],
    output: Annotated[str, typer.Argument(help="The dtype or the preset of the result.")],
    arg: Annotated[list[str], typer.Argument(help="What the operator takes, in its order.")],
    device: Annotated[str, typer.Option(help="Where the tensors are, such as cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel a call takes, and why each one before it declined.

    An ARG is a tensor, as int8:128x256 (a dtype and sizes) or INT8_ROW:128x256 (a preset of hop.presets; random numbers
    are quantized by it); a number; a list, as [1,1]; none, true or false; or one of these by its name, as
    stride=[2,2]. Behind the sizes, .t transposes the tensor, .pack packs a weight by hop.pack, and .channels_last lays
    it out so. With a preset among them the call is of hop.scaled, else of hop.out_dtype.

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
        kwargs = {f"output_{name}": x for name, x in arguments.given(result, where).items()} | kwargs
    asked = kernels(operator, result, args, kwargs)
    tensors = _made(operator, result, args, kwargs)
    if as_json:
        given = [*map(arguments.described, args), *(f"{k}={arguments.described(v)}" for k, v in kwargs.items())]
        show_json({"op": str(operator), "output": output, "arguments": given, "result": tensors, "kernels": asked})
        return
    for kernel in asked:
        show(f"{kernel['name']}: {kernel['reason'] or 'chosen'}", style=None if kernel["reason"] else "green")


def kernels(op: Any, result: Any, args: list[Any], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels that a call asks, in their order; the last one takes it, and has no reason against it."""
    lines = [line.split(": ", 1) for line in hop.explain(op, result, *args, **kwargs).splitlines()]
    return [
        {"name": name, "chosen": words == "chosen", "reason": None if words == "chosen" else words}
        for name, words in lines
    ]


def _made(op: Any, result: Any, args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """What the call gives, found without computing it; None if the operator says so only by running. Raises what the
    operator raises for shapes that do not fit, of which kernels are not asked."""
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
            f"{name!r} is no device of PyTorch; take one such as cpu, cuda or cuda:1", param_hint="'--device'"
        ) from error
    try:
        torch.empty(0, device=result)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # PyTorch without CUDA asserts
        raise typer.BadParameter(f"{name!r} is not here: {error}", param_hint="'--device'") from error
    return result
