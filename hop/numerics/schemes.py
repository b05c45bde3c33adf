"""Scheme: how the operands of a product, convolution or embedding are quantized, and how the gradient is computed.

Also named schemes for deployment. Those for training are in hop.recipes.

A name consists of the format, then what it applies to: only WEIGHT, or also activations, with scales found in each call
(DYNAMIC) or beforehand (STATIC); then the elements that share a scale, if there is a choice. `A_DA_B_W` has dynamic
activations in A and weights in B. `SCHEMES` lists them, `named` finds one by name.

A quantizer's last dimension is the one that the product sums over, regardless of how the operator takes its operands:
block (1, -1) has a scale for each row of the left factor, and for each output channel of the right one. In a
convolution the rows are the examples of the input and the output channels of the weight. In a transposed convolution
with groups, output channels at the same position in their groups share a scale.
"""

import functools
from dataclasses import dataclass, replace

from hop.numerics import presets, spelling
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import Value, shown
from hop.numerics.stored_scales import has_whole_numbers

STE, ORIGINAL, QUANTIZED = "ste", "original", "quantized"
BACKWARDS = (STE, ORIGINAL, QUANTIZED)


@dataclass(frozen=True, eq=False, repr=False)
class Scheme(Value):
    """The quantizer of each operand, and how the backward runs.

    Args:
        lhs: for the left factor, or a convolution's input; None to leave it in floats.
        rhs: for the right factor, or the weight; None to leave it in floats.
        output: for the result; None for a float result. A scheme with only an output is for operators other than
            products: norms and activations.
        grad: for the gradient of the result, with backward="quantized".
        backward: "ste", the gradient of fake quantization: products of the gradient with dequantized operands;
            "original", products with the operands before quantization; "quantized", products of codes, with the
            gradient quantized too.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: the fields cannot be combined.
    """

    lhs: Quantizer | None
    rhs: Quantizer | None
    output: Quantizer | None = None
    grad: Quantizer | None = None
    backward: str = STE

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs", "output", "grad"):
            q = getattr(self, name)
            if q is not None and not isinstance(q, Quantizer):
                raise TypeError(
                    f"Scheme: {name} must be a Quantizer or None, got {shown(q)}; give one such as hop.presets.INT8_ROW"
                )
            if q is not None and (q.flat or q.layout is not None):
                raise ValueError(
                    f"Scheme: {name}={q} has flat=True or a layout, which operands of a product cannot have; use one "
                    "without"
                )
        if self.lhs is None and self.rhs is None and self.output is None:
            raise ValueError("Scheme: lhs, rhs and output are None, so nothing would be quantized; give one of them")
        if self.output is not None and self.output.stochastic:
            raise ValueError(f"Scheme: output={self.output} rounds at random; use one that rounds to nearest")
        self._check_noise()
        if self.backward not in BACKWARDS:
            raise ValueError(
                f"Scheme: backward must be one of {BACKWARDS}, got {shown(self.backward)}; use one of them"
            )
        if (self.grad is not None) != (self.backward == QUANTIZED):
            raise ValueError(
                f"Scheme: grad is the quantizer of gradients for backward='quantized', and only for it; got "
                f"grad={self.grad} and backward={shown(self.backward)}; give both, or neither"
            )
        if self.backward == QUANTIZED:
            self._check_quantized()
        self._check_kinds()
        str(self)  # raises TypeError for a field without a textual form

    def _check_noise(self) -> None:
        """Raise ValueError unless noise is only added to operands, and the backward reads the same values as the
        forward.
        """
        for name in ("output", "grad"):
            q = getattr(self, name)
            if q is not None and q.adds_noise():
                raise ValueError(
                    f"Scheme: {name}={q} adds noise instead of rounding, but {name} is passed on as codes; use "
                    "gradient=None there"
                )
        if self.backward == ORIGINAL and self.adds_noise():
            raise ValueError(
                "Scheme: backward='original' multiplies the unquantized operands, but lhs or rhs adds "
                "noise to them; use backward='ste'"
            )

    def _check_kinds(self) -> None:
        """Raise ValueError unless values of these formats can be multiplied with each other."""
        given = {name: q for name in ("lhs", "rhs", "grad") if (q := getattr(self, name)) is not None}
        formats = [q.format for q in given.values()]
        if self.lhs is not None and self.rhs is not None and self.grad is None:
            formats[1] = self.lhs.format if has_whole_numbers(self.rhs) else self.rhs.format
        if len(given) > 1 and not (all(f.is_integer for f in formats) or all(f.is_float for f in formats)):
            raise ValueError(
                "Scheme: integers are multiplied by integers, floats by floats, and codebooks by plain floats; got "
                f"{' and '.join(f'{name}={q}' for name, q in given.items())}; use formats of one kind, or None for "
                "one of them"
            )

    def _check_quantized(self) -> None:
        for name in ("lhs", "rhs"):
            q = getattr(self, name)
            if q is None:
                raise ValueError(f"Scheme: backward='quantized' multiplies codes, but {name} is None; give a quantizer")
            if q.gradient is not None:
                raise ValueError(
                    f"Scheme: backward='quantized' multiplies codes, but {name} has gradient={q.gradient}, which is "
                    "for floats; use backward='ste'"
                )
            if q.scale.has_zero_point() and not q.shares_scale():
                raise ValueError(
                    f"Scheme: backward='quantized' sums over the rows of {name}, whose zero points differ ({q}); use "
                    "a symmetric quantizer, or one scale for the tensor"
                )
        assert self.lhs is not None and self.rhs is not None and self.grad is not None
        if self.rhs.hadamard is not None or self.lhs.hadamard != self.grad.hadamard:
            raise ValueError(
                "Scheme: with backward='quantized' the gradient of rhs is a product of the columns of lhs and grad, "
                "whose transforms cancel: hadamard of lhs and grad must be the same, and rhs has none; got "
                f"lhs={self.lhs.hadamard}, grad={self.grad.hadamard}, rhs={self.rhs.hadamard}; give both one transform"
            )

    @staticmethod
    def parse(text: str) -> "Scheme":
        """The scheme that `str` spells as `text`. Raises ValueError with the position of an error."""
        return _parse(text)

    def to_nearest(self) -> "Scheme":
        """The scheme without random bits and gradient estimators: stochastic rounding becomes rounding to nearest.

        Layers compute in it in eval mode, and once they are frozen.
        """
        if not self.is_stochastic() and not self.has_estimator():
            return self
        fields = {f: getattr(self, f) for f in ("lhs", "rhs", "output", "grad")}
        plain = {f: replace(q, stochastic=False, gradient=None) for f, q in fields.items() if q is not None}
        return replace(self, **plain)

    def has_estimator(self) -> bool:
        """Whether the gradient of a rounding is not straight-through."""
        return any(q is not None and q.gradient is not None for q in (self.lhs, self.rhs, self.output, self.grad))

    def is_stochastic(self) -> bool:
        """Whether a call draws random bits, in its forward or backward."""
        return any(q is not None and q.is_random() for q in (self.lhs, self.rhs, self.grad))

    def mixes_rows(self) -> bool:
        """Whether a row of the result depends on the other rows of its batch, because a scale found from the input or
        the result serves several rows. An infinity in one of them then makes all others non-finite.
        """
        found = [q for q in (self.lhs, self.output) if q is not None and q.scale.missing() is None]
        return any(set(block[:-1]) != {1} for q in found for _, block in q.stored_by_rule().values())

    def signed_scales(self) -> bool:
        """Whether the searched scales of weights may be negative: where activations stay in floats. Backends that
        multiply integers, such as XNNPACK, need positive ones.
        """
        return self.lhs is None

    def adds_noise(self) -> bool:
        """Whether training replaces an operand's codes by floats with noise."""
        return any(q is not None and q.adds_noise() for q in (self.lhs, self.rhs))


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Scheme:
    return spelling.read(text, Scheme)


