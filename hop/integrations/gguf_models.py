"""Models of GGUF files: what transformers calls their configuration and their tensors, and how to undo what llama.cpp
wants otherwise.

    names        of tensors in the file -> of modules in the model, `{}` for the number of a block
    rows         tensors whose rows lie in another order: of Llama's query and key, of GPT-NeoX's query, key and value
    shifted      norms that are stored as 1 + w

Sources: the converters of llama.cpp, which write such files, and the tensor processors and configurations of
transformers, which read them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from hop.interchange import GGUFFile
from hop.tensor import QuantizedTensor
from hop.tensor.units import of_buffers

Names = Mapping[str, str]


class Model(NamedTuple):
    """A kind of models."""

    model_type: str  # of transformers
    model_class: str  # of transformers
    fields: Mapping[str, str]  # a key of the metadata, after the architecture -> a field of the configuration
    names: Names
    configure: Callable[["Metadata"], dict[str, Any]] = lambda _: {}
    rows: Callable[[str, int, Any], Tensor | None] = lambda name, rows, config: None
    shifted: str = "$^"  # a pattern of names
    options: Mapping[str, Any] = {}  # of the model's constructor


class Metadata:
    """The metadata of a file, by keys after the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture: Any = file.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata lacks {self.architecture}.{key}; convert the model again")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self.file


# ---- configurations


def _llama(data: Metadata) -> dict[str, Any]:
    if data.get("expert_count"):
        raise ValueError(f"{data.file.path}: llama with experts is a Mixtral, which load_model does not read from GGUF")
    head = data.get("attention.key_length", data.get("rope.dimension_count"))
    return {
        **({"head_dim": head} if head else {}),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_gate.bias"),
        "rope_parameters": {"rope_theta": data.get("rope.freq_base", 10000.0), **_scaling(data)},
    }


def _scaling(data: Metadata) -> dict[str, Any]:
    """How positions are scaled."""
    if data.has_tensor("rope_freqs.weight"):
        return _llama3(data)
    kind, factor = data.get("rope.scaling.type", "none"), data.get("rope.scaling.factor", data.get("rope.scale_linear"))
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = data.need("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(f"{data.file.path}: rope.scaling.type is {kind!r}; those that are read are none, linear and yarn")


def _llama3(data: Metadata) -> dict[str, Any]:
    """The scaling of Llama 3.1 to 3.3, of which a file has the divisors of its frequencies. All of them have the same
    parameters but for the factor, the largest divisor: others are refused."""
    divisors = data.file["rope_freqs.weight"].to(torch.float64)
    head = data.get("attention.key_length", data.get("rope.dimension_count"))
    low, high, original, factor = 1.0, 4.0, 8192, float(divisors.max())
    frequencies = data.get("rope.freq_base", 10000.0) ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    smooth = ((original * frequencies / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != wanted.shape or not torch.allclose(divisors, wanted, rtol=1e-3):
        raise ValueError(
            f"{data.file.path}: tensor 'rope_freqs.weight' is not that of Llama 3.1 to 3.3, and no other is read"
        )
    scale = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **scale}


def _qwen3(data: Metadata) -> dict[str, Any]:
    return {
        "head_dim": data.need("attention.key_length"),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": {"rope_theta": data.get("rope.freq_base", 10000.0), **_scaling(data)},
    }


def _gemma3(data: Metadata) -> dict[str, Any]:
    blocks, head = data.need("block_count"), data.need("attention.key_length")
    # llama.cpp scales scores by the head's size, but in the model of 27 billion parameters.
    scalar = data.need("embedding_length") // data.need("attention.head_count") if blocks == 62 else head
    theta = {"full": data.get("rope.freq_base", 1e6), "sliding": data.get("rope.freq_base_swa", 10000.0)}
    return {
        "head_dim": head,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window_pattern": data.get("attention.sliding_window_pattern", 6),
        "rope_parameters": {
            "full_attention": {"rope_theta": theta["full"], **_scaling(data)},
            "sliding_attention": {"rope_theta": theta["sliding"], "rope_type": "default"},
        },
    }


def _gpt_neox(data: Metadata) -> dict[str, Any]:
    head = data.need("embedding_length") / data.need("attention.head_count")
    return {
        "use_parallel_residual": data.get("use_parallel_residual", True),
        "attention_bias": data.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": {
            "rope_theta": data.get("rope.freq_base", 10000.0),
            "partial_rotary_factor": data.need("rope.dimension_count") / head,
            **_scaling(data),
        },
    }


def _bert(data: Metadata) -> dict[str, Any]:
    name = "token_types.weight"
    return {"type_vocab_size": data.file.shape(name)[0] if data.has_tensor(name) else 1}


# ---- orders of rows


def _pairs(name: str, rows: int, config: Any) -> Tensor | None:
    """Query and key of Llama, whose rotated pairs lie side by side in the file, and half a head apart in the model."""
    match = re.search(r"\.attn_([qk])\.", name)
    if match is None:
        return None
    heads = config.num_attention_heads if match.group(1) == "q" else config.num_key_value_heads
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _heads(name: str, rows: int, config: Any) -> Tensor | None:
    """Query, key and value of GPT-NeoX: one after the other in the file, head by head in the model."""
    if ".attn_qkv." not in name:
        return None
    return torch.arange(rows).view(3, config.num_attention_heads, -1).transpose(0, 1).reshape(-1)


def in_rows(tensor: Tensor, order: Tensor) -> Tensor:
    """The rows of a tensor in an order: tensor[order], of codes and what is stored beside them."""
    if not isinstance(tensor, QuantizedTensor):
        return tensor.index_select(0, order)
    units = of_buffers(tensor.quantizer, tensor.usages, tensor.dim())
    buffers = tensor.buffers()
    if any(units[name][0] not in (1, -1) for name in buffers):
        raise ValueError(f"rows of a tensor by {tensor.quantizer} share scales, and cannot be ordered one by one")
    return tensor.rebuilt({name: b.index_select(0, order) if units[name][0] == 1 else b for name, b in buffers.items()})


# ---- the table

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_DECODER_FIELDS = _FIELDS | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_NORMED = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_LLAMA = _DECODER | {"blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm"}
_GEMMA3 = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
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

MODELS = {
    "llama": Model("llama", "LlamaForCausalLM", _DECODER_FIELDS, _LLAMA, _llama, rows=_pairs),
    "qwen3": Model("qwen3", "Qwen3ForCausalLM", _DECODER_FIELDS, _LLAMA | _NORMED, _qwen3),
    "gemma3": Model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _DECODER_FIELDS | {"attention.sliding_window": "sliding_window"},
        _DECODER | _NORMED | _GEMMA3,
        _gemma3,
        shifted=r"norm\.weight$",
    ),
    "gptneox": Model(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        _GPT_NEOX,
        _gpt_neox,
        rows=_heads,
    ),
    "bert": Model(
        "bert",
        "BertModel",
        _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        _BERT,
        _bert,
        options={"add_pooling_layer": False},
    ),
}
"""By general.architecture."""

