"""Wrong calls of quantize, fake_quantize and dequantize."""

import torch

import hop
from hop import presets, recipes, schemes
from tests.support.wrong_calls.row import each, floats, int8, rows, traced, wrong

STATIC, AFFINE, RANDOM = presets.INT8_TENSOR_STATIC, presets.INT8_TENSOR_STATIC_AFFINE, presets.NVFP4_STOCHASTIC
ONE = "make one with torch.tensor"
MADE = "make one with hop.quantize"
FLOATS = "must be float16, bfloat16, float32 or float64"
PRESET = "give one such as hop.presets.INT8_ROW"


def quantize(q, x=None, **options):
    return hop.quantize(q, floats(2, 16) if x is None else x, **options)


def one(x: float = 1.0):
    return torch.tensor(x)


QUANTIZE = [
    *each(traced, TypeError, f"q | must be a Quantizer | {PRESET}", {
        "quantize_q_text": ("'INT8_ROW'", lambda: quantize("INT8_ROW")),
        "quantize_q_none": ("None", lambda: quantize(None)),
        "fake_quantize_q_text": ("'INT8_ROW'", lambda: hop.fake_quantize("INT8_ROW", floats(2, 4))),
    }),
    *each(wrong, TypeError, f"q | must be a Quantizer | {PRESET}", {
        "quantize_q_scheme": ("Scheme(lhs=", lambda: quantize(schemes.INT8_DYNAMIC)),
        "quantize_q_format": ("int8", lambda: quantize(hop.formats.INT8)),
        "quantize_swapped": ("shape (2, 4)", lambda: hop.quantize(floats(2, 4), presets.INT8_ROW)),
    }),
    *each(traced, TypeError, f"x | must be a tensor | {ONE}", {
        "quantize_x_list": ("[[1.0]]", lambda: quantize(presets.INT8_ROW, [[1.0]])),
        "quantize_x_none": ("None", lambda: hop.quantize(presets.INT8_ROW, None)),
    }),
    *each(traced, TypeError, f"x | {FLOATS} | cast it first", {
        "quantize_x_int8": ("torch.int8", lambda: quantize(presets.INT8_ROW, int8(2, 4))),
        "fake_quantize_x_int8": ("torch.int8", lambda: hop.fake_quantize(presets.INT8_ROW, int8(2, 4))),
    }),
    wrong("quantize_x_complex", TypeError, lambda: quantize(presets.INT8_ROW, floats(2, 4) + 1j),
          f"x | torch.complex64 | {FLOATS} | cast it first"),
    wrong("quantize_x_sparse", TypeError, lambda: quantize(presets.INT8_ROW, floats(2, 4).to_sparse()),
          "x | torch.sparse_coo | must be dense | use x.to_dense()"),
    *each(traced, ValueError, "scale | has no rule to find a scale | pass scale=", {
        "quantize_scale_missing": ("None", lambda: quantize(STATIC)),
        "fake_quantize_scale_missing": ("None", lambda: hop.fake_quantize(STATIC, floats(2))),
    }),
    traced("quantize_scales_missing", ValueError, lambda: quantize(AFFINE),
          "zero_point | None | has no rule to find a scale | pass scale= and zero_point="),
    traced("quantize_amax_missing", ValueError, lambda: quantize(recipes.FP8_DELAYED.lhs),
          "scale | None | needs the amax of earlier steps | pass scale="),
    *each(traced, TypeError, f"scale | must be a number or a tensor | {ONE}", {
        "quantize_scale_text": ("'0.5'", lambda: quantize(STATIC, scale="0.5")),
        "quantize_scale_list": ("[0.5]", lambda: quantize(STATIC, scale=[0.5])),
    }),
    *each(wrong, ValueError, "scale | must be above 0 and finite | find one with hop.calibration", {
        "quantize_scale_negative": ("-1.0", lambda: quantize(STATIC, scale=one(-1.0))),
        "quantize_scale_nan": ("nan", lambda: quantize(STATIC, scale=one(float("nan")))),
    }),
    traced("quantize_scale_dtype", TypeError, lambda: quantize(STATIC, scale=torch.tensor(1)),
          "scale | torch.int64 | must be floating point | cast it with .to(torch.float32)"),
    traced("quantize_scale_shape", ValueError, lambda: quantize(presets.INT8_ROW, scale=floats(4)),
          "scale | (4,) | must have a shape that broadcasts to (2, 1) | give one number for each block"),
    wrong("quantize_scale_device", ValueError, lambda: quantize(STATIC, scale=torch.tensor(1.0, device="meta")),
          "scale | on meta | must be on the device of the operands, cpu | move one of them"),
    traced("quantize_zero_point_missing", ValueError, lambda: quantize(AFFINE, scale=one()),
          "zero_point | None | needs zero_point in addition to scale | pass zero_point="),
    traced("quantize_zero_point_alone", ValueError, lambda: quantize(AFFINE, zero_point=one()),
          "zero_point | scale is None | must be given with scale | give both, or neither"),
    traced("quantize_zero_point_extra", ValueError, lambda: quantize(STATIC, scale=one(), zero_point=one()),
          "zero_point | torch.float32 | has no zero point | leave it out"),
    traced("quantize_zero_point_text", TypeError, lambda: quantize(AFFINE, scale=one(), zero_point="3"),
          f"zero_point | '3' | must be a number or a tensor | {ONE}"),
    traced("quantize_zero_point_int", ValueError, lambda: quantize(AFFINE, scale=one(), zero_point=300),
          "zero_point | got 300 | must be a code of int8, from -128 to 127 | find one with hop.calibration"),
    wrong("quantize_zero_point_int16", ValueError, lambda: quantize(AFFINE, scale=one(),
          zero_point=torch.tensor(300, dtype=torch.int16)),
          "zero_point | got 300 | must be a code of int8, from -128 to 127 | find one with hop.calibration"),
    traced("quantize_scale_negative_number", ValueError, lambda: quantize(STATIC, scale=-1.0),
          "scale | -1.0 | must be above 0 and finite | find one with hop.calibration"),
    traced("quantize_zero_point_dtype", TypeError, lambda: quantize(AFFINE, scale=one(), zero_point=torch.tensor(True)),
          "zero_point | torch.bool | must be floating point or torch.int8 | cast it with .to(torch.int8)"),
    wrong("quantize_zero_point_infinite", ValueError, lambda: quantize(AFFINE, scale=one(),
          zero_point=one(float("inf"))),
          "zero_point | inf | must be finite | find one with hop.calibration"),
    wrong("quantize_zero_point_range", ValueError, lambda: quantize(hop.Quantizer(hop.formats.INT4,
          scale=hop.scale_rules.Static(affine=True)), scale=one(), zero_point=int8(1) * 100),
          "zero_point | got 100 | must be a code of int4, from -8 to 7 | find one with hop.calibration"),
    traced("quantize_noise_missing", ValueError, lambda: quantize(RANDOM),
          "noise | None | rounds at random | pass noise=hop.noise(seed, x.shape)"),
    traced("quantize_noise_dtype", ValueError, lambda: quantize(RANDOM, noise=floats(2, 16)),
          "noise | torch.float32 | must be uint8 or int32 of x's shape (2, 16) | make it with hop.noise"),
    traced("quantize_noise_list", TypeError, lambda: quantize(RANDOM, noise=[0]),
          f"noise | [0] | must be a tensor | {ONE}"),
    traced("quantize_noise_extra", ValueError, lambda: quantize(presets.INT8_ROW, noise=torch.zeros(2, 16,
          dtype=torch.uint8)),
          "noise | torch.uint8 | rounds to the nearest | leave it out, or use stochastic=True"),
    wrong("quantize_generator_type", TypeError, lambda: quantize(RANDOM, generator=3),
          "generator | 3 | must be a torch.Generator | give one, or None"),
    wrong("quantize_generator_extra", ValueError, lambda: quantize(presets.INT8_ROW, generator=torch.Generator()),
          "generator | torch._C.Generator | rounds to the nearest | leave it out, or use stochastic=True"),
    wrong("quantize_noise_twice", ValueError, lambda: quantize(RANDOM, noise=torch.zeros(2, 16, dtype=torch.uint8),
          generator=torch.Generator()),
          "generator | torch.uint8 | noise and generator exclude each other | give one of them"),
    traced("quantize_usages_name", ValueError, lambda: quantize(presets.INT8_ROW, usages="rows"),
          "usages | 'rows' | must name one or both of ('rowwise', 'columnwise') | use one of them, or both"),
    *each(wrong, ValueError, "usages | must name one or both of ('rowwise', 'columnwise') | use one of them, or both",
          {
        "quantize_usages_number": ("3", lambda: quantize(presets.INT8_ROW, usages=3)),
        "quantize_usages_none": ("None", lambda: quantize(presets.INT8_ROW, usages=None)),
    }),
    traced("quantize_usages_flat", ValueError, lambda: quantize(presets.STATE8, usages="columnwise"),
          "usages | columnwise | has no column-wise copy | use usages='rowwise'"),
    traced("quantize_gradient", ValueError, lambda: quantize(presets.INT8_ROW, gradient="ste"),
          "gradient | 'ste' | must be one of ('clipped', 'plain') | use one of them"),
    traced("quantize_hadamard", ValueError, lambda: quantize(presets.NVFP4_HADAMARD, floats(3, 16),
          usages="columnwise"),
          "x | got 3 | must be a multiple | pad x, or use usages='rowwise'"),
    traced("quantize_scale_of_copies", ValueError, lambda: quantize(presets.INT8_ROW, scale=floats(2, 1),
          usages=("rowwise", "columnwise")),
          "scale | ('rowwise', 'columnwise') | belongs to one copy | quantize each usage separately"),
    wrong("quantize_tiles", ValueError, lambda: quantize(hop.Quantizer(hop.formats.INT8, (1, -1),
          layout=hop.layouts.Tiled()), floats(4)),
          "layout | (4,) | is for matrices and weights of convolutions | give such a tensor, or use layout=None"),
    traced("dequantize_plain", TypeError, lambda: hop.dequantize(floats(2)),
          f"x | torch.float32 | must be a QuantizedTensor | {MADE}"),
    wrong("dequantize_list", TypeError, lambda: hop.dequantize([1.0]),
          f"x | [1.0] | must be a QuantizedTensor | {MADE}"),
    traced("dequantize_dtype", TypeError, lambda: hop.dequantize(rows(2, 4), torch.int8),
          f"dtype | torch.int8 | {FLOATS} | use one of them"),
    wrong("dequantize_dtype_text", TypeError, lambda: hop.dequantize(rows(2, 4), "float32"),
          f"dtype | 'float32' | {FLOATS} | use one of them"),
]  # fmt: skip
