"""Plans: what was found for a call, kept for the next one like it; and whether a call may skip PyTorch's dispatcher.

A plan is a function of what an operator of ours is given, that computes what the operator gives. Two calls share one if
what is fixed in them (operator, quantizers, dtypes, numbers by type and bits) and the quantizers, shapes, dtypes and
devices of their tensors are equal, and the strides of those with more than two dimensions. Checking a call and choosing
a kernel takes 20 to 150 µs; a plan is found in 1.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import PLAIN

Plan = Callable[..., Any]

MOST = 4096
_plans: dict[tuple[Any, ...], Plan] = {}
_kinds: dict[tuple[Any, ...], "Kind"] = {}
_wrappers: dict[type, Callable[[Any], "Kind"]] = {}
_LISTS = (list, tuple)
_THEMSELVES = frozenset({int, str, type(None)})
_NUMBERS = frozenset({*_THEMSELVES, float, bool})  # and what else may be in a key
_float_bits = struct.Struct("d").pack

# Names of this module are found faster than attributes of others.
_is_plain_eager, _is_grad_enabled = eager.is_plain_eager, torch.is_grad_enabled
_is_dual_level_open, _has_tangent = eager.is_dual_level_open, eager.has_tangent
_is_unwatched = eager.is_unwatched


class Kind:
    """What wrapper tensors have in common that kernels take alike. There is one for equal `values`, so that a key
    hashes and compares it in no time.

    Args:
        values: what it stands for.
        part: the name of a tensor that they hold, whose class says whether plans know it.
        is_large: whether they have more than two dimensions."""

    def __init__(self, values: tuple[Any, ...], part: str, is_large: bool) -> None:
        self.values, self.part, self.is_large = values, part, is_large


def kind(values: tuple[Any, ...], part: str, is_large: bool) -> Kind:
    """The one of these values."""
    if len(_kinds) >= MOST:
        _kinds.clear()
    return _kinds.setdefault(values, Kind(values, part, is_large))


def register_wrapper(cls: type, kind_of: Callable[[Any], Kind]) -> None:
    """Let tensors of a wrapper class be what plans are given. `kind_of` finds the kind of one, and keeps it as
    `_kind`."""
    _wrappers[cls] = kind_of


def key(fixed: tuple[Any, ...], given: Iterable[Any]) -> tuple[Any, ...] | None:
    """What two calls have in common that can share a plan; None for one that the dispatcher must see: where something
    watches or transforms calls, or an argument needs a gradient, has a tangent, is of a class that no plan knows or
    made of such, or is no tensor, number, text, or list of numbers. `fixed` must have a hash."""
    if not _is_unwatched():
        return None
    parts, grad, dual = [*fixed], _is_grad_enabled(), _is_dual_level_open()
    add = parts.append
    for x in given:
        cls = type(x)
        if cls in PLAIN:
            if (grad and x.requires_grad) or (dual and _has_tangent(x)):
                return None
            shape = x.shape
            parts += (x.dtype, shape, x.device)
            if len(shape) > 2:  # a result lies as its input does
                add(x.stride())
        elif cls in _wrappers:
            kind = x._kind or _wrappers[cls](x)
            if (grad and x.requires_grad) or (dual and _has_tangent(x)) or type(getattr(x, kind.part)) not in PLAIN:
                return None
            add(kind)
            if kind.is_large:
                add(x.stride())
        elif cls in _THEMSELVES:
            add(x)
        elif cls in _NUMBERS:
            add(bits(x))
        elif cls in _LISTS and _THEMSELVES.issuperset(map(type, x)):
            add(tuple(x))
        elif cls in _LISTS and _NUMBERS.issuperset(map(type, x)):
            add(tuple(map(bits, x)))
        else:
            return None
    return tuple(parts)


def bits(x: Any) -> Any:
    """What represents a number, text or None in a key: equal for the same type and bits alone. In Python 1, 1.0 and
    True are equal, so are 0.0 and -0.0, and a NaN does not even equal itself."""
    cls = type(x)
    return _float_bits(x) if cls is float else bytes((x,)) if cls is bool else x


def named(kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What represents numbers by name in a key, None if one is not a number, text or None."""
    if _NUMBERS.issuperset(map(type, kwargs.values())):
        return tuple((name, bits(v)) for name, v in kwargs.items())
    return None


find = _plans.get
"""The plan of a key, None if there is none."""


def remember(known: tuple[Any, ...], plan: Plan) -> Plan:
    """Keep that calls with this key run `plan`, and return it."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[known] = plan
    return plan


forget = _plans.clear
"""Called after what kernels may be taken has changed."""


def is_plain(classes: frozenset[type], args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """As `key`, where nothing is kept: whether no operand needs a rule of the dispatcher. Operands may lie in lists, of
    `classes`, and are strided, without a lazy conjugation or negation."""
    if not _is_plain_eager():
        return False
    grad, dual = _is_grad_enabled(), _is_dual_level_open()
    for x in tensors(args, kwargs):
        cls = type(x)
        if (
            cls not in classes
            or x.layout is not torch.strided
            or (grad and x.requires_grad)
            or (dual and _has_tangent(x))
            or x.is_conj()
            or x.is_neg()
        ):
            return False
        if cls in _wrappers and type(getattr(x, _wrappers[cls](x).part)) not in PLAIN:
            return False
    return True


def tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments and in the lists that are among them; a tenth of the time of tree_leaves."""
    result: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            result.append(x)
        elif isinstance(x, _LISTS) and x and not isinstance(x[0], int):
            result += [y for y in cast(list[Any], x) if isinstance(y, Tensor)]
    return result
