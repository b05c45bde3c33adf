"""Wrong calls of everything that is public."""

from tests.support.wrong_calls import (
    models,
    others,
    out_dtype,
    programs,
    quantize,
    quantized,
    quantizers,
    scaled,
    tensors,
    values,
)
from tests.support.wrong_calls.row import Wrong

WRONG: list[Wrong] = [
    *(*out_dtype.OUT_DTYPE, *scaled.SCALED, *quantize.QUANTIZE, *quantized.QUANTIZED, *others.OTHERS),
    *(*quantizers.QUANTIZERS, *quantizers.SCHEMES, *values.RULES, *values.NAMES),
    *(*tensors.TENSORS, *tensors.FILES, *models.LAYERS, *models.OPTIMIZERS),
    *(*programs.PROGRAMS, *programs.COMMANDS),
]
