"""What a call of attention says beside query, key and value."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from hop.impls.scaled.calls import Call


class Options(NamedTuple):
    """Its mask and numbers."""

    mask: Tensor | None  # booleans, or floats that are added
    is_causal: bool  # aligned top left
    scale: float
    grouped: bool  # several heads of the query share one of key and value


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
