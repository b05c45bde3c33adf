"""Properties of the operator that out_dtype runs, read from its schema and tags."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hop.compat.eager import Argument, OpOverload
from hop.compat.pytree import Args, ArgsKwargs, Kwargs
from hop.impls.out_dtype.kept import kept, kept_integers

aten = torch.ops.aten
_LISTS = (list, tuple)
_INTS = (int, torch.SymInt)

# These draw random numbers only if the argument is not 0.
_DRAWING = {"aten::scaled_dot_product_attention": "dropout_p"}


@dataclass(frozen=True)
class Inner:
    """The operator that out_dtype runs."""

    op: OpOverload
    positional: tuple[Argument, ...]
    keyword_only: dict[str, Argument]
    operand_at: tuple[tuple[int, str], ...]  # position and name of positional arguments that take tensors or Scalars
    keyword_operands: frozenset[str]  # names of keyword-only arguments that do
    promoted: frozenset[str]  # names of operands that are cast to the common dtype
    kept_integers: frozenset[str]  # names of promoted operands that keep integer dtypes
    lists: dict[int, int]  # position and length of fixed-size integer lists, int[N]
    least: float  # from this number of positional arguments on, no required one is missing
    returns_view: bool
    drawing: str | None  # the argument that must be 0, or random numbers would be drawn

    def bind(self, args: Args, kwargs: Kwargs) -> ArgsKwargs:
        """Canonical arguments: positional up to the last one that is not its default, keyword-only ones by name."""
        if not kwargs and self.least <= len(args) <= len(self.positional):
            return self._with_lists(args), kwargs
        if len(args) > len(self.positional):
            raise RuntimeError(
                f"{self.op} takes {len(self.positional)} positional arguments, got {len(args)}; leave out the others: "
                f"{self.op._schema}"
            )
        given = dict(zip((a.name for a in self.positional), args, strict=False))
        keywords = {}
        for name, value in kwargs.items():
            if name in given:
                raise RuntimeError(
                    f"{self.op} got two values for argument {name!r}, which takes one; leave one out: {self.op._schema}"
                )
            if name in self.keyword_only:
                keywords[name] = value
            elif any(a.name == name for a in self.positional):
                given[name] = value
            else:
                known = ", ".join([*(a.name for a in self.positional), *self.keyword_only])
                raise RuntimeError(f"{self.op} has no argument {name!r}; use one of {known}: {self.op._schema}")
        last = max((i for i, a in enumerate(self.positional) if a.name in given), default=-1)
        missing = [a.name for i, a in enumerate(self.positional) if a.name not in given and not a.has_default_value()]
        missing += [n for n, a in self.keyword_only.items() if n not in keywords and not a.has_default_value()]
        if missing:
            raise RuntimeError(
                f"{self.op} is missing a value for argument {missing[0]!r}, which has no default; give it: "
                f"{self.op._schema}"
            )
        ordered = tuple(given.get(a.name, a.default_value) for a in self.positional[: last + 1])
        return self._with_lists(ordered), keywords

    def _with_lists(self, args: Args) -> Args:
        """Expand a number to a list where the schema has int[N], as torch.nn.functional does."""
        for i, length in self.lists.items():
            if i < len(args) and isinstance(args[i], _INTS):
                args = (*args[:i], [args[i]] * length, *args[i + 1 :])
        return args

    def check_drawing(self, caller: str, args: tuple[object, ...]) -> None:
        """Raise ValueError if the call would draw random numbers."""
        for argument, value in zip(self.positional, args, strict=False):
            if argument.name == self.drawing and value != 0:
                raise ValueError(
                    f"{caller}: argument {self.drawing!r} of {self.op} must be 0, got {value}; call it outside, or "
                    "drop elements of the result"
                )

    def operands(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[tuple[str, Any]]:
        """(name, value) of every tensor and Scalar argument; members of a list have the list's name."""
        count = len(args)
        given = [(name, args[i]) for i, name in self.operand_at if i < count]
        if kwargs:
            given += [(name, v) for name, v in kwargs.items() if name in self.keyword_operands]
        if not any(isinstance(v, _LISTS) for _, v in given):
            return given
        return [(name, x) for name, v in given for x in (v if isinstance(v, _LISTS) else [v])]

    def promotes(self, name: str, value: object) -> bool:
        """Whether `value` of the argument `name` is cast to the common dtype."""
        if name in self.kept_integers and isinstance(value, Tensor):
            return value.is_floating_point()
        return name in self.promoted

    def map_promoted(self, args: tuple[object, ...], function: Callable[[Tensor], Tensor]) -> Args:
        """Apply `function` to every promoted tensor among the positional arguments."""

        def one(value: object) -> object:
            if isinstance(value, Tensor):
                return function(value)
            return [one(v) for v in value] if isinstance(value, list | tuple) else value

        return tuple(one(v) if self.promotes(a.name, v) else v for a, v in zip(self.positional, args, strict=False))

    def cast(self, args: tuple[object, ...], kwargs: Mapping[str, object], dtype: torch.dtype) -> ArgsKwargs:
        """Cast every promoted tensor to `dtype`."""
        keywords = {
            name: v.to(dtype) if isinstance(v, Tensor) and self.promotes(name, v) else v for name, v in kwargs.items()
        }
        return self.map_promoted(args, lambda x: x.to(dtype)), keywords


def _length(argument: Any) -> int:
    """The length N of an argument of type int[N], else 0."""
    return argument.N or 0


def _least(arguments: Sequence[Argument]) -> float:
    if any(a.kwarg_only and not a.has_default_value() for a in arguments):
        return math.inf
    needed = [i for i, a in enumerate(a for a in arguments if not a.kwarg_only) if not a.has_default_value()]
    return max(needed, default=-1) + 1


@functools.cache
def describe(op: OpOverload) -> Inner:
    """Describe `op` from its schema. Raises ValueError if out_dtype cannot run it."""
    schema = op._schema
    if schema.is_mutable:
        raise ValueError(
            f"out_dtype: op must be functional, but {op} writes to its arguments; use one that returns a new tensor: "
            f"{schema}"
        )
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        raise ValueError(f"out_dtype: op must return exactly one tensor, got {op}; use one that does: {schema}")
    if torch.Tag.nondeterministic_seeded in op.tags and schema.name not in _DRAWING:
        raise ValueError(
            f"out_dtype: op must be a function of its arguments, but {op} draws random numbers; call it outside"
        )
    operands = [a for a in schema.arguments if any(w in str(a.type) for w in ("Tensor", "number", "Scalar"))]
    positional = tuple(a for a in schema.arguments if not a.kwarg_only)
    return Inner(
        op=op,
        positional=positional,
        keyword_only={a.name: a for a in schema.arguments if a.kwarg_only},
        operand_at=tuple((i, a.name) for i, a in enumerate(positional) if a in operands),
        keyword_operands=frozenset(a.name for a in operands if a.kwarg_only),
        promoted=frozenset(a.name for a in operands if a.name not in kept(op)),
        kept_integers=kept_integers(op),
        lists={i: _length(a) for i, a in enumerate(positional) if _length(a) and "int" in str(a.type)},
        least=_least(schema.arguments),
        returns_view=schema.returns[0].alias_info is not None,
        drawing=_DRAWING.get(schema.name),
    )
