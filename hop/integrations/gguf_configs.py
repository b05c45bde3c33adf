"""The configuration of transformers for the metadata of a GGUF file: sizes, rotary embedding, attention and experts.

Each function takes a Metadata and returns the fields of one architecture that differ from key to key; the fields that
all share are in gguf_models.py. Sources: the converters of llama.cpp, which write the keys, and the models of
llama.cpp, which read them.
"""

import math
from typing import Any, cast

import torch

from hop.interchange import GGUFFile
from hop.numerics.spelling import JsonObject, shown


class Metadata:
    """The metadata of a file, by key without the architecture. `read` records the keys that were accessed."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture: object = file.metadata.get("general.architecture")
        self.read = {"general.architecture", "general.alignment"}

    def get(self, key: str, default: object = None) -> Any:
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

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """A required integer from `least` to `most`, or one with a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, value, f"an integer from {least} to {most}")
        return value

    def wrong(self, key: str, value: object, rule: str) -> ValueError:
        return ValueError(
            f"load_model: {self.file.path}: {self.architecture}.{key} must be {rule}, got {shown(value)}; convert the "
            "model again, or run the file with llama.cpp"
        )

    def has_tensor(self, name: str) -> bool:
        return name in self.file

    def head(self) -> int:
        """The size of a head: that of keys if the file has it, else the width divided by the number of heads."""
        return self.integer("attention.key_length") if self.get("attention.key_length") else self.share()

    def share(self) -> int:
        """The width divided by the number of heads."""
        width, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        if width % heads:
            raise self.wrong("embedding_length", width, f"a multiple of attention.head_count, {heads}")
        return width // heads


# ---- configurations


def llama(data: Metadata) -> JsonObject:
    return {
        "head_dim": data.head(),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": data.has_tensor("blk.0.ffn_gate.bias"),
        "rope_parameters": _rope(data, data.head()),
    }


def mixtral(data: Metadata) -> JsonObject:
    return {"head_dim": data.head(), "rope_parameters": _rope(data, data.head()), **_experts(data, "num_local_experts")}


def _experts(data: Metadata, name: str) -> JsonObject:
    """The number of experts, as the field `name`, and of those that a token takes."""
    count = data.integer("expert_count")
    return {name: count, "num_experts_per_tok": data.integer("expert_used_count", most=count)}


def _rope(data: Metadata, size: int, theta: float = 10000.0) -> JsonObject:
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


def _yarn(data: Metadata, kind: str, factor: float, size: int, theta: float) -> JsonObject:
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
    original = data.integer("rope.scaling.original_context_length")
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


def _llama3(data: Metadata, size: int, theta: float) -> JsonObject:
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


def qwen3(data: Metadata) -> JsonObject:
    data.need("attention.key_length")
    return {
        "head_dim": data.head(),
        "attention_bias": data.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": _rope(data, data.head()),
    }


def qwen2(data: Metadata) -> JsonObject:
    return {"head_dim": data.head(), "rope_parameters": _rope(data, data.head())}


