"""Random bits of stochastic rounding on the CPU, in C++ (native/quantize/noise.cpp)."""

from typing import Any

from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Kernel
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators


def _declines(call: tuple[Any, ...]) -> str | None:
    seed, _, shape, *_ = call
    if (reason := native.declines_here() or native.declines_tensor("seed", seed)) is not None:
        return reason
    return None if tracing.hints(shape) is not None else f"nothing is known of the sizes {tuple(shape)}"


def _noise(call: tuple[Any, ...]) -> Tensor:
    seed, stream, shape, *bits = call
    return native_operators.noise(seed, list(shape), stream, *bits)


NOISE = Kernel("native", _declines, _noise, native=True)
