"""Plans: cached functions that compute a call. Also decides whether a call may skip PyTorch's dispatcher.

A plan is a function from the arguments of one of our operators to its result. Plans are cached by operator, constants
(numbers by type and bits), and each tensor's quantizer, shape, dtype and device, and strides if it has more than two
dimensions. Checking a call and choosing a kernel takes 20 to 150 µs, finding a cached plan 1 µs.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import PLAIN

Plan = Callable[..., Any]
Key = tuple[object, ...]
T = TypeVar("T")

MOST = 4096
_plans: dict[Key, Plan] = {}
_kinds: dict[Key, "Kind"] = {}
_wrappers: dict[type, Callable[[Any], "Kind"]] = {}
_LISTS = (list, tuple)
_THEMSELVES = frozenset({int, str, type(None)})
_NUMBERS = frozenset({*_THEMSELVES, float, bool})  # and the other types that a key may contain
_float_bits = struct.Struct("d").pack

# Names of this module are looked up faster than attributes of others.
_is_plain_eager, _is_grad_enabled = eager.is_plain_eager, torch.is_grad_enabled
_is_dual_level_open, _has_tangent = eager.is_dual_level_open, eager.has_tangent
_is_unwatched = eager.is_unwatched


class Kind:
    """The properties that kernels need of a wrapper tensor.

    There is one instance for equal `values`, so that hashing and comparing it as part of a key costs almost nothing.

    Args:
        values: the properties.
        part: the name of an inner tensor, whose class decides whether plans support the wrapper.
        is_large: whether the wrapper has more than two dimensions.
    """

    def __init__(self, values: tuple[object, ...], part: str, is_large: bool) -> None:
        self.values, self.part, self.is_large = values, part, is_large


def kind(values: tuple[object, ...], part: str, is_large: bool) -> Kind:
    """The instance with these values."""
    if len(_kinds) >= MOST:
        _kinds.clear()
    return _kinds.setdefault(values, Kind(values, part, is_large))


def register_wrapper(cls: type[T], kind_of: Callable[[T], Kind]) -> None:
    """Let plans support tensors of a wrapper class. `kind_of` returns the kind of a tensor,
    and stores it as `_kind`.
    """
    _wrappers[cls] = kind_of


def key(fixed: Key, given: Iterable[Any]) -> Key | None:
    """The key under which the plan of a call is cached; None if the dispatcher must see the call.

    That is the case while modes or transforms are active, and if an argument needs a gradient, has a tangent, is of an
    unsupported class (or contains a tensor of one), or is not a tensor, number, text, or list of numbers. `fixed` must
    be hashable.
    """
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
            if len(shape) > 2:  # strides of the result follow the input's
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


def bits(x: object) -> object:
    """Represent a number, text or None in a key, so that two are equal only if type and bits are.

    In Python 1, 1.0 and True are equal, as are 0.0 and -0.0, and a NaN does not equal itself.
    """
    return _float_bits(x) if type(x) is float else b"\1" if x is True else b"\0" if x is False else x


def named(kwargs: Mapping[str, object]) -> Key | None:
    """Represent keyword arguments in a key; None if one is not a number, text or None."""
    if _NUMBERS.issuperset(map(type, kwargs.values())):
        return tuple((name, bits(v)) for name, v in kwargs.items())
    return None


find = _plans.get
"""The plan of a key, None if there is none."""


def remember(known: Key, plan: Plan) -> Plan:
    """Cache `plan` under this key, and return it."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[known] = plan
    return plan


forget = _plans.clear
"""Called after the set of allowed kernels has changed."""


def is_plain(classes: frozenset[type], args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    """Whether no operand needs a dispatcher rule. The test of `key`, without a key.

    Operands may be in lists. They must be of `classes` and strided, without a lazy conjugation or negation.
    """
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


def tensors(args: Iterable[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors among the arguments and in lists of them; takes a tenth of the time of tree_leaves."""
    result: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            result.append(x)
        elif isinstance(x, _LISTS) and x and not isinstance(x[0], int):
            result += [y for y in x if isinstance(y, Tensor)]
    return result
