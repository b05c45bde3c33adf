"""Random bits for stochastic rounding on the CPU, in C++ (native/quantize/noise.cpp)."""

from typing import Any

from hop.dispatch.kernel import Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators


def _prepare(call: tuple[Any, ...]) -> Plan:
    seed, _, shape, *_ = call
    decline(native.declines_here() or native.declines_tensor("seed", seed))
    native.sizes(shape)
    return lambda seed, stream, shape, *bits: native_operators.noise(seed, list(shape), stream, *bits)


NOISE = Kernel("native", _prepare, native=True)
