"""Mixed- and low-precision operators for PyTorch that mean one thing everywhere."""

import importlib
from typing import TYPE_CHECKING, Any

from hop.compat import aliases as _aliases
from hop.impls.decompositions import decompositions as decompositions
from hop.impls.explain import explain as explain
from hop.impls.out_dtype import out_dtype as out_dtype
from hop.impls.pack import pack as pack
from hop.impls.pack import unpack as unpack
from hop.impls.quantize import dequantize as dequantize
from hop.impls.quantize import fake_quantize as fake_quantize
from hop.impls.quantize import quantize as quantize
from hop.impls.quantized import Scales as Scales
from hop.impls.quantized import quantized as quantized
from hop.impls.scaled import scaled as scaled
from hop.numerics import presets as presets
from hop.numerics import recipes as recipes
from hop.numerics import schemes as schemes
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
    "decompositions",
    "dequantize",
    "explain",
    "fake_quantize",
    "from_codes",
    "noise",
    "out_dtype",
    "pack",
    "patch_torch",
    "presets",
    "quantize",
    "quantize_",
    "quantized",
    "recipes",
    "scaled",
    "schemes",
    "unpack",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hop import algorithms as algorithms
    from hop import export as export
    from hop import nn as nn
    from hop.export.rewrite.patching import patch_torch as patch_torch
    from hop.integrations import compile_decode as compile_decode
    from hop.integrations import load_model as load_model
    from hop.nn import distributed as distributed
    from hop.nn.quantizing import quantize_ as quantize_
    from hop.numerics import attention_schemes as attention_schemes
    from hop.numerics import calibration as calibration
    from hop.numerics import estimators as estimators
    from hop.numerics import formats as formats
    from hop.numerics import hadamard as hadamard
    from hop.numerics import integer_functions as integer_functions
    from hop.numerics import layouts as layouts
    from hop.numerics import requantization as requantization
    from hop.numerics import scale_rules as scale_rules
    from hop.tensor import storage as storage

# Imported when they are first asked for; and what has another name (hop/compat/aliases.py).
_LATER = ("algorithms", "checkpoint", "export", "integrations", "nn", "optim", "report")
_FUNCTIONS = {
    "compile_decode": "hop.integrations",
    "load_model": "hop.integrations",
    "patch_torch": "hop.export.rewrite.patching",
    "quantize_": "hop.nn.quantizing",
}
_OTHERS = tuple(name.removeprefix("hop.") for name in _aliases.PUBLIC if name.count(".") == 1)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"hop.{name}")
    if (renamed := _aliases.module(f"hop.{name}")) is not None:
        return renamed
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise _aliases.no_attribute("hop", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_OTHERS, *_FUNCTIONS})


_aliases.install()
