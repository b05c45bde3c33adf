"""Values as JSON has them."""

import math
from collections.abc import Iterable
from typing import Any, cast


def plain(x: Any) -> Any:
    """x as JSON has it: numbers that it has not as strings, "inf", "-inf" and "nan"."""
    if isinstance(x, dict):
        return {key: plain(v) for key, v in cast(dict[Any, Any], x).items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in cast(Iterable[Any], x)]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
