"""Models of transformers written as GGUF, as the converters of llama.cpp do: names by the package gguf, rows of Llama's
query and key and of GPT-NeoX's query, key and value in llama.cpp's order, Gemma's norms plus 1."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.models import llama

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}


def package() -> Any:
    return pytest.importorskip("gguf", reason="the package gguf, which writes the files, is missing")


def made(config: Any, cls: Any, **options: Any) -> Any:
    """A random model, whose norms and biases are random too, of few bits: 1 + w is exact."""
    torch.manual_seed(1)
    model = cls(config, **options).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += (300 * torch.randn(p.shape)).round() / 1024
    return model


def _gemma3(head: int = 32) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": head, "sliding_window": 4}
    return made(Gemma3TextConfig(**sizes, query_pre_attn_scalar=head), Gemma3ForCausalLM)


def _qwen3(head: int = 16) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return made(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=head, tie_word_embeddings=False), Qwen3ForCausalLM)


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return made(GPTNeoXConfig(**SIZES, rope_parameters={"partial_rotary_factor": 0.5}), GPTNeoXForCausalLM)


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return made(BertConfig(**SIZES), BertModel, add_pooling_layer=False)


def _decoder(name: str, **sizes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SIZES | {"num_key_value_heads": 2} | sizes))
    return made(config, getattr(transformers, f"{name}ForCausalLM"))


def _phi3(long: bool = False) -> Any:
    factors = {"short_factor": [1.0, 1.25], "long_factor": [2.0, 4.5], "attention_factor": 1.25}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8, **factors} if long else {}
    rope |= {"partial_rotary_factor": 0.25} if long else {}
    more = {"original_max_position_embeddings": 8} if long else {"sliding_window": 4}
    return _decoder("Phi3", rope_parameters={"rope_theta": 10000.0, **rope}, pad_token_id=0, **more)


def _deepseek2(**changes: Any) -> Any:
    sizes = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 32}
    sizes |= {"num_key_value_heads": 4}
    sizes |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "topk_method": "greedy"}
    return _decoder("DeepseekV2", **(sizes | changes))


def _deepseek2_groups() -> Any:
    scale = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    scale |= {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    return _deepseek2(q_lora_rank=32, rope_parameters=scale, **groups)


def _deepseek3(**changes: Any) -> Any:
    """Biases are large enough to change the choice of experts."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 32}
    sizes |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    model = _decoder("DeepseekV3", **(sizes | changes))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(2)))
    return model


def _deepseek3_yarn() -> Any:
    scale = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    scale |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return _deepseek3(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_parameters=scale)


def _gpt_oss() -> Any:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 150000.0}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=4,
                    rope_parameters=yarn, experts_implementation="eager")  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie=True),
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "qwen3 128": lambda: _qwen3(128),  # heads of the size that transformers takes all of them to be
    "gemma3 256": lambda: _gemma3(256),
    "gptneox": _gpt_neox,
    "bert": _bert,
    "qwen2": lambda: _decoder("Qwen2"),
    "qwen3moe": lambda: _decoder(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=32, norm_topk_prob=True
    ),
    "phi3": _phi3,
    "phi3 long": lambda: _phi3(long=True),
    "gemma": lambda: _decoder("Gemma", head_dim=32),
    "gemma2": lambda: _decoder("Gemma2", head_dim=32, query_pre_attn_scalar=32, sliding_window=4),
    "deepseek2": _deepseek2,
    "deepseek2 groups": _deepseek2_groups,
    "deepseek_v3": _deepseek3,
    "deepseek_v3 yarn": _deepseek3_yarn,
    "gpt-oss": _gpt_oss,
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
}
ARCHITECTURES = {
    "gpt_neox": "gptneox", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss", "mixtral": "llama",
}  # fmt: skip


def stored(x: np.ndarray, kind: str) -> np.ndarray:
    """The bytes that a file of this type stores for a tensor."""
    types = package().GGMLQuantizationType
    return package().quants.quantize(x, types[kind])


