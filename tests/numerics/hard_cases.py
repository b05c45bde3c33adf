"""Finds the inputs of hop.numerics.functions that float64 does not decide, and writes what decides them:

    python -m tests.numerics.hard_cases [FOLDER]    needs a C++ compiler; some minutes

hard_cases.cpp lists those whose value lies within about 2^-49 of itself from the middle of two float32s (gelu: more in
its tail); mpmath says on which side. A hash of one bit (hop/numerics/hard_cases.py) is sought that gives all of them.
FOLDER keeps the lists. Written: hop/numerics/hard_cases.py, native/functions/hard_cases.h, and
tests/numerics/hard_cases.txt with a line for each function: pairs of the bits of x and of the result.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
from mpmath import mpf

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_suffix(".txt")

mpmath.mp.prec = 400

EXACT: dict[str, Callable[[Any], Any]] = {
    "exp": mpmath.exp,
    "exp2": lambda x: mpmath.power(2, x),
    "log": mpmath.log,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpf("0.044715") * x * x * x))),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "sqrt": mpmath.sqrt,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
}
PARTS = {"sin": 2, "cos": 2, "exp": 2, "exp2": 2, "log": 7, "gelu": 3, "silu": 4, "gelu_tanh": 3}
"""Into how many parts the inputs are split before each is given a factor; one where nothing is said."""
ODD = ("tanh", "erf", "sin", "cos")
"""Odd or even functions, of which positive inputs are enough."""
WITHOUT_KERNEL = ("sqrt", "sin", "cos")
BY_RESULT = ("log", "sin", "cos")
SMALL_ARE_BELOW = ("erf", "sigmoid")
"""Whose factor is negative and small: small positive numbers, which follow a rule, are told that they lie below."""


def allowance(name: str, x: float) -> float:
    """How far the float64 value may be off, relatively: native/functions/exact.h."""
    if name == "gelu":
        return (min(max(x, -16.0), 0.0) ** 2 + 4) * 2.0**-52
    if name == "gelu_tanh":
        v = -1.5957691216057308 * (x + 0.044715 * x * x * x)
        return (min(max(v, 0.0), 128.0) + 2) * 2.0**-51
    return {"exp": 2, "exp2": 3, "sin": 2, "cos": 2}.get(name, 4) * 2.0**-52


def settled(name: str, x: float) -> tuple[float, bool, float]:
    """How far x's value is from the middle of two float32s, in units of itself; whether it lies above, in magnitude;
    and the float32 nearest to it."""
    y = EXACT[name](mpf(x))
    size = abs(y)
    unit = mpf(2) ** (max(int(mpmath.floor(mpmath.log(size, 2))), -126) - 23)
    whole = mpmath.floor(size / unit)
    off = size / unit - whole - mpf(0.5)
    if off == 0:
        up = int(whole) % 2 == 1
    else:
        up = off > 0
    nearest = float((whole + (1 if up else 0)) * unit)
    return float(abs(off) * unit / size), up, -nearest if y < 0 else nearest


def bits(x: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(x).view(np.uint32))


def lists(folder: Path) -> Iterator[tuple[str, list[int]]]:
    program = folder / "hard_cases"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'native'}"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["c++", *flags, str(source), "-o", str(program), "-lpthread"], check=True)
    for name in EXACT.keys() - {"sqrt"}:  # as rsqrt, it needs nothing
        known = folder / f"{name}.txt"
        if not known.exists():
            known.write_text(subprocess.run([str(program), name], stdout=subprocess.PIPE, check=True, text=True).stdout)
        yield name, [int(line, 16) for line in known.read_text().split()]


def fraction(z: np.ndarray, k: np.ndarray) -> np.ndarray:
    product = z * k
    return product - np.floor(product)


def candidates(name: str, random: np.random.Generator, count: int) -> np.ndarray:
    if name in SMALL_ARE_BELOW:
        return -random.integers(2**24, 2**28, count).astype(np.float64) * (2.0**-5 if name == "erf" else 2.0**-17)
    return random.integers(2**22, 2**28, count).astype(np.float64) * (2.0**-4 if name in (*BY_RESULT, "exp2") else 1.0)


def factor(name: str, z: np.ndarray, up: np.ndarray, random: np.random.Generator) -> float:
    """For which the fraction of z * factor is below a half where `up`, and only there."""
    for _ in range(4000):
        k, good = candidates(name, random, 1 << 14), None
        for one, above in zip(z, up, strict=True):
            k = k if good is None else k[good]
            part = fraction(one, k)
            good = (
                ((part < 0.4999) & (part > 1e-4 * (abs(one) > 1e-30))) if above else ((part > 0.5001) & (part < 0.9999))
            )
            if name not in BY_RESULT:  # whose z is a float64 value, that another library may give otherwise
                good = (part < 0.5) == above
        if good is None or good.any():
            return float((k if good is None else k[good])[0])
    raise RuntimeError(f"{name}: no factor for {len(z)} inputs; split them into more parts")


def factors(name: str, z: np.ndarray, up: np.ndarray) -> tuple[float, list[float]]:
    random, parts = np.random.default_rng(0), PARTS.get(name, 1)
    if parts == 1:
        return 0.0, [factor(name, z, up, random)]
    splits = candidates(name, random, 4000)
    places = [fraction(z, k) * parts for k in splits]
    clear = [np.abs(p - np.round(p)).min() > 1e-3 for p in places]
    most = [
        np.bincount(p.astype(int), minlength=parts).max() if c else len(z) for p, c in zip(places, clear, strict=True)
    ]
    best = int(np.argmin(most))
    part = places[best].astype(int)
    return float(splits[best]), [factor(name, z[part == i], up[part == i], random) for i in range(parts)]


def key(name: str, x: float) -> float:
    """The number that is hashed: the result where it says more than the input."""
    if name in BY_RESULT:
        return float(abs(EXACT[name](mpf(x))) if name in ODD else EXACT[name](mpf(x)))
    return abs(x) if name in ODD else x


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        found = dict(lists(Path(sys.argv[1] if len(sys.argv) > 1 else temporary)))
    python, native, listed = [], [], []
    for name, inputs in found.items():
        keys: dict[float, tuple[bool, float]] = {}
        pairs = []
        for number in inputs:
            x = float(np.uint32(number).view(np.float32))
            if name in ("log", "rsqrt") and x <= 0:
                continue
            off, up, y = settled(name, x)
            if off <= 2.2 * allowance(name, x):
                keys[x] = up, y
                pairs.append(f"{number:08x}:{bits(y):08x}")
        listed.append(f"{name} {' '.join(pairs)}")
        if name == "rsqrt":  # √ and / are correctly rounded everywhere, and off by less than what is left
            assert min(settled(name, x)[0] for x in keys) > 2.0**-52
            continue
        z = np.array([key(name, x) for x in keys])
        split, each = factors(name, z, np.array([up for up, _ in keys.values()]))
        print(f"{name}: {len(keys)} inputs, {len(each)} factors", flush=True)
        python.append(f'    "{name}": ({split!r}, ({", ".join(map(repr, each))}{"," * (len(each) == 1)})),\n')
        numbers = ", ".join(repr(v) for v in [*each, *[each[-1]] * (7 - len(each))])
        if name not in WITHOUT_KERNEL:
            native.append(f"    {{{split!r}, {len(each)}, {{{numbers}}}}},  // {name}\n")
    header = "Written by tests/numerics/hard_cases.py."
    (ROOT / "hop/numerics/hard_cases.py").write_text(
        PYTHON.format(header=header, lines="".join(python)), encoding="utf-8"
    )
    order = ["exp", "exp2", "log", "tanh", "erf", "sigmoid", "rsqrt", "gelu", "gelu_tanh", "silu"]
    native.append("    {0.0, 0, {}},  // rsqrt\n")
    native.sort(key=lambda line: order.index(line.split()[-1]))
    text = NATIVE.format(header=header, lines="".join(native))
    (ROOT / "native/functions/hard_cases.h").write_text(text, encoding="utf-8")
    LISTED.write_text("\n".join(listed) + "\n", encoding="utf-8")


PYTHON = '''\
"""For inputs that float64 may not decide: on which side of the midpoint of two float32s the function's value is.

A one-bit hash, which is right for each such input and arbitrary for all others. {header}

`name: (split, factors)`. With fraction(v) = v - floor(v), and z the input (the float64 result for log, sin and cos; its
magnitude for odd and even functions): fraction(z * split) selects a factor, with [0, 1) divided equally among the
factors; the value is above the midpoint, in magnitude, if fraction(z * factor) < 1/2. Products of inputs are exact, so
they are the same on every machine.
"""

BY_NAME: dict[str, tuple[float, tuple[float, ...]]] = {{
{lines}}}
'''

NATIVE = """// The side of the midpoint of two float32s on which a function's value is: see hop/numerics/hard_cases.py.
// {header}
#pragma once

namespace hop::functions {{

struct Sides {{
    double split;
    int parts;
    double factors[7];
}};

constexpr Sides kSides[] = {{
{lines}}};

}}  // namespace hop::functions
"""

if __name__ == "__main__":
    main()
