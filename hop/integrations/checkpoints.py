"""load_model: transformers' models from the files of other tools, whose weights stay the codes of the file.

    model = hop.integrations.load_model("model.gguf")
    model = hop.integrations.load_model("folder")        # safetensors of compressed-tensors, GPTQ, AWQ, ...

transformers builds the model without weights and fills it as it does from a checkpoint that we saved: codes, scales and
what lies beside them, by the names of the model. So what it saves, it loads again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from hop.integrations import gguf_models, model_folders
from hop.integrations.config import HopConfig
from hop.integrations.quantizer import HopQuantizer as HopQuantizer
from hop.interchange import Checkpoint, open_checkpoint, open_gguf
from hop.interchange.files import checked_path
from hop.nn.freezing import freeze
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

# Beside a weight: scales of activations, which stay in floats here, and of keys and values.
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale")
_ORDER = ".input_order"


class Source(NamedTuple):
    """What a file or folder says of a model."""

    model_class: Any
    config: Any
    options: Mapping[str, Any]
    tensors: Iterator[tuple[str, Tensor, Tensor | None]]  # name, tensor, the order of its columns


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    pack: bool = True,
    activations: Quantizer | None = None,
) -> Any:
    """A model of transformers, in eval mode, whose quantized weights are the codes and scales of a file.

    Each quantized weight is a QuantizedTensor of the very numbers that the tool which wrote it reads, in layers of
    hop.nn whose activations stay in floats unless `activations` says how they are quantized; its floats are never made,
    but for the rows of an embedding that are looked up, and what a product without a kernel for the format dequantizes
    for the moment. What the file has in floats stays so. An embedding and a head that are tied are one table.
    `model.hop_report` says which is which.

    GGUF: configuration and tensors as the metadata say. Rows of Llama's query and key, and of GPT-NeoX's query, key and
    value, are brought to transformers' order; norms of Gemma, which a file holds as 1 + w, to w.
    A folder: config.json with the quantization_config of compressed-tensors, GPTQ, AWQ, fp8, ModelOpt or bitsandbytes
    (hop.interchange.open_checkpoint), and safetensors. Columns that GPTQ took in an order of its own ("act-order") are
    sorted by group; the layer has the order as its buffer `input_order`, and gathers its input by it. Scales of
    activations in the file are left out.

    Args:
        path: of a GGUF file, or of a folder.
        dtype: of what is no code, and in which quantized weights appear. None for that of config.json; float32 of GGUF.
        pack: whether weights are laid out for the kernels of this machine; hop.nn.freeze says more.
        activations: what quantizes the input of linear layers whose weights are integers times scales, in each call,
            such as hop.presets.INT8_32: products are then those of integers, in less time, and results are others than
            the file's numbers give. Layers of other weights (NF4, fp8, ...) take floats. None for floats in all.

    Returns:
        The model. `save_pretrained` writes what `from_pretrained` reads where hop.integrations is imported.

    Raises:
        TypeError: path is no path, dtype no float dtype, pack no bool, or activations no Quantizer.
        FileNotFoundError: there is no such file or folder.
        ImportError: transformers, or safetensors for a folder, is missing.
        ValueError: activations are none of integers whose scales are found in each call; the file is damaged; the
            architecture is none of llama, qwen3, gemma3, gptneox and bert; a key of the metadata changes what the model
            computes and is not read; or a tensor is missing, or one too many, or of another shape than the model has.
    """
    place = checked_path("load_model", path, "model.gguf")
    _check_options(dtype, pack, activations)
    source = _of_folder(place) if place.is_dir() else _of_gguf(place)
    state, quantizers = _state(place, source)
    if quantizers:
        rules = _rules(source, state, quantizers, activations)
        source.config.quantization_config = {**rules.to_dict(), "pack": False}  # now the state has what it replaces
    model = _filled(place, source, state, dtype or getattr(source.config, "dtype", None) or torch.float32)
    state.clear()
    if quantizers:
        freeze(model, pack=pack)
        model.config.quantization_config.pack = pack
    return model


def _check_options(dtype: Any, pack: Any, activations: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"load_model: dtype must be a float dtype or None, got {dtype!r}; give one such as torch.bfloat16"
        )
    if not isinstance(pack, bool):
        raise TypeError(f"load_model: pack must be True or False, got {pack!r}; give one of them")
    if activations is None:
        return
    if not isinstance(activations, Quantizer):
        raise TypeError(
            f"load_model: activations must be a Quantizer or None, got {shown(activations)}; give one such as "
            "hop.presets.INT8_32"
        )
    is_dynamic = activations.scale.missing() is None and not activations.scale.is_compound
    if not activations.format.is_integer or not is_dynamic or activations.flat or activations.layout is not None:
        raise ValueError(
            f"load_model: activations must be integers in rows whose scales are found in each call, got {activations}; "
            "give one such as hop.presets.INT8_32"
        )


# ---- where models come from


def _of_gguf(place: Path) -> Source:
    file = open_gguf(place)
    kind = gguf_models.model_of(file)
    config = gguf_models.config_of(file, kind)
    tensors = ((name, tensor, None) for name, tensor in gguf_models.tensors_of(file, kind, config))
    return Source(getattr(transformers, kind.model_class), config, kind.options, tensors)


def _of_folder(folder: Path) -> Source:
    described = model_folders.described("load_model", folder)
    checkpoint = open_checkpoint(folder)
    known = [kind.model_type for kind in gguf_models.MODELS.values()]
    if described.get("model_type") not in known:
        raise ValueError(
            f"load_model: {folder}: model_type is {shown(described.get('model_type'))}; those that are read are "
            f"{', '.join(known)}"
        )
    model_folders.check_numbers("load_model", folder, described, len(checkpoint))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    named: Any = (config.architectures or ["none"])[0]
    model_class = model_folders.model_class(config, named)
    if getattr(model_class, "config_class", None) is not type(config):
        raise ValueError(
            f"load_model: {folder}: architectures of config.json names no model of transformers: {shown(named)}"
        )
    vars(config).pop("quantization_config", None)
    is_bare = model_class is transformers.BertModel and not any("pooler." in name for name in checkpoint)
    options = {"add_pooling_layer": False} if is_bare else {}
    return Source(model_class, config, options, _of_checkpoint(checkpoint))


def _of_checkpoint(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    for name in checkpoint:
        if name.rpartition(".")[2] not in _OF_ACTIVATIONS:
            yield name, checkpoint[name], checkpoint.permutation(name)


# ---- what transformers is given


def _shapes(place: Path, source: Source) -> dict[str, torch.Size]:
    """What the model has by the configuration."""
    try:
        with torch.device("meta"):
            model = source.model_class(source.config, **source.options)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"load_model: {place}: its configuration makes no model: {shown(error)}") from error
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _state(place: Path, source: Source) -> tuple[dict[str, Tensor], dict[str, Quantizer]]:
    """The state_dict, flat, and the quantizers of layers by name."""
    state: dict[str, Tensor] = {}
    quantizers: dict[str, Quantizer] = {}
    shapes = _shapes(place, source)
    missing = set(shapes) - set(_tied(source))
    for name, tensor, order in source.tensors:
        missing.discard(name)
        if name in shapes and tensor.shape != shapes[name]:
            raise ValueError(
                f"load_model: {place}: tensor {shown(name)} has shape {tuple(tensor.shape)}, and the model by its "
                f"configuration {tuple(shapes[name])}"
            )
        if not isinstance(tensor, QuantizedTensor):
            state[name] = tensor
            continue
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight":
            raise ValueError(
                f"load_model: {place}: tensor {shown(name)} is quantized, and must be the weight of a layer"
            )
        quantizers[layer] = tensor.quantizer.plain
        state |= {f"{name}:{buffer}": data for buffer, data in tensor.buffers().items()}
        if order is not None:
            state[f"{layer}{_ORDER}"] = order
    if missing:  # transformers would make it, of any size that the configuration says
        raise ValueError(
            f"load_model: {place}: missing tensors of the model: {shown(sorted(missing))}; download it again"
        )
    return state, quantizers


def _tied(source: Source) -> dict[str, str]:
    """The weights that are others, by names of these."""
    tied = getattr(source.model_class, "_tied_weights_keys", None) or {}
    return tied if source.config.tie_word_embeddings else {}


def _rules(
    source: Source, state: Mapping[str, Tensor], quantizers: dict[str, Quantizer], activations: Quantizer | None
) -> HopConfig:
    """The schemes of layers by name, that of most of them last, as the rule for all others. Tied weights join them."""
    for target, of in _tied(source).items():
        tied = quantizers.get(of.removesuffix(".weight"))
        if target not in state and tied is not None:
            quantizers.setdefault(target.removesuffix(".weight"), tied)
    floats = [name.removesuffix(".weight") for name, t in state.items() if ":" not in name and t.dim() > 1]
    schemes = {q: Scheme(activations if q.format.is_whole else None, q) for q in quantizers.values()}
    ((most, _),) = Counter(quantizers.values()).most_common(1)
    others = [(name, schemes[q]) for name, q in quantizers.items() if q != most]
    orders = [name.removesuffix(_ORDER) for name in state if name.endswith(_ORDER)]
    rules = [*others, *((name, None) for name in floats), ("*", schemes[most])]
    return HopConfig(rules, input_orders=orders)


def _filled(place: Path, source: Source, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    model, info = source.model_class.from_pretrained(
        None, config=source.config, state_dict=state, dtype=dtype, output_loading_info=True, **source.options
    )
    for what, names in info.items():
        if names:
            raise ValueError(
                f"load_model: {place}: {what.replace('_', ' ')}, for {type(model).__name__}: "
                f"{shown(sorted(map(str, names)))}"
            )
    return model
