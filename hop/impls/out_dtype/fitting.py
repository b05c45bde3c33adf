"""Check arguments against the operator's schema: types, and shapes of products and convolutions.

PyTorch makes some of these checks too, with different errors in eager mode, tracing and compilation. These errors are
the same everywhere and name the argument.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.dispatch.operators import (
    BIAS,
    CONVOLUTION,
    EMBEDDING,
    INDEX,
    LHS,
    MATRIX,
    RHS,
    TABLE,
    VECTOR,
    Operator,
    argument_names,
    aten,
)
from hop.numerics.spelling import shown

# these require tensors; other operators accept numbers, as PyTorch does
_NEEDS_TENSORS = (MATRIX, VECTOR, CONVOLUTION, EMBEDDING)
_INDICES = (torch.int32, torch.int64)
_TEXTS = (str, bytes)
_LISTS = (list, tuple)
_LEAST = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
_RANKS = {aten.mm.default: 2, aten.bmm.default: 3}

# ---- types


def check_types(caller: str, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise TypeError for an argument whose type does not match the schema of `op`."""
    positional, named = _rules(op)
    given = [(name, rule, x) for (name, rule), x in zip(positional, args, strict=False)]
    given += [(name, named[name], x) for name, x in kwargs.items() if name in named]
    for name, rule, x in given:
        if not rule.fits(x):
            kind, remedy = rule.words
            raise TypeError(f"{caller}: argument {name!r} of {op} must be {kind}, got {shown(x)}; {remedy}")
    roles = TABLE.get(op)
    if roles is not None and INDEX in roles.roles:
        _check_indices(caller, op, args, roles.roles.index(INDEX))


def _check_indices(caller: str, op: OpOverload, args: Sequence[object], place: int) -> None:
    x = args[place] if place < len(args) else None
    if isinstance(x, Tensor) and x.dtype not in _INDICES and not hasattr(x, "quantizer"):
        name = op._schema.arguments[place].name
        raise TypeError(
            f"{caller}: argument {name!r} of {op} must be int32 or int64, got {x.dtype}; cast it with .long()"
        )


_SUCH_NUMBERS = "give such numbers"
_WORDS = {
    "Tensor": ("a tensor", "make one with torch.tensor"),
    "List[Tensor]": ("a list of tensors", "give such a list"),
    "int": ("an integer", "give such a number"),
    "List[int]": ("an integer or a list of integers", _SUCH_NUMBERS),
    "number": ("a number", "give one such as 1"),
}


class _Rule(NamedTuple):
    """A rule for the values of an argument."""

    fits: Callable[[object], bool]
    words: tuple[str, str]  # the rule and the remedy, for errors


@functools.cache
def _rules(op: OpOverload) -> tuple[list[tuple[str, _Rule]], dict[str, _Rule]]:
    """The rules of the arguments of `op`, by name, of positional ones in order."""
    roles = TABLE.get(op)
    takes_numbers = roles is None or roles.family not in _NEEDS_TENSORS
    tests: dict[str, Callable[[Any], bool]] = {
        "Tensor": lambda x: isinstance(x, Tensor) or (takes_numbers and not isinstance(x, (*_LISTS, *_TEXTS))),
        "List[Tensor]": lambda x: isinstance(x, _LISTS) and all(isinstance(v, Tensor) for v in x),
        "int": lambda x: not isinstance(x, (float, complex, *_LISTS, *_TEXTS)),
        "List[int]": lambda x: all(map(tests["int"], x if isinstance(x, _LISTS) else [x])),
        "number": lambda x: not isinstance(x, (*_LISTS, *_TEXTS)),
    }
    positional: list[tuple[str, _Rule]] = []
    named: dict[str, _Rule] = {}
    for a in op._schema.arguments:
        kind = str(a.real_type).replace("SymInt", "int")
        is_optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]" if is_optional else "")
        rule = _ANY
        if kind in tests:
            rule = _Rule(functools.partial(_fits, tests[kind], is_optional), _WORDS[kind])
        if a.kwarg_only:
            named[a.name] = rule
        else:
            positional.append((a.name, rule))
    return positional, named


def _fits(test: Callable[[object], bool], is_optional: bool, x: object) -> bool:
    return is_optional if x is None else test(x)


_ANY = _Rule(lambda x: True, ("", ""))


# ---- shapes


def check_shapes(caller: str, op: OpOverload, args: Sequence[object]) -> None:
    """Raise RuntimeError if the shapes of a product's or convolution's operands do not match. Skips symbolic sizes."""
    roles = TABLE.get(op)
    if roles is None or roles.family not in (MATRIX, CONVOLUTION):
        return
    shapes = [getattr(roles.find(role, args), "shape", ()) for role in (LHS, RHS, BIAS)]  # type: ignore[arg-type]
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return
    check = _check_matrices if roles.family is MATRIX else _check_convolution
    check(_Said(caller, op), roles, args, *map(tuple, shapes))


