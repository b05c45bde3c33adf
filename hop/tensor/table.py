"""The table of what ATen operators do with quantized tensors.

An operator without a rule runs on dequantized values, and requantizes the quantized tensors it wrote to. One that is
composed of others (CompositeImplicitAutograd) runs as those; a foreach operator runs tensor by tensor.

If a view would split a block, the result is a plain tensor instead. Both cases warn, once per operator.
"""

import contextlib
import contextvars
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from hop.compat import patches, subclasses
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs, tree_leaves, tree_map_only

RULES: dict[OpOverload, Callable[..., object]] = {}
P = ParamSpec("P")
R = TypeVar("R")
_warned: set[OpOverload] = set()
_FOREACH = "aten::_foreach_"
_moving = contextvars.ContextVar("moving", default=False)


class IndivisibleError(Exception):
    """Raised for a view that would split a block or a byte of codes, or leave a copy stale;
    its text gives the reason.
    """


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Context manager for the time DTensor moves a tensor between processes.

    No process may continue with a plain tensor while others have codes, so splitting a block is an error, except at the
    end of the tensor, where DTensor removes padding.
    """
    token = _moving.set(True)
    try:
        yield
    finally:
        _moving.reset(token)


def is_moving() -> bool:
    """Whether DTensor is moving a tensor."""
    return _moving.get()


patches.MOVING.append(moving)


def implements(*ops: OpOverload) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a rule for `ops`, called as rule(op, *args, **kwargs)."""

    def enter(rule: Callable[P, R]) -> Callable[P, R]:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has two rules: {RULES[op].__name__} and {rule.__name__}")
            RULES[op] = rule
        return rule

    return enter


_COLLECTIVES = ("distributed.collectives", "distributed.c10d")


@functools.cache
def rules() -> dict[OpOverload, Callable[..., object]]:
    """The table; imports its modules when the first operator is called on a QuantizedTensor."""
    for name in ("rules", "distributed.padding", *(_COLLECTIVES if distributed.is_available() else ())):
        importlib.import_module(f"hop.tensor.{name}")
    return RULES


