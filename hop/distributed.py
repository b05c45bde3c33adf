"""Layers spread over processes."""

from hop.compat.names import lookup as _lookup
from hop.nn.distributed import *  # noqa: F403
from hop.nn.distributed import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
