"""The table of docs/which_scheme.md: size and accuracy of MiniLM in each scheme, from benchmarks.which_scheme."""

from docs.training_tables import results
from tests.support import pages


def minilm() -> str:
    rows = [["scheme", "parameters, MB", "cosine, mean", "cosine, worst", "same nearest sentence"]]
    for name, row in results("which_scheme")["rows"].items():
        label = name if name == "float32" else f'`"{name}"`'
        numbers = [f"{row['megabytes']:.1f}", f"{row['cosine']:.4f}", f"{row['worst']:.3f}"]
        rows.append([label, *numbers, f"{row['same_nearest']:.0f} %"])
    return pages.table(rows)


TABLES = {": minilm": minilm}