class _Said:
    """Common text of error messages about an operator."""

    def __init__(self, caller: str, op: OpOverload) -> None:
        self.caller, self.op = caller, op

    def name(self, roles: Operator, role: str) -> str:
        return repr(argument_names(self.op)[roles.roles.index(role)])

    def refuse(self, what: str, rule: str) -> NoReturn:
        raise RuntimeError(f"{self.caller}: {what} of {self.op} {rule}")


def _check_matrices(
    said: _Said,
    roles: Operator,
    args: Sequence[object],
    left: tuple[int, ...],
    right: tuple[int, ...],
    bias: tuple[int, ...],
) -> None:
    lhs, rhs = said.name(roles, LHS), said.name(roles, RHS)
    rank = _RANKS.get(roles.product) if roles.product is not None else None
    for name, shape in ((lhs, left), (rhs, right)):
        if rank is not None and len(shape) != rank:
            said.refuse(
                f"argument {name}",
                f"must have {rank} dimensions, got shape {shape}; use another operator, such as aten.matmul.default",
            )
    if min(len(left), len(right)) < 2:
        return
    along = roles.rhs_sums
    if left[-1] != right[along]:
        which = "last" if along == -1 else "last but one"
        raise RuntimeError(
            f"{said.caller}: {said.op} sums over the last dimension of {lhs} and the {which} of {rhs}, which must be "
            f"equal; got shapes {left} and {right}; transpose or reshape one of them"
        )
    if rank == 3 and left[0] != right[0]:
        said.refuse(
            f"arguments {lhs} and {rhs}",
            f"must have as many matrices, got shapes {left} and {right}; give both one batch size",
        )
    width = right[-2 if along == -1 else -1]
    if bias and bias[-1] not in (1, width):
        _refuse_bias(said, roles, width, right, bias)


def _refuse_bias(said: _Said, roles: Operator, width: int, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    said.refuse(
        f"argument {said.name(roles, BIAS)}",
        f"must have {width} elements for {said.name(roles, RHS)} {weight}, got {bias}; give one for each output",
    )


def _check_convolution(
    said: _Said,
    roles: Operator,
    args: Sequence[object],
    x: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...],
) -> None:
    names = [a.name for a in said.op._schema.arguments]
    given = {a.name: a.default_value for a in said.op._schema.arguments if a.has_default_value()}
    given |= dict(zip(names, args, strict=False))
    spatial = roles.spatial or len(weight) - 2
    _check_ranks(said, spatial, x, weight)
    options = {name: _spatial(said, name, given[name], spatial) for name in _LEAST if name in given}
    steps = {name: values for name, values in options.items() if values is not None}
    groups = given["groups"]
    if not isinstance(groups, int) or len(steps) < len(options):
        return
    if groups < 1:
        said.refuse("argument 'groups'", f"must be 1 or more, got {groups}; give such a number")
    transposed = roles.transposed or bool(given.get("transposed"))
    channels, out = (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0])
    if x[-1 - spatial] != channels:
        said.refuse(
            "argument 'input'",
            f"must have {channels} channels for 'weight' {weight}, got shape {x}; give an input with as many",
        )
    if bias and bias != (out,):
        _refuse_bias(said, roles, out, weight, bias)
    if not transposed and not isinstance(given["padding"], str):
        sizes = zip(x[-spatial:], weight[2:], steps["padding"], steps["dilation"], strict=True)
        if any(size + 2 * pad < dilation * (k - 1) + 1 for size, k, pad, dilation in sizes):
            said.refuse(
                "argument 'weight'",
                f"must not be larger than the padded input, got {weight} for an input of {x}; pad the input, or use a "
                "smaller one",
            )


def _check_ranks(said: _Said, spatial: int, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    for name, shape, ranks in (("weight", weight, (spatial + 2,)), ("input", x, (spatial + 1, spatial + 2))):
        if spatial < 1 or len(shape) not in ranks:
            said.refuse(
                f"argument {name!r}",
                f"must have {' or '.join(map(str, ranks))} dimensions, got shape {shape}; reshape it",
            )


def _spatial(said: _Said, name: str, value: object, spatial: int) -> Sequence[int] | None:
    """A convolution option with one number per spatial dimension; () for padding by name, None for symbolic values."""
    if isinstance(value, str):
        return ()
    given = value if isinstance(value, list | tuple) else [value]
    values = [n for n in given if isinstance(n, int)]
    if len(values) < len(given):
        return None
    if len(values) not in (1, spatial):
        said.refuse(f"argument {name!r}", f"must have {spatial} numbers, got {values}; give one for each dimension")
    if any(n < _LEAST[name] for n in values):
        said.refuse(f"argument {name!r}", f"must be {_LEAST[name]} or more, got {values}; {_SUCH_NUMBERS}")
    return values * (spatial // len(values))
