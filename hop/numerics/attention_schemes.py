"""AttentionScheme: how query, key and value of an attention are quantized; and named schemes for deployment.

Blocks are of (tokens, width) in each head: (1, -1) has a scale per token, (1, -1, 1) one per channel of each head.
hop.scaled defines which combinations are supported (docs/scaled.md#attention).
"""

from dataclasses import dataclass, replace

from hop.numerics import formats, presets, spelling
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import CurrentScaling
from hop.numerics.spelling import Value


@dataclass(frozen=True, eq=False, repr=False)
class AttentionScheme(Value):
    """The quantizers of an attention's query, key and value. Operands that are quantized already, as in a cache, stay
    so.

    Args:
        query: None to leave it in floats.
        key, value: quantizers with formats of the same kind, and of the query's kind.
        rotated: whether query and key are transformed before they are quantized, each head by a block Hadamard matrix:
            `torch.ops.hop.hadamard`, with the largest of hop.numerics.hadamard.SIZES that divides the head's width. The
            matrix is orthogonal, so scores change only by rounding; elements that are large in all tokens are spread
            over their block. Ashkboos et al. 2024, "QuaRot" (arXiv 2404.00456).

    Raises:
        TypeError: an operand's quantizer is not a Quantizer, or rotated is not a bool.
        ValueError: a quantizer has static or delayed scales, random bits, flat=True or a layout.
    """

    query: Quantizer | None
    key: Quantizer
    value: Quantizer
    rotated: bool = False

    def __post_init__(self) -> None:
        for name in ("query", "key", "value"):
            q = getattr(self, name)
            if q is None and name == "query":
                continue
            if not isinstance(q, Quantizer):
                raise TypeError(
                    f"AttentionScheme: {name} must be a Quantizer, got {spelling.shown(q)}; give one such as "
                    "hop.presets.INT8_ROW"
                )
            if q.scale.missing() is not None or q.is_random() or q.flat or q.layout is not None:
                raise ValueError(
                    f"AttentionScheme: {name}={q} has static or delayed scales, random bits, flat=True or a layout; "
                    "use one that finds its scales in each call, such as hop.presets.INT8_ROW"
                )

        if not isinstance(self.rotated, bool):
            raise TypeError(
                f"AttentionScheme: rotated must be True or False, got {spelling.shown(self.rotated)}; give one of them"
            )

    @staticmethod
    def parse(text: str) -> "AttentionScheme":
        """The scheme that `str` spells as `text`. Raises ValueError with the position of an error."""
        return spelling.read(text, AttentionScheme)


INT8_ATTENTION = AttentionScheme(presets.INT8_ROW, presets.INT8_ROW, presets.INT8_ROW)
INT8_ROTATED_ATTENTION = replace(INT8_ATTENTION, rotated=True)
FP8_ATTENTION = AttentionScheme(presets.FP8_ROW, presets.FP8_ROW, Quantizer(formats.E4M3, (1, -1, 1), CurrentScaling()))
# Float queries, hence float probabilities: for keys and values in a cache.
INT8_KEYS_VALUES = AttentionScheme(None, presets.INT8_ROW, presets.INT8_ROW)
# The most accurate of the measured schemes (docs/scaled.md).
INT8_ROTATED_KEYS_VALUES = AttentionScheme(None, presets.INT8_32, presets.INT8_32, rotated=True)

ATTENTION_SCHEMES = {name: value for name, value in list(globals().items()) if isinstance(value, AttentionScheme)}
SHORT = {"int8": "int8_attention", "int8_rotated": "int8_rotated_attention", "fp8": "fp8_attention"}


def named(name: str) -> AttentionScheme:
    """The scheme with a name: "int8_attention" or "INT8_ATTENTION" for INT8_ATTENTION; or short, "int8", "fp8".

    Raises ValueError with similar names if there is none.
    """
    lower = name.lower().replace("-", "_")
    result = ATTENTION_SCHEMES.get(SHORT.get(lower, lower).upper())
    if result is None:
        known = [*SHORT, *(scheme.lower() for scheme in ATTENTION_SCHEMES)]
        near = spelling.similar(lower, known)
        raise ValueError(
            f"attention: no scheme is called {name!r}; use {', '.join(near)}, or a "
            "hop.attention_schemes.AttentionScheme"
        )
    return result


__all__ = ["ATTENTION_SCHEMES", "AttentionScheme", *ATTENTION_SCHEMES]  # pyright: ignore[reportUnsupportedDunderAll]
