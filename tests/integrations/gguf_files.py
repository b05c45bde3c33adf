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


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie=True),
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "qwen3 128": lambda: _qwen3(128),  # heads of the size that transformers takes all of them to be
    "gemma3 256": lambda: _gemma3(256),
    "gptneox": _gpt_neox,
    "bert": _bert,
}
ARCHITECTURES = {"gpt_neox": "gptneox", "gemma3_text": "gemma3"}


def stored(x: np.ndarray, kind: str) -> np.ndarray:
    """The bytes that a file of this type stores for a tensor."""
    types = package().GGMLQuantizationType
    return package().quants.quantize(x, types[kind])


def rounded(model: Any, kind: str) -> Any:
    """The model with the numbers that such a file has, by the package alone."""
    types = package().GGMLQuantizationType
    with torch.no_grad():
        for p in {id(p): p for name, p in model.named_parameters() if is_quantized(name, p)}.values():
            p.copy_(torch.from_numpy(package().quants.dequantize(stored(p.numpy(), kind), types[kind])))
    return model


def is_quantized(name: str, p: torch.Tensor) -> bool:
    return p.dim() == 2 and "position_embeddings" not in name and "token_type" not in name


def write(model: Any, path: Path, kind: str = "Q8_0", **changes: Any) -> None:
    """The model as a file, with weights of one type.

    Args:
        changes: keys of the metadata, to replace or add; and "architecture", what the file says it is; "leave" and
            "add", a tensor to leave out or to add; "add_rows", tensors to add."""
    gguf, config = package(), model.config
    named = ARCHITECTURES.get(config.model_type, config.model_type)
    said, leave, add = (changes.pop(key, None) for key in ("architecture", "leave", "add"))
    more = {name: t.numpy() for name, t in changes.pop("add_rows", {}).items()}
    more |= {} if add is None else {add: np.zeros(4, np.float32)}
    writer = gguf.GGUFWriter(path, said or named, use_temp_file=False)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if named in ("bert", "gptneox"):
        keys["attention.layer_norm_epsilon"] = config.layer_norm_eps
    else:
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        keys["attention.head_count_kv"] = config.num_key_value_heads
        keys["attention.key_length"] = config.head_dim
    if named in ("llama", "qwen3"):
        keys["rope.freq_base"] = config.rope_parameters["rope_theta"]
        keys["rope.dimension_count"] = config.head_dim
    if named == "gemma3":
        keys |= {"attention.sliding_window": config.sliding_window, "rope.freq_base": 1e6}
    if named == "gptneox":
        keys |= {"rope.dimension_count": 8, "use_parallel_residual": config.use_parallel_residual}
    for key, value in {**keys, **changes}.items():
        by_type = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        if value is not None:
            by_type[type(value)](f"{named}.{key}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, named.upper()), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = _arranged(named, name, tensor.numpy(), config)
        as_type = kind if is_quantized(name, tensor) else "F32"
        held = stored(array, as_type) if as_type != "F32" else array
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        if found == leave:
            continue
        writer.add_tensor(found, held, raw_dtype=gguf.GGMLQuantizationType[as_type])
    for name, array in more.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arranged(named: str, name: str, x: np.ndarray, config: Any) -> np.ndarray:
    """A tensor as llama.cpp wants it."""
    if named == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return np.ascontiguousarray(x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape))
    if named == "gptneox" and "query_key_value" in name:
        parts = x.reshape(config.num_attention_heads, 3, -1, *x.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *x.shape[1:]) for i in range(3)])
    return x + np.float32(1) if named == "gemma3" and name.endswith("norm.weight") else x
