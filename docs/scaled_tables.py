"""Tables of docs/scaled.md: operators, requantization, attention."""

import statistics
from collections.abc import Callable

import torch

from docs import training_tables
from hop.dispatch.operators import SCALED
from hop.impls.scaled.families.attention import PAIRS as ATTENTION_PAIRS
from hop.numerics.formats import INT8
from hop.numerics.requantization import (
    GEMMLOWP,
    TFLITE,
    Division,
    DoubleMultiplier,
    FixedPoint,
    FloatMultiplier,
    Reciprocal,
    Requantization,
    WideFixedPoint,
)
from tests.support import pages


def operators() -> str:
    """The operators of hop.scaled without their overloads, one row for each family."""
    found: dict[str, list[str]] = {}
    for op, roles in SCALED.items():
        name = str(op).removeprefix("aten.").rsplit(".", 1)[0]
        found.setdefault(roles.family.name, []).append(name)
    rows = [[family, " ".join(f"`{name}`" for name in sorted({*names}))] for family, names in found.items()]
    return pages.table([["family", "operators"], *rows])


def attention_pairs() -> str:
    """The formats of query, key and value that attention accepts together, and how it sums."""
    return pages.table([["query", "key", "value", "sums"], *([*pair, how] for pair, how in ATTENTION_PAIRS.items())])


ATTENTION_ERRORS = (
    "int8", "int8, values by channels", "int8, plain queries", "int8 rotated", "int8 rotated, plain queries",
    "int8 rotated, plain queries, keys and values in groups of 32", "fp8",
)  # fmt: skip


def attention_medians() -> str:
    """The median error of each scheme over the layers of each model."""
    found = training_tables.results("attention_errors")
    rows = [["scheme", *found]]
    for scheme in ATTENTION_ERRORS:
        rows.append([scheme, *(f"{statistics.median(row[scheme] for row in own):.2%}" for own in found.values())])
    return pages.table(rows)


_MANTISSA = "31-bit mantissa, shift"
# By convention: who uses it, its arithmetic, and the value.
CONVENTIONS = {
    "Division()": ("ONNX QuantizeLinear; `hop.quantize`", "y / scale in float32", Division()),
    "Reciprocal()": ("PT2E and torchao quantize nodes", "y · (1 / scale) in float32", Reciprocal()),
    "FloatMultiplier()": ("XNNPACK, QNNPACK, FBGEMM", "float32(sum) · M in float32", FloatMultiplier()),
    "GEMMLOWP": ("gemmlowp, TFLite by default", f"{_MANTISSA}; rounds twice", GEMMLOWP),
    "TFLITE": ("TFLite with single rounding", f"{_MANTISSA}; rounds once", TFLITE),
    'FixedPoint(rounding="away")': ("", f"{_MANTISSA}; ties away from 0", FixedPoint(rounding="away")),
    'FixedPoint(rounding="even")': ("", f"{_MANTISSA}; ties to even", FixedPoint(rounding="even")),
    'FixedPoint(rounding="ruy")': (
        "LiteRT's optimized kernels", f"{_MANTISSA}; rounds twice, ties up", FixedPoint(rounding="ruy"),
    ),
    "DoubleMultiplier()": ("LiteRT int16 fully connected", "float64(sum) · M in float64", DoubleMultiplier()),
    "WideFixedPoint()": ("LiteRT int16 convolutions", "int64 sum, 15-bit mantissa", WideFixedPoint()),
}  # fmt: skip
HALVES = (1, 3, 5, -1, -3, -5)


def conventions() -> str:
    """How each convention computes, and the codes of half steps for M = 1/2."""
    rows = []
    for name, (user, formula, rule) in CONVENTIONS.items():
        codes = _codes(rule, HALVES, 0.5)
        rows.append([f"`{name}`", user, formula, ", ".join(codes)])
    halves = ", ".join(f"{n}/2" for n in HALVES)
    return pages.table([["convention", "used by", "computes", f"codes of {halves}"], *rows])


def _codes(rule: Requantization, sums: tuple[int, ...], multiplier: float) -> list[str]:
    one = torch.ones(())
    total = torch.tensor(sums, dtype=torch.int32)
    if not rule.exact:
        steps = (total.to(torch.float32) * multiplier).round().to(torch.int32)
    else:
        steps = rule.codes(total, torch.tensor(multiplier), one, one, 0, INT8)
    return [str(int(n)) for n in steps]


TABLES: dict[str, Callable[[], str]] = {
    ": operators": operators,
    ": attention": attention_pairs,
    ": attention_medians": attention_medians,
    ": conventions": conventions,
}
