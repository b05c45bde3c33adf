"""The table of what ATen operators do with quantized tensors.

An operator without a rule runs on dequantized numbers; one that writes to its first argument then quantizes it anew.
Where a view would cut a block, the result is a plain tensor instead. Both warn, once for each operator.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from hop import _compile
from hop._compile import OpOverload

RULES: dict[OpOverload, Callable[..., Any]] = {}
_warned: set[OpOverload] = set()


class Cut(Exception):
    """A view that would cut a block, or a byte of codes, or leave a copy behind; its text says which."""


def implements(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule for `ops`, called as rule(op, *args, **kwargs)."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has two rules: {RULES[op].__name__} and {rule.__name__}")
            RULES[op] = rule
        return rule

    return enter


def apply(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `op`, at least one of whose arguments is a QuantizedTensor."""
    rule = RULES.get(op)
    if rule is None:
        return _dequantized(op, args, kwargs)
    try:
        out = rule(op, *args, **kwargs)
    except Cut as cut:
        plain_args, plain_kwargs = _plain((args, kwargs))
        out = op(*plain_args, **plain_kwargs)  # raises for arguments that are wrong for any tensor
        _warn(op, f"{op} of a QuantizedTensor gives a plain, dequantized tensor and no view of it: {cut}")
        return out
    return _compile.correct_aliasing(op, args, kwargs, out)


def _dequantized(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = op._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if written and (written != [arguments[0]] or not isinstance(args[0], Tensor) or op.is_view):
        raise NotImplementedError(f"{op} has no rule for a QuantizedTensor; use an operator that returns a new tensor")
    plain_args, plain_kwargs = _plain((args, kwargs))
    out = op(*plain_args, **plain_kwargs)
    _warn(op, f"{op} has no rule for a QuantizedTensor and runs on dequantized numbers")
    if not written or args[0] is plain_args[0]:
        return out
    if out.shape != args[0].shape:
        raise NotImplementedError(f"{op} has no rule for a QuantizedTensor, whose shape it would change")
    return args[0].copy_(out)


def _plain(tree: Any) -> Any:
    return tree_map_only(Tensor, _numbers, tree)


def _numbers(x: Any) -> Tensor:
    return x.numbers().contiguous() if hasattr(x, "quantizer") else x


def _warn(op: OpOverload, message: str) -> None:
    if op not in _warned:
        _warned.add(op)
        warnings.warn(message, stacklevel=5)
