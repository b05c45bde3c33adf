"""Conventions by which integer sums become codes."""

from hop.compat.names import lookup as _lookup
from hop.numerics.requantization import *  # noqa: F403
from hop.numerics.requantization import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
