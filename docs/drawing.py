"""Colours and helpers for the pictures of the pages."""

import io
from typing import Any

INK, RULER, WHOLE, GROUPED, DATA = "#1f2933", "#9aa5b1", "#c2410c", "#1d4ed8", "#e4e7eb"

# Of pictures that matplotlib draws.
STYLE: Any = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "font.size": 9,
    "axes.edgecolor": RULER,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def pyplot() -> Any:
    """matplotlib's, that draws into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def png(figure: Any) -> bytes:
    """The picture as a PNG file of 64 colours, the same each time, without what is not the picture."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()
