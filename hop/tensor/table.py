"""The table of what ATen operators do with quantized tensors.

An operator without a rule runs on dequantized numbers; one that writes to its first argument then quantizes it anew.
One that is composed of others (CompositeImplicitAutograd) runs as those.
Where a view would cut a block, the result is a plain tensor instead. Both warn, once for each operator.
"""

import contextlib
import contextvars
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, distributed

from hop.compat import patches, subclasses
from hop.compat.eager import OpOverload
from hop.compat.pytree import tree_leaves, tree_map_only

RULES: dict[OpOverload, Callable[..., Any]] = {}
_warned: set[OpOverload] = set()


_moving = contextvars.ContextVar("moving", default=False)


class IndivisibleError(Exception):
    """A view that would cut a block, or a byte of codes, or leave a copy behind; its text says which."""


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """While DTensor moves a tensor between processes: no process may go on with a plain tensor where another has codes,
    so what would cut a block is an error, but for the end of the tensor, where DTensor takes padding off."""
    token = _moving.set(True)
    try:
        yield
    finally:
        _moving.reset(token)


def is_moving() -> bool:
    """Whether DTensor moves a tensor."""
    return _moving.get()


patches.MOVING.append(moving)


def implements(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule for `ops`, called as rule(op, *args, **kwargs)."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has two rules: {RULES[op].__name__} and {rule.__name__}")
            RULES[op] = rule
        return rule

    return enter


_COLLECTIVES = ("distributed.collectives", "distributed.c10d")


@functools.cache
def rules() -> dict[OpOverload, Callable[..., Any]]:
    """The table, whose modules are imported when the first operator meets a QuantizedTensor."""
    for name in ("rules", "distributed.padding", *(_COLLECTIVES if distributed.is_available() else ())):
        importlib.import_module(f"hop.tensor.{name}")
    return RULES


def apply(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `op`, at least one of whose arguments is a QuantizedTensor."""
    return subclasses.dispatch(op, args, kwargs, _apply)


def _apply(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = rules().get(op)
    if rule is None:
        return _dequantized(op, args, kwargs)
    try:
        out = rule(op, *args, **kwargs)
    except IndivisibleError as cut:
        if is_moving():
            raise RuntimeError(_uncut(op, args, cut)) from cut
        plain_args, plain_kwargs = _plain((args, kwargs))
        out = op(*plain_args, **plain_kwargs)  # raises for arguments that are wrong for any tensor
        _warn(op, f"{op} of a QuantizedTensor gives a plain, dequantized tensor and no view of it: {cut}")
        return out
    return subclasses.correct_aliasing(op, args, kwargs, out)


def _uncut(op: OpOverload, args: tuple[Any, ...], cut: IndivisibleError) -> str:
    t = next(x for x in tree_leaves(args) if hasattr(x, "quantizer"))
    return (
        f"DTensor cannot place a QuantizedTensor of shape {tuple(t.shape)} and {t.quantizer} so: {op} would cut what "
        f"belongs together, {cut}. Shard a dimension into parts that are multiples of the block, or one without "
        "blocks, or distribute the float tensor and quantize it then, or hop.dequantize it first"
    )


def _dequantized(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.namespace in ("c10d", "_c10d_functional", "_dtensor"):
        raise NotImplementedError(
            f"{op} has no rule for a QuantizedTensor, of which only codes and scales travel; use another collective, "
            "or hop.dequantize it first"
        )
    arguments = op._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if written and (written != [arguments[0]] or not isinstance(args[0], Tensor) or op.is_view):
        raise NotImplementedError(f"{op} has no rule for a QuantizedTensor; use an operator that returns a new tensor")
    plain_args, plain_kwargs = _plain((args, kwargs))
    out = op(*plain_args, **plain_kwargs)
    changes = bool(written) and args[0] is not plain_args[0]
    if changes and out.shape != args[0].shape:
        raise NotImplementedError(
            f"{op} has no rule for a QuantizedTensor, whose shape it would change; call hop.dequantize first"
        )
    _warn(op, f"{op} has no rule for a QuantizedTensor and runs on dequantized numbers")
    return args[0].copy_(out) if changes else out


def _plain(tree: Any) -> Any:
    return tree_map_only(Tensor, _numbers, tree)


def _numbers(x: Any) -> Tensor:
    return x.numbers().contiguous() if hasattr(x, "quantizer") else x


def _warn(op: OpOverload, message: str) -> None:
    if op not in _warned:
        _warned.add(op)
        warnings.warn(message, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """How many calls up from `_warn` the code is that called the operator."""
    frame, depth = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("hop.tensor.", "hop.compat.", OpOverload.__module__)
    ):
        frame, depth = frame.f_back, depth + 1
    return depth
