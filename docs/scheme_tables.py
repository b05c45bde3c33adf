"""The tables of docs/which_scheme.md: size and accuracy of models in each scheme, from benchmarks.which_scheme."""

from collections.abc import Callable

from docs.training_tables import results
from tests.support import pages

# Rows by the bits of a weight: ours, then those of peers.
COMPARED = {
    "32": ("float32",),
    "8": ("int8_weight",),
    "8, activations too": ("int8", "fp8", "mxfp8"),
    "5": ("int4", "int4, scales of the rule", "int4, 32 samples", "torchao int4", "llama.cpp Q4_1"),
    "5.25": ("int4_weight_32_affine",),
    "4.5, integers": ("llama.cpp Q4_0",),
    "5, int8 activations": ("8da4w", "8da4w, scales of the rule", "8da4w, 32 samples", "torchao 8da4w"),
    "4.5": ("nvfp4 weights", "torchao nvfp4 weights"),
    "4.25": ("mxfp4 weights", "torchao mxfp4 weights", "llama.cpp MXFP4"),
    "4, activations too": (
        *("nvfp4", "nvfp4, scales of the rule", "nvfp4, 32 samples"),
        *("mxfp4", "mxfp4, scales of the rule", "mxfp4, 32 samples"),
    ),
}


def label(name: str) -> str:
    """A row's name, with a scheme's as code."""
    scheme, *rest = name.split(", ")
    is_name = name != "float32" and " " not in scheme
    return ", ".join([f'`"{scheme}"`' if is_name else scheme, *rest])


def minilm() -> str:
    rows = [
        ["scheme", "parameters, MB", "cosine, mean", "cosine, worst", "same nearest sentence", "same in the nearest 10"]
    ]
    found = results("which_scheme")["models"]["minilm"]
    for name, row in found.items():
        if name in ("float32", "int8_weight", "int8", "fp8", "mxfp8", "8da4w", "int4", "nvfp4", "mxfp4"):
            numbers = [f"{row['megabytes']:.1f}", f"{row['cosine']:.4f}", f"{row['worst']:.3f}"]
            rows.append([label(name), *numbers, f"{row['same_nearest']:.0f} %", f"{row['recall']:.0f} %"])
    return pages.table(rows)


def peers() -> str:
    """A row for each quantizer, by the bits of a weight; empty cells were not measured."""
    models = results("which_scheme")["models"]
    cells: dict[str, Callable[[dict[str, float]], str]] = {
        "minilm": lambda row: f"{row['cosine']:.4f}, {row['same_nearest']:.0f} %, {row['recall']:.0f} %",
        "gemma": lambda row: f"{row['perplexity']:.2f}",
        "digits": lambda row: f"{row['error']:.3f}",
    }
    rows = [["bits", "quantizer", "MiniLM: cosine, nearest, nearest 10", "Gemma: perplexity", "digits: error"]]
    for bits, names in COMPARED.items():
        for name in names:
            if any(name in models[model] for model in cells):
                found = [of(models[model][name]) if name in models[model] else "" for model, of in cells.items()]
                rows.append([bits, label(name), *found])
    return pages.table(rows)


TABLES = {": minilm": minilm, ": peers": peers}
