"""A wrong call and what its error must say: the argument, its value, the rule, and what to do."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import hop

aten = torch.ops.aten
mm, linear, conv2d = aten.mm.default, aten.linear.default, aten.conv2d.default

VERBS = frozenset(
    "add call cast choose copy create dequantize find give keep leave load make move omit pad pass put quantize "
    "read rename run save skip spell swap take transpose use".split()
)
"""Verbs that a remedy may begin with."""


class Wrong(NamedTuple):
    """A call that must fail.

    Args:
        name: of the row.
        error: what it raises.
        call: it.
        argument: the name of the argument that is wrong, by which the caller knows it.
        value: what the caller gave, or its dtype or shape where that is the point.
        rule: what it must be.
        remedy: what to do, a verb first.
        traced: whether the same message comes under torch.compile(fullgraph=True) and make_fx.
    """

    name: str
    error: type[Exception]
    call: Callable[[], Any]
    argument: str
    value: str
    rule: str
    remedy: str
    traced: bool = False


def wrong(name: str, error: type[Exception], call: Callable[[], Any], parts: str) -> Wrong:
    """A row, its parts in one text: argument | value | rule | remedy."""
    return Wrong(name, error, call, *parts.split(" | "))


def traced(name: str, error: type[Exception], call: Callable[[], Any], parts: str) -> Wrong:
    """The same, of a call that is traced too."""
    return wrong(name, error, call, parts)._replace(traced=True)


def each(
    row: Callable[..., Wrong],
    error: type[Exception],
    parts: str,
    calls: Mapping[str, tuple[str, Callable[[], Any]]],
) -> list[Wrong]:
    """Rows by `wrong` or `traced` with one argument | rule | remedy, from {name: (value, call)}."""
    argument, rest = parts.split(" | ", 1)
    return [row(name, error, call, f"{argument} | {value} | {rest}") for name, (value, call) in calls.items()]


def missing(row: Wrong, message: str) -> list[str]:
    """The parts that a message lacks."""
    message = " ".join(message.split())
    verb, _, rest = row.remedy.partition(" ")
    said = {
        "argument": re.search(rf"(?<!\w){re.escape(row.argument)}(?!\w)", message) is not None,
        "value": row.value in message,
        "rule": row.rule in message,
        "remedy": verb in VERBS and re.search(r"\w", rest) is not None and row.remedy in message,
    }
    return [part for part, is_there in said.items() if not is_there]


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def int8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


def rows(*shape: int) -> Any:
    """A tensor by hop.presets.INT8_ROW."""
    return hop.quantize(hop.presets.INT8_ROW, torch.ones(shape))
