"""Wrong quantizers and schemes."""

import torch

import hop
from hop import presets
from hop.numerics import formats, layouts, requantization
from hop.numerics import scale_rules as rules
from tests.support.wrong_calls.row import each, wrong

SIZES = "must be a tuple of sizes over the last dimensions"
SUCH = "give one such as (1, -1)"
FLAG = "must be True or False"
ROW = presets.INT8_ROW


QUANTIZERS = [
    *each(wrong, TypeError, "format | must be one of hop.formats | give one such as hop.formats.INT8", {
        "quantizer_format_text": ("'int8'", lambda: hop.Quantizer("int8")),
        "quantizer_format_dtype": ("torch.int8", lambda: hop.Quantizer(torch.int8)),
    }),
    wrong("quantizer_format_of_scales", ValueError, lambda: hop.Quantizer(formats.E8M0),
          "format | e8m0 | must be a format of elements | give one such as hop.formats.INT8"),
    *each(wrong, ValueError, f"block | {SIZES} | {SUCH}", {
        "quantizer_block_zero": ("got 0", lambda: hop.Quantizer(formats.INT8, 0)),
        "quantizer_block_float": ("(1, 2.5)", lambda: hop.Quantizer(formats.INT8, (1, 2.5))),
        "quantizer_block_text": ("'row'", lambda: hop.Quantizer(formats.INT8, "row")),
        "quantizer_block_nested": ("((1, -1),)", lambda: hop.Quantizer(formats.INT8, ((1, -1),))),
    }),
    *each(wrong, TypeError, "scale | must be a rule | give one such as hop.scale_rules.Amax()", {
        "quantizer_rule_class": ("Amax'>", lambda: hop.Quantizer(formats.INT8, scale=rules.Amax)),
        "quantizer_rule_number": ("0.5", lambda: hop.Quantizer(formats.INT8, scale=0.5)),
    }),
    wrong("quantizer_stochastic", ValueError, lambda: hop.Quantizer(formats.INT8, stochastic=1),
          f"stochastic | 1 | {FLAG} | give one of them"),
    wrong("quantizer_codebook", ValueError, lambda: hop.Quantizer(formats.DYNAMIC8, stochastic=True),
          "stochastic | dynamic8 | only rounds to nearest | use stochastic=False"),
    wrong("quantizer_flat_block", ValueError, lambda: hop.Quantizer(formats.INT8, flat=True),
          "block | (-1, -1) | needs a block of one size | give one such as (256,)"),
    wrong("quantizer_hadamard", TypeError, lambda: hop.Quantizer(formats.E2M1, hadamard=True),
          "hadamard | True | must be a Hadamard or None | give hop.hadamard.Hadamard()"),
    wrong("quantizer_flat_hadamard", ValueError, lambda: hop.Quantizer(formats.E2M1, (16,), flat=True,
          hadamard=hop.hadamard.Hadamard()),
          "hadamard | Hadamard() | exclude each other | leave one out"),
    wrong("quantizer_layout", TypeError, lambda: hop.Quantizer(formats.INT8, layout="tiled"),
          "layout | 'tiled' | must be one of hop.layouts | give one such as hop.layouts.Tiled()"),
    wrong("quantizer_flat_layout", ValueError, lambda: hop.Quantizer(formats.INT8, (4,), flat=True,
          layout=layouts.Tiled()),
          "layout | flat=True | is for blocks of dimensions | use layout=None"),
    wrong("quantizer_zero_point", ValueError, lambda: hop.Quantizer(formats.E4M3, scale=rules.MinMax()),
          "scale | e4m3 | makes a zero point | use an integer format"),
    wrong("quantizer_delayed", ValueError, lambda: hop.Quantizer(formats.INT8, scale=rules.Delayed()),
          "scale | int8 | is for 8-bit floats | use hop.formats.E4M3 or E5M2"),
    wrong("quantizer_delayed_block", ValueError, lambda: hop.Quantizer(formats.E4M3, (1, -1), scale=rules.Delayed()),
          "block | (1, -1) | must be (-1, -1) | leave it out"),
    wrong("quantizer_microscaling", ValueError, lambda: hop.Quantizer(formats.INT8, (1, 32),
          scale=rules.Microscaling(rounding="floor")),
          "scale | int8 | is for float formats | use rounding='rceil'"),
    wrong("quantizer_requantize", ValueError, lambda: hop.Quantizer(formats.E4M3,
          scale=rules.Static(requantize=requantization.TFLITE)),
          "requantize | e4m3 | returns integers | use Division()"),
    wrong("quantizer_outer", ValueError, lambda: hop.Quantizer(formats.E2M1, (1, 16), scale=rules.TwoLevel(outer=(1,
          8))),
          "outer | (1, 8) | each size must be -1 or that of the block, (1, 16) | give such sizes"),
    wrong("stored_scales_dtype", TypeError, lambda: rules.StoredScales(torch.float64),
          "scale | torch.float64 | must be a format or one of | give one such as torch.float16"),
    wrong("stored_scales_outer_dtype", TypeError, lambda: rules.StoredScales(formats.INT8, (1, 256), "half"),
          "outer_dtype | 'half' | must be one of | use one"),
    wrong("stored_scales_outer_floats", ValueError, lambda: rules.StoredScales(torch.float16, (1, 256)),
          "outer | (1, 256) | is for scales that are codes | give a format such as hop.formats.INT8"),
    wrong("stored_scales_outer_block", ValueError, lambda: hop.Quantizer(formats.INT8, (1, 32),
          rules.StoredScales(formats.INT8, (1, 48))),
          "outer | (1, 48) | must be -1 or a multiple of that of the block, (1, 32) | give such sizes"),
    wrong("stored_scales_offset", ValueError, lambda: hop.Quantizer(formats.INT4, (1, 32),
          rules.StoredScales(offset=True)),
          "offset | int4 | are for integers from 0 up | use one such as hop.formats.UINT4, or offset=False"),
    wrong("stored_scales_search", ValueError, lambda: rules.StoredScales(search=2),
          "search | 2 | must be 0 or an odd number up to 99 | give one such as 9"),
    wrong("stored_scales_search_block", ValueError, lambda: hop.Quantizer(formats.INT8, (1, 128),
          rules.StoredScales(search=3)),
          "search | block (1, 128) | in blocks of up to 64 elements | use a smaller block, or search=0"),
    wrong("stored_scales_search_values", ValueError, lambda: hop.Quantizer(formats.NF4, (1, 32),
          rules.StoredScales(search=3)),
          "search | nf4 | is for formats of integers | use search=0"),
    wrong("stored_scales_given", ValueError, lambda: hop.quantize(hop.Quantizer(formats.INT8,
          scale=rules.StoredScales()), torch.ones(2, 2), scale=torch.ones(())),
          "scale | of torch.float32 and shape () | must be None | leave it out"),
    wrong("planes_of_bytes", ValueError, lambda: hop.Quantizer(formats.INT8, layout=layouts.Planes()),
          "layout | int8 has 8 | is for codes of 3, 5 or 6 bits | use layout=None"),
    wrong("planes_of_a_number", ValueError, lambda: hop.quantize(hop.Quantizer(formats.INT5, layout=layouts.Planes()),
          torch.ones(())),
          "layout | dimension; got shape () | is for tensors with at least one dimension | use layout=None"),
    wrong("quantizer_parse", ValueError, lambda: hop.Quantizer.parse("INT8_ROW"),
          "text | 'INT8_ROW' | expected 'hop1:' | give what str(quantizer) spells"),
    wrong("quantizer_parse_number", TypeError, lambda: hop.Quantizer.parse(3),
          "text | 3 | must be a str | give what str(quantizer) spells"),
]  # fmt: skip

