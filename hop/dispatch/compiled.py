"""Our operators by their names, for modules that those of the operators import."""

from typing import Any

operators: dict[str, Any] = {}
