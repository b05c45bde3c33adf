"""The table of docs/integer_functions.md: how far integer functions are from the float ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from hop.numerics import functions
from hop.numerics.formats import INT8
from hop.numerics.integer.functions import IBertLayerNorm, IBertSoftmax, TfliteSoftmax, TfliteTable, TosaSoftmax
from tests.support import pages

_IN, _OUT = torch.tensor(0.03), torch.tensor(0.02)


def accuracy() -> str:
    """The largest and the mean difference, in codes, from the nearest code of the exact function."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (1000, 128), generator=generator).to(torch.int8)
    share = (x * 0.1).double().softmax(-1) * 256 - 128
    rows = [_row(rule, rule.codes(x, torch.tensor(0.1), 0, _OUT, 0, INT8), share) for rule in _SOFTMAXES]
    every = torch.arange(-128, 128).to(torch.int8)
    for name in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh"):
        rule = TfliteTable(function=name)
        real = functions.apply(name, every.double() * float(_IN)) / float(_OUT)
        rows.append(_row(rule, rule.codes(every, _IN, 0, _OUT, 0, INT8), real))
    norm = torch.nn.functional.layer_norm(x.double(), (128,)) / float(_OUT)
    rows.append(_row(IBertLayerNorm(), IBertLayerNorm().codes(x, _IN, 0, _OUT, 0, INT8), norm))
    return pages.table([["", "largest", "mean"], *rows])


_SOFTMAXES = (TfliteSoftmax(), TosaSoftmax(), IBertSoftmax())


def _row(rule: object, codes: Tensor, real: Tensor) -> list[str]:
    difference = (codes.double() - real.round().clamp(-128, 127)).abs()
    return [f"`{rule}`", f"{difference.max():.0f}", f"{difference.mean():.2g}"]


TABLES: dict[str, Callable[[], str]] = {": accuracy": accuracy}
