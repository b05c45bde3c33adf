"""Tables of docs/scaled.md: what hop.scaled runs, which kernel takes what, how conventions compute."""

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
    """The operators that scaled runs, by what they are."""
    found: dict[tuple[str, str], list[str]] = {}
    for op, roles in SCALED.items():
        found.setdefault((roles.family.name, ", ".join(roles.roles)), []).append(f"`{op}`")
    rows = [[family, roles, " ".join(sorted(ops))] for (family, roles), ops in found.items()]
    return pages.table([["", "roles of the tensors", "operators"], *rows])


def attention_pairs() -> str:
    """What attention takes together, and how it sums."""
    return pages.table([["query", "key", "value", "sums"], *([*pair, how] for pair, how in ATTENTION_PAIRS.items())])


def attention_errors() -> str:
    """A layer a row, of each model: the error of each scheme that has a short name, and the median."""
    found, schemes = training_tables.results("attention_errors"), ("int8", "int8 rotated", "fp8")
    rows = [["layer", *(f"{model}, {scheme}" for model in found for scheme in schemes)]]
    for i in range(max(map(len, found.values()))):
        cells = [f"{own[i][scheme]:.2%}" if i < len(own) else "" for own in found.values() for scheme in schemes]
        rows.append([str(i + 1), *cells])
    medians = [statistics.median(row[scheme] for row in own) for own in found.values() for scheme in schemes]
    return pages.table([*rows, ["median", *(f"{x:.2%}" for x in medians)]])


def attention_medians() -> str:
    """A scheme a row: the median of its errors over the layers of each model."""
    found = training_tables.results("attention_errors")
    rows = [["", *found]]
    for scheme in next(iter(found.values()))[0]:
        rows.append([scheme, *(f"{statistics.median(row[scheme] for row in own):.2%}" for own in found.values())])
    return pages.table(rows)


# By label, presets, or types of GGUF, of two factors of a linear layer, the weight packed or not; a dtype is a plain
# tensor.
QUANTIZERS = {t.name: t.quantizer for t in TYPES.values()} | PRESETS
PAIRS = {
    "int8 × int8, rows × channels": ("INT8_ROW", "INT8_ROW", False),
    "the same, zero points on the left": ("INT8_ROW_AFFINE", "INT8_ROW", False),
    "zero points on both sides": ("INT8_TENSOR_AFFINE", "INT8_ROW_AFFINE", False),
    "uint8 × int8": ("UINT8_TENSOR_AFFINE", "INT8_ROW", False),
    "int8 × int4 in groups (8da4w)": ("INT8_ROW_AFFINE", "INT4_32", False),
    "int4 × uint4 in groups": ("INT4_32", "UINT4_64_AFFINE", False),
    "int8 × ternary": ("INT8_ROW", "TERNARY_TENSOR", False),
    "fp8 × fp8, rows or tensors": ("FP8_ROW", "FP8_TENSOR", False),
    "e4m3 × e5m2": ("FP8_ROW", "FP8_E5M2_ROW", False),
    "fp8, 1×128 × 128×128": ("FP8_1X128", "FP8_128X128", False),
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
    """What takes each pair of operands, asked of the kernels."""
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x, rows = w[:16], []
    for label, (of_lhs, of_rhs, packed) in PAIRS.items():
        lhs = hop.quantize(QUANTIZERS[of_lhs], x) if isinstance(of_lhs, str) else x.to(of_lhs)
        rhs = hop.quantize(QUANTIZERS[of_rhs], w)
        rhs = hop.pack(rhs) if packed else rhs
        rows.append([label, *(_taken(output, lhs, rhs) for output in (torch.float32, torch.bfloat16))])
    return pages.table([["operands", "to float32", "to bfloat16"], *rows])


def _taken(output: torch.dtype, lhs: Tensor, rhs: Tensor) -> str:
    try:
        return hop.explain(torch.ops.aten.linear.default, output, lhs, rhs).splitlines()[-1].removesuffix(": chosen")
    except ValueError:
        return "error"


CONVENTIONS = {
    "Division": ("ONNX's QuantizeLinear; `hop.quantize` of the float result", Division()),
    "Reciprocal": ("quantize and dequantize nodes of PyTorch and torchao", Reciprocal()),
    "FloatMultiplier": ("XNNPACK and QNNPACK in float32, FBGEMM", FloatMultiplier()),
    'FixedPoint("gemmlowp")': ("gemmlowp, TFLite by default", GEMMLOWP),
    'FixedPoint("tflite")': ("TFLite with single rounding", TFLITE),
    'FixedPoint("away")': ("exact, ties away from zero", FixedPoint(rounding="away")),
    'FixedPoint("even")': ("exact, ties to even", FixedPoint(rounding="even")),
    'FixedPoint("ruy")': ("LiteRT's optimized kernels", FixedPoint(rounding="ruy")),
    "DoubleMultiplier": ("LiteRT's fully connected layers of int16", DoubleMultiplier()),
    "WideFixedPoint": ("LiteRT's convolutions of int16", WideFixedPoint()),
}
HALVES = (1, 3, 5, -1, -3, -5)


def conventions() -> str:
    """How each convention computes, and the codes of half steps with M = 1/2, then of 3 · 2^-33."""
    rows = []
    for name, (who, rule) in CONVENTIONS.items():
        formula = str(rule.__doc__).splitlines()[0].rstrip(".")
        codes = _codes(rule, HALVES, 0.5)
        edge = _codes(rule, (2**30, -(2**30)), 3 * 2.0**-31)
        rows.append([f"`{name}`", who, formula, ", ".join(codes), ", ".join(edge)])
    header = ["convention", "who computes so", "how"]
    halves = ", ".join(f"{n}/2" for n in HALVES)
    return pages.table([[*header, f"codes of {halves}", "codes of ±1.5, as 2^30 · 3 · 2^-31"], *rows])


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
    ": attention_errors": attention_errors,
    ": attention_medians": attention_medians,
    ": conventions": conventions,
}
