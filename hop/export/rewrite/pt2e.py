"""PT2E, the default target of to_integer, and the lists of operators and functions that other targets share."""

from dataclasses import replace

from hop.dispatch import operators as families
from hop.export.rewrite.target import Row, Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers

VIEWS = (
    *("view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "unsqueeze.default"),
    *("squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "transpose.int", "t.default"),
    *("slice.Tensor", "narrow.default", "select.int", "clone.default", "contiguous.default", "alias.default"),
    *("movedim.int", "movedim.intlist"),
)
SAME = (
    *("max_pool1d.default", "max_pool2d.default", "relu.default", "embedding.default"),
    *("upsample_nearest2d.vec", "upsample_nearest2d.default"),
)  # operators that return codes of their operand
POOLS = tuple(f"{kind}avg_pool{n}d.default" for kind in ("", "adaptive_") for n in (1, 2))
BILINEAR = ("upsample_bilinear2d.vec", "upsample_bilinear2d.default")


def without(target: Target, *names: str) -> Target:
    """The target without some operators."""
    kept = [(row, tuple(n for n in row.operators if n not in names)) for row in target.rows]
    return replace(target, rows=tuple(replace(row, operators=own) for row, own in kept if own))


def with_rows(target: Target, *rows: Row) -> Target:
    """The target with other rows for some operators."""
    return replace(target, rows=(*without(target, *(n for row in rows for n in row.operators)).rows, *rows))


def uniform_target(name: str, convention: requantization.Requantization, source: str) -> Target:
    """A target with one convention for all operators of scaled but attention and transforms; others stay in floats."""
    other = (families.ATTENTION, families.TRANSFORM)
    every = dict.fromkeys(row.family for row in families.SCALED.values() if row.family not in other)
    rows = tuple(Row(operators_of(family), convention, source) for family in every)
    return Target(name, rows, False, ("int8", "uint8", "int16"))


def operators_of(family: families.Family) -> tuple[str, ...]:
    """The operators of a family."""
    return tuple(sorted(str(o).removeprefix("aten.") for o, r in families.SCALED.items() if r.family is family))


PT2E = with_rows(
    uniform_target(
        "PT2E",
        requantization.Reciprocal(),
        "torch/ao/quantization/fx/_decomposed.py quantize_per_tensor: x times 1 / scale, ties to even",
    ),
    Row(("mean.dim",), integers.Pt2eMean(), "aten/src/ATen/native/cpu/SumKernel.cpp cascade_sum, in float32"),
    Row(
        tuple(f"{'adaptive_' if adaptive else ''}avg_pool{n}d.default" for n in (1, 2, 3) for adaptive in (0, 1))[:-1],
        integers.Pt2eAveragePool(),
        "aten/src/ATen/native/cpu/AvgPoolKernel.cpp cpu_avg_pool2d, in float32",
    ),
    Row(BILINEAR, integers.Pt2eResizeBilinear(), "aten/src/ATen/native/cpu/UpSampleKernel.cpp, in float32"),
)
"""PyTorch's quantize and dequantize nodes around float operators; the default of to_integer."""
