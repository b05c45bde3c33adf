"""Quantizers with a name."""

from hop.compat.names import lookup as _lookup
from hop.numerics.presets import *  # noqa: F403
from hop.numerics.presets import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
