"""Orders of codes in memory that kernels read faster."""

from hop.compat.names import lookup as _lookup
from hop.numerics.layouts import *  # noqa: F403
from hop.numerics.layouts import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
