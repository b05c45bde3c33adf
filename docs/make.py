"""Write what pages show of the code and of the results on disk: their tables, between two comments, the pictures of
the gallery and those of the training runs.

python -m docs.make
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hop
from docs import (
    algorithms_tables,
    diagrams,
    distributed_tables,
    export_tables,
    function_tables,
    gpu_tables,
    migrating_tables,
    module_tables,
    optimizers_tables,
    training_tables,
)
from docs.drawing import DATA, GROUPED, INK, STYLE, WHOLE, png, pyplot
from hop.compat import patches, versions
from hop.dispatch.operators import ATTENTION, CONVOLUTION, EMBEDDING, MATRIX, SCALED
from hop.export.rewrite import encodings
from hop.export.rewrite.integer import VALUES
from hop.impls.scaled.families.attention import PAIRS as ATTENTION_PAIRS
from hop.interchange.gguf_types import TYPES
from hop.numerics.attention_schemes import ATTENTION_SCHEMES
from hop.numerics.attention_schemes import SHORT as OF_ATTENTION
from hop.numerics.formats import FORMATS, INT8, Codebook, Format, Integer, PowerOfTwo
from hop.numerics.presets import PRESETS
from hop.numerics.quantizer import Quantizer
from hop.numerics.recipes import RECIPES
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
from hop.numerics.scale_rules import AbsMean, Amax, MinMax, Rule
from hop.numerics.schemes import SCHEMES, SHORT
from hop.tensor import table
from tests.support import pages

DOCS = Path(__file__).parent
COMMAND = "python -m docs.make"
SHAPE = (256, 1024)  # of the tensors that the gallery quantizes
GROUP = 32  # elements with a scale of their own, beside one scale for the whole tensor


# ---- tables


def rules() -> str:
    """What ATen operators do with a QuantizedTensor, one row for each rule."""
    by_rule: dict[Any, list[str]] = {}
    collectives_last = sorted(table.rules().items(), key=lambda row: "" if row[0].namespace == "aten" else str(row[0]))
    for op, rule in collectives_last:
        by_rule.setdefault(rule, []).append(f"`{op}`")
    rows = [[", ".join(names), " ".join(str(rule.__doc__).split())] for rule, names in by_rule.items()]
    return pages.table([["operators", "result"], *rows])


def presets() -> str:
    """The quantizers with a name, and what they cost."""
    header = ["preset", "numbers", "block", "scale rule", "besides", "bits per element"]
    rows = []
    for name, q in PRESETS.items():
        flags = ("stochastic", "hadamard", "flat")
        besides = ", ".join(flag for flag in flags if getattr(q, flag))
        block = "×".join("all" if b == -1 else str(b) for b in q.block)
        rule = repr(q.scale).replace("()", "")
        rows.append([f"`{name}`", q.format.name, block, rule, besides, f"{bits_per_element(q):.4g}"])
    return pages.table([header, *rows])


def bits_per_element(q: Quantizer) -> float:
    """Of a tensor of 1024 by 4096, scales included."""
    proto = hop.TensorProto((1024, 4096), quantizer=q)
    return sum(torch.Size(b.shape).numel() * b.dtype.itemsize * 8 for b in proto.buffers()) / (1024 * 4096)


def formats() -> str:
    """The formats in numbers."""
    header = ["format", "bits", "numbers", "smallest", "largest", "least above 0", "codes are"]
    rows = []
    for f in FORMATS:
        least = min(v for v in f.numbers if v > 0)
        dtype = str(f.dtype).removeprefix("torch.")
        rows.append([f.name, str(f.bits), str(len(f.numbers)), _short(f.min), _short(f.max), _short(least), dtype])
    return pages.table([header, *rows])


def scaled_operators() -> str:
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


def integer_operators() -> str:
    """What to_integer makes of operators, by what they are."""
    floats = (MATRIX, CONVOLUTION, EMBEDDING)
    found: dict[str, list[str]] = {}
    for op, roles in SCALED.items():
        found.setdefault(roles.family.name, []).append(f"`{str(op).removeprefix('aten.')}`")
    rows = []
    for family in dict.fromkeys(roles.family for roles in SCALED.values()):
        plain = "scaled, floats" if family in floats else "codes, by the same scale" if family in VALUES else "left"
        codes = "left" if family is ATTENTION else "scaled, codes"
        rows.append([family.name, " ".join(sorted(found[family.name])), codes, plain])
    return pages.table([["", "operators", "where all that reads the result quantizes it", "elsewhere"], *rows])


def encodings_read() -> str:
    """The operators that say what codes mean, by the library that they belong to."""
    rows = []
    for what, names in (
        ("quantize", encodings.QUANTIZE), ("dequantize", encodings.DEQUANTIZE), ("find a scale", encodings.CHOOSE),
    ):  # fmt: skip
        rows.append([what, " ".join(f"`{name}`" for name in names)])
    return pages.table([["", "operators"], *rows])


def schemes() -> str:
    """The schemes of deployment, with their short names."""
    short = {name.upper(): f'"{word}"' for word, name in SHORT.items()}
    rows = [[f"`{name}`", short.get(name, ""), *_spelled(s.lhs, s.rhs)] for name, s in SCHEMES.items()]
    return pages.table([["hop.schemes", "short", "lhs", "rhs"], *rows])


def recipes() -> str:
    """The schemes of training."""
    rows = [[f"`{name}`", *_spelled(s.lhs, s.rhs, s.grad)] for name, s in RECIPES.items()]
    return pages.table([["hop.recipes", "lhs", "rhs", "grad"], *rows])


def attention_schemes() -> str:
    """The schemes of attention, with their short names."""
    short = {name.upper(): f'"{word}"' for word, name in OF_ATTENTION.items()}
    rows = [
        [f"`{name}`", short.get(name, ""), *_spelled(s.query, s.key, s.value), "rotated" if s.rotated else ""]
        for name, s in ATTENTION_SCHEMES.items()
    ]
    return pages.table([["hop.attention_schemes", "short", "query", "key", "value", ""], *rows])


def _spelled(*quantizers: Quantizer | None) -> list[str]:
    return ["" if q is None else f"`{repr(q).removeprefix('Quantizer')}`" for q in quantizers]


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


def scaled_support() -> str:
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


def lacks() -> str:
    """What works with some versions of torch alone."""
    tested = [".".join(map(str, v)) for v in versions.TESTED]
    rows = []
    for lack in versions.LACKS.values():
        marks = ["no" if lack.shows(v) else "yes" for v in versions.TESTED]
        rows.append([lack.what, *marks, lack.instead])
    return pages.table([["what", *tested, "instead"], *rows])


def changes() -> str:
    """What is changed inside PyTorch, and what the library goes around."""
    rows = []
    for patch in patches.PATCHES.values():
        shown = [v for v in versions.TESTED if patch.has_fault(v)]
        spelled = "all" if len(shown) == len(versions.TESTED) else ", ".join(".".join(map(str, v)) for v in shown)
        rows.append([patch.fault, spelled, f"`{patch.module}`" if patch.module else "", " ".join(patch.reported)])
    return pages.table([["what PyTorch does by itself", "versions", "changed", "reported"], *rows])


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


def scaled_conventions() -> str:
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


def _short(x: float) -> str:
    exponent = np.log2(x) if x > 0 else 0.0
    return f"2^{exponent:.0f}" if abs(exponent) > 4 and exponent == round(exponent) else f"{x:.6g}"


# ---- the gallery


@dataclass(frozen=True)
class Subject:
    """What one picture shows.

    Args:
        title: what stands above it.
        numbers: by label, the numbers that an element can be, in units of `unit`.
        quantizers: by label, those whose error is shown.
        signed: whether numbers below 0 can be held; if not, magnitudes are quantized.
    """

    title: str
    numbers: Mapping[str, list[float]]
    unit: str
    quantizers: Mapping[str, Quantizer]
    signed: bool

    def of(self, data: str) -> str:
        """What is quantized of a tensor of that name."""
        return data if self.signed else f"magnitudes of {data}"


def subjects() -> dict[str, Subject]:
    """By the name of its picture: each format of elements, and each preset with scales in a format of their own."""
    found = {f.name: of_format(f) for f in FORMATS if not isinstance(f, PowerOfTwo)}
    for name, q in PRESETS.items():
        (dtype, _), *_ = q.stored().values()
        if dtype != torch.float32 and not q.stochastic and q.hadamard is None:
            found[name.lower()] = of_preset(name, q)
    return found


def of_format(f: Format) -> Subject:
    """A format with a plain scale: an amax; a range for codes without a sign; a mean for a single magnitude."""
    rule: Rule = Amax()
    if isinstance(f, Integer) and f.low >= 0:
        rule = MinMax()
    elif len(f.numbers) <= 3:
        rule = AbsMean()
    zero = f.zero
    quantizers = {
        "one scale": Quantizer(f, (-1, -1), rule),
        f"a scale for each {GROUP}": Quantizer(f, (1, GROUP), rule),
    }
    what = f"{f.bits} bits, {len(f.numbers)} numbers, scaled by {type(rule).__name__}"
    unit = "scales, from the zero point" if zero else "scales"
    signed = not (isinstance(f, Codebook) and f.min >= 0)
    return Subject(f"{f.name}: {what}", {"": [v - zero for v in f.numbers]}, unit, quantizers, signed)


def of_preset(name: str, q: Quantizer) -> Subject:
    """A preset: the numbers of blocks with three different amax."""
    numbers = {}
    for amax in (1.0, 0.3, 0.05):
        x = torch.zeros(q.block[0], 2 * q.block[1])  # a block with the amax of the tensor, and another one
        x[0, 0], x[0, -1] = 1.0, amax
        buffers = q.quantize(x)
        step = q.scale.scale_of([buffers[n] for n in q.stored()], q.format).flatten()[-1].item()
        numbers[f"amax {amax:g}"] = [v * step for v in q.format.numbers]
    block = "×".join(str(b) for b in q.block)
    title = f"{name}: {q.format.name} in blocks of {block}, {bits_per_element(q):.4g} bits with scales"
    return Subject(title, numbers, "amax of the tensor", {f"blocks of {block}": q}, True)


def data() -> dict[str, Tensor]:
    """The tensors that are quantized, by name: of standard deviation 1."""
    rng = np.random.default_rng(0)
    drawn = {"normal": rng.standard_normal(SHAPE), "Student t, 3 degrees": rng.standard_t(3, SHAPE) / np.sqrt(3)}
    return {name: torch.from_numpy(x).to(torch.float32) for name, x in drawn.items()}


def errors(subject: Subject) -> Iterator[tuple[str, str, Tensor, Tensor, float]]:
    """For each tensor and quantizer: their labels, x, its error, and 10 log10(Σ x² / Σ error²)."""
    for name, x in data().items():
        x = x if subject.signed else x.abs()
        for label, q in subject.quantizers.items():
            error = hop.fake_quantize(q, x).double() - x.double()
            ratio = x.double().square().sum() / error.square().sum()
            yield name, label, x, error, 10 * torch.log10(ratio).item()


def gallery() -> str:
    """The table of errors, and all pictures."""
    rows, pictures = [["", "", "of", *(f"{name}, dB" for name in data())]], []
    for name, subject in subjects().items():
        found = {(tensor, label): ratio for tensor, label, _, _, ratio in errors(subject)}
        for label in subject.quantizers:
            of = "numbers" if subject.signed else "magnitudes"
            rows.append([f"[{name}](#{name})", label, of, *(f"{found[tensor, label]:.1f}" for tensor in data())])
        about = ", ".join(f"{label} {ratio:.0f} dB on {subject.of(tensor)}" for (tensor, label), ratio in found.items())
        pictures.append(f"## {name}\n\n![{subject.title}. Signal to error: {about}](gallery/{name}.png)\n")
    return pages.table(rows) + "\n" + "\n".join(pictures)


# ---- drawing


def draw(subject: Subject) -> bytes:
    """The picture, a PNG file that is the same each time."""
    plot = pyplot()
    with plot.rc_context(STYLE):
        rulers = 0.25 + 0.22 * len(subject.numbers)
        figure = plot.figure(figsize=(8, 3.9 + 2 * rulers), dpi=120, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(rulers, rulers, 2.6))
        figure.suptitle(subject.title, fontsize=11, fontweight="bold")
        draw_numbers(figure.add_subplot(grid[0, :]), subject, logarithmic=False)
        draw_numbers(figure.add_subplot(grid[1, :]), subject, logarithmic=True)
        left = figure.add_subplot(grid[2, 0])
        draw_errors([left, figure.add_subplot(grid[2, 1], sharey=left)], subject)
        picture = png(figure)
        plot.close(figure)
    return picture


def draw_numbers(axes: Any, subject: Subject, *, logarithmic: bool) -> None:
    """One mark for each number, along a linear axis or, those above 0, along a logarithmic one."""
    for row, numbers in enumerate(reversed(list(subject.numbers.values()))):
        shown = [v for v in numbers if v > 0 or not logarithmic]
        axes.vlines(shown, row - 0.35, row + 0.35, color=INK, linewidth=0.9)
    axes.set_ylim(-0.6, len(subject.numbers) - 0.4)
    axes.set_yticks(range(len(subject.numbers)), list(subject.numbers)[::-1])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(f"{'magnitude, logarithmic' if logarithmic else 'number'} ({subject.unit})")


def draw_errors(panels: list[Any], subject: Subject) -> None:
    """Relative error against magnitude, over the distribution of the data."""
    drawn = iter(panels)
    axes: dict[str, Any] = {}
    edges = np.logspace(-3, 2, 76)
    middles = np.sqrt(edges[1:] * edges[:-1])
    colors = dict(zip(subject.quantizers, (WHOLE, GROUPED) if len(subject.quantizers) > 1 else (GROUPED,), strict=True))
    for name, label, x, error, ratio in errors(subject):
        place = np.digitize(x.abs().numpy().ravel(), edges)
        count = np.bincount(place, minlength=77)[1:-1]
        if name not in axes:
            axes[name] = next(drawn)
            axes[name].set_title(subject.of(name))
            below = axes[name].twinx()
            below.fill_between(middles, count / count.max(), color=DATA, step="mid", linewidth=0)
            below.set_ylim(0, 2.5)
            below.axis("off")
            axes[name].set_zorder(below.get_zorder() + 1)
            axes[name].patch.set_visible(False)
        squares = np.bincount(place, error.square().numpy().ravel(), 77)[1:-1]
        sizes = np.bincount(place, x.double().square().numpy().ravel(), 77)[1:-1]
        known = count >= 8
        relative = 100 * np.sqrt(squares[known] / sizes[known])
        axes[name].plot(middles[known], relative, color=colors[label], linewidth=1.6, label=f"{label}: {ratio:.1f} dB")
    for panel in axes.values():
        panel.set(xscale="log", yscale="log", xlim=(1e-3, 1e2), ylim=(0.1, 300))
        panel.set_xlabel("magnitude of an element (standard deviations)")
        panel.set_yticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
        panel.set_xticks([1e-3, 1e-2, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
        panel.minorticks_off()
        panel.grid(color=DATA, linewidth=0.6)
        panel.legend(loc="lower left", frameon=False, handlelength=1.4)
    panels[0].set_ylabel("RMS error / magnitude")


# ---- writing

# By page, what is written after the command in the comments around it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "code_map.md": module_tables.TABLES,
    "distributed.md": distributed_tables.TABLES,
    "export.md": {": operators": integer_operators, ": encodings": encodings_read, **export_tables.TABLES},
    "gallery.md": {"": gallery},
    "gpu.md": gpu_tables.TABLES,
    "integer_functions.md": function_tables.TABLES,
    "migrating.md": migrating_tables.TABLES,
    "numerics.md": {"": formats},
    "optimizers_runs.md": optimizers_tables.TABLES,
    "algorithms_runs.md": algorithms_tables.TABLES,
    "quantized.md": {": schemes": schemes, ": recipes": recipes},
    "quantized_tensor.md": {"": rules},
    "quantizers.md": {"": presets},
    "scaled.md": {
        ": operators": scaled_operators,
        ": support": scaled_support,
        ": attention": attention_pairs,
        ": attention_errors": attention_errors,
        ": attention_medians": attention_medians,
        ": conventions": scaled_conventions,
    },
    "training_runs.md": training_tables.TABLES,
    "transformers.md": {": attention_schemes": attention_schemes},
    "versions.md": {": lacks": lacks, ": changes": changes},
}


def page(name: str) -> str:
    """The page `name` with its tables of today."""
    text = (DOCS / name).read_text()
    for label, write in TABLES[name].items():
        text = pages.filled(text, COMMAND + label, write())
    return text


def main() -> None:
    folder = DOCS / "gallery"
    folder.mkdir(exist_ok=True)
    wanted = subjects()
    for old in folder.glob("*.png"):
        if old.stem not in wanted:
            old.unlink()
    for name, subject in wanted.items():
        (folder / f"{name}.png").write_bytes(draw(subject))
    (DOCS / "finetune.png").write_bytes(training_tables.draw())
    (DOCS / "optimizers.png").write_bytes(optimizers_tables.draw())
    (DOCS / "algorithms.png").write_bytes(algorithms_tables.draw())
    for name, draw_diagram in diagrams.DIAGRAMS.items():
        (DOCS / name).write_text(draw_diagram())
    for name in TABLES:
        (DOCS / name).write_text(page(name))
    drawn = "finetune.png, optimizers.png, algorithms.png"
    print(f"wrote {len(wanted)} pictures to {folder}, {drawn}, and the tables of {', '.join(TABLES)}")


if __name__ == "__main__":
    main()
