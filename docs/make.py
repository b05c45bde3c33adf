"""Write what pages show of the code and of the results on disk: their tables, between two comments, the pictures of
the gallery and those of the training runs.

python -m docs.make
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from docs import (
    algorithms_tables,
    diagrams,
    distributed_tables,
    export_tables,
    function_tables,
    gallery_tables,
    gpu_tables,
    migrating_tables,
    module_tables,
    optimizers_tables,
    scaled_tables,
    training_tables,
)
from hop.compat import patches, versions
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
        rows.append([f"`{name}`", q.format.name, block, rule, besides, f"{gallery_tables.bits_per_element(q):.4g}"])
    return pages.table([header, *rows])


def formats() -> str:
    """The formats in numbers."""
    header = ["format", "bits", "numbers", "smallest", "largest", "least above 0", "codes are"]
    rows = []
    for f in FORMATS:
        least = min(v for v in f.numbers if v > 0)
        dtype = str(f.dtype).removeprefix("torch.")
        rows.append([f.name, str(f.bits), str(len(f.numbers)), _short(f.min), _short(f.max), _short(least), dtype])
    return pages.table([header, *rows])


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


def lacks() -> str:
    """What some versions of torch lack."""
    tested = [".".join(map(str, v)) for v in versions.TESTED]
    rows = []
    for lack in versions.LACKS.values():
        marks = ["no" if lack.shows(v) else "yes" for v in versions.TESTED]
        rows.append([lack.what, *marks, lack.instead])
    return pages.table([["what", *tested, "instead"], *rows])


def changes() -> str:
    """Faults of PyTorch that the library patches or avoids."""
    rows = []
    for patch in patches.PATCHES.values():
        shown = [v for v in versions.TESTED if patch.has_fault(v)]
        spelled = "all" if len(shown) == len(versions.TESTED) else ", ".join(".".join(map(str, v)) for v in shown)
        rows.append([patch.fault, spelled, f"`{patch.module}`" if patch.module else "", " ".join(patch.reported)])
    return pages.table([["fault in PyTorch", "versions", "patched module", "reported"], *rows])


def _short(x: float) -> str:
    exponent = np.log2(x) if x > 0 else 0.0
    return f"2^{exponent:.0f}" if abs(exponent) > 4 and exponent == round(exponent) else f"{x:.6g}"


# ---- writing

# By page, what is written after the command in the comments around it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "code_map.md": module_tables.TABLES,
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
    "training.md": training_tables.TABLES,
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
