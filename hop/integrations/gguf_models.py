"""Models in GGUF files: for each architecture the class of transformers, its configuration and its tensors' names.

gguf_configs.py   the configuration for the metadata
gguf_tensors.py   how tensors become parameters
gguf_keys.py      which metadata keys are read
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hop.integrations import gguf_configs, gguf_keys
from hop.integrations import gguf_tensors as tensors
from hop.integrations.gguf_configs import Metadata
from hop.integrations.gguf_tensors import Join, Joins, Layout
from hop.interchange import GGUFFile
from hop.numerics.spelling import JsonObject, shown


class Model(NamedTuple):
    """A model architecture."""

    model_type: str  # of transformers
    model_class: str  # of transformers
    fields: Mapping[str, str]  # required key, without the architecture -> field of the configuration
    layout: Layout
    configure: Callable[[Metadata], JsonObject]
    options: Mapping[str, Any] = {}  # of the model's constructor
    kv_heads: bool = False  # whether there is a separate head size, and possibly fewer heads of keys and values


# ---- the table

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_DECODER_FIELDS = _FIELDS | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
}
_GATED = {
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_ROUTER = {"blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate"}
_NORMED = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_SECOND_NORM = {"blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm"}
_LLAMA = _DECODER | _SECOND_NORM | _GATED
_GEMMA2 = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_PHI3 = {
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_GPT_OSS = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
}
_DEEPSEEK2 = {
    "blk.{}.attn_q_a": "model.layers.{}.self_attn.q_a_proj",
    "blk.{}.attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "blk.{}.attn_q_b": "model.layers.{}.self_attn.q_b_proj",
    "blk.{}.attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "blk.{}.attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "blk.{}.attn_kv_b": "model.layers.{}.self_attn.kv_b_proj",
    "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
    "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
}
_CHOICE = {"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"}  # of experts
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "blk.{}.attn_qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "blk.{}.attn_output": "gpt_neox.layers.{}.attention.dense",
    "blk.{}.ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
    "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
    "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
    "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
    "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
    "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
    "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}

_EXPERTS: Joins = {
    ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"): Join(
        "model.layers.{}.mlp.experts.gate_up_proj", tensors.gate_and_up
    ),
}
_STACKS = {
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.down_proj",
    "blk.{}.ffn_gate_up_exps.weight": "model.layers.{}.mlp.experts.gate_up_proj",  # merged by llama.cpp's converter
}
_GPT_OSS_EXPERTS: Joins = {
    (f"blk.{{}}.ffn_gate_exps.{kind}", f"blk.{{}}.ffn_up_exps.{kind}"): Join(
        f"model.layers.{{}}.mlp.experts.gate_up_proj{end}", tensors.interleaved
    )
    for kind, end in (("weight", ""), ("bias", "_bias"))
} | {
    (f"blk.{{}}.ffn_down_exps.{kind}",): Join(f"model.layers.{{}}.mlp.experts.down_proj{end}", tensors.transposed)
    for kind, end in (("weight", ""), ("bias", "_bias"))
}
_LATENT: Joins = {
    ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"): Join(
        "model.layers.{}.self_attn.kv_b_proj.weight", tensors.latent_keys_and_values
    ),
}
_QKV: Joins = {
    tuple(f"blk.{{}}.attn_{x}.weight" for x in "qkv"): Join(
        "model.layers.{}.self_attn.qkv_proj.weight", tensors.rows_after_rows
    ),
}
_SIGMOID = 2  # expert_gating_func of DeepSeek V3
_NORMS = r"norm\.weight$"  # of Gemma


def _decoder(kind: str, name: str, layout: Layout, configure: Any, **more: Any) -> Model:
    """A decoder with RMS norms, whose class of transformers is called `name`ForCausalLM."""
    fields = _DECODER_FIELDS | more.pop("fields", {})
    return Model(kind, f"{name}ForCausalLM", fields, layout, configure, kv_heads=more.pop("kv_heads", True), **more)


MODELS = {
    "llama": _decoder("llama", "Llama", Layout(_LLAMA, tensors.pairs), gguf_configs.llama),
    "qwen2": _decoder("qwen2", "Qwen2", Layout(_LLAMA), gguf_configs.qwen2),
    "qwen3": _decoder("qwen3", "Qwen3", Layout(_LLAMA | _NORMED), gguf_configs.qwen3),
    "qwen3moe": _decoder(
        "qwen3_moe",
        "Qwen3Moe",
        Layout(_DECODER | _SECOND_NORM | _NORMED | _ROUTER | _STACKS, joins=_EXPERTS),
        gguf_configs.qwen3moe,
    ),
    "phi3": _decoder("phi3", "Phi3", Layout(_DECODER | _SECOND_NORM | _PHI3, joins=_QKV), gguf_configs.phi3),
    "gemma": _decoder("gemma", "Gemma", Layout(_LLAMA, shifted=_NORMS), gguf_configs.gemma),
    "gemma2": _decoder("gemma2", "Gemma2", Layout(_DECODER | _GATED | _GEMMA2, shifted=_NORMS), gguf_configs.gemma2),
    "gemma3": _decoder(
        "gemma3_text",
        "Gemma3",
        Layout(_DECODER | _GATED | _NORMED | _GEMMA2, shifted=_NORMS),
        gguf_configs.gemma3,
        fields={"attention.sliding_window": "sliding_window"},
    ),
    "deepseek2": _decoder(
        "deepseek_v2",
        "DeepseekV2",
        Layout(_LLAMA | _DEEPSEEK2 | _ROUTER | _STACKS, joins=_EXPERTS | _LATENT),
        gguf_configs.deepseek2,
        kv_heads=False,
    ),
    "gpt-oss": _decoder("gpt_oss", "GptOss", Layout(_DECODER | _GPT_OSS, joins=_GPT_OSS_EXPERTS), gguf_configs.gpt_oss),
    "gptneox": Model(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        Layout(_GPT_NEOX, tensors.heads),
        gguf_configs.gpt_neox,
    ),
    "bert": Model(
        "bert",
        "BertModel",
        _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        Layout(_BERT),
        gguf_configs.bert,
        options={"add_pooling_layer": False},
    ),
}
"""Models by general.architecture."""

_MIXTRAL = _decoder(
    "mixtral",
    "Mixtral",
    Layout(_DECODER | _SECOND_NORM | _ROUTER | _STACKS, tensors.pairs, joins=_EXPERTS),
    gguf_configs.mixtral,
)
_DEEPSEEK3 = _decoder(
    "deepseek_v3",
    "DeepseekV3",
    Layout(_LLAMA | _DEEPSEEK2 | _CHOICE | _ROUTER | _STACKS, joins=_EXPERTS | _LATENT),
    gguf_configs.deepseek3,
    kv_heads=False,
)
VARIANTS = {
    "llama": ("with experts", _MIXTRAL, lambda get: bool(get("llama.expert_count"))),
    "deepseek2": ("with a sigmoid", _DEEPSEEK3, lambda get: get("deepseek2.expert_gating_func") == _SIGMOID),
}
"""Other models of an architecture: a description, the model, and whether a file with these metadata has it."""

ALL = [*MODELS.values(), *(model for _, model, _ in VARIANTS.values())]
_TABLE = "token_embd.weight"
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def model_of(file: GGUFFile) -> Model:
    """The architecture of a file's model."""
    named: Any = file.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in MODELS:
        raise ValueError(
            f"load_model: {file.path}: general.architecture is {shown(named)}; those that are read are "
            f"{', '.join(MODELS)}"
        )
    _, variant, applies = VARIANTS.get(named, ("", MODELS[named], lambda get: True))
    return variant if applies(file.metadata.get) else MODELS[named]


