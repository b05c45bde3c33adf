"""Wrong calls of scaled."""

import torch

import hop
from hop import presets
from tests.support.wrong_calls.row import aten, conv2d, each, floats, int8, linear, mm, rows, traced, wrong

I32, F32 = torch.int32, torch.float32
ONE = "make one with torch.tensor"
embedding, cat, bmm, addmm = aten.embedding.default, aten.cat.default, aten.bmm.default, aten.addmm.default


def image(*shape: int):
    return hop.quantize(presets.INT8_TENSOR, torch.ones(shape))


def kernel(*shape: int):
    return hop.quantize(presets.INT8_CONV, torch.ones(shape))


SCALED = [
    wrong("scaled_op_packet", ValueError, lambda: hop.scaled(aten.mm, F32, rows(2, 4), rows(4, 2)),
          "op | aten.mm | must be an operator overload | use aten.mm.default"),
    wrong("scaled_op_none", ValueError, lambda: hop.scaled(None, F32, rows(2, 4)),
          "op | None | must be an operator that hop.scaled supports | use one of"),
    traced("scaled_op_unknown", ValueError, lambda: hop.scaled(aten.topk.default, F32, rows(2, 4), 1),
          "op | aten.topk.default | must be an operator that hop.scaled supports | use one of"),
    traced("scaled_output_integer", TypeError, lambda: hop.scaled(linear, I32, rows(2, 4), rows(3, 4)),
          "output | torch.int32 | must be float16, bfloat16, float32, float64 or a Quantizer | "
          "give a Quantizer such as hop.presets.INT8_TENSOR"),
    traced("scaled_output_text", TypeError, lambda: hop.scaled(linear, "float32", rows(2, 4), rows(3, 4)),
          "output | 'float32' | must be a torch.dtype or a Quantizer | "
          "give one such as torch.float32 or hop.presets.INT8_TENSOR"),
    traced("scaled_output_none", TypeError, lambda: hop.scaled(linear, None, rows(2, 4), rows(3, 4)),
          "output | None | must be a torch.dtype or a Quantizer | "
          "give one such as torch.float32 or hop.presets.INT8_TENSOR"),
    traced("scaled_output_random", ValueError, lambda: hop.scaled(linear, presets.NVFP4_STOCHASTIC, rows(2, 4), rows(3,
          4)),
          "output | stochastic=True | rounds at random | use a dtype, then hop.quantize with noise"),
    traced("scaled_plain", TypeError, lambda: hop.scaled(linear, F32, floats(2, 4), floats(3, 4)),
          "input | plain tensors | must be a QuantizedTensor | quantize one with hop.quantize"),
    traced("scaled_codes", TypeError, lambda: hop.scaled(linear, F32, rows(2, 4), int8(3, 4)),
          "weight | torch.int8 | must be a QuantizedTensor or float16, bfloat16, float32 or float64 | "
          "quantize it with hop.quantize"),
    *each(traced, TypeError, f"weight | must be a tensor | {ONE}", {
        "scaled_list": ("[[1.0, 1.0, 1.0, 1.0]]", lambda: hop.scaled(linear, F32, rows(2, 4), [[1.0] * 4])),
        "scaled_number": ("3", lambda: hop.scaled(linear, F32, rows(2, 4), 3)),
    }),
    traced("scaled_none", TypeError, lambda: hop.scaled(linear, F32, None, rows(2, 4)),
          f"input | None | must be a tensor | {ONE}"),
    traced("scaled_bias_list", TypeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4), [1.0, 2.0, 3.0]),
          f"bias | [1.0, 2.0, 3.0] | must be a tensor | {ONE}"),
    traced("scaled_bias_dtype", TypeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4), int8(3)),
          "bias | torch.int8 | must be floating point, or int32 | cast it to torch.float32"),
    traced("scaled_bias_quantized", ValueError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4), rows(3)),
          "bias | a QuantizedTensor | cannot be quantized | call hop.dequantize on it"),
    traced("scaled_bias_shape", RuntimeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4), floats(2)),
          "bias | got (2,) | must have 3 elements | give one for each output"),
    traced("scaled_bias_int32", ValueError, lambda: hop.scaled(linear, F32, floats(2, 4), rows(3, 4), torch.ones(3,
          dtype=I32)),
          "bias | torch.int32 | for two operands of integers | give a float one"),
    traced("scaled_shapes", RuntimeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 5)),
          "weight | (2, 4) and (3, 5) | which must be equal | transpose or reshape one of them"),
    traced("scaled_rank", RuntimeError, lambda: hop.scaled(mm, F32, image(2, 3, 4), image(4, 2)),
          "self | (2, 3, 4) | must have 2 dimensions | use another operator, such as aten.matmul.default"),
    traced("scaled_scale_along_sum", ValueError, lambda: hop.scaled(mm, F32, rows(2, 4), rows(4, 2)),
          "mat2 | Quantizer(format=int8, block=(1, -1)) | must not change with each element | use a block along it"),
    traced("scaled_pair", ValueError, lambda: hop.scaled(linear, F32, rows(2, 4), hop.quantize(presets.FP8_ROW,
          floats(3, 4))),
          "weight | format=e4m3 | takes integers with integers | quantize both by formats of one kind"),
    wrong("scaled_devices", RuntimeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4).to("meta")),
          "weight | meta | must be on one device | move one of them"),
    wrong("scaled_flat", ValueError, lambda: hop.scaled(linear, F32, hop.quantize(hop.Quantizer(hop.formats.INT8, (4,),
          flat=True), floats(2, 4)), rows(3, 4)),
          "input | flat=True | takes no blocks over the flattened tensor | use flat=False"),
    traced("scaled_output_scale_with_dtype", ValueError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4),
          output_scale=torch.tensor(1.0)),
          "output_scale | output torch.float32 | must be None | leave it out"),
    traced("scaled_output_scale_missing", ValueError, lambda: hop.scaled(linear, presets.INT8_TENSOR_STATIC, rows(2,
          4), rows(3, 4)),
          "output_scale | None | has no rule to find a scale | pass output_scale="),
    traced("scaled_output_scale_text", TypeError, lambda: hop.scaled(linear, presets.INT8_TENSOR_STATIC, rows(2, 4),
          rows(3, 4), output_scale="0.5"),
          f"output_scale | '0.5' | must be a number or a tensor | {ONE}"),
    wrong("scaled_output_scale_negative", ValueError, lambda: hop.scaled(linear, presets.INT8_TENSOR_STATIC, rows(2,
          4), rows(3, 4), output_scale=torch.tensor(-1.0)),
          "output_scale | -1.0 | must be above 0 and finite | find one with hop.calibration"),
    traced("scaled_output_scale_shape", ValueError, lambda: hop.scaled(linear, presets.INT8_TENSOR_STATIC, rows(2, 4),
          rows(3, 4), output_scale=floats(5)),
          "output_scale | (5,) | must have a shape that broadcasts to (1, 1) | give one number for each block"),
    traced("scaled_output_zero_point_missing", ValueError, lambda: hop.scaled(linear,
          presets.INT8_TENSOR_STATIC_AFFINE, rows(2, 4), rows(3, 4), output_scale=torch.tensor(1.0)),
          "output_zero_point | None | needs output_zero_point in addition to output_scale | pass output_zero_point="),
    traced("scaled_output_zero_point_dtype", TypeError, lambda: hop.scaled(linear, presets.INT8_TENSOR_STATIC_AFFINE,
          rows(2, 4), rows(3, 4), output_scale=torch.tensor(1.0), output_zero_point=torch.tensor(True)),
          "output_zero_point | torch.bool | must be floating point or torch.int8 | cast it with .to(torch.int8)"),
    wrong("scaled_by_sum", ValueError, lambda: hop.scaled(linear, hop.Quantizer(hop.formats.INT8,
          scale=hop.scale_rules.Static(requantize=hop.requantization.TFLITE)), floats(2, 4), rows(3, 4),
          output_scale=torch.tensor(1.0)),
          "output | FixedPoint(rounding= | is found from an exact integer sum | use Static(requantize=Division())"),
    traced("scaled_unknown_name", RuntimeError, lambda: hop.scaled(linear, F32, rows(2, 4), rows(3, 4),
          scale=torch.tensor(1.0)),
          "scale | 'scale' | has no argument | use one of input, weight, bias"),
    traced("scaled_missing", RuntimeError, lambda: hop.scaled(linear, F32, rows(2, 4)),
          "weight | missing a value | which has no default | give it"),
    traced("scaled_stride_float", TypeError, lambda: hop.scaled(conv2d, F32, image(1, 2, 4, 4), kernel(2, 2, 3, 3),
          None, 1.5),
          "stride | 1.5 | must be an integer or a list of integers | give such numbers"),
    traced("scaled_stride_zero", RuntimeError, lambda: hop.scaled(conv2d, F32, image(1, 2, 4, 4), kernel(2, 2, 3, 3),
          None, 0),
          "stride | [0, 0] | must be 1 or more | give such numbers"),
    traced("scaled_channels", RuntimeError, lambda: hop.scaled(conv2d, F32, image(1, 3, 4, 4), kernel(2, 2, 3, 3)),
          "input | (1, 3, 4, 4) | must have 2 channels | give an input with as many"),
    wrong("scaled_convolution_blocks", ValueError, lambda: hop.scaled(conv2d, F32, rows(1, 2, 4, 4), kernel(2, 2, 3,
          3)),
          "input | (-1, 1, 1, -1) | takes one scale for each example at most | "
          "take a preset such as hop.presets.INT8_CONV"),
    wrong("scaled_columns_only", ValueError, lambda: hop.scaled(conv2d, F32, hop.quantize(presets.INT8_TENSOR,
          floats(1, 2, 4, 4), usages="columnwise"), kernel(2, 2, 3, 3)),
          "input | ('columnwise',) | reads row-wise copies | quantize it with usages='rowwise'"),
    wrong("scaled_cat_member", TypeError, lambda: hop.scaled(cat, F32, [rows(2, 4), "x"]),
          "tensors | 'x' | must be a list of tensors | give such a list"),
    traced("scaled_cat_tensor", TypeError, lambda: hop.scaled(cat, F32, rows(2, 4)),
          "tensors | shape (2, 4) | must be a list of tensors | give such a list"),
    wrong("scaled_add_text", TypeError, lambda: hop.scaled(aten.add.Tensor, F32, rows(2, 4), "x"),
          f"other | 'x' | must be a tensor | {ONE}"),
    traced("scaled_indices_float", TypeError, lambda: hop.scaled(embedding, F32, rows(4, 8), floats(3)),
          "indices | torch.float32 | must be int32 or int64 | cast it with .long()"),
    traced("scaled_indices_list", TypeError, lambda: hop.scaled(embedding, F32, rows(4, 8), [1, 2]),
          f"indices | [1, 2] | must be a tensor | {ONE}"),
]  # fmt: skip
