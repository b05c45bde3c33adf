"""The metadata keys of a GGUF file: which of them affect the model, and which of these are supported.

    USED          read into the configuration, for the architectures that have them
    IRRELEVANT    does not affect the model, with the reason
    REFUSED       affects the model, and transformers' model does not support it: an error unless the value
                  has no effect

A key in USED that the file's architecture does not read is rejected unless REFUSED allows its value. So is any key of
the architecture that is in no table. Keys with other prefixes, which llama.cpp does not know, are ignored.

`{arch}` stands for the architecture. Sources: gguf's constants.py; llama.cpp's llama-model.cpp and llama-context.cpp,
which read the keys.
"""

import math
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from hop.interchange import GGUFFile
from hop.numerics.spelling import shown

_T = TypeVar("_T")


class Sizes(NamedTuple):
    """The values of a model that key values are compared with."""

    head: int
    heads: int
    width: int
    is_causal: bool
    theta: object  # rope.freq_base, None if the file has none


class Rule(NamedTuple):
    """The values of a key that have no effect on the model."""

    text: str  # a template with the fields of Sizes
    allows: Callable[[object, Sizes], bool]


def _numbers(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _only(*values: float) -> Rule:
    text = " or ".join(f"{value:g}" for value in values)
    return Rule(text, lambda value, _: all(isinstance(v, int | float) and v in values for v in _numbers(value)))


def _equal(text: str, wanted: Callable[[Sizes], float]) -> Rule:
    def allows(value: object, sizes: Sizes) -> bool:
        return all(isinstance(v, int | float) and math.isclose(v, wanted(sizes), rel_tol=1e-6) for v in _numbers(value))

    return Rule(text, allows)


_NONE, _NO_SCALE = _only(0), _only(0, 1)
_NEVER = Rule("absent", lambda value, _: False)
_HEAD = _equal("{head}, the size of a head", lambda sizes: sizes.head)

USED: Mapping[str, str] = {
    "general.architecture": "the model's class",
    "general.alignment": "where tensors begin",
    "split.no": "which file of a model this is",
    "split.count": "how many files a model has",
    "split.tensors.count": "how many tensors they have",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
    "{arch}.context_length": "max_position_embeddings",
    "{arch}.embedding_length": "hidden_size",
    "{arch}.block_count": "num_hidden_layers",
    "{arch}.feed_forward_length": "intermediate_size",
    "{arch}.use_parallel_residual": "use_parallel_residual of GPT-NeoX",
    "{arch}.attn_logit_softcapping": "attn_logit_softcapping of Gemma 2",
    "{arch}.final_logit_softcapping": "final_logit_softcapping of Gemma 2 and 3",
    "{arch}.leading_dense_block_count": "first_k_dense_replace of DeepSeek",
    "{arch}.expert_count": "num_local_experts, num_experts or n_routed_experts",
    "{arch}.expert_used_count": "num_experts_per_tok",
    "{arch}.expert_shared_count": "n_shared_experts of DeepSeek",
    "{arch}.expert_feed_forward_length": "moe_intermediate_size of Qwen 3 and DeepSeek",
    "{arch}.expert_gating_func": "whether the router of DeepSeek is a softmax, V2, or a sigmoid, V3",
    "{arch}.expert_group_count": "n_group of DeepSeek",
    "{arch}.expert_group_used_count": "topk_group of DeepSeek",
    "{arch}.expert_weights_norm": "norm_topk_prob of DeepSeek V3",
    "{arch}.expert_weights_scale": "routed_scaling_factor of DeepSeek",
    "{arch}.attention.head_count": "num_attention_heads",
    "{arch}.attention.head_count_kv": "num_key_value_heads",
    "{arch}.attention.key_length": "head_dim; of DeepSeek qk_nope_head_dim and qk_rope_head_dim",
    "{arch}.attention.key_length_mla": "the same of DeepSeek, whose key_length is then that of latent keys",
    "{arch}.attention.value_length": "v_head_dim of DeepSeek",
    "{arch}.attention.value_length_mla": "the same, if value_length is that of latent values",
    "{arch}.attention.kv_lora_rank": "kv_lora_rank of DeepSeek",
    "{arch}.attention.q_lora_rank": "q_lora_rank of DeepSeek",
    "{arch}.attention.layer_norm_epsilon": "layer_norm_eps of GPT-NeoX and BERT",
    "{arch}.attention.layer_norm_rms_epsilon": "rms_norm_eps of the others",
    "{arch}.attention.sliding_window": "sliding_window of Phi 3, Gemma 2 and 3, and GPT-OSS",
    "{arch}.attention.sliding_window_pattern": "layer_types of Gemma 2 and 3, and GPT-OSS",
    "{arch}.rope.dimension_count": "partial_rotary_factor of GPT-NeoX and Phi 3, qk_rope_head_dim of DeepSeek",
    "{arch}.rope.freq_base": "rope_theta",
    "{arch}.rope.freq_base_swa": "rope_theta of Gemma 3's layers with a window",
    "{arch}.rope.scaling.type": "rope_type",
    "{arch}.rope.scaling.factor": "factor",
    "{arch}.rope.scaling.original_context_length": "original_max_position_embeddings of YaRN and Phi 3",
    "{arch}.rope.scaling.attn_factor": "attention_factor of YaRN and Phi 3",
    "{arch}.rope.scaling.yarn_ext_factor": "whether YaRN extrapolates",
    "{arch}.rope.scaling.yarn_beta_fast": "beta_fast of YaRN",
    "{arch}.rope.scaling.yarn_beta_slow": "beta_slow of YaRN",
    "{arch}.rope.scaling.yarn_log_multiplier": "mscale and mscale_all_dim of DeepSeek",
}
"""The use of each key."""

IRRELEVANT: Mapping[str, str] = {
    "general.file_type": "each tensor has its own type",
    **dict.fromkeys(("general.name", "general.author", "general.version", "general.organization"), "names the model"),
    **dict.fromkeys(("general.finetune", "general.basename", "general.description"), "names the model"),
    **dict.fromkeys(("general.quantized_by", "general.size_label", "general.tags"), "names the model"),
    **dict.fromkeys(("general.license", "general.license.*", "general.languages"), "names the model"),
    **dict.fromkeys(("general.url", "general.doi", "general.uuid", "general.repo_url"), "says where it comes from"),
    **dict.fromkeys(("general.source.*", "general.base_model.*", "general.dataset.*"), "says where it comes from"),
    "general.sampling.*": "how to sample tokens, which the arguments of generate determine",
    "tokenizer.*": "how text becomes tokens, which load_tokenizer reads",
    "imatrix.*": "the data that importances were measured on, already reflected in the codes",
    "{arch}.vocab_size": "the rows of token_embd.weight are counted, as llama.cpp counts tokens",
    "{arch}.tensor_data_layout": "llama.cpp does not read it: rows of query and key have one order in all files",
    "{arch}.pooling_type": "what a caller does with the hidden states, which the model returns unpooled",
    "{arch}.rope.scaling.finetuned": "llama.cpp only prints it",
    "{arch}.attention.layer_norm_epsilon": "for a kind of norm that the architecture does not have",
    "{arch}.attention.layer_norm_rms_epsilon": "for a kind of norm that the architecture does not have",
}
"""The reason why a key, or the keys of a pattern, does not affect the model."""

_ARCHITECTURE_REFUSED: Mapping[str, Rule] = {
    "embedding_length_out": _equal("{width}, the embedding_length", lambda sizes: sizes.width),
    "use_parallel_residual": _NONE,
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), _NO_SCALE),
    **dict.fromkeys(("features_length", "leading_dense_block_count", "expert_feed_forward_length"), _NONE),
    **dict.fromkeys(("expert_shared_feed_forward_length", "expert_chunk_feed_forward_length", "expert_count"), _NONE),
    **dict.fromkeys(("expert_used_count", "expert_shared_count", "expert_group_count", "expert_weights_norm"), _NONE),
    **dict.fromkeys(("expert_group_used_count", "expert_gating_func", "expert_group_scale"), _NONE),
    **dict.fromkeys(("experts_per_group", "moe_every_n_layers", "moe_latent_size", "nextn_predict_layers"), _NONE),
    **dict.fromkeys(("n_deepstack_layers", "decoder_block_count", "swin_norm"), _NONE),
    **dict.fromkeys(("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping"), _NONE),
    **dict.fromkeys(("rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim"), _NONE),
    **dict.fromkeys(("token_shift_count", "interleave_moe_layer_step", "full_attention_interval"), _NONE),
    **dict.fromkeys(("activation_sparsity_scale", "altup.active_idx", "altup.num_inputs"), _NONE),
    **dict.fromkeys(("embedding_length_per_layer_input", "swiglu_clamp_exp", "swiglu_clamp_shexp"), _NONE),
    **dict.fromkeys(("*_feat_in", "*_feat_out"), _NEVER),  # dense layers after the model
    "decoder_start_token_id": _NEVER,  # of an encoder-decoder
    "attention.head_count_kv": _equal("{heads}, the attention.head_count", lambda sizes: sizes.heads),
    "attention.causal": _equal("{is_causal}", lambda sizes: sizes.is_causal),
    "attention.scale": Rule(
        "0 or 1 / sqrt({head})",
        lambda value, sizes: (
            _NONE.allows(value, sizes) or _equal("", lambda sizes: sizes.head**-0.5).allows(value, sizes)
        ),
    ),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.clamp_kqv", "attention.output_scale"), _NONE),
    **dict.fromkeys(("attention.group_norm_epsilon", "attention.group_norm_groups"), _NONE),
    "attention.relative_buckets_count": _NONE,
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.decay_lora_rank"), _NONE),
    **dict.fromkeys(("attention.iclr_lora_rank", "attention.value_residual_mix_lora_rank"), _NONE),
    **dict.fromkeys(("attention.gate_lora_rank", "attention.shared_kv_layers"), _NONE),
    **dict.fromkeys(("attention.sliding_window", "attention.temperature_length"), _NONE),
    **dict.fromkeys(("attention.temperature_scale", "attention.indexer.*"), _NONE),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), _NONE),
    "attention.sliding_window_pattern": _NO_SCALE,
    **dict.fromkeys(("attention.key_length", "attention.value_length"), _HEAD),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), _HEAD),
    **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), _HEAD),
    "rope.dimension_sections": _NONE,
    "rope.freq_base_swa": Rule("{theta}, the rope.freq_base", lambda value, sizes: value == sizes.theta),
    "rope.scaling.alpha": _NONE,
    "rope.scaling.yarn_attn_factor": _only(1),  # versions of llama.cpp apply it, or compute it from other keys
    "rope.scaling.yarn_log_multiplier": _NONE,  # likewise
    **dict.fromkeys(("ssm.*", "kda.*", "wkv.*", "posnet.*", "convnext.*", "shortconv.*"), _NONE),
    "classifier.*": _NEVER,
}

