"""The quantizers of attention: of queries, keys and values."""

from hop.compat.names import lookup as _lookup
from hop.numerics.attention_schemes import *  # noqa: F403
from hop.numerics.attention_schemes import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
