"""Arguments that keep their dtype because they are not operands of the arithmetic.

They select elements, count them or describe a layout. Schemas do not tell, so they are listed here by argument name, or
by operator and argument name. A test compares the lists with the schemas of all ATen operators.
"""

from hop.compat.eager import OpOverload

_NAMES = frozenset(
    {
        # positions
        *("index", "indices", "ccol_indices", "row_indices", "crow_indices", "col_indices", "compressed_indices"),
        *("plain_indices", "maximum_indices", "sorter", "pivots", "LU_pivots"),
        *("offsets", "offs", "offset2bag", "col_offsets", "col_offsets_ih", "col_offsets_hh"),
        # choices
        *("mask", "condition", "thread_masks"),
        # counts of elements
        *("repeats", "lengths", "input_lengths", "target_lengths", "batch_sizes", "bag_size", "fweights", "count"),
        *("nested_size", "nested_strides", "cpu_nested_shape_example", "min_seqlen", "max_seqlen"),
        # packed weights, and scales in the format that the operator reads
        *("scale_a", "scale_b", "scale_result"),
        *("packed", "packed_weight", "packed_weights", "packed_ih", "packed_hh", "meta", "mat1_meta", "compressed_A"),
        # tensors used only for their shape, dtype or presence
        *("dummy", "dep_token", "the_template", "like", "nt_example"),
    }
)
_OPERATORS = {
    "self": (
        *("aten::one_hot", "aten::bincount", "aten::_convert_indices_from_coo_to_csr", "aten::_int_mm"),
        *("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"),
    ),
    "start": ("aten::narrow",),
    "target": (
        *("aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d", "aten::nll_loss_backward"),
        *("aten::nll_loss2d_backward", "aten::multi_margin_loss", "aten::multi_margin_loss_backward"),
        *("aten::multilabel_margin_loss", "aten::multilabel_margin_loss_backward"),
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    ),
    "targets": ("aten::ctc_loss", "aten::_ctc_loss_backward"),
    "other": ("aten::view_as", "aten::expand_as", "aten::reshape_as", "aten::type_as", "aten::to"),
    "shape": ("aten::_reshape_from_tensor",),
    "key": ("aten::_philox_key_split", "aten::_philox_key_fold_in", "aten::_philox_normal", "aten::_philox_uniform"),
    "input": ("aten::_no_grad_embedding_renorm_",),
    "mat2": (
        *("aten::_int_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm"),
        *("aten::_scaled_grouped_mm_v2", "aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm"),
        *("aten::_weight_int4pack_mm_for_cpu", "aten::_weight_int4pack_mm_with_scales_and_zeros"),
    ),
    "bias": ("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"),
    "weight": (
        *("aten::fbgemm_linear_int8_weight", "aten::fbgemm_linear_int8_weight_fp32_activation"),
        "aten::_mixed_dtypes_linear",
    ),
    "weights": ("aten::_dyn_quant_pack_4bit_weight",),
    "w_ih": ("aten::quantized_gru_cell", "aten::quantized_rnn_relu_cell", "aten::quantized_rnn_tanh_cell"),
    "w_hh": ("aten::quantized_gru_cell", "aten::quantized_rnn_relu_cell", "aten::quantized_rnn_tanh_cell"),
}
# Indices, masks or zero points if they are integers or booleans. Floats here are operands: probabilities, summands,
# learned zero points.
_INTEGERS_OF_OPERATOR = {
    "aten::cross_entropy_loss": {"target"},
    "aten::scaled_dot_product_attention": {"attn_mask"},
    "hop::attention": {"attn_mask"},
}
_INTEGERS = frozenset({"zero_point", "zero_points", "input_zero_point", "output_zero_point", "weight_zero_point"})


def kept(op: OpOverload) -> frozenset[str]:
    """Names of the arguments of `op` that keep their dtype."""
    return _NAMES | {name for name, operators in _OPERATORS.items() if op._schema.name in operators}


def kept_integers(op: OpOverload) -> frozenset[str]:
    """Names of the arguments of `op` that keep their dtype if they are integers or booleans."""
    return _INTEGERS | _INTEGERS_OF_OPERATOR.get(op._schema.name, set())
