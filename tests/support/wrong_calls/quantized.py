"""Wrong calls of quantized."""

import torch

import hop
from hop import presets, schemes
from tests.support.wrong_calls.row import aten, conv2d, each, floats, int8, linear, traced, wrong

ONE = "make one with torch.tensor"
FLOATS = "must be float16, bfloat16, float32 or float64"


def quantized(*args, scheme=schemes.INT8_DYNAMIC, op=linear, **options):
    return hop.quantized(op, scheme, *args, **options)


def one(x: float = 1.0):
    return torch.tensor(x)


QUANTIZED = [
    *each(wrong, ValueError, "op | must be one of | use one of them", {
        "quantized_op_packet": ("aten.mm", lambda: quantized(floats(2, 8), floats(8, 4), op=aten.mm)),
        "quantized_op_list": ("linear", lambda: quantized(floats(2, 8), floats(8, 4), op=[linear])),
    }),
    traced("quantized_scheme_text", ValueError, lambda: quantized(floats(2, 8), floats(4, 8), scheme="INT8_DYNAMICS"),
          "scheme | 'INT8_DYNAMICS' | no scheme is called | use int8_dynamic"),
    wrong("quantized_scheme_quantizer", TypeError, lambda: quantized(floats(2, 8), floats(4, 8),
          scheme=presets.INT8_ROW),
          "scheme | Quantizer(format=int8 | must be a hop.Scheme | give one such as hop.schemes.INT8_DYNAMIC"),
    traced("quantized_list", TypeError, lambda: quantized([[1.0] * 2], floats(4, 2)),
          f"input | [[1.0, 1.0]] | must be a tensor | {ONE}"),
    traced("quantized_none", TypeError, lambda: quantized(floats(2, 8), None),
          f"weight | None | must be a tensor | {ONE}"),
    traced("quantized_codes", TypeError, lambda: quantized(floats(2, 8), int8(4, 8)),
          f"weight | torch.int8 | {FLOATS} | cast it, or use hop.out_dtype"),
    traced("quantized_missing", RuntimeError, lambda: quantized(floats(2, 8)),
          "weight | missing a value | which has no default | give it"),
    traced("quantized_unknown_name", RuntimeError, lambda: quantized(floats(2, 8), floats(4, 8), out=1),
          "out | 'out' | has no argument | use one of input, weight, bias"),
    traced("quantized_dtype", TypeError, lambda: quantized(floats(2, 8), floats(4, 8), dtype=torch.int8),
          f"dtype | torch.int8 | {FLOATS} | use one of them"),
    wrong("quantized_scales_dict", TypeError, lambda: quantized(floats(2, 8), floats(4, 8), scales={"lhs": 1}),
          "scales | {'lhs': 1} | must be hop.Scales | give one such as hop.Scales(lhs=...)"),
    traced("quantized_scales_missing", ValueError, lambda: quantized(floats(2, 8), floats(4, 8),
          scheme=schemes.INT8_STATIC),
          "lhs | None | has no rule to find a scale | pass scales=hop.Scales(lhs=..."),
    traced("quantized_scales_extra", ValueError, lambda: quantized(floats(2, 8), floats(4, 8),
          scales=hop.Scales(output=one())),
          "scales.output | torch.float32 | scheme's output is None | leave it out"),
    wrong("quantized_scales_text", TypeError, lambda: quantized(floats(2, 8), floats(4, 8),
          scheme=schemes.INT8_STATIC, scales=hop.Scales(lhs="0.5")),
          f"scales.lhs | '0.5' | must be a number or a tensor | {ONE}"),
    traced("quantized_scales_shape", ValueError, lambda: quantized(floats(2, 8), floats(4, 8),
          scheme=schemes.INT8_STATIC, scales=hop.Scales(lhs=floats(7), lhs_zero_point=one())),
          "scales.lhs | (7,) | must have a shape that broadcasts to (1, 1) | give one number for each block"),
    wrong("quantized_seed", ValueError, lambda: quantized(floats(2, 8), floats(4, 8), seed=3),
          f"seed | 3 | must be an int64 tensor of shape () | {ONE}"),
    traced("quantized_seed_dtype", ValueError, lambda: quantized(floats(2, 8), floats(4, 8), seed=one()),
          f"seed | torch.float32 | must be an int64 tensor of shape () | {ONE}"),
    traced("quantized_shapes", RuntimeError, lambda: quantized(floats(2, 8), floats(4, 7)),
          "weight | (2, 8) and (4, 7) | which must be equal | transpose or reshape one of them"),
    wrong("quantized_devices", RuntimeError, lambda: quantized(floats(2, 8), floats(4, 8).to("meta")),
          "weight | meta | must be on one device | move one of them"),
    wrong("quantized_other_quantizer", ValueError, lambda: quantized(hop.quantize(presets.FP8_ROW, floats(2, 8)),
          floats(4, 8)),
          "input | format=e4m3 | the scheme says | pass a float tensor, or a scheme that matches"),
    traced("quantized_bias_shape", RuntimeError, lambda: quantized(floats(2, 8), floats(4, 8), floats(3)),
          "bias | got (3,) | must have 4 elements | give one for each output"),
    traced("quantized_stride", TypeError, lambda: quantized(floats(1, 2, 4, 4), floats(2, 2, 3, 3), None, 1.5,
          op=conv2d),
          "stride | 1.5 | must be an integer or a list of integers | give such numbers"),
    traced("quantized_channels", RuntimeError, lambda: quantized(floats(1, 3, 4, 4), floats(2, 2, 3, 3), op=conv2d),
          "input | (1, 3, 4, 4) | must have 2 channels | give an input with as many"),
    traced("quantized_indices", TypeError, lambda: quantized(floats(4, 8), floats(2), op=aten.embedding.default),
          "indices | torch.float32 | must be int32 or int64 | cast it with .long()"),
    wrong("quantized_embedding_floats", ValueError, lambda: quantized(floats(4, 8), torch.tensor([1]),
          op=aten.embedding.default, scheme=hop.Scheme(presets.INT8_ROW, None)),
          "rhs | rhs=None | looks up rows of its rhs | use a scheme with rhs"),
]  # fmt: skip
