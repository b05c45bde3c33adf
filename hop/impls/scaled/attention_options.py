"""The arguments of attention other than query, key and value."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from hop.impls.scaled.calls import Call


class Options(NamedTuple):
    """Mask, causality, scale and grouping of an attention call."""

    mask: Tensor | None  # bool (False is masked out), or float to be added
    is_causal: bool  # aligned top left
    scale: float
    grouped: bool  # several query heads share one key and value head


def options(call: Call) -> Options:
    given: tuple[Any, ...] = (*call.args[3:], *(None, 0.0, False)[len(call.args) - 3 :])
    mask, _, is_causal = given
    scale = call.kwargs.get("scale")
    return Options(
        mask,
        is_causal,
        1 / math.sqrt(int(call.args[0].shape[-1])) if scale is None else float(scale),
        bool(call.kwargs.get("enable_gqa", False)),
    )
