"""Wrong rules, formats and layouts, and names that there are none of."""

import torch

import hop
from hop import formats, layouts, presets, requantization, schemes
from hop import scale_rules as rules
from tests.support.wrong_calls.row import each, rows, wrong

SIZES = "must be a tuple of sizes over the last dimensions"
SUCH = "give one such as (1, -1)"
FLAG = "must be True or False"


RULES = [
    wrong("amax_floor", ValueError, lambda: rules.Amax(floor=-1),
          "floor | -1 | must be a finite number, 0 or more | give such a number"),
    wrong("static_affine", ValueError, lambda: rules.Static(affine=1), f"affine | 1 | {FLAG} | give one of them"),
    wrong("static_requantize", TypeError, lambda: rules.Static(requantize="tflite"),
          "requantize | 'tflite' | must be a convention of hop.requantization | "
          "give one such as hop.requantization.TFLITE"),
    wrong("current_eps", ValueError, lambda: rules.CurrentScaling(eps=float("nan")),
          "eps | nan | must be a finite number, 0 or more | give such a number"),
    wrong("delayed_margin", ValueError, lambda: rules.Delayed(margin=1.5),
          "margin | 1.5 | must be an integer from -64 | give such a number"),
    wrong("delayed_history", ValueError, lambda: rules.Delayed(history=0),
          "history | 0 | must be an integer from 1 | give such a number"),
    wrong("microscaling_rounding", ValueError, lambda: rules.Microscaling(rounding="up"),
          "rounding | 'up' | must be one of ('rceil', 'floor', 'ceil', 'even') | use one of them"),
    wrong("microscaling_exponent", TypeError, lambda: rules.Microscaling(exponent=formats.INT8),
          "exponent | int8 | must be a format of powers of two | give one such as hop.formats.E8M0"),
    wrong("two_level_inner", TypeError, lambda: rules.TwoLevel(inner=formats.INT8),
          "inner | int8 | must be a format of floats | give one such as hop.formats.E4M3"),
    wrong("two_level_outer", ValueError, lambda: rules.TwoLevel(outer="x"), f"outer | 'x' | {SIZES} | {SUCH}"),
    *each(wrong, ValueError, "signs | must be 4, 8, 16, 32, 64, 128 or 256 numbers 1 and -1 | give so many", {
        "hadamard_signs": ("(1, 2)", lambda: hop.hadamard.Hadamard((1, 2))),
        "hadamard_number": ("3", lambda: hop.hadamard.Hadamard(3)),
    }),
    wrong("division_low", ValueError, lambda: requantization.Division(low="x"),
          "low | 'x' | must be a finite number | give such a number"),
    wrong("division_order", ValueError, lambda: requantization.Division(low=2, high=1),
          "low | 2.0 | must not be above high | swap them"),
    wrong("fixed_point_rounding", ValueError, lambda: requantization.FixedPoint(rounding="up"),
          "rounding | 'up' | must be one of ('gemmlowp', 'tflite', 'away', 'even', 'ruy') | use one of them"),
    wrong("decoded_dtype", TypeError, lambda: layouts.Decoded("bf16"),
          "dtype | 'bf16' | must be torch.bfloat16 | give torch.bfloat16"),
    wrong("tiled_columns", ValueError, lambda: layouts.Tiled(columns=1), f"columns | 1 | {FLAG} | give one of them"),
    wrong("format_name", ValueError, lambda: formats.Integer(3, 8, torch.int8, -128, 127),
          "name | 3 | must be text | give one such as 'int8'"),
    wrong("format_bits", ValueError, lambda: formats.Integer("x", 9, torch.int8, -128, 127),
          "bits | 9 | must be 1 to 8 | give such a number"),
    wrong("format_bits_float", ValueError, lambda: formats.Integer("x", 8.0, torch.int8, -128, 127),
          "bits | 8.0 | must be an integer | give such a number"),
    wrong("format_dtype", ValueError, lambda: formats.Integer("x", 8, torch.float32, -128, 127),
          "dtype | torch.float32 | must be one of (torch.int8, torch.uint8 | use one of them"),
    wrong("format_range", ValueError, lambda: formats.Integer("x", 4, torch.int8, -128, 127),
          "low | -128 to 127 | must be ascending and fit 4 bits | give such numbers"),
    wrong("format_unsigned_range", ValueError, lambda: formats.Integer("x", 8, torch.uint8, -128, 127),
          "low | -128 to 127 | must fit torch.uint8 | give such numbers"),
    wrong("format_float_bits", ValueError, lambda: formats.Float("x", 8, torch.uint8, 5, 3, 7, 126),
          "exponent_bits | 5 and 3 | must be 8 bits | give such numbers"),
    wrong("format_largest", ValueError, lambda: formats.Float("x", 8, torch.uint8, 4, 3, 7, 400),
          "largest | 400 | must be a code below 128 | give such numbers"),
    wrong("format_book_order", ValueError, lambda: formats.Codebook("x", 2, torch.uint8, (1.0, 0.0)),
          "book | (1.0, 0.0) | must be 2 to 4 numbers, ascending | give such numbers"),
    *each(wrong, ValueError, "book | must be a tuple of numbers | give one such as (-1.0, 0.0, 1.0)", {
        "format_book_text": ("'abc'", lambda: formats.Codebook("x", 2, torch.uint8, "abc")),
        "format_book_none": ("None", lambda: formats.Codebook("x", 2, torch.uint8, (0.0, None))),
    }),
    wrong("format_powers", ValueError, lambda: formats.PowerOfTwo("x", 8, torch.uint8, bias=300),
          "bias | 300 | must be between 2^-127 and 2^127 | give one such as 127"),
]  # fmt: skip

NAMES = [
    wrong("name_hop", AttributeError, lambda: hop.quantise, "hop | 'quantise' | has no attribute | use quantize"),
    *each(wrong, AttributeError, "hop.presets | has no attribute | use INT8_ROW", {
        "name_preset": ("'INT8_ROWS'", lambda: presets.INT8_ROWS),
        "name_preset_case": ("'int8_row'", lambda: presets.int8_row),
    }),
    wrong("name_format", AttributeError, lambda: formats.INT9, "hop.formats | 'INT9' | has no attribute | use INT"),
    wrong("name_scheme", AttributeError, lambda: schemes.INT8_DYNAMICS,
          "hop.schemes | 'INT8_DYNAMICS' | has no attribute | use INT8_DYNAMIC"),
    wrong("name_rule", AttributeError, lambda: rules.AMAX, "hop.scale_rules | 'AMAX' | has no attribute | use Amax"),
    wrong("name_convention", AttributeError, lambda: requantization.Fixed,
          "hop.requantization | 'Fixed' | has no attribute | use FixedPoint"),
    wrong("name_layout", AttributeError, lambda: layouts.Tile, "hop.layouts | 'Tile' | has no attribute | use Tiled"),
    wrong("name_far", AttributeError, lambda: presets.zzzzzz,
          "hop.presets | 'zzzzzz' | has no attribute | call dir(hop.presets)"),
    wrong("name_buffer", AttributeError, lambda: setattr(rows(2, 4), "zero_point", torch.ones(2, 1)),
          "zero_point | 'zero_point' | has the buffers ('codes', 'scale') | create a tensor that has it"),
]  # fmt: skip
