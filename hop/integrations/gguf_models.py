"""Models in GGUF files: transformers' configuration and tensor names, and how to undo llama.cpp's changes to tensors.

    names        tensor names in the file -> module names in the model, `{}` for the number of a block
    rows         tensors whose rows are permuted: Llama's query and key, GPT-NeoX's query, key and value
    shifted      norms that are stored as 1 + w

Sources: the converters of llama.cpp, which write such files, and the tensor processors and configurations of
transformers, which read them.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from hop.integrations import gguf_keys
from hop.interchange import GGUFFile
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor
from hop.tensor.units import of_buffers

Names = Mapping[str, str]


class Model(NamedTuple):
    """A model architecture."""

    model_type: str  # of transformers
    model_class: str  # of transformers
    fields: Mapping[str, str]  # required key, without the architecture -> field of the configuration
    names: Names
    configure: Callable[["Metadata"], dict[str, Any]] = lambda _: {}
    rows: Callable[[str, int, Any], Tensor | None] = lambda name, rows, config: None
    shifted: str = "$^"  # pattern of tensor names
    options: Mapping[str, Any] = {}  # of the model's constructor
    kv_heads: bool = False  # whether there is a separate head size, and possibly fewer heads of keys and values


class Metadata:
    """The metadata of a file, by key without the architecture. `read` records the keys that were accessed."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture: Any = file.metadata.get("general.architecture")
        self.read = {"general.architecture", "general.alignment"}

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(name := f"{self.architecture}.{key}")
        return self.file.metadata.get(name, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata lacks {self.architecture}.{key}; convert the model again")
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A required number above 0, or one with a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise self.wrong(key, value, "one number above 0")
        return value

    def wrong(self, key: str, value: Any, rule: str) -> ValueError:
        return ValueError(
            f"load_model: {self.file.path}: {self.architecture}.{key} must be {rule}, got {shown(value)}; convert the "
            "model again, or run the file with llama.cpp"
        )

    def has_tensor(self, name: str) -> bool:
        return name in self.file

    def head(self) -> int:
        """The size of a head: that of keys if the file has it, else the width divided by the number of heads."""
        return self.number("attention.key_length") if self.get("attention.key_length") else self.share()

    def share(self) -> int:
        """The width divided by the number of heads."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        if width % heads:
            raise self.wrong("embedding_length", width, f"a multiple of attention.head_count, {heads}")
        return width // heads


# ---- configurations


def _llama(data: Metadata) -> dict[str, Any]:
    if data.get("expert_count"):
        raise ValueError(f"{data.file.path}: llama with experts is a Mixtral, which load_model does not read from GGUF")
    return {
        "head_dim": data.head(),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_gate.bias"),
        "rope_parameters": _rope(data, data.head()),
    }


def _rope(data: Metadata, size: int, theta: float = 10000.0) -> dict[str, Any]:
    """The rotary embedding of the first `size` elements of a head."""
    theta = data.number("rope.freq_base", theta)
    kind = data.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = data.get("rope.scaling.factor", data.get("rope.scale_linear", 0.0))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < 2**31:
        raise data.wrong("rope.scaling.factor", factor, "a number, 0 or more")
    factor = float(factor or 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{data.file.path}: rope.scaling.type is {shown(kind)}; those that are read are none, linear and yarn"
        )
    yarn = _yarn(data, kind, factor, size, theta)
    if data.has_tensor("rope_freqs.weight"):
        if kind == "yarn" or (kind == "linear" and factor != 1):
            raise data.wrong("rope.scaling.type", kind, "'none' in a file that has the tensor rope_freqs.weight")
        return {"rope_theta": theta, **_llama3(data, size, theta)}
    if yarn:
        return {"rope_theta": theta, "rope_type": "yarn", "factor": factor, **yarn}
    if kind == "none" or factor == 1:
        return {"rope_theta": theta, "rope_type": "default"}
    return {"rope_theta": theta, "rope_type": "linear", "factor": factor}


def _yarn(data: Metadata, kind: str, factor: float, size: int, theta: float) -> dict[str, Any]:
    """The parameters of YaRN; empty for other kinds of scaling, for which the file must not extrapolate."""
    is_yarn = kind == "yarn"
    extends, attention = data.get("rope.scaling.yarn_ext_factor", -1.0), data.number("rope.scaling.attn_factor", 1.0)
    if extends not in ((-1.0, 1.0) if is_yarn else (-1.0, 0.0)):
        rule = f"-1 or {1 if is_yarn else 0} where rope.scaling.type is {kind!r}"
        raise data.wrong("rope.scaling.yarn_ext_factor", extends, rule)
    fast, slow = (data.number(f"rope.scaling.yarn_beta_{name}", x) for name, x in (("fast", 32.0), ("slow", 1.0)))
    if not is_yarn:
        data.get("rope.scaling.original_context_length")
        if attention != 1:
            raise data.wrong("rope.scaling.attn_factor", attention, f"1 where rope.scaling.type is {kind!r}")
        return {}
    original = data.number("rope.scaling.original_context_length")
    ends = [size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    if max(math.floor(ends[0]), 0) > min(math.ceil(ends[1]), size - 1):
        raise data.wrong(
            "rope.scaling.original_context_length", original, f"long enough for {slow:g} to {fast:g} turns"
        )
    return {
        "original_max_position_embeddings": original,
        "beta_fast": float(fast),
        "beta_slow": float(slow),
        "attention_factor": float(attention * (0.1 * math.log(factor) + 1 if factor > 1 else 1)),
    }


def _llama3(data: Metadata, size: int, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 to 3.3, for which a file stores the frequency divisors.

    These models differ only in the factor, which is the largest divisor; other divisors raise ValueError.
    """
    divisors = data.file["rope_freqs.weight"].to(torch.float64)
    low, high, original = 1.0, 4.0, 8192
    if fits := divisors.shape == (len(range(0, size, 2)),) and size > 0:
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        smooth = ((original * frequencies / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        fits = torch.allclose(divisors, 1 / ((1 - smooth) / divisors.max() + smooth), rtol=1e-3)
    if not fits:
        raise ValueError(
            f"{data.file.path}: tensor 'rope_freqs.weight' is not that of Llama 3.1 to 3.3; others are not supported"
        )
    scale = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": float(divisors.max()), **scale}


def _qwen3(data: Metadata) -> dict[str, Any]:
    data.need("attention.key_length")
    return {
        "head_dim": data.head(),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": _rope(data, data.head()),
    }


def _gemma3(data: Metadata) -> dict[str, Any]:
    blocks = data.number("block_count")
    data.need("attention.key_length")
    # llama.cpp scales scores by the head size, except for the model with 27 billion parameters.
    scalar = data.number("embedding_length") // data.number("attention.head_count") if blocks == 62 else data.head()
    return {
        "head_dim": data.head(),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": data.get("final_logit_softcapping") or None,  # 0 means no cap
        "layer_types": _layer_types(data, blocks),
        "rope_parameters": {
            "full_attention": _rope(data, data.head(), 1e6),
            "sliding_attention": {"rope_theta": data.number("rope.freq_base_swa", 10000.0), "rope_type": "default"},
        },
    }


def _layer_types(data: Metadata, blocks: int) -> list[str]:
    """The layer types of Gemma 3: all but every n-th have a window, or the file lists them."""
    key, kinds = "attention.sliding_window_pattern", ("full_attention", "sliding_attention")
    value = data.get(key, 6)
    if isinstance(value, list) and value and all(isinstance(x, bool) for x in cast("list[Any]", value)):
        windows = cast("list[bool]", value)
    elif type(value) is int and value > 0:
        windows = [bool((i + 1) % value) for i in range(blocks)]
    else:
        raise data.wrong(key, value, "an integer above 0, or true or false for each block")
    if len(windows) != blocks:
        raise data.wrong(key, value, f"a list of {blocks}, one for each block")
    return [kinds[window] for window in windows]


def _gpt_neox(data: Metadata) -> dict[str, Any]:
    head, size = data.share(), data.number("rope.dimension_count")
    parallel = data.get("use_parallel_residual", True)
    if not isinstance(parallel, bool):
        raise data.wrong("use_parallel_residual", parallel, "true or false")
    if type(size) is not int or size > head or size % 2:
        raise data.wrong("rope.dimension_count", size, f"an even number up to the size of a head, {head}")
    return {
        "use_parallel_residual": parallel,
        "attention_bias": data.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": {"partial_rotary_factor": _fraction(size, head), **_rope(data, size)},
    }


def _fraction(size: int, head: int) -> float:
    """The factor for which transformers computes `size` as int(head · factor)."""
    factor = size / head
    return factor if int(head * factor) == size else math.nextafter(factor, 2)


def _bert(data: Metadata) -> dict[str, Any]:
    name = "token_types.weight"
    return {"type_vocab_size": data.file.shape(name)[0] if data.has_tensor(name) else 1}


# ---- orders of rows


def _pairs(name: str, rows: int, config: Any) -> Tensor | None:
    """The row order of Llama's query and key: rotated pairs are adjacent in the file, and half a head apart in the
    model.
    """
    match = re.search(r"\.attn_([qk])\.", name)
    if match is None:
        return None
    heads = config.num_attention_heads if match.group(1) == "q" else config.num_key_value_heads
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _heads(name: str, rows: int, config: Any) -> Tensor | None:
    """The row order of GPT-NeoX's query, key and value: one after another in the file, interleaved by head in the
    model.
    """
    if ".attn_qkv." not in name:
        return None
    return torch.arange(rows).view(3, config.num_attention_heads, -1).transpose(0, 1).reshape(-1)


def permute_rows(tensor: Tensor, order: Tensor) -> Tensor:
    """tensor[order], permuting the rows of codes and scales of a quantized tensor."""
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
    "llama": Model("llama", "LlamaForCausalLM", _DECODER_FIELDS, _LLAMA, _llama, rows=_pairs, kv_heads=True),
    "qwen3": Model("qwen3", "Qwen3ForCausalLM", _DECODER_FIELDS, _LLAMA | _NORMED, _qwen3, kv_heads=True),
    "gemma3": Model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _DECODER_FIELDS | {"attention.sliding_window": "sliding_window"},
        _DECODER | _NORMED | _GEMMA3,
        _gemma3,
        shifted=r"norm\.weight$",
        kv_heads=True,
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
"""Models by general.architecture."""

_TABLE = "token_embd.weight"
_NO_WEIGHTS = {"rope_freqs.weight"}  # part of the configuration instead
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def model_of(file: GGUFFile) -> Model:
    """The architecture of a file's model."""
    named: Any = file.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in MODELS:
        raise ValueError(
            f"load_model: {file.path}: general.architecture is {shown(named)}; those that are read are "
            f"{', '.join(MODELS)}"
        )
    return MODELS[named]


def config_of(file: GGUFFile, model: Model) -> Any:
    """The transformers configuration from a file's metadata.

    Raises ValueError if the metadata are invalid, or do not match the number of blocks in the file.
    """
    data = Metadata(file)
    if not data.has_tensor(_TABLE) or len(file.shape(_TABLE)) != 2:
        raise ValueError(f"load_model: {file.path} has no matrix {_TABLE!r}; the model is incomplete")
    known = {field: data.number(key) for key, field in model.fields.items()}
    if model.kv_heads:
        known["num_key_value_heads"] = data.number("attention.head_count_kv", known["num_attention_heads"])
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
    if "output" in model.names:
        known["tie_word_embeddings"] = "output.weight" not in file
    fields = model.configure(data)
    try:
        config = AutoConfig.for_model(model.model_type, vocab_size=file.shape(_TABLE)[0], **known, **fields)
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


def tensors_of(file: GGUFFile, model: Model, config: Any) -> Any:
    """The tensors by their names in the model, converted to its form."""
    for name in file:
        if name in _NO_WEIGHTS:
            continue
        tensor = file[name]
        order = model.rows(name, tensor.shape[0], config)
        if order is not None:
            tensor = permute_rows(tensor, order)
        if re.search(model.shifted, name):
            tensor = tensor - 1
        yield _renamed(file, name, model.names), tensor


def _renamed(file: GGUFFile, name: str, names: Names) -> str:
    base, _, end = name.rpartition(".")
    number = re.match(r"blk\.(\d+)\.", base)
    pattern = base if number is None else f"blk.{{}}.{base[number.end() :]}"
    if pattern not in names:
        raise ValueError(f"load_model: {file.path}: tensor {shown(name)} has no place in the model; leave it out")
    return f"{names[pattern].format(number and number.group(1))}.{end}"
