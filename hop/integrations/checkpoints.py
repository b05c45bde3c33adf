"""load_model: transformers models from other tools' files, without changing the files' codes.

    model = hop.load_model("model.gguf")
    model = hop.load_model("folder")        # safetensors of compressed-tensors, GPTQ, AWQ, ...

transformers creates the model without weights and fills it as from a checkpoint that we saved, with codes and scales
under the model's names. So it can save the model and load it again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from hop.impls.quantize import dequantize
from hop.integrations import gguf_models, gguf_tensors, model_folders
from hop.integrations.config import HopConfig
from hop.integrations.folder_tensors import ModelTensor, folder_tensors
from hop.integrations.quantizer import HopQuantizer as HopQuantizer
from hop.interchange import open_checkpoint, open_gguf
from hop.interchange.files import checked_path
from hop.nn.contexts import INPUT
from hop.nn.models.exact import check_layers, check_schemes
from hop.nn.models.freezing import freeze
from hop.nn.models.kinds import layer_of
from hop.nn.weights.holders import kind_of
from hop.numerics import blocks
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor

_ORDER = ".input_order"


class ModelSource(NamedTuple):
    """The description of a model by a file or folder."""

    model_class: Any
    config: Any
    options: Mapping[str, object]
    tensors: Iterator[ModelTensor]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    pack: bool = True,
    activations: Quantizer | str | None = None,
    exact: bool = False,
) -> Any:
    """Load a transformers model, in eval mode, whose quantized weights are the codes and scales of a file.

    Each quantized weight is a QuantizedTensor with exactly the values that the file's own tool reads, in layers of
    hop.nn whose activations stay in floats unless `activations` is given. Weights are not materialized in floats,
    except for looked-up rows of an embedding, and temporarily in products without a kernel for the format. Tensors that
    are floats in the file stay floats. A tied embedding and head share one table. `model.hop_report` lists all layers.

    GGUF: the configuration and the tensors come from the metadata. Rows of Llama's query and key, and of GPT-NeoX's
    query, key and value, are permuted to transformers' order; norms of Gemma, stored as 1 + w, become w. Experts become
    transformers' stacks, each weight with its own codes; gate and up, one parameter there, become floats if their types
    differ. Keys and values of DeepSeek, whose blocks run along different dimensions, become one float weight.

    A folder: config.json with the quantization_config of compressed-tensors, GPTQ, AWQ, fp8, ModelOpt, MXFP4, torchao
    or bitsandbytes (hop.interchange.open_checkpoint), and safetensors. Experts in matrices of their own become stacks.
    Columns that GPTQ permuted ("act-order") are sorted by group; the layer stores the order as its buffer `input_order`
    and permutes its input by it.

    Args:
        path: a GGUF file, or a folder.
        dtype: of tensors other than codes, and of quantized weights as they appear. Default: that of config.json;
            float32 for GGUF.
        pack: whether to pack weights for this machine's kernels, see hop.nn.freeze.
        activations: a quantizer with dynamic scales, such as hop.presets.INT8_32, for the inputs of linear layers whose
            weights are integers times scales. Products are then integer products, which are faster, but the outputs
            differ from those of the file's values. Layers with other weights (NF4, fp8, ...) keep float inputs. Or
            "file": as a folder of compressed-tensors, or of ModelOpt in fp8, says, with its static scales; inputs of
            experts stay in floats. Default: float inputs everywhere, and the file's scales of activations are ignored.
        exact: whether the model gives the same bits on every route and CPU level, as for hop.quantize_. It needs
            `activations` with a scale for each row or part of one, and attention runs in "int8".

    Returns:
        The model. `save_pretrained` writes a checkpoint that `from_pretrained` reads once hop.integrations is imported.

    Raises:
        TypeError: path is not a path, dtype not a float dtype, pack not a bool, or activations neither a Quantizer nor
            "file".
        FileNotFoundError: the file or folder does not exist.
        ImportError: transformers, or safetensors for a folder, is not installed.
        ValueError: activations are not integers with dynamic scales; the file is damaged; the architecture is not one
            of hop.integrations.gguf_models; a metadata key that affects the model is not supported; or a tensor
            is missing, superfluous, or has another shape than in the model; or exact=True, and a layer would multiply
            floats.
    """
    place = checked_path("load_model", path, "model.gguf")
    _check_options(dtype, pack, activations, exact)
    source = _source_from_folder(place) if place.is_dir() else _source_from_gguf(place)
    state, quantizers = _state(place, source)
    inputs = _file_inputs(place, quantizers, state) if isinstance(activations, str) else activations
    if exact:
        _check_layers(place, source, quantizers)
    if quantizers:
        rules = _rules(place, source, state, quantizers, inputs, exact)
        source.config.quantization_config = {
            **rules.to_dict(),
            "pack": False,
        }  # after _rules, which needs the names in state
    model = _filled(place, source, state, dtype or getattr(source.config, "dtype", None) or torch.float32)
    state.clear()
    if quantizers:
        freeze(model, pack=pack)
        model.config.quantization_config.pack = pack
    return model


def _check_options(dtype: object, pack: object, activations: object, exact: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"load_model: dtype must be a float dtype or None, got {dtype!r}; give one such as torch.bfloat16"
        )
    if not isinstance(pack, bool):
        raise TypeError(f"load_model: pack must be True or False, got {pack!r}; give one of them")
    if not isinstance(exact, bool):
        raise TypeError(f"load_model: exact must be True or False, got {exact!r}; give one of them")
    if activations is None:
        if exact:
            raise ValueError(
                "load_model: exact=True, and activations=None leaves the inputs of layers in floats, whose sums depend "
                "on the kernel; give activations such as hop.presets.INT8_32"
            )
        return
    if activations == "file":
        return
    if not isinstance(activations, Quantizer):
        raise TypeError(
            f"load_model: activations must be a Quantizer, 'file' or None, got {shown(activations)}; give one such as "
            "hop.presets.INT8_32"
        )
    is_dynamic = activations.scale.missing() is None and not activations.scale.is_compound
    if not activations.format.is_integer or not is_dynamic or activations.flat or activations.layout is not None:
        raise ValueError(
            f"load_model: activations must be integers in rows with dynamic scales, got {activations}; "
            "give one such as hop.presets.INT8_32"
        )


# ---- sources of models


def _source_from_gguf(place: Path) -> ModelSource:
    file = open_gguf(place)
    kind = gguf_models.model_of(file)
    config = gguf_models.config_of(file, kind)
    tensors = ((name, tensor, None) for name, tensor in gguf_tensors.tensors_of(file, kind.layout, config))
    return ModelSource(getattr(transformers, kind.model_class), config, kind.options, tensors)


def _source_from_folder(folder: Path) -> ModelSource:
    described = model_folders.read_config("load_model", folder)
    checkpoint = open_checkpoint(folder)
    known = [kind.model_type for kind in gguf_models.ALL]
    if described.get("model_type") not in known:
        raise ValueError(
            f"load_model: {folder}: model_type is {shown(described.get('model_type'))}; those that are read are "
            f"{', '.join(known)}"
        )
    model_folders.check_numbers("load_model", folder, described, len(checkpoint))
    config = model_folders.transformers_config("load_model", folder)
    named = (config.architectures or ["none"])[0]
    model_class = model_folders.model_class(config, named)
    if getattr(model_class, "config_class", None) is not type(config):
        raise ValueError(
            f"load_model: {folder}: architectures of config.json names no model of transformers: {shown(named)}"
        )
    vars(config).pop("quantization_config", None)
    is_bare = model_class is transformers.BertModel and not any("pooler." in name for name in checkpoint)
    options = {"add_pooling_layer": False} if is_bare else {}
    return ModelSource(model_class, config, options, folder_tensors(folder, checkpoint, config.model_type))


# ---- the model


def _on_meta(place: Path, source: ModelSource) -> nn.Module:
    return model_folders.on_meta("load_model", place, source.model_class, source.config, source.options)


def _check_layers(place: Path, source: ModelSource, quantizers: Mapping[str, Quantizer]) -> None:
    """Raise ValueError for layers that the file has in floats."""
    tied = {target.removesuffix(".weight"): of.removesuffix(".weight") for target, of in _tied(source).items()}
    check_layers(
        "load_model",
        _on_meta(place, source),
        lambda name, module: tied.get(name, name) in quantizers,
        "quantize them in the file too",
    )


def _state(place: Path, source: ModelSource) -> tuple[dict[str, Tensor], dict[str, Quantizer]]:
    """The flat state_dict, and the quantizers of layers, by the layer's name, and of experts, by the parameter's."""
    state: dict[str, Tensor] = {}
    quantizers: dict[str, Quantizer] = {}
    model = _on_meta(place, source)
    stacks = _stacks(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = set(shapes) - set(_tied(source))
    found: set[str] = set()
    for name, tensor, order in source.tensors:
        if name in found:
            raise ValueError(f"load_model: {place}: the tensor {shown(name)} of the model is there twice; remove one")
        found.add(name)
        if name in shapes and tensor.shape != shapes[name]:
            raise ValueError(
                f"load_model: {place}: tensor {shown(name)} has shape {tuple(tensor.shape)}, and the model by its "
                f"configuration {tuple(shapes[name])}"
            )
        layer, _, leaf = name.rpartition(".")
        if not isinstance(tensor, QuantizedTensor):
            state[name] = tensor
        elif name in stacks:
            state[name], q = _by_matrix(tensor)
            if q is not None:
                quantizers[name] = (q.transposed(2) if stacks[name] else q).plain
        elif leaf != "weight":
            raise ValueError(
                f"load_model: {place}: tensor {shown(name)} is quantized, and must be the weight of a layer"
            )
        elif name in shapes and not _is_layer(model, layer):  # such as a router
            state[name] = dequantize(tensor)
        else:
            quantizers[layer] = tensor.quantizer.plain
            state |= {f"{name}:{buffer}": data for buffer, data in tensor.buffers().items()}
            if order is not None:
                state[f"{layer}{_ORDER}"] = order
    if missing := missing - found:  # transformers would create them, with sizes from an untrusted configuration
        raise ValueError(
            f"load_model: {place}: missing tensors of the model: {shown(sorted(missing))}; download it again"
        )
    _flatten_stacks(stacks, state, quantizers)
    return state, quantizers


def _file_inputs(place: Path, quantizers: Mapping[str, Quantizer], state: dict[str, Tensor]) -> dict[str, Quantizer]:
    """The quantizers of inputs that a folder stores, by layer. Static scales are added to `state`."""
    if not place.is_dir():
        raise ValueError(f"load_model: activations='file' is for folders, and {place} is a file; give a Quantizer")
    checkpoint, result = open_checkpoint(place), dict[str, Quantizer]()
    for name in quantizers:
        activation = checkpoint.activation(f"{name}.weight")
        if activation is None:
            continue
        result[name] = activation.quantizer
        for part in ("scale", "zero_point"):
            value: Tensor | None = getattr(activation, part)
            if value is not None:
                state[f"{name}.scales.{INPUT}.{part}"] = value.to(torch.float32).reshape(1)
    return result


def _stacks(model: nn.Module) -> dict[str, bool]:
    """The weights of experts by name, with whether products sum over their first dimension."""
    kinds = ((name, module, kind_of(module)) for name, module in model.named_modules())
    return {
        f"{name}.{weight}": kind.sums_first(module)
        for name, module, kind in kinds
        if kind is not None
        for weight in kind.weights_of(module)
    }


def _by_matrix(stack: QuantizedTensor) -> tuple[Tensor, Quantizer | None]:
    """The stack with scales for each matrix, and the quantizer of one; floats and None if matrices share other scales
    than those of all.
    """
    q = stack.quantizer
    if q.flat:
        return stack, q
    own = q.of_blocks(lambda block: blocks.per_dimension(block, 2))
    shapes = own.of_batch(2).buffers(stack.shape)
    try:
        buffers = {name: b.expand(shapes[name][0]).contiguous() for name, b in stack.buffers().items()}
    except RuntimeError:
        return dequantize(stack, torch.float32), None
    return stack.rebuilt(buffers, quantizer=own.of_batch(2)), own


def _flatten_stacks(stacks: Mapping[str, bool], state: dict[str, Tensor], quantizers: dict[str, Quantizer]) -> None:
    """Replace quantized weights of experts by their buffers; by floats where another weight of them is in floats."""
    floats = {name.rpartition(".")[0] for name in stacks if name not in quantizers}
    for name in stacks.keys() & quantizers.keys():
        tensor = state.pop(name)
        assert isinstance(tensor, QuantizedTensor)
        if name.rpartition(".")[0] in floats:
            state[name] = dequantize(tensor, torch.float32)
            del quantizers[name]
        else:
            state |= {f"{name}:{buffer}": data for buffer, data in tensor.buffers().items()}


def _tied(source: ModelSource) -> dict[str, str]:
    """The names of tied weights, each with the name of the weight that it shares."""
    tied = getattr(source.model_class, "_tied_weights_keys", None) or {}
    return tied if source.config.tie_word_embeddings else {}


def _rules(
    place: Path,
    source: ModelSource,
    state: Mapping[str, Tensor],
    quantizers: dict[str, Quantizer],
    inputs: Quantizer | Mapping[str, Quantizer] | None,
    exact: bool,
) -> HopConfig:
    """The schemes of layers by name, followed by the most frequent one as the default. Tied weights get the same
    scheme.
    """
    for target, of in _tied(source).items():
        tied = quantizers.get(of.removesuffix(".weight"))
        if target not in state and tied is not None:
            quantizers.setdefault(target.removesuffix(".weight"), tied)
    model = _on_meta(place, source)
    stacks = _stacks(model)
    floats = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    floats = [name for name in floats if name not in stacks and _is_layer(model, name)]
    floats += {name.rpartition(".")[0]: None for name in stacks if name in state}  # each once
    modules, different = _by_module(stacks, quantizers)
    schemes: dict[str, Scheme] = {}
    for name, q in modules.items():
        parts = [q, *(other for weight, other in different.items() if weight.rpartition(".")[0] == name)]
        if isinstance(inputs, Mapping):
            schemes[name] = Scheme(inputs.get(name), q)
        else:
            schemes[name] = Scheme(inputs if all(part.format.is_whole for part in parts) else None, q)
    if exact:
        check_schemes("load_model", schemes.values(), [])
    ((most, _),) = Counter(schemes.values()).most_common(1)
    others = [(name, scheme) for name, scheme in schemes.items() if scheme != most]
    orders = [name.removesuffix(_ORDER) for name in state if name.endswith(_ORDER)]
    rules = [*others, *((name, None) for name in floats), ("*", most)]
    return HopConfig(rules, input_orders=orders, exact=exact, weight_quantizers=different)


def _is_layer(model: nn.Module, name: str) -> bool:
    """Whether the model has a layer of this name, which hop.nn could quantize."""
    return name in dict(model.named_modules()) and layer_of(model.get_submodule(name)) is not None


def _by_module(
    stacks: Mapping[str, bool], quantizers: Mapping[str, Quantizer]
) -> tuple[dict[str, Quantizer], dict[str, Quantizer]]:
    """The quantizers by module, and those of weights of experts that differ from their module's, by parameter."""
    modules = {name: q for name, q in quantizers.items() if name not in stacks}
    different: dict[str, Quantizer] = {}
    for name in (name for name in stacks if name in quantizers):
        if modules.setdefault(name.rpartition(".")[0], quantizers[name]) != quantizers[name]:
            different[name] = quantizers[name]
    return modules, different


def _filled(place: Path, source: ModelSource, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
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
