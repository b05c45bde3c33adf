"""Rotations of blocks before they are quantized."""

from hop.compat.names import lookup as _lookup
from hop.numerics.hadamard import *  # noqa: F403
from hop.numerics.hadamard import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
