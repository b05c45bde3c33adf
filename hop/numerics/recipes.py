"""Schemes for training, by name. `RECIPES` lists them.

Their backwards multiply codes, including those of gradients. Some round gradients or all operands stochastically, so
that small updates are preserved on average. In eval mode, and once frozen, a layer draws no random bits: it rounds to
nearest instead (Scheme.to_nearest), in the forward and in the gradient, so equal inputs give equal bits. To deploy such
a model, freeze it in the scheme it was trained with; the names of hop.schemes are for models trained in floats.
"""

from hop.numerics import formats, presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed
from hop.numerics.schemes import QUANTIZED, Scheme

# ---- integers: the gradient is rounded stochastically in training

INT8_TRAINING = Scheme(
    presets.INT8_ROW, presets.INT8_ROW, grad=Quantizer(formats.INT8, (1, -1), stochastic=True), backward=QUANTIZED
)

# ---- 8-bit floats: e4m3 forward, e5m2 for gradients; no random bits

FP8_HYBRID = Scheme(presets.FP8_TENSOR, presets.FP8_TENSOR, grad=presets.FP8_E5M2_TENSOR, backward=QUANTIZED)
FP8_DELAYED = Scheme(  # in eval mode the amaxes of the last training step are used, and none is recorded
    Quantizer(formats.E4M3, scale=Delayed()),
    Quantizer(formats.E4M3, scale=Delayed()),
    grad=Quantizer(formats.E5M2, scale=Delayed()),
    backward=QUANTIZED,
)
FP8_BLOCKWISE = Scheme(presets.FP8_1X128, presets.FP8_128X128, grad=presets.FP8_1X128, backward=QUANTIZED)

# ---- block-scaled formats

MXFP8_TRAINING = Scheme(presets.MXFP8, presets.MXFP8, grad=presets.MXFP8, backward=QUANTIZED)
# Hadamard transforms of activations and gradients, 16 x 16 tiles for weights; stochastic rounding of gradients.
NVFP4_TRAINING = Scheme(presets.NVFP4_HADAMARD, presets.NVFP4_16X16, grad=presets.NVFP4_GRADIENT, backward=QUANTIZED)

RECIPES = {name: value for name, value in list(globals().items()) if isinstance(value, Scheme)}

__all__ = ["RECIPES", *RECIPES]  # pyright: ignore[reportUnsupportedDunderAll]