def rows_share_scales(q: Quantizer) -> bool:
    """Whether one scale serves each row, so that it can be factored out of a sum over the row."""
    return q.scale.outer_block is None and all(
        block[-1] == -1 and set(block) <= {-1, 1} for _, block in q.stored().values()
    )


def turns_exactly(q: Quantizer) -> bool:
    """Whether transposing a matrix transposes its codes and scales, because its blocks are square."""
    return not q.stochastic and q.transposed(2) == q


def for_convolution(q: Quantizer, ndim: int, transposed: bool = False) -> Quantizer:
    """The quantizer of a convolution's operand: its rows are the elements with the same first index.

    In the weight of a transposed convolution, (I, O / groups, *kernel), the second index, so that groups share scales.
    """
    if len(q.block) == 2 and q.block[-1] == -1:
        rows = (-1, q.block[0]) if transposed else q.block
        return replace(q, block=(*rows, *(-1,) * (ndim - 2)))
    return q


# ---- integers

INT8_DYNAMIC = Scheme(presets.INT8_ROW, presets.INT8_ROW)  # a scale per row and channel
INT8_STATIC = Scheme(presets.INT8_TENSOR_STATIC_AFFINE, presets.INT8_ROW)  # calibrated or learned activation scales
INT8_WEIGHT = Scheme(None, presets.INT8_ROW)
INT4_WEIGHT_32 = Scheme(None, presets.INT4_32)  # groups of 32 along the input features
INT4_WEIGHT_64 = Scheme(None, presets.INT4_64)
INT4_WEIGHT_128 = Scheme(None, presets.INT4_128)
INT4_WEIGHT_32_AFFINE = Scheme(None, presets.UINT4_32_AFFINE)  # with a zero point per group
INT4_WEIGHT_64_AFFINE = Scheme(None, presets.UINT4_64_AFFINE)
INT4_WEIGHT_128_AFFINE = Scheme(None, presets.UINT4_128_AFFINE)
INT8_DA_INT4_W = Scheme(presets.INT8_ROW_AFFINE, presets.INT4_32)
INT8_DA_TERNARY_W = Scheme(presets.INT8_ROW, presets.TERNARY_TENSOR)

