"""Wrong calls of out_dtype, and of explain."""

import torch

import hop
from hop import presets
from tests.support.wrong_calls.row import aten, conv2d, each, floats, int8, linear, mm, rows, traced, wrong

I32, F32 = torch.int32, torch.float32
ONE = "make one with torch.tensor"
embedding, cat, bmm, addmm = aten.embedding.default, aten.cat.default, aten.bmm.default, aten.addmm.default


OUT_DTYPE = [
    wrong("out_dtype_op_packet", ValueError, lambda: hop.out_dtype(aten.mm, I32, int8(2, 2), int8(2, 2)),
          "op | aten.mm | must be an operator overload | use one of aten.mm.default"),
    *each(wrong, ValueError, "op | must be an operator overload | use one such as torch.ops.aten.mm.default", {
        "out_dtype_op_function": ("built-in method mm", lambda: hop.out_dtype(torch.mm, I32, int8(2, 2), int8(2, 2))),
        "out_dtype_op_text": ("'mm'", lambda: hop.out_dtype("mm", I32, int8(2, 2), int8(2, 2))),
        "out_dtype_op_none": ("None", lambda: hop.out_dtype(None, I32, int8(2, 2), int8(2, 2))),
    }),
    traced("out_dtype_op_mutable", ValueError, lambda: hop.out_dtype(aten.add_.Tensor, I32, int8(2), int8(2)),
          "op | aten.add_.Tensor | must be functional | use one that returns a new tensor"),
    traced("out_dtype_op_list", ValueError, lambda: hop.out_dtype(aten.topk.default, I32, int8(2), 1),
          "op | aten.topk.default | must return exactly one tensor | use one that does"),
    traced("out_dtype_op_random", ValueError, lambda: hop.out_dtype(aten.rand_like.default, F32, floats(2)),
          "op | aten.rand_like.default | must be a function of its arguments | call it outside"),
    traced("out_dtype_dtype_text", TypeError, lambda: hop.out_dtype(mm, "int32", int8(2, 2), int8(2, 2)),
          "output_dtype | 'int32' | must be a torch.dtype | give one such as torch.int32"),
    *each(wrong, TypeError, "output_dtype | must be a torch.dtype | give one such as torch.int32", {
        "out_dtype_dtype_python": ("<class 'int'>", lambda: hop.out_dtype(mm, int, int8(2, 2), int8(2, 2))),
        "out_dtype_dtype_quantizer": ("Quantizer(format=int8", lambda: hop.out_dtype(mm, presets.INT8_ROW, int8(2, 2),
            int8(2, 2))),
        "explain_scheme": ("Scheme(lhs=", lambda: hop.explain(linear, hop.schemes.INT8_DYNAMIC, floats(2, 8), floats(4,
            8))),
    }),
    traced("out_dtype_dtype_quantized", TypeError, lambda: hop.out_dtype(mm, torch.qint8, int8(2, 2), int8(2, 2)),
          "output_dtype | torch.qint8 | must be a dtype that tensors can be cast to | give one such as torch.int32"),
    traced("out_dtype_nested_lists", TypeError, lambda: hop.out_dtype(conv2d, I32, [[1]], [[1]]),
          f"input | [[1]] | must be a tensor | {ONE}"),
    traced("out_dtype_list", TypeError, lambda: hop.out_dtype(mm, I32, int8(2, 2), [[1, 2]]),
          f"mat2 | [[1, 2]] | must be a tensor | {ONE}"),
    *each(traced, TypeError, f"self | must be a tensor | {ONE}", {
        "out_dtype_none": ("None", lambda: hop.out_dtype(mm, I32, None, int8(2, 2))),
        "out_dtype_number": ("3", lambda: hop.out_dtype(mm, I32, 3, int8(2, 2))),
    }),
    *each(wrong, TypeError, f"self | must be a tensor | {ONE}", {
        "out_dtype_text": ("'x'", lambda: hop.out_dtype(mm, I32, "x", int8(2, 2))),
        "explain_nested_lists": ("[[1]]", lambda: hop.explain(mm, I32, [[1]], int8(2, 2))),
    }),
    traced("out_dtype_missing", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 2)),
          "mat2 | missing a value | which has no default | give it"),
    traced("out_dtype_too_many", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 2), int8(2, 2), int8(2, 2)),
          "arguments | got 3 | takes 2 positional arguments | leave out the others"),
    traced("out_dtype_unknown_name", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 2), mat3=int8(2, 2)),
          "mat3 | 'mat3' | has no argument | use one of self, mat2"),
    traced("out_dtype_twice", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 2), self=int8(2, 2)),
          "self | two values | which takes one | leave one out"),
    traced("out_dtype_devices", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 2), int8(2, 2).to("meta")),
          "mat2 | meta | all tensors must be on one device | move one of them"),
    wrong("out_dtype_quantized", TypeError, lambda: hop.out_dtype(mm, I32, rows(2, 2), int8(2, 2)),
          "self | QuantizedTensor | represents real numbers | give its .codes, or use hop.scaled"),
    traced("out_dtype_shapes", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 3), int8(2, 3)),
          "mat2 | (2, 3) and (2, 3) | which must be equal | transpose or reshape one of them"),
    traced("out_dtype_rank", RuntimeError, lambda: hop.out_dtype(mm, I32, int8(2, 3, 4), int8(4, 3)),
          "self | (2, 3, 4) | must have 2 dimensions | use another operator, such as aten.matmul.default"),
    traced("out_dtype_batch", RuntimeError, lambda: hop.out_dtype(bmm, I32, int8(2, 3, 4), int8(3, 4, 5)),
          "mat2 | (2, 3, 4) and (3, 4, 5) | must have as many matrices | give both one batch size"),
    traced("out_dtype_bias_shape", RuntimeError, lambda: hop.out_dtype(linear, I32, int8(2, 4), int8(3, 4), int8(2)),
          "bias | got (2,) | must have 3 elements | give one for each output"),
    traced("out_dtype_channels", RuntimeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 3, 5, 5), int8(2, 2, 3, 3)),
          "input | (1, 3, 5, 5) | must have 2 channels | give an input with as many"),
    traced("out_dtype_stride_zero", RuntimeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 4, 4), int8(2, 2, 3,
          3), None, [0, 1]),
          "stride | [0, 1] | must be 1 or more | give such numbers"),
    traced("out_dtype_stride_float", TypeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 4, 4), int8(2, 2, 3, 3),
          None, 1.5),
          "stride | 1.5 | must be an integer or a list of integers | give such numbers"),
    traced("out_dtype_stride_length", RuntimeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 4, 4), int8(2, 2, 3,
          3), None, [1, 1, 1]),
          "stride | [1, 1, 1] | must have 2 numbers | give one for each dimension"),
    traced("out_dtype_groups_zero", RuntimeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 4, 4), int8(2, 2, 3,
          3), None, 1, 0, 1, 0),
          "groups | got 0 | must be 1 or more | give such a number"),
    traced("out_dtype_groups_float", TypeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 4, 4), int8(2, 2, 3, 3),
          None, 1, 0, 1, 1.0),
          "groups | 1.0 | must be an integer | give such a number"),
    traced("out_dtype_kernel_size", RuntimeError, lambda: hop.out_dtype(conv2d, I32, int8(1, 2, 2, 2), int8(2, 2, 3,
          3)),
          "weight | (2, 2, 3, 3) | must not be larger than the padded input | pad the input"),
    wrong("out_dtype_scalar", TypeError, lambda: hop.out_dtype(addmm, I32, int8(2, 2), int8(2, 2), int8(2, 2),
          alpha="x"),
          "alpha | 'x' | must be a number | give one such as 1"),
    traced("out_dtype_indices", TypeError, lambda: hop.out_dtype(embedding, I32, int8(4, 8), floats(2)),
          "indices | torch.float32 | must be int32 or int64 | cast it with .long()"),
]  # fmt: skip
