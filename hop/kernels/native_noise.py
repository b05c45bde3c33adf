"""Random bits of stochastic rounding on the CPU, in C++ (native/quantize/noise.cpp)."""

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.kernels import Kernel, native
from hop.kernels.memory import address


@functools.cache
def _function() -> Any:
    library: Any = native.library().functions
    found = library.hop_noise
    found.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32]
    found.restype = None
    return found


def _declines(call: tuple[Any, ...]) -> str | None:
    seed, _, shape = call
    if (reason := native.declines_here() or native.declines_tensor("seed", seed)) is not None:
        return reason
    return None if tracing.hints(shape) is not None else f"nothing is known of the sizes {tuple(shape)}"


def _noise(call: tuple[Any, ...]) -> Tensor:
    seed, stream, shape = call
    out = torch.empty(shape, dtype=torch.uint8)
    _function()(address(seed), stream, math.prod(shape), address(out), torch.get_num_threads())
    return out


NOISE = Kernel("native", _declines, _noise, leaf=True)