def qwen3moe(data: Metadata) -> JsonObject:
    experts = _experts(data, "num_experts")
    share = max(data.integer("feed_forward_length") // experts["num_experts_per_tok"], 1)  # llama.cpp's default
    size = data.integer("expert_feed_forward_length", share)
    return {**qwen3(data), **experts, "moe_intermediate_size": size, "norm_topk_prob": True}


def phi3(data: Metadata) -> JsonObject:
    size, head = _rotated(data), data.share()
    window = data.integer("attention.sliding_window", 0, least=0)
    pads = "tokenizer.ggml.padding_token_id" in data.file.metadata
    return {
        **({} if pads else {"pad_token_id": None}),  # transformers' default is for a large vocabulary
        "sliding_window": window or None,  # 0 means no window
        "original_max_position_embeddings": data.integer(
            "rope.scaling.original_context_length", data.integer("context_length")
        ),
        "rope_parameters": {"partial_rotary_factor": fraction(size, head), **_long_rope(data, size)},
    }


def _long_rope(data: Metadata, size: int) -> JsonObject:
    """The rotary embedding of Phi 3, whose frequencies have divisors for short and for long contexts in two tensors."""
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("short", "long")}
    if not any(map(data.has_tensor, names.values())):
        return _rope(data, size)
    theta = data.number("rope.freq_base", 10000.0)
    factors: dict[str, list[float]] = {}
    for field, name in names.items():
        divisors = data.file[name].to(torch.float64) if data.has_tensor(name) else torch.empty(0)
        if divisors.shape != (size // 2,) or not bool((divisors.isfinite() & (divisors > 0)).all()):
            raise ValueError(
                f"load_model: {data.file.path}: tensor {name!r} must have {size // 2} numbers above 0, one for each "
                "rotated pair; convert the model again"
            )
        factors[field] = divisors.tolist()
    return {
        "rope_theta": theta,
        "rope_type": "longrope",
        "original_max_position_embeddings": data.integer("rope.scaling.original_context_length"),
        "attention_factor": float(data.number("rope.scaling.attn_factor", 1.0)),
        **factors,
    }


def _rotated(data: Metadata) -> int:
    """The number of a head's elements that are rotated, even and at most all."""
    size, head = data.need("rope.dimension_count"), data.share()
    if type(size) is not int or not 0 < size <= head or size % 2:
        raise data.wrong("rope.dimension_count", size, f"an even number up to the size of a head, {head}")
    return size


def gemma(data: Metadata) -> JsonObject:
    data.need("attention.key_length")
    return {"head_dim": data.head(), "rope_parameters": _rope(data, data.head())}


def gemma2(data: Metadata) -> JsonObject:
    blocks = data.integer("block_count")
    # llama.cpp scales scores by the head size, except for the model with 27 billion parameters.
    scalar = data.integer("embedding_length") // data.integer("attention.head_count") if blocks == 46 else data.head()
    return {
        **gemma(data),
        "query_pre_attn_scalar": scalar,
        "sliding_window": data.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": float(data.number("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(data.number("final_logit_softcapping", 30.0)),
        "layer_types": _layer_types(data, blocks, 2),
    }


def gpt_oss(data: Metadata) -> JsonObject:
    data.need("attention.key_length")
    rope = _rope(data, data.head())
    return {
        "head_dim": data.head(),
        "sliding_window": data.integer("attention.sliding_window"),
        "layer_types": _layer_types(data, data.integer("block_count"), 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        **_experts(data, "num_local_experts"),
    }


def deepseek2(data: Metadata) -> JsonObject:
    """The fields of DeepSeek V2, whose router is a softmax."""
    if data.get("expert_gating_func", 1) not in (0, 1):
        rule = "1, a softmax as in DeepSeek V2, or 2, a sigmoid as in V3"
        raise data.wrong("expert_gating_func", data.get("expert_gating_func"), rule)
    if data.get("expert_weights_norm", False):
        raise data.wrong("expert_weights_norm", True, "false, as in DeepSeek V2")
    groups = _expert_groups(data, 1)
    return _deepseek(data) | (
        {"topk_method": "group_limited_greedy", **groups} if groups else {"topk_method": "greedy"}
    )


def deepseek3(data: Metadata) -> JsonObject:
    """The fields of DeepSeek V3, whose router is a sigmoid with a bias for the choice of experts."""
    data.get("expert_gating_func")
    norm = data.get("expert_weights_norm", False)
    if not isinstance(norm, bool):
        raise data.wrong("expert_weights_norm", norm, "true or false")
    groups = _expert_groups(data, 2)  # transformers, like llama.cpp, adds the two highest scores of a group
    return _deepseek(data) | {"norm_topk_prob": norm, **(groups or {"n_group": 1, "topk_group": 1})}


def _deepseek(data: Metadata) -> JsonObject:
    """The fields of DeepSeek V2 and V3, with latent keys and values."""
    heads, blocks = data.integer("attention.head_count"), data.integer("block_count")
    kv_heads = data.integer("attention.head_count_kv", heads)
    if kv_heads not in (1, heads):
        raise data.wrong("attention.head_count_kv", kv_heads, f"1 or {heads}, the attention.head_count")
    rank, rotated = data.integer("attention.kv_lora_rank"), data.integer("rope.dimension_count")
    query, value = data.integer("attention.key_length"), data.integer("attention.value_length")
    if data.get("attention.key_length_mla"):  # then the others describe latent keys and values
        if (query, value) != (rank + rotated, rank):
            raise data.wrong("attention.key_length", query, f"{rank + rotated} next to a value_length of {rank}")
        query, value = data.integer("attention.key_length_mla"), data.integer("attention.value_length_mla")
    if query <= rotated or rotated % 2:
        raise data.wrong("rope.dimension_count", rotated, f"an even number below the size of a key, {query}")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": data.integer("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": query - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "first_k_dense_replace": data.integer("leading_dense_block_count", 0, least=0, most=blocks),
        "n_shared_experts": data.integer("expert_shared_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
        "rope_parameters": _deepseek_rope(data, rotated),
        **_experts(data, "n_routed_experts"),
        "routed_scaling_factor": _expert_scale(data),
    }


def _expert_scale(data: Metadata) -> float:
    scale = data.get("expert_weights_scale", 0.0) or 1.0  # 0 means no scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 2**31:
        raise data.wrong("expert_weights_scale", scale, "a number, 0 or more")
    return float(scale)


def _expert_groups(data: Metadata, least: int) -> JsonObject:
    """The groups of at least `least` experts of which a token takes some; empty if there is one group."""
    count, groups = data.integer("expert_count"), data.integer("expert_group_count", 0, least=0)
    used = data.integer("expert_group_used_count", 0, least=0, most=groups)
    if groups <= 1:
        return {}
    if count % groups or count // groups < least or not used:
        raise data.wrong(
            "expert_group_count",
            groups,
            f"a divisor of {count} experts, with {least} or more in a group, of which 1 and more are used",
        )
    taken = data.integer("expert_used_count", most=count)
    if taken > used * (count // groups):
        raise data.wrong("expert_used_count", taken, f"at most {used * (count // groups)}, those of the used groups")
    return {"n_group": groups, "topk_group": used}


def _deepseek_rope(data: Metadata, size: int) -> JsonObject:
    """The rotary embedding; with YaRN, scores are scaled instead of rotations."""
    rope = _rope(data, size)
    if rope["rope_type"] != "yarn":
        return rope
    attention = data.get("rope.scaling.attn_factor", 1.0)
    if attention != 1:
        raise data.wrong("rope.scaling.attn_factor", attention, "1 for DeepSeek")
    scale = float(data.number("rope.scaling.yarn_log_multiplier")) / 0.1
    del rope["attention_factor"]
    return rope | {"mscale": scale, "mscale_all_dim": scale}


def gemma3(data: Metadata) -> JsonObject:
    blocks = data.integer("block_count")
    data.need("attention.key_length")
    # llama.cpp scales scores by the head size, except for the model with 27 billion parameters.
    scalar = data.integer("embedding_length") // data.integer("attention.head_count") if blocks == 62 else data.head()
    return {
        "head_dim": data.head(),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": data.get("final_logit_softcapping") or None,  # 0 means no cap
        "layer_types": _layer_types(data, blocks, 6),
        "rope_parameters": {
            "full_attention": _rope(data, data.head(), 1e6),
            "sliding_attention": {"rope_theta": data.number("rope.freq_base_swa", 10000.0), "rope_type": "default"},
        },
    }


def _layer_types(data: Metadata, blocks: int, period: int) -> list[str]:
    """The types of layers: all but every n-th, by default every `period`-th, have a window, or the file lists them."""
    key, kinds = "attention.sliding_window_pattern", ("full_attention", "sliding_attention")
    value = data.get(key, period)
    if isinstance(value, list) and value and all(isinstance(x, bool) for x in value):
        windows = cast("list[bool]", value)
    elif type(value) is int and value > 0:
        windows = [bool((i + 1) % value) for i in range(blocks)]
    else:
        raise data.wrong(key, value, "an integer above 0, or true or false for each block")
    if len(windows) != blocks:
        raise data.wrong(key, value, f"a list of {blocks}, one for each block")
    return [kinds[window] for window in windows]


def gpt_neox(data: Metadata) -> JsonObject:
    head, size = data.share(), _rotated(data)
    parallel = data.get("use_parallel_residual", True)
    if not isinstance(parallel, bool):
        raise data.wrong("use_parallel_residual", parallel, "true or false")
    return {
        "use_parallel_residual": parallel,
        "attention_bias": data.has_tensor("blk.0.attn_qkv.bias"),
        "rope_parameters": {"partial_rotary_factor": fraction(size, head), **_rope(data, size)},
    }


def fraction(size: int, head: int) -> float:
    """The factor for which transformers computes `size` as int(head · factor)."""
    factor = size / head
    return factor if int(head * factor) == size else math.nextafter(factor, 2)


def bert(data: Metadata) -> JsonObject:
    name = "token_types.weight"
    return {"type_vocab_size": data.file.shape(name)[0] if data.has_tensor(name) else 1}
