"""Write weights in the compressed-tensors format: safetensors, and the quantization_config in config.json.

    hop.interchange.save_compressed_tensors("folder", model)

vLLM, transformers and other tools run such weights without hop. Reading needs the package `safetensors`, writing does
not.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from hop.compat.files import whole_folder, write_whole
from hop.interchange.compressed_activations import activations_of, input_args
from hop.interchange.compressed_forms import INTEGERS, Form, iterate_rows, storage_form
from hop.interchange.safetensors_files import NAMES, Entry, Writer, writer
from hop.numerics.spelling import JsonObject, from_json, shown
from hop.tensor import QuantizedTensor

__all__ = ["save_compressed_tensors"]

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_CALLER = "save_compressed_tensors"


class _PlannedTensor(NamedTuple):
    """A tensor, and its entries in the file."""

    name: str
    entries: tuple[Entry, ...]
    format: str | None = None  # None for a plain tensor
    args: Mapping[str, Any] = {}
    input_args: Mapping[str, Any] | None = None  # of activations

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries)


def save_compressed_tensors(
    folder: str | Path,
    tensors: Mapping[str, Tensor] | nn.Module,
    config: Mapping[str, object] | None = None,
    *,
    integers: str | None = None,
    shard_size: int = 5 * 10**9,
    activations: bool = False,
) -> None:
    """Write tensors to a folder in the compressed-tensors format. Codes are written as they are, never quantized again.

    A QuantizedTensor, the weight of a Linear or an Embedding, is stored so that the package decompresses it to exactly
    the values of `hop.dequantize`; a plain tensor keeps its dtype:

        integers of 1 to 8 bits, scales per group, row, tensor or block, with or without zero points
                                                    pack-quantized, or int-quantized
        e4m3, scales per row, group, tensor or block        float-quantized
        MXFP4, MXFP8                                mxfp4-pack-quantized, mxfp8-quantized
        NVFP4 whose scales are divided by a float   nvfp4-pack-quantized

    MX and NVFP4 weights are read back in bfloat16. Scales are written in the weight's dtype if it represents them
    exactly, and otherwise in float32, which the weight then has when read. Each tensor is accessed twice, first to plan
    its storage, so that a lazy mapping has one of its tensors in memory at a time.

    The files are written to a temporary folder in `folder` and moved together, config.json and the index first. If
    writing fails or the process is killed, `folder` has none of them. If several processes write to one folder, the
    first to finish succeeds, and the others raise FileExistsError.

    Args:
        folder: a folder to create, or an existing one without safetensors.
        tensors: tensors by name, weights as "module.weight"; or a module, whose tied parameters and buffers are written
            once.
        config: the content of config.json apart from quantization_config. Default: the module's config, if it has one
            like models of transformers, else the config.json in the folder.
        integers: "pack-quantized" or "int-quantized", for integers that both can store: symmetric codes, and affine
            ones per row or group. Default: int-quantized for 8 bits per row, tensor or block, pack-quantized otherwise.
        shard_size: the most bytes per file, unless a single tensor is larger.
        activations: whether to write how the layers of a module quantize their inputs, with static scales:
            input_activations of the configuration. Otherwise other tools leave them in floats.

    Raises:
        TypeError: an argument has the wrong type.
        FileExistsError: the folder has safetensors, perhaps from another process.
        OSError: the disk is full, or a file cannot be written.
        ValueError: the format cannot represent a tensor (the message gives the reason), or a quantized tensor's name is
            not a weight's. Nothing is written then.
    """
    place, state = _checked(folder, tensors, config, integers, shard_size)
    inputs = _inputs(tensors, state, activations)
    configuration = _config(place, tensors, config)
    planned = [  # keeps one tensor alive at a time
        _plan_tensor(name, state[name], integers)._replace(input_args=inputs.get(name)) for name in state
    ]
    _check_orders([p for p in planned if p.format], state)
    shards, places = _shards(planned, shard_size), dict[str, str]()
    with whole_folder(place, lambda: _check_folder(place), first=(_CONFIG, _INDEX)) as staged:
        for i, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
            entries = [e for p in shard for e in p.entries]
            places |= dict.fromkeys((e.name for e in entries), name)
            with writer(staged / name, entries, {"format": "pt"}) as file:
                for each in shard:
                    _write(file, each, state[each.name], integers)
        if len(shards) > 1:
            total = sum(p.bytes for p in planned)
            write_whole(staged / _INDEX, _json({"metadata": {"total_size": total}, "weight_map": places}))
        write_whole(staged / _CONFIG, _json({**configuration, "quantization_config": _quantization(planned)}))


def _checked(
    folder: object, tensors: object, config: object, integers: object, size: object
) -> tuple[Path, Mapping[str, Tensor]]:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{_CALLER}: folder must be text or a Path, got {shown(folder)}; give one such as 'model'")
    if not isinstance(tensors, Mapping | nn.Module):
        raise TypeError(f"{_CALLER}: tensors must be a mapping or a module, got {shown(tensors)}; give one of them")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"{_CALLER}: config must be a mapping or None, got {shown(config)}; give such a dict")
    if integers not in (None, *INTEGERS):
        raise ValueError(f"{_CALLER}: integers must be one of {INTEGERS} or None, got {integers!r}; take one of them")
    if type(size) is not int or size < 1:
        raise ValueError(f"{_CALLER}: shard_size must be a number of bytes, got {size!r}; give one such as 10**9")
    place = Path(cast("str | os.PathLike[str]", folder))
    _check_folder(place)
    return place, _module_tensors(tensors) if isinstance(tensors, nn.Module) else cast("Mapping[str, Tensor]", tensors)


def _check_folder(place: Path) -> None:
    if any(place.glob("*.safetensors")) or (place / _INDEX).exists():
        raise FileExistsError(f"{_CALLER}: folder {place} has safetensors already; give another one, or remove them")


def _module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and buffers, each once, under its first name."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in cast("Mapping[str, Any]", module.state_dict(keep_vars=True)).items():
        if isinstance(tensor, Tensor):
            weights.setdefault(id(tensor), (name, tensor))
    return dict(weights.values())


def _config(place: Path, tensors: Any, config: Mapping[str, Any] | None) -> JsonObject:
    """The content of config.json without a quantization_config."""
    config_of: Any = getattr(tensors, "config", None)
    if config is not None:
        configuration: Any = dict(config)
    elif isinstance(tensors, nn.Module) and hasattr(config_of, "to_dict"):
        configuration = config_of.to_dict()
        configuration["architectures"] = configuration.get("architectures") or [type(tensors).__name__]
    else:
        file = place / _CONFIG
        configuration = from_json(file.read_bytes(), str(file)) if file.is_file() else {}
    configuration = {key: value for key, value in configuration.items() if key != "quantization_config"}
    try:
        json.dumps(configuration)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_CALLER}: config must be what JSON has: {error}; give such values") from error
    return configuration


# ---- the tensors


def _plan_tensor(name: object, tensor: object, integers: str | None) -> _PlannedTensor:
    if not isinstance(name, str):
        raise TypeError(f"{_CALLER}: names of tensors must be text, got {name!r}; rename it")
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise TypeError(f"{_CALLER}: tensors[{name!r}] must be a tensor with data, got {shown(tensor)}; load it first")
    if not isinstance(tensor, QuantizedTensor):
        if tensor.dtype not in NAMES:
            raise ValueError(f"{_CALLER}: tensors[{name!r}] is {tensor.dtype}, which safetensors lacks; convert it")
        return _PlannedTensor(name, (Entry(name, tensor.dtype, tuple(tensor.shape), 0, 0),))
    start, _, end = name.rpartition(".")
    if end != "weight" or not start:
        raise ValueError(
            f"{_CALLER}: tensors[{name!r}] is quantized, so its name must be a module's weight, such as 'a.weight': "
            "rename it, or dequantize it"
        )
    form = _form(name, tensor, integers)
    entries = (Entry(f"{start}.{e}", dtype, shape, 0, 0) for e, (dtype, shape) in form.entries.items())
    return _PlannedTensor(name, tuple(entries), form.format, form.args)


def _form(name: str, tensor: QuantizedTensor, integers: str | None) -> Form:
    try:
        return storage_form(tensor, integers)
    except ValueError as error:
        raise ValueError(
            f"{_CALLER}: tensors[{name!r}] cannot be stored in compressed-tensors: {error}; quantize it differently "
            "or dequantize it"
        ) from error


def _check_orders(quantized: Sequence[_PlannedTensor], state: Mapping[str, Tensor]) -> None:
    for each in quantized:
        if f"{each.name.removesuffix('weight')}input_order" in state:
            raise ValueError(
                f"{_CALLER}: tensors[{each.name!r}] has permuted columns (input_order), which the package "
                "no longer supports; dequantize the layer"
            )


def _shards(planned: Sequence[_PlannedTensor], size: int) -> list[list[_PlannedTensor]]:
    shards: list[list[_PlannedTensor]] = [[]]
    for each in planned:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + each.bytes > size:
            shards.append([])
        shards[-1].append(each)
    return shards


def _inputs(tensors: Any, state: Any, activations: Any) -> dict[str, JsonObject]:
    """The arguments of activations by the weight's name; their static scales are renamed in `state`."""
    if not isinstance(activations, bool) or (activations and not isinstance(tensors, nn.Module)):
        raise TypeError(
            f"{_CALLER}: activations must be True or False, and True for a module alone, got {shown(activations)}; "
            "leave it out"
        )
    result: dict[str, dict[str, object]] = {}
    for name, activation in activations_of(tensors).items() if activations else ():
        if name not in state:
            continue  # a tied weight, written under its first name
        start = name.removesuffix("weight")
        try:
            result[name], small = input_args(activation)
        except ValueError as error:
            raise ValueError(
                f"{_CALLER}: the layer {start[:-1]!r} cannot be stored in compressed-tensors: {error}; quantize it "
                "differently, or give activations=False"
            ) from error
        for end in ("scale", "zero_point"):
            state.pop(f"{start}scales.input.{end}", None)
        state |= {start + end: tensor for end, tensor in small.items()}
    return result


