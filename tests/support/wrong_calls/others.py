"""Wrong calls of pack, unpack, noise and hop.calibration."""

import torch

import hop
from hop import presets
from hop.numerics import calibration
from tests.support.wrong_calls.row import each, floats, int8, rows, traced, wrong

STATIC = presets.INT8_TENSOR_STATIC
ONE = "make one with torch.tensor"
MADE = "make one with hop.quantize"
PRESET = "give one such as hop.presets.INT8_ROW"


def one(x: float = 1.0):
    return torch.tensor(x)


OTHERS = [
    *each(traced, TypeError, f"weight | must be a QuantizedTensor | {MADE}", {
        "pack_plain": ("torch.float32", lambda: hop.pack(floats(2, 2))),
        "unpack_plain": ("torch.float32", lambda: hop.unpack(floats(2, 2))),
    }),
    wrong("pack_none", TypeError, lambda: hop.pack(None), f"weight | None | must be a QuantizedTensor | {MADE}"),
    *each(wrong, TypeError, "layout | must be one of hop.layouts | give one such as hop.layouts.Tiled()", {
        "pack_layout_text": ("'tiled'", lambda: hop.pack(rows(4, 4), "tiled")),
        "pack_layout_class": ("Tiled'>", lambda: hop.pack(rows(4, 4), hop.layouts.Tiled)),
    }),
    wrong("pack_layout_format", ValueError, lambda: hop.pack(rows(4, 4), hop.layouts.Decoded()),
          "layout | int8 | is for float formats | use another layout, or None"),
    wrong("pack_layout_bits", ValueError, lambda: hop.pack(hop.quantize(presets.TERNARY_ROW, floats(4, 4)),
          hop.layouts.Tiled()),
          "layout | ternary has 2 | is for codes of 4 or 8 bits | use another layout, or None"),
    wrong("pack_shape", ValueError, lambda: hop.pack(rows(4), hop.layouts.Tiled()),
          "layout | (4,) | is for matrices and weights of convolutions | give such a tensor, or use layout=None"),
    wrong("pack_usages", ValueError, lambda: hop.pack(hop.quantize(presets.INT8_ROW, floats(4, 4), usages=("rowwise",
          "columnwise"))),
          "weight | ('rowwise', 'columnwise') | must have only the row-wise copy | quantize it so"),
    wrong("unpack_decoded", ValueError, lambda: hop.unpack(hop.pack(hop.quantize(presets.FP8_ROW, floats(4, 4)),
          hop.layouts.Decoded())),
          "weight | Decoded() | cannot become codes again | keep the tensor that was packed"),
    wrong("noise_seed_int", TypeError, lambda: hop.noise(3, (2,)),
          f"seed | 3 | must be an int64 tensor of shape () | {ONE}"),
    traced("noise_seed_dtype", ValueError, lambda: hop.noise(one(), (2,)),
          f"seed | torch.float32 | must be an int64 tensor of shape () | {ONE}"),
    *each(wrong, TypeError, "shape | must be a tuple of integers | give one such as (2, 4)", {
        "noise_shape_number": ("4", lambda: hop.noise(torch.tensor(1), 4)),
        "noise_shape_float": ("(1.5,)", lambda: hop.noise(torch.tensor(1), (1.5,))),
        "noise_shape_nested": ("[2]", lambda: hop.noise(torch.tensor(1), [[2]])),
    }),
    wrong("noise_shape_negative", ValueError, lambda: hop.noise(torch.tensor(1), (-1,)),
          "shape | (-1,) | must have sizes of 0 or more | give one such as (2, 4)"),
    wrong("noise_stream", ValueError, lambda: hop.noise(torch.tensor(1), (2,), stream=-1),
          "stream | -1 | must be an integer from 0 to 2^32 - 1 | give one such as 0"),
    wrong("noise_bits", ValueError, lambda: hop.noise(torch.tensor(1), (2,), bits=16),
          "bits | 16 | must be 8 or 24 | give one of them"),
    wrong("calibration_q", TypeError, lambda: calibration.amax("INT8_ROW", floats(2)),
          f"q | 'INT8_ROW' | must be a Quantizer | {PRESET}"),
    wrong("calibration_nothing", ValueError, lambda: calibration.amax(presets.INT8_ROW),
          "batches | got none | must contain at least one tensor | give them one by one"),
    *each(wrong, TypeError, "batches | must be floating-point tensors | give them one by one", {
        "calibration_list": ("[1.0]", lambda: calibration.amax(presets.INT8_ROW, [1.0])),
        "calibration_integers": ("torch.int8", lambda: calibration.amax(presets.INT8_ROW, int8(2))),
    }),
    wrong("calibration_shapes", ValueError, lambda: calibration.amax(presets.INT8_ROW, floats(2, 4), floats(3, 4)),
          "batches | [(2, 4), (3, 4)] | must split into the same number of blocks | give batches of one shape"),
    wrong("calibration_devices", ValueError, lambda: calibration.amax(STATIC, floats(2), floats(2).to("meta")),
          "batches | meta | must be on one device | move them to one"),
    wrong("calibration_percent", ValueError, lambda: calibration.percentile(STATIC, floats(2), percent=0.99),
          "percent | 0.99 | must be from 1 to 100 | give percent=99"),
    wrong("calibration_percent_text", ValueError, lambda: calibration.percentile(STATIC, floats(2), percent="99"),
          "percent | '99' | must be from 1 to 100 | give one such as 99.9"),
    wrong("calibration_steps", ValueError, lambda: calibration.mse(STATIC, floats(2), steps=2.5),
          "steps | 2.5 | must be an integer of 2 or more | give one such as 80"),
    wrong("calibration_least", ValueError, lambda: calibration.mse(STATIC, floats(2), least="x"),
          "least | 'x' | must be between 0 and 1 | give one such as 0.2"),
]  # fmt: skip
