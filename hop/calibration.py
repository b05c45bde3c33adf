"""Scales from data."""

from hop.compat.names import lookup as _lookup
from hop.numerics.calibration import *  # noqa: F403
from hop.numerics.calibration import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
