"""Commonly used quantizers, by name. `PRESETS` lists them; for others, create a Quantizer.

A name consists of the format and the elements that share a scale: TENSOR, ROW, COLUMN, a group size along the last
dimension, or a tile.
"""

from hop.numerics import formats
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel

# ---- integers: symmetric, affine (with a zero point), and static (the caller gives the scale)

INT8_TENSOR = Quantizer(formats.INT8)
INT8_ROW = Quantizer(formats.INT8, (1, -1))
INT8_COLUMN = Quantizer(formats.INT8, (-1, 1))
INT8_TENSOR_AFFINE = Quantizer(formats.INT8, scale=MinMax())
INT8_ROW_AFFINE = Quantizer(formats.INT8, (1, -1), MinMax())
INT8_TENSOR_STATIC = Quantizer(formats.INT8, scale=Static())
INT8_TENSOR_STATIC_AFFINE = Quantizer(formats.INT8, scale=Static(affine=True))
INT8_CONV = Quantizer(formats.INT8, (1, -1, -1, -1))  # per output channel of a conv2d weight
UINT8_TENSOR = Quantizer(formats.UINT8)
UINT8_TENSOR_AFFINE = Quantizer(formats.UINT8, scale=MinMax())
UINT8_ROW_AFFINE = Quantizer(formats.UINT8, (1, -1), MinMax())
UINT8_TENSOR_STATIC_AFFINE = Quantizer(formats.UINT8, scale=Static(affine=True))
INT8_32 = Quantizer(formats.INT8, (1, 32))
INT8_256 = Quantizer(formats.INT8, (1, 256))
INT4_32 = Quantizer(formats.INT4, (1, 32))
INT4_64 = Quantizer(formats.INT4, (1, 64))
INT4_128 = Quantizer(formats.INT4, (1, 128))
UINT4_32_AFFINE = Quantizer(formats.UINT4, (1, 32), MinMax())
UINT4_64_AFFINE = Quantizer(formats.UINT4, (1, 64), MinMax())
UINT4_128_AFFINE = Quantizer(formats.UINT4, (1, 128), MinMax())
TERNARY_TENSOR = Quantizer(formats.TERNARY, scale=AbsMean())
TERNARY_ROW = Quantizer(formats.TERNARY, (1, -1), AbsMean())

# ---- 8-bit floats

FP8_TENSOR = Quantizer(formats.E4M3, scale=CurrentScaling())
FP8_ROW = Quantizer(formats.E4M3, (1, -1), CurrentScaling())
FP8_COLUMN = Quantizer(formats.E4M3, (-1, 1), CurrentScaling())
FP8_1X128 = Quantizer(formats.E4M3, (1, 128), BlockScaling())
FP8_128X128 = Quantizer(formats.E4M3, (128, 128), BlockScaling())
FP8_TENSOR_STATIC = Quantizer(formats.E4M3, scale=Static())
FP8_E5M2_TENSOR = Quantizer(formats.E5M2, scale=CurrentScaling())
FP8_E5M2_ROW = Quantizer(formats.E5M2, (1, -1), CurrentScaling())
FP8_E5M2_1X128 = Quantizer(formats.E5M2, (1, 128), BlockScaling())

# ---- block-scaled formats

MXFP8 = Quantizer(formats.E4M3, (1, 32), Microscaling())
MXFP8_E5M2 = Quantizer(formats.E5M2, (1, 32), Microscaling())
MXFP4 = Quantizer(formats.E2M1, (1, 32), Microscaling())
NVFP4 = Quantizer(formats.E2M1, (1, 16), TwoLevel())
NVFP4_16X16 = Quantizer(formats.E2M1, (16, 16), TwoLevel())
NVFP4_ROW = Quantizer(formats.E2M1, (1, 16), TwoLevel(outer=(1, -1)))
NVFP4_HADAMARD = Quantizer(formats.E2M1, (1, 16), TwoLevel(), hadamard=Hadamard())
NVFP4_STOCHASTIC = Quantizer(formats.E2M1, (1, 16), TwoLevel(), stochastic=True)
NVFP4_GRADIENT = Quantizer(formats.E2M1, (1, 16), TwoLevel(), stochastic=True, hadamard=Hadamard())

# ---- states of low-bit optimizers

STATE8 = Quantizer(formats.DYNAMIC8, (256,), Amax(floor=1e-12), flat=True)
STATE8_UNSIGNED = Quantizer(formats.DYNAMIC8_UNSIGNED, (256,), Amax(floor=1e-12), flat=True)
STATE4 = Quantizer(formats.DYNAMIC4, (128,), Amax(floor=1e-12), flat=True)
STATE4_UNSIGNED = Quantizer(formats.LINEAR4_UNSIGNED, (128,), Amax(floor=1e-12), flat=True)
STATE4_UNSIGNED_ZERO = Quantizer(formats.LINEAR4_UNSIGNED_ZERO, (128,), Amax(floor=1e-12), flat=True)
STATE_FP8 = Quantizer(formats.E4M3, (256,), Amax(floor=1e-12), flat=True)

PRESETS = {name: value for name, value in list(globals().items()) if isinstance(value, Quantizer)}

__all__ = ["PRESETS", *PRESETS]  # pyright: ignore[reportUnsupportedDunderAll]
