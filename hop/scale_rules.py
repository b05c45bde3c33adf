"""Rules that choose the scales of blocks."""

from hop.compat.names import lookup as _lookup
from hop.numerics.scale_rules import *  # noqa: F403
from hop.numerics.scale_rules import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
