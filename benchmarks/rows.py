"""Operators between products, quantizing their results in one pass, against ATen's operator alone, which returns
floats.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved
from hop import Quantizer, formats, presets, scale_rules
from hop.kernels.cpu import native, operators

aten = torch.ops.aten


def rows() -> Iterator[Row]:
    """Floats of 1024 by 4096 to int8 rows; float32 softmax to uint8 with a static scale."""
    torch.manual_seed(0)
    x, weight, s = torch.randn(1024, 4096).to(FLOAT), torch.randn(4096).to(FLOAT), torch.randn(12, 512, 512)
    q = presets.INT8_ROW
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
        f"gelu to int8 rows, {NAME} 1024x4096": (
            lambda: hop.scaled(aten.gelu.default, q, x), lambda: functional.gelu(x), ("<= 0.7", "<= 2"),
        ),
        f"silu(a) * b to int8 rows, {NAME} 1024x4096": (
            lambda: hop.scaled(torch.ops.hop.silu_mul.default, q, x, x),
            lambda: functional.silu(x) * x, ("<= 1", "<= 2"),
        ),
        f"layer_norm to int8 rows, {NAME} 1024x4096": (
            lambda: hop.scaled(aten.layer_norm.default, q, x, [4096], weight, weight),
            lambda: functional.layer_norm(x, (4096,), weight, weight), ("<= 0.8", "<= 1"),
        ),
        "softmax to uint8, float32 12x512x512": (
            _softmax(s), lambda: torch.softmax(s, -1), ("<= 0.9", "<= 2"),
        ),
    }  # fmt: skip
    for case, (ours, aten_alone, targets) in cases.items():  # of levels with bfloat16, and of others
        own, other = interleaved([ours, aten_alone])
        yield Row("row", case, own, "ATen's function alone", other, targets[torch.float32 == FLOAT])


def _softmax(s: torch.Tensor) -> Callable[[], Any]:
    q = Quantizer(formats.UINT8, (-1,), scale_rules.Static(affine=True))
    units = {"output_scale": torch.tensor(1 / 255), "output_zero_point": torch.tensor(0, dtype=torch.uint8)}
    return lambda: hop.scaled(aten.softmax.int, q, s, -1, **units)


def functions() -> Iterator[Row]:
    """Elementary functions of 2^20 float32 values, correctly rounded, against ATen's."""
    if native.declines_here() is not None:
        return
    x = torch.randn(2**20)
    for name in ("exp", "tanh", "erf", "log", "sigmoid"):
        of, given = getattr(torch, name), x.abs() if name == "log" else x
        own, other = interleaved([lambda: operators.function(given, name), lambda: of(given)])  # noqa: B023
        target = "<= 1.3" if name in ("exp", "tanh", "erf") else ""
        yield Row("function", f"{name} of 2^20 float32", own, "ATen's, within an ulp", other, target)


GROUPS = [rows, functions]