def rounded(model: Any, kind: str) -> Any:
    """The model with the numbers that such a file has, by the package alone."""

    def round_rows(x: np.ndarray) -> np.ndarray:
        return package().quants.dequantize(stored(x, kind), package().GGMLQuantizationType[kind])

    with torch.no_grad():
        for name, p in {id(p): (n, p) for n, p in model.named_parameters() if is_quantized(n, p)}.values():
            x = p.numpy()
            if "kv_b_proj" in name:
                keys, values = _latent(x, model.config)
                keys, values = round_rows(keys).swapaxes(1, 2), round_rows(values)
                x = np.concatenate([keys, values], 1).reshape(x.shape)
            elif model.config.model_type == "gpt_oss" and p.dim() == 3:
                x = round_rows(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
            else:
                x = round_rows(x)
            p.copy_(torch.from_numpy(x))
    return model


def is_quantized(name: str, p: torch.Tensor) -> bool:
    floats = ("position_embeddings", "token_type", "mlp.gate.", "router", "_bias")
    return p.dim() >= 2 and not any(part in name for part in floats)


def _latent(x: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Transposed keys and values by head, as llama.cpp's converter splits them."""
    heads = x.reshape(config.num_attention_heads, -1, x.shape[1])
    keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values)


def write(model: Any, path: Path, kind: str = "Q8_0", **changes: Any) -> None:
    """The model as a file, with weights of one type.

    Args:
        changes: keys of the metadata, to replace or add; and "architecture", what the file says it is; "leave", tensors
            or one to leave out; "add", a tensor to add; "add_rows", tensors to add; "kinds", types of tensors by their
            names in a block; "whole_latent", whether keys and values of DeepSeek are one tensor, as in older files."""
    gguf, config = package(), model.config
    named = ARCHITECTURES.get(config.model_type, config.model_type)
    said, leave, add = (changes.pop(key, None) for key in ("architecture", "leave", "add"))
    kinds: dict[str, str] = changes.pop("kinds", {})
    more = {name: t.numpy() for name, t in changes.pop("add_rows", {}).items()}
    more |= {} if add is None else {add: np.zeros(4, np.float32)}
    if (rope := getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        for length in ("short", "long"):
            more.setdefault(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer = gguf.GGUFWriter(path, said or named, use_temp_file=False)
    whole_latent = changes.pop("whole_latent", False)
    keys = _keys(named, config, whole_latent)
    if (padding := changes.pop("tokenizer.padding", None)) is not None:
        writer.add_pad_token_id(padding)
    for key, value in {**keys, **changes}.items():
        by_type = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        if value is not None:
            by_type[type(value)](f"{named}.{key}", value)
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[named]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for found, array in _pieces(named, name, tensor.numpy(), config, names, whole_latent):
            as_type = kinds.get(found.split(".", 2)[-1], kind) if is_quantized(name, tensor) else "F32"
            held = stored(array, as_type) if as_type != "F32" else array
            if found in (leave if isinstance(leave, list) else [leave]):
                continue
            writer.add_tensor(found, held, raw_dtype=gguf.GGMLQuantizationType[as_type])
    for name, array in more.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(named: str, config: Any, whole_latent: bool) -> dict[str, Any]:
    """The metadata as llama.cpp's converters write them."""
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if named in ("bert", "gptneox"):
        keys["attention.layer_norm_epsilon"] = config.layer_norm_eps
    else:
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        keys["attention.head_count_kv"] = config.num_key_value_heads
    if named in ("llama", "qwen3", "gemma", "gemma2", "gemma3", "qwen3moe", "gpt-oss"):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys["attention.key_length"] = head
    if named in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "qwen3moe", "phi3", "deepseek2", "gpt-oss"):
        keys["rope.freq_base"] = float(rope["rope_theta"])
    if named in ("llama", "qwen3"):
        keys["rope.dimension_count"] = keys["attention.key_length"]
    if named in ("gemma2", "gemma3", "gpt-oss"):
        keys["attention.sliding_window"] = config.sliding_window
    if rope.get("rope_type") == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if (experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None))) is not None:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    return keys | _own_keys(named, config, rope, whole_latent)


