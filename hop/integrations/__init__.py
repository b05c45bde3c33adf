"""Integration with transformers and PEFT: quantize models as they load, read other tools' files, cache keys and values
as codes, and train LoRA adapters.

config.py       HopConfig, a quantization_config of transformers
quantizer.py    HopQuantizer, called by transformers while it loads and saves
loading.py      from the tensors of a checkpoint to quantized weights
places.py       which layers are quantized, and which stay in floats
checkpoints.py  load_model: models from GGUF files and other tools' checkpoints
gguf_models.py  the models of GGUF files: gguf_configs.py, their configuration; gguf_tensors.py, their tensors;
                gguf_keys.py, the metadata keys
tokens.py       load_tokenizer: the tokenizer of a GGUF file
folders.py      quantize_folder: quantize a checkpoint file by file; model_folders.py, its config.json;
                gguf_folders.py, a GGUF file instead
experts.py      experts in 3-D parameters
attention.py    attention on codes, through transformers' AttentionInterface
cache.py        HopCache, a cache of keys and values as codes
decoding.py     compile_decode: a compiled program for one decode step; decode_program.py exports it, kept_programs.py
                finds it again on disk
adapters.py     PEFT's adapters on layers with codes, and larger tables of tokens

Importing this package registers HopConfig and the attention implementation "hop" if transformers is installed, so that
checkpoints with "quant_method": "hop" load, and lets PEFT's adapters merge into layers with codes.

Needs: pip install 'torch-hop[transformers]'.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hop.integrations.adapters import requantized_merge as requantized_merge
    from hop.integrations.cache import HopCache as HopCache
    from hop.integrations.config import HopConfig as HopConfig
    from hop.integrations.folders import quantize_folder as quantize_folder
    from hop.integrations.tokens import load_tokenizer as load_tokenizer

__all__ = [
    "HopCache",
    "HopConfig",
    "load_tokenizer",
    "quantize_folder",
    "requantized_merge",
]

_MODULES = {  # of each name; hop exports compile_decode and load_model, which need the same package
    "HopCache": "hop.integrations.cache",
    "HopConfig": "hop.integrations.quantizer",
    "compile_decode": "hop.integrations.decoding",
    "load_model": "hop.integrations.checkpoints",
    "load_tokenizer": "hop.integrations.tokens",
    "quantize_folder": "hop.integrations.folders",
    "requantized_merge": "hop.integrations.adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hop.integrations' has no attribute {name!r}")
    if find_spec("transformers") is None:
        caller = f"hop.integrations.{name}" if name in __all__ else f"hop.{name}"
        raise ImportError(
            f"{caller} needs the package transformers: pip install 'torch-hop[transformers]'", name="transformers"
        )
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__


if find_spec("transformers") is not None:
    importlib.import_module("hop.integrations.quantizer")
    importlib.import_module("hop.integrations.attention")
    importlib.import_module("hop.integrations.adapters")