# ---- 8-bit floats, e4m3

FP8_DYNAMIC_ROW = Scheme(presets.FP8_ROW, presets.FP8_ROW)
FP8_DYNAMIC_TENSOR = Scheme(presets.FP8_TENSOR, presets.FP8_TENSOR)
FP8_WEIGHT = Scheme(None, presets.FP8_ROW)

# ---- block-scaled formats

MXFP8_DYNAMIC = Scheme(presets.MXFP8, presets.MXFP8)
MXFP8_WEIGHT = Scheme(None, presets.MXFP8)
MXFP4_DYNAMIC = Scheme(presets.MXFP4, presets.MXFP4)
MXFP4_WEIGHT = Scheme(None, presets.MXFP4)
NVFP4_DYNAMIC = Scheme(presets.NVFP4, presets.NVFP4)
NVFP4_DYNAMIC_ROW = Scheme(presets.NVFP4_ROW, presets.NVFP4)  # a global amax per row of the input
NVFP4_WEIGHT = Scheme(None, presets.NVFP4)

SCHEMES = {name: value for name, value in list(globals().items()) if isinstance(value, Scheme)}

SHORT = {
    "int8": "int8_dynamic",
    "int4": "int4_weight_32",
    "8da4w": "int8_da_int4_w",
    "fp8": "fp8_dynamic_row",
    **{name: f"{name}_dynamic" for name in ("mxfp8", "mxfp4", "nvfp4")},
    "nvfp4_row": "nvfp4_dynamic_row",
}
"""Short names."""


def named(name: str) -> Scheme:
    """The scheme with a name: "int8_weight" or "INT8_WEIGHT" for INT8_WEIGHT; or a short name.

    Short names are "int8", "int4", "8da4w", "fp8", "mxfp8", "mxfp4", "nvfp4" and "nvfp4_row". Raises ValueError with
    similar names if there is none.
    """
    lower = name.lower().replace("-", "_")
    result = SCHEMES.get(SHORT.get(lower, lower).upper())
    if result is None:
        known = [*SHORT, *(scheme.lower() for scheme in SCHEMES)]
        near = spelling.similar(lower, known)
        raise ValueError(f"scheme: no scheme is called {name!r}; use {', '.join(near)}, or a hop.Scheme")
    return result


__all__ = ["SCHEMES", "named", *SCHEMES]  # pyright: ignore[reportUnsupportedDunderAll]
