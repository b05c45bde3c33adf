"""Our operators by name, for modules that the operators' own modules import."""

from typing import Any

operators: dict[str, Any] = {}