_TABLE = "token_embd.weight"
_NO_WEIGHTS = {"rope_freqs.weight"}  # the configuration says it
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def model_of(file: GGUFFile) -> Model:
    """The kind of a file's model."""
    named: Any = file.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in MODELS:
        raise ValueError(
            f"load_model: {file.path}: general.architecture is {named!r}; those that are read are {', '.join(MODELS)}"
        )
    return MODELS[named]


def config_of(file: GGUFFile, model: Model) -> Any:
    """The configuration of transformers that the metadata says.

    Raises ValueError for metadata that make none, or that count other blocks than the file has."""
    data = Metadata(file)
    if not data.has_tensor(_TABLE) or len(file.shape(_TABLE)) != 2:
        raise ValueError(f"load_model: {file.path} has no matrix {_TABLE!r}; it is no whole model")
    known = {field: _number(data, key) for key, field in model.fields.items() if data.get(key) is not None}
    blocks = {int(match.group(1)) for name in file if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if blocks != set(range(len(blocks))) or known.get("num_hidden_layers") != len(blocks):
        raise ValueError(
            f"load_model: {file.path}: {data.architecture}.block_count is {data.get('block_count')!r}, and the file "
            f"has {len(blocks)} blocks; it is no whole model"
        )
    for field, name in _TOKENS.items():
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        known |= {} if token is None else {field: token}
    if "output" in model.names:
        known["tie_word_embeddings"] = "output.weight" not in file
    own = model.configure(data)
    try:
        return AutoConfig.for_model(model.model_type, vocab_size=file.shape(_TABLE)[0], **known, **own)
    except (TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"load_model: {file.path}: its metadata make no configuration: {error}") from error


def _number(data: Metadata, key: str) -> Any:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise ValueError(
            f"load_model: {data.file.path}: {data.architecture}.{key} must be one number above 0, got {value!r}"
        )
    return value


def tensors_of(file: GGUFFile, model: Model, config: Any) -> Any:
    """The tensors by the names that they have in the model, each as the model has it."""
    for name in file:
        if name in _NO_WEIGHTS:
            continue
        tensor = file[name]
        order = model.rows(name, tensor.shape[0], config)
        if order is not None:
            tensor = in_rows(tensor, order)
        if re.search(model.shifted, name):
            tensor = tensor - 1
        yield _renamed(file, name, model.names), tensor


def _renamed(file: GGUFFile, name: str, names: Names) -> str:
    base, _, end = name.rpartition(".")
    number = re.match(r"blk\.(\d+)\.", base)
    pattern = base if number is None else f"blk.{{}}.{base[number.end() :]}"
    if pattern not in names:
        raise ValueError(f"load_model: {file.path}: tensor {name!r} has no place in the model; leave it out")
    return f"{names[pattern].format(number and number.group(1))}.{end}"