def config_of(file: GGUFFile, model: Model) -> Any:
    """The transformers configuration from a file's metadata.

    Raises ValueError if the metadata are invalid, or do not match the number of blocks in the file.
    """
    data = Metadata(file)
    if not data.has_tensor(_TABLE) or len(file.shape(_TABLE)) != 2:
        raise ValueError(f"load_model: {file.path} has no matrix {_TABLE!r}; the model is incomplete")
    known = {k: data.number(key) if "epsilon" in key else data.integer(key) for key, k in model.fields.items()}
    if model.kv_heads:
        known["num_key_value_heads"] = data.integer("attention.head_count_kv", known["num_attention_heads"])
    blocks = {int(match.group(1)) for name in file if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if blocks != set(range(len(blocks))) or known.get("num_hidden_layers") != len(blocks):
        raise ValueError(
            f"load_model: {file.path}: {data.architecture}.block_count is {shown(data.get('block_count'))}, and the "
            f"file has {len(blocks)} blocks; the model is incomplete"
        )
    for field, name in _TOKENS.items():
        data.read.add(key := f"tokenizer.ggml.{name}_token_id")
        token = file.metadata.get(key)
        known |= {} if token is None else {field: token}
    if "output" in model.layout.names:
        known["tie_word_embeddings"] = "output.weight" not in file
    fields = model.configure(data)
    try:
        config = AutoConfig.for_model(model.model_type, vocab_size=file.shape(_TABLE)[0], **(known | fields))
    except (TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"load_model: {file.path}: its metadata are not a valid configuration: {error}") from error
    sizes = gguf_keys.Sizes(
        head=data.head() if model.kv_heads else data.share(),
        heads=known["num_attention_heads"],
        width=known["hidden_size"],
        is_causal=model.model_type != "bert",
        theta=file.metadata.get(f"{data.architecture}.rope.freq_base"),
    )
    gguf_keys.check(file, data.read, sizes)
    return config
