"""For inputs that float64 may not decide: on which side of the midpoint of two float32s the function's value is.

A one-bit hash, which is right for each such input and arbitrary for all others. Written by
tests/numerics/hard_cases.py.

`name: (split, factors)`. With fraction(v) = v - floor(v), and z the input (the float64 result for log, sin and cos; its
magnitude for odd and even functions): fraction(z * split) selects a factor, with [0, 1) divided equally among the
factors; the value is above the midpoint, in magnitude, if fraction(z * factor) < 1/2. Products of inputs are exact, so
they are the same on every machine.
"""

BY_NAME: dict[str, tuple[float, tuple[float, ...]]] = {
    "exp": (15021195.0, (45556196.0, 121317708.0)),
    "exp2": (938824.6875, (430406.5, 12125789.375)),
    "log": (15821209.8125, (6483018.875, 11767058.875, 9957321.0625, 314500.25, 8709453.25, 1458838.0, 13204306.1875)),
    "tanh": (0.0, (25439198.0,)),
    "erf": (0.0, (-7417240.4375,)),
    "sigmoid": (0.0, (-131.6813201904297,)),
    "gelu": (172505793.0, (124369704.0, 265259892.0, 36282038.0)),
    "gelu_tanh": (8561585.0, (226359734.0, 248000799.0, 149903840.0)),
    "silu": (172505793.0, (150609201.0, 246956748.0, 184047384.0, 188956469.0)),
    "sin": (8703599.75, (12395804.8125, 14042631.125)),
    "cos": (10781612.0625, (16458242.25, 13171378.75)),
}
