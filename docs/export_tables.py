"""The table of docs/export.md: the operators of graphs."""

from collections.abc import Callable

import hop
from hop.impls.decompositions import operators_named
from tests.support import pages

_FUNCTIONS = (
    *(hop.out_dtype, hop.quantize, hop.dequantize, hop.scaled, hop.quantized, hop.fake_quantize, hop.noise, hop.pack),
)


def names() -> str:
    """The operators that our functions put into graphs."""
    rows = []
    for function in _FUNCTIONS:
        targets = " ".join(f"`{hop_.name()}`" for hop_ in operators_named(function))
        rows.append([f"`hop.{function.__name__}`", targets])
    return pages.table([["function", "operators in torch.ops.higher_order"], *rows])


TABLES: dict[str, Callable[[], str]] = {": names": names}
