"""Small models of transformers, from scratch and from files."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hop

ROOT = Path(__file__).parents[2]
IDS = torch.arange(1, 9)[None]
NEEDED = ("transformers", "accelerate", "safetensors")  # by every test here
# What transformers and PEFT warn of, in themselves.
QUIET = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Attempting to save a model with offloaded")
QUIET += ("ignore:Could not find a config file in",)


def llama(tie: bool = False, seed: int = 0) -> Any:
    """A Llama of 90,432 parameters, whose 4 query heads share 2 keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@contextmanager
def saved(model: Any, **options: Any) -> Iterator[str]:
    """A folder with the checkpoint of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        yield folder


def loaded(model: Any, config: Any, cls: Any = None, **options: Any) -> Any:
    """The model, saved in floats and loaded with a quantization_config."""
    with saved(model) as folder:
        return (cls or type(model)).from_pretrained(folder, quantization_config=config, **options)


def tokens(model: Any) -> list[int]:
    """The tokens that the model generates after IDS."""
    return model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()


def size(folder: str) -> int:
    """Bytes of the weights."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The float values of a tensor."""
    return hop.dequantize(tensor) if isinstance(tensor, hop.QuantizedTensor) else tensor
