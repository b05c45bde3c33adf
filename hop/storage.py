"""Quantized tensors in safetensors files."""

from hop.compat.names import lookup as _lookup
from hop.tensor.storage import *  # noqa: F403
from hop.tensor.storage import __all__ as __all__

__getattr__ = _lookup(__name__, __all__)
