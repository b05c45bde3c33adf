"""Generate the tables of the pages, the pictures of the gallery, the diagrams, and the plots of training runs.

python -m docs.make
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

os.environ.setdefault("HOP_GPU_KERNELS", "all")  # tables say which kernel a product takes once it was tried

from docs import (
    algorithms_tables,
    diagrams,
    distributed_tables,
    export_tables,
    file_tables,
    function_tables,
    gallery_tables,
    gpu_tables,
    migrating_tables,
    name_tables,
    optimizers_tables,
    scaled_tables,
    scheme_tables,
    support_tables,
    training_tables,
)
from hop.compat import versions
from hop.dispatch.operators import ATTENTION, CONVOLUTION, EMBEDDING, MATRIX, SCALED
from hop.export.rewrite import encodings
from hop.export.rewrite.integer import VALUES
from hop.numerics.attention_schemes import ATTENTION_SCHEMES
from hop.numerics.attention_schemes import SHORT as OF_ATTENTION
from hop.numerics.formats import FORMATS
from hop.numerics.presets import PRESETS
from hop.numerics.quantizer import Quantizer
from hop.numerics.recipes import RECIPES
from hop.numerics.schemes import SCHEMES, SHORT
from hop.tensor import table
from tests.support import pages

DOCS = Path(__file__).parent
COMMAND = "python -m docs.make"


# ---- tables


def rules() -> str:
    """The result of ATen operators on a QuantizedTensor, one row for each result."""
    by_result: dict[str, list[str]] = {}
    collectives_last = sorted(table.rules().items(), key=lambda row: "" if row[0].namespace == "aten" else str(row[0]))
    for op, rule in collectives_last:
        name = str(op).removeprefix("aten.").removesuffix(".default")
        by_result.setdefault(" ".join(str(rule.__doc__).split()), []).append(f"`{name}`")
    rows = [[", ".join(names), result] for result, names in by_result.items()]
    return pages.table([["operators", "result"], *rows])


def presets() -> str:
    """The presets, and the bits that each takes."""
    header = ["preset", "format", "block", "scale rule", "options", "bits per element"]
    rows = []
    for name, q in PRESETS.items():
        flags = ("stochastic", "hadamard", "flat")
        besides = ", ".join(flag for flag in flags if getattr(q, flag))
        block = "×".join("all" if b == -1 else str(b) for b in q.block)
        rule = repr(q.scale).replace("()", "")
        rows.append([f"`{name}`", q.format.name, block, rule, besides, f"{gallery_tables.bits_per_element(q):.4g}"])
    return pages.table([header, *rows])


def formats() -> str:
    """The range of each format."""
    header = ["format", "bits", "values", "smallest", "largest", "least above 0", "dtype of codes"]
    rows = []
    for f in FORMATS:
        least = min(v for v in f.numbers if v > 0)
        dtype = str(f.dtype).removeprefix("torch.")
        rows.append([f.name, str(f.bits), str(len(f.numbers)), _short(f.min), _short(f.max), _short(least), dtype])
    return pages.table([header, *rows])


def integer_operators() -> str:
    """What to_integer does with the operators of each family."""
    floats = (MATRIX, CONVOLUTION, EMBEDDING)
    families = dict.fromkeys(roles.family for roles in SCALED.values())
    by_result: dict[tuple[str, str], list[str]] = {}
    for family in families:
        otherwise = (
            "`hop.scaled` to floats" if family in floats else "codes, same scale" if family in VALUES else "float"
        )
        codes = "float" if family is ATTENTION else "`hop.scaled` to codes"
        by_result.setdefault((codes, otherwise), []).append(family.name)
    rows = [[", ".join(names), *results] for results, names in by_result.items()]
    return pages.table([["operators", "if every reader quantizes the result", "otherwise"], *rows])


def encodings_read() -> str:
    """The operators that quantize, dequantize and choose scales, without overloads, by library."""
    rows = []
    for what, names in (
        ("quantize", encodings.QUANTIZE), ("dequantize", encodings.DEQUANTIZE), ("choose a scale", encodings.CHOOSE),
    ):  # fmt: skip
        packets = dict.fromkeys(str(name).split(".")[0] for name in names)
        rows.append([what, " ".join(f"`{name}`" for name in packets)])
    return pages.table([["", "operators"], *rows])


def schemes() -> str:
    """The schemes of hop.quantize_, with their short names."""
    short = {name.upper(): f'"{word}"' for word, name in SHORT.items()}
    rows = [
        [f"`{name}`", short.get(name, ""), *_described(s.lhs, s.rhs), "yes" if s.mixes_rows() else ""]
        for name, s in SCHEMES.items()
    ]
    return pages.table([["hop.schemes", "short", "lhs", "rhs", "depends on the batch"], *rows])


def recipes() -> str:
    """The recipes for training."""
    rows = [[f"`{name}`", *_described(s.lhs, s.rhs, s.grad)] for name, s in RECIPES.items()]
    return pages.table([["hop.recipes", "lhs", "rhs", "grad"], *rows])


def attention_schemes() -> str:
    """The attention schemes, with their short names."""
    short = {name.upper(): f'"{word}"' for word, name in OF_ATTENTION.items()}
    rows = [
        [f"`{name}`", short.get(name, ""), *_described(s.query, s.key, s.value), "yes" if s.rotated else ""]
        for name, s in ATTENTION_SCHEMES.items()
    ]
    return pages.table([["hop.attention_schemes", "short", "query", "key", "value", "rotated"], *rows])


def _described(*quantizers: Quantizer | None) -> list[str]:
    """The preset of each quantizer, or its fields."""
    names = {q: name for name, q in PRESETS.items()}
    texts = ["" if q is None else names.get(q, repr(q).removeprefix("Quantizer")) for q in quantizers]
    return [f"`{text}`" if text else "" for text in texts]


def lacks() -> str:
    """What some versions of torch lack."""
    tested = [".".join(map(str, v)) for v in versions.TESTED]
    rows = []
    for lack in versions.LACKS.values():
        marks = ["no" if lack.shows(v) else "yes" for v in versions.TESTED]
        rows.append([lack.what, *marks, lack.instead])
    return pages.table([["what", *tested, "instead"], *rows])


def _short(x: float) -> str:
    exponent = np.log2(x) if x > 0 else 0.0
    return f"2^{exponent:.0f}" if abs(exponent) > 4 and exponent == round(exponent) else f"{x:.6g}"


# ---- writing

# By page: the label in the comments around each table, and the function that writes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "api/0_names.md": name_tables.TABLES,
    "distributed.md": distributed_tables.TABLES,
    "export.md": {": operators": integer_operators, ": encodings": encodings_read, **export_tables.TABLES},
    "gallery.md": {"": gallery_tables.gallery},
    "gpu.md": gpu_tables.USERS,
    "gpu_kernels.md": gpu_tables.AUTHORS,
    "integer_functions.md": function_tables.TABLES,
    "migrating.md": migrating_tables.TABLES,
    "numerics.md": {"": formats},
    "optimizers.md": optimizers_tables.TABLES,
    "algorithms.md": algorithms_tables.TABLES,
    "quantized.md": {": schemes": schemes, ": recipes": recipes},
    "quantized_tensor.md": {"": rules},
    "quantizers.md": {"": presets},
    "scaled.md": scaled_tables.TABLES,
    "support.md": {**support_tables.TABLES, **file_tables.TABLES},
    "training.md": training_tables.TABLES,
    "transformers.md": {": attention_schemes": attention_schemes},
    "which_scheme.md": scheme_tables.TABLES,
    "versions.md": {": lacks": lacks},
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
    wanted = gallery_tables.subjects()
    for old in folder.glob("*.png"):
        if old.stem not in wanted:
            old.unlink()
    for name, subject in wanted.items():
        (folder / f"{name}.png").write_bytes(gallery_tables.draw(subject))
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