def _write(writer: Writer, each: _PlannedTensor, tensor: Tensor, integers: str | None) -> None:
    if _plan_tensor(each.name, tensor, integers)._replace(input_args=each.input_args) != each:
        raise ValueError(f"{_CALLER}: tensors[{each.name!r}] changed between its first and its second access")
    if not isinstance(tensor, QuantizedTensor):
        writer.write_rows(each.name, 0, tensor)
        return
    form, start = _form(each.name, tensor, integers), each.name.removesuffix("weight")
    for end, part in form.small.items():
        writer.write_rows(start + end, 0, part)
    for first, part in iterate_rows(tensor, form):
        writer.write_rows(start + form.end, first, part)


def _groups(planned: Sequence[_PlannedTensor]) -> list[tuple[_PlannedTensor, list[str]]]:
    """A weight of each distinct format and arguments, with the modules that use them."""
    groups: dict[str, tuple[_PlannedTensor, list[str]]] = {}
    for each in planned:
        if each.format is not None:
            key = json.dumps([each.format, each.args, each.input_args])
            groups.setdefault(key, (each, []))[1].append(each.name.rpartition(".")[0])
    return list(groups.values())


def _quantization(planned: Sequence[_PlannedTensor]) -> JsonObject:
    groups = _groups(planned)
    formats = {str(one.format) for one, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(formats) > 1 else next(iter(formats), "dense"),
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": [],
        "config_groups": {
            f"group_{i}": {
                "targets": names,
                "weights": dict(one.args),
                "input_activations": one.input_args,
                "output_activations": None,
                "format": one.format,
            }
            for i, (one, names) in enumerate(groups)
        },
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
