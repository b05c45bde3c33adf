"""Correctly rounded elementary functions of float32, computed in float64 by numerically stable forms.

float64 does not decide every case: where a value is within the float64 error of the midpoint of two float32s, libraries
may differ. These inputs are known (tests/numerics/hard_cases.py finds them among all 2^32), and a one-bit hash tells on
which side of the midpoint the exact value is (hard_cases.py). The float64 value is moved to that side, by less than the
distance of all other values from a midpoint. So every library that is accurate to a few units in the last place of
float64 gives the same float32, the nearest one.

Functions of float64 tensors are PyTorch's own.
"""

import contextvars
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from hop.compat.export import is_lowering
from hop.compat.tracing import is_describing
from hop.compat.values import STATE
from hop.numerics.hard_cases import BY_NAME


def _gelu(x: Tensor) -> Tensor:
    """x · Φ(x), computed with erfc, which keeps its precision far below 0."""
    return x * _erfc(x * -math.sqrt(0.5)) / 2


def _erfc(x: Tensor) -> Tensor:
    """erfc, which core ATen lacks.

    With z = |x| and t = 2 / (2 + z): t · exp(P(t) - z²), where P is the polynomial of degree 23 through log(erfc(z) /
    t) + z² at the Chebyshev nodes of z up to 10.6. The relative error is about (1 + z²) · 2^-53.
    """
    if not is_lowering():
        return torch.special.erfc(x)
    z = x.abs()
    t = 2 / (z + 2)
    u = (t - (1 + _LEAST) / 2) * (2 / (1 - _LEAST))
    polynomial = torch.full_like(u, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        polynomial = polynomial * u + coefficient
    tail = torch.where(z < 10.6, t * torch.exp(polynomial - z * z), 0.0)  # beyond, the result is 0 in float32
    return torch.where(x < 0, 2 - tail, tail)


_LEAST = 2 / 12.6  # t at 10.6
_ERFC = (
    -0.5640253942636992,
    0.5754277980458827,
    0.016903756373056293,
    -0.030277026107115395,
    -0.0012676297467898823,
    0.003908981795448649,
    -0.0002636871773114082,
    -0.0005951607046097734,
    0.00015555205226021795,
    7.486979198621956e-05,
    -4.638613774793253e-05,
    -2.4829924523228012e-06,
    9.521628391319493e-06,
    -2.2052091877307447e-06,
    -1.1698638535092128e-06,
    7.705453200264266e-07,
    -1.9767056911720856e-08,
    -1.3526322415281923e-07,
    4.577041012924168e-08,
    9.419855440974136e-09,
    -1.004696955361772e-08,
    1.220170787425596e-09,
    9.010269877726538e-10,
    -2.6379096415157835e-10,
)


def _erf(x: Tensor) -> Tensor:
    """erf for runtimes without a float64 one: x · P(x²) below 1, with P near erf(√u) / √u to 2^-62; 1 - erfc beyond."""
    if not is_lowering():
        return torch.erf(x)
    z = x.abs()
    u = (x * x).clamp(max=1)
    polynomial = torch.full_like(u, _ERF[-1])
    for coefficient in _ERF[-2::-1]:
        polynomial = polynomial * u + coefficient
    far = 1 - _erfc(z)
    return torch.where(z >= 1, torch.where(x < 0, -far, far), x * polynomial)


_ERF = (
    1.1283791670955126,
    -0.3761263890318375,
    0.11283791670954879,
    -0.026866170645076792,
    0.0052239776248180145,
    -0.000854832698083379,
    0.0001205533111164271,
    -1.4925595266831182e-05,
    1.6461000484121368e-06,
    -1.6350312701054695e-07,
    1.4659775274047436e-08,
    -1.1372848856791674e-09,
    5.957176147748911e-11,
)


def _exp2(x: Tensor) -> Tensor:
    """2^x, which core ATen lacks too; ln 2 is split in two, so that the first part's product
    with a float32 is exact.
    """
    if not is_lowering():
        return torch.exp2(x)
    return torch.exp(x * _LN2_HIGH) * torch.exp(x * _LN2_LOW)


_LN2_HIGH = round(math.log(2) * 2**28) / 2**28
_LN2_LOW = 1.8206359985041462e-09


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU with tanh, x · (1 + tanh(u)) / 2 = x / (1 + exp(-2u))."""
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": _exp2,
    "log": torch.log,
    "tanh": torch.tanh,
    "erf": _erf,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "sqrt": torch.sqrt,  # whose float32 kernels are wrong in the last bit on some CPUs
    "rsqrt": lambda x: x.sqrt().reciprocal(),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sin": torch.sin,
    "cos": torch.cos,
}

_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "exp2": torch.exp2,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "rsqrt": torch.rsqrt,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}

_AT_MINUS_INFINITY = {"gelu", "gelu_tanh", "silu"}  # the formula gives NaN where the limit is -0
_BY_RESULT = {"log", "sin", "cos"}  # the hash is that of the result, which says more than the input
_ODD = {"tanh", "erf", "sin", "cos"}  # odd or even: the side is that of the magnitude

NAMES = tuple(_WIDE)
WITHOUT_KERNEL = ("sqrt", "sin", "cos")


_of_runtime = contextvars.ContextVar("of_runtime", default=False)

STATE.append(lambda: "functions of a runtime" if are_of_runtime() else "")


@contextmanager
def of_runtime() -> Iterator[None]:
    """Context manager in which programs are lowered for a runtime that computes float functions by its own operators.

    These are elementary functions, norms and softmax.
    """
    token = _of_runtime.set(True)
    try:
        yield
    finally:
        _of_runtime.reset(token)


def are_of_runtime() -> bool:
    """Whether that context is active."""
    return _of_runtime.get()


def apply(name: str, x: Tensor) -> Tensor:
    """Apply the function `name`, one of NAMES, to x, float32 or float64; the result has x's dtype."""
    if is_describing():
        return torch.empty_like(x)
    if x.dtype == torch.float64:
        return _OWN.get(name, _WIDE[name])(x)
    wide = x.to(torch.float64)
    y = _WIDE[name](wide)
    y = (y * _toward(name, wide, y)).to(torch.float32)
    return torch.where(x == -math.inf, -0.0, y) if name in _AT_MINUS_INFINITY else y


def _toward(name: str, x: Tensor, y: Tensor) -> Tensor | float:
    """The factor that moves y, in float64, to the side of the midpoint on which the exact value is."""
    if name not in BY_NAME:
        return 1.0
    (split, factors), z = BY_NAME[name], y if name in _BY_RESULT else x
    z = z.abs() if name in _ODD else z
    factor: Tensor | float = factors[-1]
    if len(factors) > 1:
        part, factor = _fraction(z * split) * len(factors), torch.full_like(z, factors[-1])
        for i in range(len(factors) - 2, -1, -1):
            factor = torch.where(part < i + 1, factors[i], factor)
    side = (_fraction(z * factor) < 0.5).to(torch.float64) * 2 - 1
    return side * _allowance(name, x) + 1


def _fraction(x: Tensor) -> Tensor:
    return x - x.floor()


def _allowance(name: str, x: Tensor) -> Tensor | float:
    """The relative error allowed in the float64 value, with a margin: larger where an exponent is large."""
    if name == "gelu":
        return (x.clamp(-16.0, 0.0) ** 2 + 4) * 2.0**-52
    if name == "gelu_tanh":
        return ((-_SLOPE * (x + 0.044715 * x * x * x)).clamp(0.0, 128.0) + 2) * 2.0**-51
    return {"exp": 2, "exp2": 3, "sin": 2, "cos": 2}.get(name, 4) * 2.0**-52


_SLOPE = 2 * math.sqrt(2 / math.pi)