SCHEMES = [
    wrong("scheme_nothing", ValueError, lambda: hop.Scheme(None, None),
          "lhs | None | nothing would be quantized | give one of them"),
    wrong("scheme_text", TypeError, lambda: hop.Scheme("INT8_ROW", None),
          "lhs | 'INT8_ROW' | must be a Quantizer or None | give one such as hop.presets.INT8_ROW"),
    wrong("scheme_flat", ValueError, lambda: hop.Scheme(presets.STATE8, None),
          "lhs | flat=True | which operands of a product cannot have | use one without"),
    wrong("scheme_kinds", ValueError, lambda: hop.Scheme(ROW, presets.FP8_ROW),
          "rhs | format=e4m3 | integers are multiplied by integers | use formats of one kind"),
    wrong("scheme_backward", ValueError, lambda: hop.Scheme(ROW, ROW, backward="quant"),
          "backward | 'quant' | must be one of ('ste', 'original', 'quantized') | use one of them"),
    *each(wrong, ValueError, "grad | only for it | give both, or neither", {
        "scheme_grad_alone": ("Quantizer(format=int8", lambda: hop.Scheme(ROW, ROW, grad=ROW)),
        "scheme_grad_missing": ("grad=None", lambda: hop.Scheme(ROW, ROW, backward="quantized")),
    }),
    wrong("scheme_quantized_half", ValueError, lambda: hop.Scheme(None, ROW, grad=ROW, backward="quantized"),
          "lhs | None | multiplies codes | give a quantizer"),
    wrong("scheme_output_random", ValueError, lambda: hop.Scheme(ROW, ROW, presets.NVFP4_STOCHASTIC),
          "output | stochastic=True | rounds at random | use one that rounds to nearest"),
    wrong("scheme_zero_points", ValueError, lambda: hop.Scheme(presets.INT8_ROW_AFFINE, ROW, grad=ROW,
          backward="quantized"),
          "lhs | scale=MinMax() | whose zero points differ | use a symmetric quantizer"),
    wrong("scheme_hadamard", ValueError, lambda: hop.Scheme(presets.NVFP4, presets.NVFP4, grad=presets.NVFP4_HADAMARD,
          backward="quantized"),
          "hadamard | grad=hop1:Hadamard() | must be the same | give both one transform"),
    wrong("scheme_parse", ValueError, lambda: hop.Scheme.parse("INT8"),
          "text | 'INT8' | expected 'hop1:' | give what str(quantizer) spells"),
]  # fmt: skip
