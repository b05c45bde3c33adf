"""How sums become codes, by name."""

from hop.numerics.requantization import GEMMLOWP, TFLITE, Division, FixedPoint, FloatMultiplier, Requantization

CONVENTIONS: dict[str, Requantization] = {
    "float_multiplier": FloatMultiplier(),
    "gemmlowp": GEMMLOWP,
    "tflite": TFLITE,
    "away": FixedPoint(),
    "even": FixedPoint(rounding="even"),
    "ruy": FixedPoint(rounding="ruy"),
}
RULES: dict[str, Requantization] = {"division": Division(), **CONVENTIONS}
