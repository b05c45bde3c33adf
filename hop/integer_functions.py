"""Functions of integers, as other runtimes compute them."""

from hop.compat.names import lookup as _lookup
from hop.numerics.integer.functions import (
    IBertLayerNorm,
    IBertSoftmax,
    IntegerFunction,
    TfliteRsqrt,
    TfliteSigmoid,
    TfliteSoftmax,
    TfliteTable,
    TosaSoftmax,
)

__all__ = [
    "IBertLayerNorm",
    "IBertSoftmax",
    "IntegerFunction",
    "TfliteRsqrt",
    "TfliteSigmoid",
    "TfliteSoftmax",
    "TfliteTable",
    "TosaSoftmax",
]

__getattr__ = _lookup(__name__, __all__)
