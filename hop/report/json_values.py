"""Values that JSON can represent."""

import math
from collections.abc import Iterable
from typing import Any, cast


def to_json_value(x: Any) -> Any:
    """Return `x` with infinities and NaN as the strings "inf", "-inf" and "nan", and tuples as lists."""
    if isinstance(x, dict):
        return {key: to_json_value(v) for key, v in cast(dict[Any, Any], x).items()}
    if isinstance(x, list | tuple):
        return [to_json_value(v) for v in cast(Iterable[Any], x)]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
