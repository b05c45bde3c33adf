"""Mixed- and low-precision operators for PyTorch that mean one thing everywhere."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from hop.compat.names import lookup as _lookup
from hop.impls.decompositions import decompositions as decompositions
from hop.impls.explain import explain as explain
from hop.impls.out_dtype import out_dtype as out_dtype
from hop.impls.pack import pack as pack
from hop.impls.pack import unpack as unpack
from hop.impls.quantize import dequantize as dequantize
from hop.impls.quantize import fake_quantize as fake_quantize
from hop.impls.quantize import quantize as quantize
from hop.impls.quantize import quantize_weight as quantize_weight
from hop.impls.quantized import Scales as Scales
from hop.impls.quantized import quantized as quantized
from hop.impls.scaled import scaled as scaled
from hop.numerics.quantizer import Quantizer as Quantizer
from hop.numerics.schemes import Scheme as Scheme
from hop.tensor import QuantizedTensor as QuantizedTensor
from hop.tensor.buffers.noise import noise as noise
from hop.tensor.from_codes import from_codes as from_codes
from hop.tensor.proto import TensorProto as TensorProto

__all__ = [
    "QuantizedTensor",
    "Quantizer",
    "Scales",
    "Scheme",
    "TensorProto",
    "algorithms",
    "attention_schemes",
    "calibration",
    "checkpoint",
    "compile_decode",
    "decompositions",
    "dequantize",
    "distributed",
    "estimators",
    "explain",
    "export",
    "fake_quantize",
    "formats",
    "from_codes",
    "hadamard",
    "integer_functions",
    "integrations",
    "interchange",
    "layouts",
    "load_model",
    "nn",
    "noise",
    "optim",
    "out_dtype",
    "pack",
    "patch_torch",
    "presets",
    "quantize",
    "quantize_",
    "quantize_weight",
    "quantized",
    "recipes",
    "report",
    "requantization",
    "scale_rules",
    "scaled",
    "schemes",
    "storage",
    "unpack",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hop import algorithms as algorithms
    from hop import attention_schemes as attention_schemes
    from hop import calibration as calibration
    from hop import checkpoint as checkpoint
    from hop import distributed as distributed
    from hop import estimators as estimators
    from hop import export as export
    from hop import formats as formats
    from hop import hadamard as hadamard
    from hop import integer_functions as integer_functions
    from hop import integrations as integrations
    from hop import interchange as interchange
    from hop import layouts as layouts
    from hop import nn as nn
    from hop import optim as optim
    from hop import presets as presets
    from hop import recipes as recipes
    from hop import report as report
    from hop import requantization as requantization
    from hop import scale_rules as scale_rules
    from hop import schemes as schemes
    from hop import storage as storage
    from hop.export.rewrite.patching import patch_torch as patch_torch
    from hop.integrations.checkpoints import load_model as load_model
    from hop.integrations.decoding import compile_decode as compile_decode
    from hop.nn.models.quantizing import quantize_ as quantize_

# Functions that are imported when somebody first uses them; modules are, too.
_LATER = {
    "compile_decode": "hop.integrations",
    "load_model": "hop.integrations",
    "patch_torch": "hop.export.rewrite.patching",
    "quantize_": "hop.nn.models.quantizing",
}
_missing = _lookup(__name__, __all__)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        try:
            return getattr(importlib.import_module(_LATER[name]), name)
        except ImportError as error:  # `from hop import *` works without the packages that a function needs
            return _unavailable(error)
    if name in __all__:
        return importlib.import_module(f"hop.{name}")
    return _missing(name)


def _unavailable(error: ImportError) -> Callable[..., NoReturn]:
    """A function that raises the error once it is called."""

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        """Raise ImportError: a package that the function needs is not installed."""
        raise error

    return unavailable


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
