"""The schemes in which people train, by name. `RECIPES` lists them.

Their backwards multiply codes, of gradients too. Some round at random, gradients or all operands, so that small updates
are not lost on the average. In eval mode, and once it is frozen, a layer draws nothing: what rounds at random rounds to
the nearest there (Scheme.to_nearest), in the forward and in the gradient, and equal inputs give equal bits. To deploy
such a model is to freeze it, in the scheme that it has learned; the names of hop.schemes are for models that were
trained in floats.
"""

from hop.numerics import formats, presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Delayed
from hop.numerics.schemes import QUANTIZED, Scheme

# ---- integers: the gradient rounds at random, in training

INT8_TRAINING = Scheme(
    presets.INT8_ROW, presets.INT8_ROW, grad=Quantizer(formats.INT8, (1, -1), stochastic=True), backward=QUANTIZED
)

# ---- 8-bit floats: e4m3 forward, e5m2 for gradients; nothing is random

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
# A Hadamard transform of activations and gradients, tiles of 16 x 16 for weights; the gradient rounds at random.
NVFP4_TRAINING = Scheme(presets.NVFP4_HADAMARD, presets.NVFP4_16X16, grad=presets.NVFP4_GRADIENT, backward=QUANTIZED)

RECIPES = {name: value for name, value in list(globals().items()) if isinstance(value, Scheme)}

__all__ = ["RECIPES", *RECIPES]  # pyright: ignore[reportUnsupportedDunderAll]
