"""Functions of integers, as other runtimes compute them."""

from hop.compat.names import lookup as _lookup
from hop.numerics.integer.functions import *  # noqa: F403
from hop.numerics.integer.functions import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