REFUSED: Mapping[str, Rule] = {
    **{f"{{arch}}.{key}": rule for key, rule in _ARCHITECTURE_REFUSED.items()},
    "general.type": Rule("'model'", lambda value, _: value == "model"),
    "general.quantization_version": _only(2),  # earlier ones had other blocks
    **dict.fromkeys(("adapter.*", "clip.*", "xielu.*"), _NEVER),
    "diffusion.shift_logits": _NONE,
}
"""The allowed values, those without effect, of keys or patterns of keys that transformers' models do not support."""


def find(table: Mapping[str, _T], key: str) -> _T | None:
    """The entry of a table for a key such as "{arch}.rope.freq_base", by name or pattern; None if there is none."""
    if key in table:
        return table[key]
    return next((value for pattern, value in table.items() if "*" in pattern and fnmatchcase(key, pattern)), None)


def check(file: GGUFFile, read: Collection[str], sizes: Sizes) -> None:
    """Raise ValueError for a key that affects the model but was not read, naming the key, its value and the allowed
    values.
    """
    prefix = f"{file.metadata.get('general.architecture')}."
    for key, value in file.metadata.items():
        if key in read:
            continue
        own = key.startswith(prefix)
        template = "{arch}." + key.removeprefix(prefix) if own else key
        if find(IRRELEVANT, template) is not None:
            continue
        rule = find(REFUSED, template) or (_NEVER if own and template not in IRRELEVANT else None)
        if rule is None or rule.allows(value, sizes):
            continue
        allowed = rule.text.format(**sizes._asdict())
        raise ValueError(
            f"load_model: {file.path}: {shown(key)} is {shown(value)}, and must be {allowed}: transformers' model does "
            "not support it; run the file with llama.cpp, or convert a model without it"
        )