def _own_keys(named: str, config: Any, rope: dict[str, Any], whole_latent: bool) -> dict[str, Any]:
    """The keys of single architectures."""
    if named == "gemma2":
        return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if named == "gemma3":
        return {"rope.freq_base": 1e6}
    if named == "gptneox":
        return {"rope.dimension_count": 8, "use_parallel_residual": config.use_parallel_residual}
    if named in ("qwen3moe", "gpt-oss"):
        return {"expert_feed_forward_length": getattr(config, "moe_intermediate_size", None)}
    if named == "phi3":
        head = config.hidden_size // config.num_attention_heads
        keys = {"rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0))}
        keys["attention.sliding_window"] = config.sliding_window or 0
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        return keys | ({"rope.scaling.attn_factor": 1.25} if rope["rope_type"] == "longrope" else {})
    if named != "deepseek2":
        return {}
    rank, rotated, query = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim + 8
    latent = {"key_length": rank + rotated, "value_length": rank, "key_length_mla": query}
    latent |= {"value_length_mla": config.v_head_dim, "head_count_kv": 1}
    whole = {"key_length": query, "value_length": config.v_head_dim, "head_count_kv": config.num_attention_heads}
    keys = {f"attention.{key}": value for key, value in (whole if whole_latent else latent).items()}
    keys |= {"attention.kv_lora_rank": rank, "attention.q_lora_rank": config.q_lora_rank}
    keys |= {"leading_dense_block_count": config.first_k_dense_replace, "rope.dimension_count": rotated}
    keys |= {"expert_shared_count": config.n_shared_experts, "expert_gating_func": 1, "expert_weights_norm": False}
    if config.model_type == "deepseek_v3":
        keys |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
    keys["expert_weights_scale"] = config.routed_scaling_factor
    keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    keys |= {"expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok}
    return keys | ({"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]} if "mscale" in rope else {})


def _pieces(
    named: str, name: str, x: np.ndarray, config: Any, names: Any, whole_latent: bool
) -> list[tuple[str, np.ndarray]]:
    """The tensors of a file for a parameter of the model."""
    block, _, end = name.partition(".mlp.experts.")
    number = block.rpartition(".")[2]
    if end:
        kind = "bias" if end.endswith("_bias") else "weight"
        if named == "gpt-oss" and kind == "weight":
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        if end.startswith("down"):
            return [(f"blk.{number}.ffn_down_exps.{kind}", x)]
        halves = (x[:, ::2], x[:, 1::2]) if named == "gpt-oss" else np.split(x, 2, 1)
        parts = zip(("gate", "up"), halves, strict=True)
        return [(f"blk.{number}.ffn_{part}_exps.{kind}", np.ascontiguousarray(half)) for part, half in parts]
    if "kv_b_proj" in name and not whole_latent:
        number = name.split(".")[2]
        keys, values = _latent(x, config)
        return [(f"blk.{number}.attn_k_b.weight", keys), (f"blk.{number}.attn_v_b.weight", values)]
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")  # as the converter renames it
    found = names.get_name(name, (".weight", ".bias"))
    if name.endswith("sinks"):
        found = f"blk.{name.split('.')[2]}.attn_sinks.weight"
    assert found is not None, name
    return [(found, _arranged(named, name, x, config))]


def _arranged(named: str, name: str, x: np.ndarray, config: Any) -> np.ndarray:
    """A tensor as llama.cpp wants it."""
    if named == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return np.ascontiguousarray(x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape))
    if named == "gptneox" and "query_key_value" in name:
        parts = x.reshape(config.num_attention_heads, 3, -1, *x.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *x.shape[1:]) for i in range(3)])
    return x + np.float32(1) if named.startswith("gemma") and name.endswith("norm.weight") else x
