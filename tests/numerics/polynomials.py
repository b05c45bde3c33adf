"""Writes native/functions/polynomials.h: polynomials and tables of elementary functions in float64; and of them, and of
hop.numerics, what GPUs take: cutlass_kernels/function_tables.py.

    python -m tests.numerics.polynomials

Each polynomial passes through its function at Chebyshev nodes, found with 300 bits; the error that is left stands
beside it, in powers of two.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
from mpmath import mpf

from hop.numerics import functions
from hop.numerics.hard_cases import BY_NAME

mpmath.mp.prec = 300
ROOT = Path(__file__).parents[2]
FILE, GPU_FILE = ROOT / "native/functions/polynomials.h", ROOT / "cutlass_kernels/function_tables.py"


def polynomial(f: Callable[[Any], Any], low: Any, high: Any, degree: int, around: Any = 0) -> list[Any]:
    """Coefficients of powers of x - around, the lowest first, of the one through f at Chebyshev nodes of [low,
    high]."""
    n = degree + 1
    nodes = [mpmath.cos(mpmath.pi * (k + mpf(0.5)) / n) for k in range(n)]
    x = [(high - low) / 2 * u + (high + low) / 2 - around for u in nodes]
    matrix = mpmath.matrix([[v**j for j in range(n)] for v in x])
    return list(mpmath.lu_solve(matrix, mpmath.matrix([f(v + around) for v in x])))


def error(f: Callable[[Any], Any], c: list[Any], low: Any, high: Any, around: Any = 0) -> float:
    """log2 of the largest relative error of the polynomial with coefficients rounded to float64."""
    points = [low + (high - low) * mpf(k) / 200 for k in range(1, 200)]
    worst = max(abs(sum(mpf(float(v)) * (x - around) ** j for j, v in enumerate(c)) / f(x) - 1) for x in points if f(x))
    return float(mpmath.log(worst, 2))


def spelled(values: list[Any]) -> str:
    return "{" + ", ".join(float(v).hex() for v in values) + "}"


def spelled32(values: list[Any]) -> str:
    """The text of numbers rounded to float32."""
    return "{" + ", ".join(f"{float(np.float32(float(v))).hex()}f" for v in values) + "}"


def lines() -> list[str]:
    text = ["// Written by python -m tests.numerics.polynomials.", "#pragma once", "", "namespace hop::functions {", ""]
    # e^r = 1 + r + r^2 p(r), |r| <= ln 2 / 32
    r = mpmath.log(2) / 32
    tail = lambda x: (mpmath.exp(x) - 1 - x) / x**2 if abs(x) > mpf(10) ** -20 else mpf(0.5)  # noqa: E731
    c = polynomial(tail, -r, r, 4)
    text.append(f"// (e^r - 1 - r) / r^2 up to ln 2 / 32; 2^{error(tail, c, -r, r):.1f}")
    text.append(f"constexpr double kExp[] = {spelled(c)};")
    text.append(f"constexpr double kPowers[] = {spelled([mpf(2) ** (mpf(j) / 16) for j in range(16)])};  // 2^(j/16)")
    # the same without a table, |r| <= ln 2 / 2
    r = mpmath.log(2) / 2
    c = polynomial(tail, -r, r, 8)
    text.append(f"// (e^r - 1 - r) / r^2 up to ln 2 / 2; 2^{error(tail, c, -r, r):.1f}")
    text.append(f"constexpr double kExpWhole[] = {spelled(c)};")
    # the same in pairs of float32, |r| <= ln 2 / 64 and a little
    step, r = mpmath.log(2) / 32, mpmath.log(2) / 63
    steps = [step, step - mpf(float(np.float32(float(step))))]
    c = [mpf(float(np.float32(float(v)))) for v in polynomial(tail, -r, r, 2)]
    worst = max(abs(sum(v * x**j for j, v in enumerate(c)) - tail(x)) * x**2 for x in (k * r / 200 for k in range(201)))
    powers = [mpf(2) ** (mpf(j) / 32) for j in range(32)]
    rest = [v - mpf(float(np.float32(float(v)))) for v in powers]
    text.append(f"// (e^r - 1 - r) / r^2 up to ln 2 / 63, float32; error of e^r: 2^{float(mpmath.log(worst, 2)):.1f}")
    text.append(f"constexpr float kExpPairs[] = {spelled32(c)};")
    text.append(f"constexpr float kExpStep[] = {spelled32(steps)};  // ln 2 / 32")
    text.append(f"constexpr float kPowersHigh[] = {spelled32(powers)};  // 2^(j/32)")
    text.append(f"constexpr float kPowersLow[] = {spelled32(rest)};  // 2^(j/32) - kPowersHigh[j]")
    # log(1 + r) = r + r^2 p(r), |r| <= 1/30
    tail = lambda x: (mpmath.log(1 + x) - x) / x**2 if abs(x) > mpf(10) ** -20 else mpf(-0.5)  # noqa: E731
    least, most = mpf(-1) / 24, mpf(1) / 16
    c = polynomial(tail, least, most, 9)
    text.append(f"// (log(1 + r) - r) / r^2 from -1/24 to 1/16; 2^{error(tail, c, least, most):.1f}")
    text.append(f"constexpr double kLog[] = {spelled(c)};")
    # for m in [1, 2), j = its upper four bits; from j = 7 on m / 2 is meant
    inverses, logs = [], []
    for j in range(16):
        middle = 1 + (mpf(j) + mpf(0.5)) / 16
        middle = middle if j < 7 else middle / 2
        inverse = mpf(1) if j in (0, 15) else mpf(round(float(256 / middle))) / 256
        inverses.append(inverse)
        logs.append(-mpmath.log(inverse))
    text.append(f"constexpr double kInverses[] = {spelled(inverses)};  // near 1 / m")
    text.append(f"constexpr double kLogs[] = {spelled(logs)};  // -log of kInverses")
    # erf(x) / x on 16 intervals of 1/4
    over = lambda x: mpmath.erf(x) / x if x else 2 / mpmath.sqrt(mpmath.pi)  # noqa: E731
    degree, columns, worst = 9, [], -1000.0
    for j in range(16):
        low = mpf(j) / 4
        c = polynomial(over, low, low + mpf(0.25), degree, low + mpf(0.125))
        columns.append(c)
        worst = max(worst, error(over, c, low, low + mpf(0.25), low + mpf(0.125)))
    text.append(f"// erf(x) / x by powers of x - (j / 4 + 1/8), one row per power, one column per j; 2^{worst:.1f}")
    rows = ",\n    ".join(spelled([columns[j][i] for j in range(16)]) for i in range(degree + 1))
    text.append(f"constexpr int kErfDegree = {degree};")
    text.append(f"constexpr double kErf[][16] = {{\n    {rows}}};")

    # Mills' ratio of the normal distribution: Phi(-t) e^(t^2/2), of u = (t - 3) / (t + 3), t from 0 to 14.5
    def mills(u: Any) -> Any:
        t = 3 * (1 + u) / (1 - u)
        return mpmath.erfc(t / mpmath.sqrt(2)) * mpmath.exp(t * t / 2) / 2 * (t + 3)

    low, high = mpf(-1), (mpf(14.5) - 3) / (mpf(14.5) + 3)
    c = polynomial(mills, low, high, 19)
    text.append(
        f"// Phi(-t) e^(t^2 / 2) (t + 3), of u = (t - 3) / (t + 3), t up to 14.5; 2^{error(mills, c, low, high):.1f}"
    )
    text.append(f"constexpr double kMills[] = {spelled(c)};")
    # 2 Phi(t) - 1, and what stands for it in the gelu of tanh, around quarters
    curves: dict[str, Callable[[Any], Any]] = {
        "kGelu": lambda t: mpmath.erf(t / mpmath.sqrt(2)),
        "kGeluTanh": lambda t: mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (t + mpf("0.044715") * t**3)),
    }
    for name, curve in curves.items():
        columns, worst = [], mpf(0)
        for around in (mpf(j) / 4 for j in range(32)):
            low, high = around - mpf(1) / 8, around + mpf(1) / 8
            c = polynomial(curve, low, high, 3, around)
            columns.append(c)
            points = [low + (high - low) * mpf(k) / 50 for k in range(51)]
            off = (abs((sum(v * (t - around) ** i for i, v in enumerate(c)) - curve(t)) * t / 2) for t in points)
            worst = max(worst, *off)
        rows = ",\n    ".join(spelled32([column[i] for column in columns]) for i in range(4))
        text.append(f"// by powers of t - j / 4; error of gelu: 2^{float(mpmath.log(worst, 2)):.1f}")
        text.append(f"constexpr float {name}[][32] = {{\n    {rows}}};")
    return [*text, *approximations(), "", "}  // namespace hop::functions", ""]


def approximations() -> list[str]:
    """Of float32, from which codes of few bits are found: e^r, and 2 Phi(x) - 1 as x times a quotient by x^2."""
    r = mpmath.log(2) / 2 * (1 + mpf(2) ** -10)
    c = polynomial(mpmath.exp, -r, r, 5)
    text = [
        f"// e^r up to ln 2 / 2; 2^{error(mpmath.exp, c, -r, r):.1f}",
        f"constexpr float kExpNear[] = {spelled32(c)};",
    ]
    most = mpf("5.6")

    def curve(u: Any) -> Any:
        t = mpmath.sqrt(u)
        return mpmath.erf(t / mpmath.sqrt(2)) / t

    # above(u) - curve(u) * below(u) = 0 at Chebyshev nodes of u, below(0) = 1
    above, below = 6, 5
    n = above + 1 + below
    nodes = [(mpmath.cos(mpmath.pi * (k + mpf(0.5)) / n) + 1) / 2 * most**2 for k in range(n)]
    matrix = mpmath.matrix(
        [[u**j for j in range(above + 1)] + [-curve(u) * u**j for j in range(1, below + 1)] for u in nodes]
    )
    found = list(mpmath.lu_solve(matrix, mpmath.matrix([curve(u) for u in nodes])))
    first, second = found[: above + 1], [mpf(1), *found[above + 1 :]]
    points = [(mpf(k) / 300) ** 2 * most**2 for k in range(1, 301)]
    value = lambda c, u: sum(v * u**j for j, v in enumerate(c))  # noqa: E731
    worst = max(abs(value(first, u) / value(second, u) / curve(u) - 1) for u in points)
    off = float(mpmath.log(worst, 2))
    text.append(f"// (2 Phi(x) - 1) / x as a quotient of two polynomials of x^2, x up to {most}; 2^{off:.1f}")
    text.append(f"constexpr float kPhiMost = {float(most)}f, kPhiAbove[] = {spelled32(first)};")
    text.append(f"constexpr float kPhiBelow[] = {spelled32(second)};")
    return text


_SHARED = {"EXP": "kExp", "POWERS": "kPowers", "MILLS": "kMills"}


def for_gpus(header: str) -> str:
    """The text of GPU_FILE, from that of FILE and hop.numerics."""
    found = {name: re.search(rf"constexpr double {own}\[\] = {{(.*?)}};", header) for name, own in _SHARED.items()}
    tables = {name: [float.fromhex(v) for v in own[1].split(", ")] for name, own in found.items() if own}
    tables["ERFC"] = list(functions._ERFC)
    text = [_GPU_HEAD]
    for name, values in tables.items():
        text.append(f"{name} = (" + "".join(f"\n    {v!r}," for v in values) + "\n)")
    sides = "".join(f"\n    {name!r}: {BY_NAME[name]!r}," for name in ("silu", "gelu", "gelu_tanh")).replace("'", '"')
    return "\n".join([*text, f"SIDES: dict[str, tuple[float, tuple[float, ...]]] = {{{sides}\n}}", ""])


_GPU_HEAD = '''"""Polynomials and tables of elementary functions. Written by python -m tests.numerics.polynomials.

EXP is (e^r - 1 - r) / r^2 up to ln 2 / 32, POWERS 2^(j / 16), MILLS Mills' ratio of the normal distribution times t +
3, by (t - 3) / (t + 3), ERFC hop.numerics.functions._ERFC, and SIDES hop.numerics.hard_cases.BY_NAME.
"""
'''

if __name__ == "__main__":
    FILE.write_text("\n".join(lines()))
    GPU_FILE.write_text(for_gpus(FILE.read_text()))
