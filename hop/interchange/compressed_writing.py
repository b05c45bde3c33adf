"""Weights written as compressed-tensors has them: safetensors, and the quantization_config of config.json.

    hop.interchange.save_compressed_tensors("folder", model)

The tools that read such folders, vLLM and transformers among them, run the weights without hop.

Needs the package `safetensors` to be read, and nothing to be written.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from hop.compat.files import whole_folder, write_whole
from hop.interchange.compressed_forms import INTEGERS, Form, form_of, rows_of
from hop.interchange.safetensors_files import NAMES, Entry, Writer, writer
from hop.numerics.spelling import from_json, shown
from hop.tensor import QuantizedTensor

__all__ = ["save_compressed_tensors"]

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_CALLER = "save_compressed_tensors"


class _Planned(NamedTuple):
    """A tensor, and what is written of it."""

    name: str
    entries: tuple[Entry, ...]
    format: str | None = None  # None for a plain one
    args: Mapping[str, Any] = {}

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries)


def save_compressed_tensors(
    folder: str | Path,
    tensors: Mapping[str, Tensor] | nn.Module,
    config: Mapping[str, Any] | None = None,
    *,
    integers: str | None = None,
    shard_size: int = 5 * 10**9,
) -> None:
    """Write tensors to a folder in the format of compressed-tensors, each as it is: codes are never quantized again.

    A QuantizedTensor, the weight of a Linear or an Embedding, becomes what the package decompresses to the very numbers
    of `hop.dequantize`; a plain tensor stays in its dtype:

        integers of 1 to 8 bits, scales by groups, rows, tensor or blocks, with zero points or without
                                                    pack-quantized, or int-quantized
        e4m3, scales by rows, groups, tensor or blocks      float-quantized
        MXFP4, MXFP8                                mxfp4-pack-quantized, mxfp8-quantized
        NVFP4 whose scales a float divides          nvfp4-pack-quantized

    Weights of MX and NVFP4 have bfloat16 when they are read. Scales are written in the dtype that the weight appears in
    where it has their numbers, else in float32, in which the weight then appears. How activations are quantized is not
    written. Each tensor is asked for twice, first for its form, so that a mapping which makes its tensors when they are
    asked for has one of them in memory at a time.

    The files are written to a temporary folder in `folder`, and moved into it together, config.json and the index
    first. Where writing fails, or the process is killed, `folder` has none of them; of several writers to one folder,
    the first to finish succeeds, and the others get FileExistsError.

    Args:
        folder: a folder to make, or one without safetensors.
        tensors: by name, weights as "module.weight"; or a module, of whose parameters and buffers those that are tied
            are written once.
        config: the content of config.json but for quantization_config. None for that of the module, where it has one as
            models of transformers do, else for the config.json that the folder has.
        integers: "pack-quantized" or "int-quantized" for all integers that have both forms: those with symmetric codes,
            and affine ones by rows or groups. None for int-quantized of 8 bits by rows, tensor or blocks.
        shard_size: bytes; one file has at most these, or one tensor.

    Raises:
        TypeError: an argument is of another type.
        FileExistsError: folder has safetensors, which may be another writer's.
        OSError: the disk is full, or a file cannot be written for another reason.
        ValueError: a tensor has no such form, with the reason, or no name that is a weight's. Nothing is written then.
    """
    place, state = _checked(folder, tensors, config, integers, shard_size)
    configuration = _config(place, tensors, config)
    planned = [_planned(name, state[name], integers) for name in state]  # one of them alive at a time
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


def _checked(folder: Any, tensors: Any, config: Any, integers: Any, size: Any) -> tuple[Path, Mapping[str, Tensor]]:
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
    return place, _of_module(tensors) if isinstance(tensors, nn.Module) else cast("Mapping[str, Tensor]", tensors)


def _check_folder(place: Path) -> None:
    if any(place.glob("*.safetensors")) or (place / _INDEX).exists():
        raise FileExistsError(f"{_CALLER}: folder {place} has safetensors already; give another one, or take them out")


def _of_module(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, each once, by the first of its names."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in cast("Mapping[str, Any]", module.state_dict(keep_vars=True)).items():
        if isinstance(tensor, Tensor):
            weights.setdefault(id(tensor), (name, tensor))
    return dict(weights.values())


def _config(place: Path, tensors: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json without a quantization_config."""
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