def apply(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """The result of `op`, at least one of whose arguments is a QuantizedTensor."""
    return subclasses.dispatch(op, args, kwargs, _apply)


def _apply(op: OpOverload, args: Args, kwargs: Kwargs) -> object:
    rule = rules().get(op)
    if rule is None:
        return _dequantized(op, args, kwargs)
    try:
        out = rule(op, *args, **kwargs)
    except IndivisibleError as cut:
        if is_moving():
            raise RuntimeError(_uncut(op, args, cut)) from cut
        plain_args, plain_kwargs = tree_map_only(Tensor, _numbers, (args, kwargs))
        out = op(*plain_args, **plain_kwargs)  # raises for arguments that are invalid for any tensor
        _warn(op, f"{op} of a QuantizedTensor returns a plain, dequantized tensor instead of a view: {cut}")
        return out
    return subclasses.correct_aliasing(op, args, kwargs, out)


def _uncut(op: OpOverload, args: tuple[object, ...], cut: IndivisibleError) -> str:
    t = next(x for x in tree_leaves(args) if hasattr(x, "quantizer"))
    return (
        f"DTensor cannot place a QuantizedTensor of shape {tuple(t.shape)} and {t.quantizer} in this way: {op} would "
        f"split what belongs together, {cut}. Shard a dimension into parts that are multiples of the block, or one "
        "without blocks, or distribute the float tensor and quantize it then, or hop.dequantize it first"
    )


def _dequantized(op: OpOverload, args: Args, kwargs: Kwargs) -> object:
    if op.namespace in ("c10d", "_c10d_functional", "_dtensor"):
        raise NotImplementedError(
            f"{op} has no rule for a QuantizedTensor, of which only codes and scales are sent; use another collective, "
            "or hop.dequantize it first"
        )
    for t in _written(op, args, kwargs):
        refuse_training(str(op), t)
    if op._schema.name.startswith(_FOREACH):
        return _one_by_one(op, args, kwargs)
    return _on_numbers(op, args, kwargs)


def _on_numbers(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """Run `op` on dequantized values, and requantize the quantized arguments it wrote to."""
    plain_args, plain_kwargs = tree_map_only(Tensor, _strided_numbers, (args, kwargs))
    out = op(*plain_args, **plain_kwargs)
    if op._schema.is_mutable:
        written, numbers = _written(op, args, kwargs), _written(op, plain_args, plain_kwargs)
        changed = [(t, x) for t, x in zip(written, numbers, strict=True) if t is not x]
        if any(t.shape != x.shape for t, x in changed):
            raise NotImplementedError(
                f"{op} has no rule for a QuantizedTensor, whose shape it would change; call hop.dequantize first"
            )
        for t, x in changed:
            t.copy_(x)
        out = subclasses.correct_aliasing(op, args, kwargs, out)
    _warn(op, f"{op} has no rule for a QuantizedTensor and runs on dequantized values")
    return out


def _one_by_one(op: OpOverload, args: Args, kwargs: Kwargs) -> list[object] | None:
    """Run a foreach operator tensor by tensor, with the rule of the single-tensor operator if there is one."""
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    count = len(next(x for x in given.values() if isinstance(x, list | tuple)))
    one = getattr(torch.ops.aten, op._schema.name.removeprefix(_FOREACH), None)
    one = getattr(one, "default", None)
    results: list[object] = []
    for i in range(count):
        if one in RULES:
            results.append(one(**{k: x[i] if isinstance(x, list | tuple) else x for k, x in given.items()}))
            continue
        # `scalars` is a list of numbers, or a tensor of them
        part = {k: x[i : i + 1] if isinstance(x, list | tuple) or k == "scalars" else x for k, x in given.items()}
        results += _on_numbers(op, tuple(part.pop(name) for name in names[: len(args)]), part) or ()
    return results if op._schema.returns else None


def _written(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that `op` writes to."""
    given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(op._schema.arguments)]
    pairs = zip(op._schema.arguments, given, strict=True)
    return tree_leaves([x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write and x is not None])


def refuse_training(who: str, t: Tensor) -> None:
    """Raise if `who` writes to a quantized tensor `t` that requires a gradient."""
    if hasattr(t, "quantizer") and t.requires_grad and t.is_leaf:
        raise training_error(who, t)


def training_error(who: str, t: Any) -> RuntimeError:
    """RuntimeError for a training step that writes to a quantized tensor."""
    return RuntimeError(
        f"{who} writes to a QuantizedTensor of shape {tuple(t.shape)} and {t.quantizer} that requires a gradient, as a "
        "training step does: its codes would round small steps away. Train floats: leave its module out when "
        "quantizing (a rule of None in hop.quantize_, modules_to_not_convert in HopConfig), or train what "
        "hop.nn.convert returns, and call hop.nn.freeze afterwards; outside of layers of hop.nn, assign "
        "torch.nn.Parameter(hop.dequantize(weight)). To write anyway, call requires_grad_(False) first"
    )


def _numbers(x: Any) -> Tensor:
    return x.numbers().contiguous() if hasattr(x, "quantizer") else x


def _strided_numbers(x: Any) -> Tensor:
    """The dequantized values with the strides of x, which derivative formulas of PyTorch read: that of `logdet` takes
    the factors of a contiguous matrix for those of its transpose, as the operator computes them.
    """
    numbers = _numbers(x)
    if numbers is x or x.is_contiguous():
        return numbers
    once = numbers[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    made = torch.empty_strided(once.shape, x.stride(), dtype=once.dtype, device=once.device)
    return made.copy_(once).expand(x.shape)


def _warn(op: OpOverload, message: str) -> None:
    if op not in _warned:
        _warned.add(op)
        warnings.warn(message, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """The stack level of the code that called the operator, counted from `_warn`."""
    frame, depth = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("hop.tensor.", "hop.compat.", OpOverload.__module__)
    ):
        frame, depth = frame.f_back, depth + 1
    return depth
