"""Tables of docs/scaled.md: operators, the kernel of each pair of operands, requantization, attention."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import hop
from docs import training_tables
from hop.dispatch.operators import SCALED
from hop.impls.scaled.families.attention import PAIRS as ATTENTION_PAIRS
from hop.interchange.gguf_types import TYPES
from hop.numerics.formats import INT8
from hop.numerics.presets import PRESETS
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


# By label: the presets or GGUF types of the two factors of a linear layer, and whether the weight is packed. A dtype is
# a plain tensor.
QUANTIZERS = {t.name: t.quantizer for t in TYPES.values()} | PRESETS
PAIRS = {
    "int8 × int8": ("INT8_ROW", "INT8_ROW", False),
    "int8 × int8 with zero points": ("INT8_TENSOR_AFFINE", "INT8_ROW_AFFINE", False),
    "uint8 × int8": ("UINT8_TENSOR_AFFINE", "INT8_ROW", False),
    "int8 × int4 in groups (8da4w)": ("INT8_ROW_AFFINE", "INT4_32", False),
    "int4 × uint4 in groups": ("INT4_32", "UINT4_64_AFFINE", False),
    "int8 × ternary": ("INT8_ROW", "TERNARY_TENSOR", False),
    "fp8 × fp8": ("FP8_ROW", "FP8_TENSOR", False),
    "e4m3 × e5m2": ("FP8_ROW", "FP8_E5M2_ROW", False),
    "fp8 1×128 × 128×128": ("FP8_1X128", "FP8_128X128", False),
    "MXFP8": ("MXFP8", "MXFP8", False),
    "MXFP4, packed": ("MXFP4", "MXFP4", True),
    "NVFP4, packed": ("NVFP4", "NVFP4", True),
    "bfloat16 × int8": (torch.bfloat16, "INT8_ROW", False),
    "bfloat16 × int4 in groups (4w)": (torch.bfloat16, "INT4_32", False),
    "bfloat16 × fp8, MX or NVFP4": (torch.bfloat16, "NVFP4", False),
    "float32 or float16 × int8": (torch.float32, "INT8_ROW", False),
    "float32 or float16 × int4 in groups": (torch.float32, "INT4_32", False),
    "float32 or float16 × fp8, MX or NVFP4": (torch.float32, "NVFP4", False),
    "floats × GGUF's types": (torch.float32, "Q4_K", False),
    "floats × codebook": (torch.float32, "STATE8", False),
    "int8 × fp8": ("INT8_ROW", "FP8_ROW", False),
}


def support() -> str:
    """The pairs of operands by the kernel that hop.explain reports."""
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x, by_kernel = w[:16], dict[str, list[str]]()
    for label, (of_lhs, of_rhs, packed) in PAIRS.items():
        lhs = hop.quantize(QUANTIZERS[of_lhs], x) if isinstance(of_lhs, str) else x.to(of_lhs)
        rhs = hop.quantize(QUANTIZERS[of_rhs], w)
        rhs = hop.pack(rhs) if packed else rhs
        kernels = [_chosen(output, lhs, rhs) for output in (torch.float32, torch.bfloat16)]
        by_kernel.setdefault(" or ".join(dict.fromkeys(kernels)), []).append(label)
    return pages.table([["kernel", "operands"], *([kernel, "; ".join(labels)] for kernel, labels in by_kernel.items())])


def _chosen(output: torch.dtype, lhs: Tensor, rhs: Tensor) -> str:
    try:
        return hop.explain(torch.ops.aten.linear.default, output, lhs, rhs).splitlines()[-1].removesuffix(": chosen")
    except ValueError:
        return "error"


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
    """How each convention computes, the codes of half steps for M = 1/2, and of ±1.5 for 2^30 · 3 · 2^-31."""
    rows = []
    for name, (user, formula, rule) in CONVENTIONS.items():
        codes = _codes(rule, HALVES, 0.5)
        edge = _codes(rule, (2**30, -(2**30)), 3 * 2.0**-31)
        rows.append([f"`{name}`", user, formula, ", ".join(codes), ", ".join(edge)])
    halves = ", ".join(f"{n}/2" for n in HALVES)
    return pages.table([["convention", "used by", "computes", f"codes of {halves}", "codes of ±1.5"], *rows])


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
    ": support": support,
    ": attention": attention_pairs,
    ": attention_medians": attention_medians,
    ": conventions": conventions,
}