# ---- what is written


def _planned(name: Any, tensor: Any, integers: str | None) -> _Planned:
    if not isinstance(name, str):
        raise TypeError(f"{_CALLER}: names of tensors must be text, got {name!r}; rename it")
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise TypeError(f"{_CALLER}: tensors[{name!r}] must be a tensor with data, got {shown(tensor)}; load it first")
    if not isinstance(tensor, QuantizedTensor):
        if tensor.dtype not in NAMES:
            raise ValueError(f"{_CALLER}: tensors[{name!r}] is {tensor.dtype}, which safetensors lacks; convert it")
        return _Planned(name, (Entry(name, tensor.dtype, tuple(tensor.shape), 0, 0),))
    start, _, end = name.rpartition(".")
    if end != "weight" or not start:
        raise ValueError(
            f"{_CALLER}: tensors[{name!r}] is quantized, and must be called as a module's weight, such as 'a.weight': "
            "rename it, or dequantize it"
        )
    form = _form(name, tensor, integers)
    entries = (Entry(f"{start}.{e}", dtype, shape, 0, 0) for e, (dtype, shape) in form.entries.items())
    return _Planned(name, tuple(entries), form.format, form.args)


def _form(name: str, tensor: QuantizedTensor, integers: str | None) -> Form:
    try:
        return form_of(tensor, integers)
    except ValueError as error:
        raise ValueError(
            f"{_CALLER}: tensors[{name!r}] has no form in compressed-tensors: {error}; quantize it otherwise, or "
            "dequantize it"
        ) from error


def _check_orders(quantized: Sequence[_Planned], state: Mapping[str, Tensor]) -> None:
    for each in quantized:
        if f"{each.name.removesuffix('weight')}input_order" in state:
            raise ValueError(
                f"{_CALLER}: tensors[{each.name!r}] has columns in an order of their own (input_order), which the "
                "package has not any more; dequantize the layer"
            )


def _shards(planned: Sequence[_Planned], size: int) -> list[list[_Planned]]:
    shards: list[list[_Planned]] = [[]]
    for each in planned:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + each.bytes > size:
            shards.append([])
        shards[-1].append(each)
    return shards


def _write(writer: Writer, each: _Planned, tensor: Tensor, integers: str | None) -> None:
    if _planned(each.name, tensor, integers) != each:
        raise ValueError(f"{_CALLER}: tensors[{each.name!r}] is another tensor than when it was first asked for")
    if not isinstance(tensor, QuantizedTensor):
        writer.write_rows(each.name, 0, tensor)
        return
    form, start = _form(each.name, tensor, integers), each.name.removesuffix("weight")
    for end, part in form.small.items():
        writer.write_rows(start + end, 0, part)
    for first, part in rows_of(tensor, form):
        writer.write_rows(start + form.end, first, part)


def _groups(planned: Sequence[_Planned]) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """The formats and arguments that there are, and the modules of each."""
    groups: dict[str, tuple[str, Mapping[str, Any], list[str]]] = {}
    for each in planned:
        if each.format is not None:
            key = json.dumps([each.format, each.args])
            groups.setdefault(key, (each.format, each.args, []))[2].append(each.name.rpartition(".")[0])
    yield from groups.values()


def _quantization(planned: Sequence[_Planned]) -> dict[str, Any]:
    groups = list(_groups(planned))
    formats = {format for format, _, _ in groups}
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
                "weights": dict(args),
                "input_activations": None,
                "output_activations": None,
                "format": format,
            }
            for i, (format, args, names) in enumerate(groups)
        },
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
