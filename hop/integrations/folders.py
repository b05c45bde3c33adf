"""quantize_folder: quantize a transformers checkpoint, or the model of a GGUF file, with little memory.

    OUT/hop_quantize.json      written first: the inputs and the settings; a later run continues if they are the same
    OUT/.hop-...               a file in progress (hop.compat.files), renamed to x.safetensors once complete
    OUT/...                    tokenizer and other files, and the index
    OUT/config.json            written last

So an interrupted run leaves a folder without config.json, which the next run completes. If several runs start at once,
one writes hop_quantize.json; those with the same settings continue and write identical files; others raise.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hop.compat.files import is_temporary, naming, whole_file, write_whole
from hop.impls.quantize import dequantize, quantize_weight
from hop.integrations import model_folders
from hop.integrations.config import HopConfig
from hop.integrations.gguf_folders import GGUFModel, GGUFTensors, save_tokenizer
from hop.integrations.places import weight_of
from hop.integrations.quantizer import HopQuantizer
from hop.interchange.files import checked_path
from hop.interchange.safetensors_files import Entry, Header, Writer, read_header, writer
from hop.nn.layers.base import Layer
from hop.nn.models.conversion import Rules
from hop.nn.models.exact import check_layers
from hop.nn.models.report import Report
from hop.nn.weights.holders import Weight
from hop.numerics import blocks
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import JsonObject, from_json, shown
from hop.tensor.proto import TensorProto

_RECORD, _INDEX, _CONFIG = "hop_quantize.json", "model.safetensors.index.json", "config.json"
_AT_ONCE = 2**22  # elements to quantize at a time, if scales do not span all rows


def quantize_folder(
    folder: str | Path,
    out: str | Path,
    scheme: Rules,
    *,
    modules_to_not_convert: Sequence[str] | None = None,
    exact: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Quantize a transformers checkpoint, or the model of a GGUF file, into another folder, tensor by tensor.

    The result equals what `from_pretrained(folder, quantization_config=HopConfig(scheme))` would save, but the model is
    never in memory: a tensor is read, quantized and written some rows at a time, or whole if its scales span all rows.
    Each file of the folder becomes one file. If interrupted, it leaves a folder without config.json, and the same call
    resumes without repeating finished files.

    A GGUF file, with an architecture that `load_model` reads, is dequantized to float32 and quantized anew, which adds
    to the error of its types; its tokenizer is converted.

    Args:
        folder: a folder with config.json and float safetensors; or a GGUF file, the first of a split model.
        out: a folder to create, or one that an interrupted call left.
        scheme, modules_to_not_convert, exact: as for `HopConfig`.
        progress: called after each tensor with its name, the bytes read so far and the total bytes.

    Returns:
        A report with a row per layer: its scheme, or the reason why it has none; its bytes; and the error of its
            weight, unless an earlier call wrote it.

    Raises:
        TypeError: an argument has the wrong type.
        FileNotFoundError: folder has no config.json or no safetensors.
        FileExistsError: out has other files, or was started with another folder, scheme or file versions.
        ValueError: folder is already quantized or damaged; HopConfig rejects the scheme; or exact=True, and a layer
            would stay in floats.
    """
    source, target = checked_path("quantize_folder", folder, "model"), Path(os.fspath(out))
    config = HopConfig(scheme, modules_to_not_convert=modules_to_not_convert, exact=exact)
    if source.is_file():
        gguf = GGUFModel(source)
        model = model_folders.on_meta("quantize_folder", source, gguf.model_class, gguf.config, gguf.options)
        headers: list[Header | GGUFTensors] = [gguf.header(model)]  # which checks the sizes before layers are converted
        model_config, files = gguf.described(), gguf.files
    else:
        model_config = _model_config(source)
        tensors = sum(len(read_header(file).entries) for file in source.glob("*.safetensors"))
        model_folders.check_numbers("quantize_folder", source, model_config, tensors)
        model = model_folders.on_meta("quantize_folder", source, *_class(source), {})
        headers = [read_header(file) for file in _files(source)]
        _check_sizes(source, model, [entry for header in headers for entry in header.entries.values()])
        files = [header.path for header in headers]
    config = _convert(model, config)
    _begin(target, source, config, files)
    total, done = sum(h.bytes for h in headers), 0
    places: dict[str, str] = {}
    measured: list[_PlannedTensor] = []
    for header in headers:
        new = target / header.path.name
        planned = {entry.name: _PlannedTensor(entry, model) for entry in header.entries.values()}
        places |= {name: new.name for tensor in planned.values() for name in tensor.written}
        measured += planned.values()
        if new.exists():
            done += header.bytes
            continue
        written = [e for t in planned.values() for e in t.written.values()]
        with writer(new, written, _file_metadata(planned.values())) as file:
            for name in header.names():
                planned[name].write(header, file)
                done += planned[name].entry.bytes
                if progress is not None:
                    progress(name, done, total)
    if source.is_file():
        save_tokenizer(source, target)
    _finish(source, target, places, {**model_config, "quantization_config": config.to_dict()})
    report = model.hop_report
    assert isinstance(report, Report)
    return _measured(report, measured)


def _measured(report: Report, tensors: Iterable["_PlannedTensor"]) -> Report:
    """The report with the bytes of each row's tensors, and the errors of its weights."""
    rows = {row.name: row for row in report.rows}
    sizes, errors = dict.fromkeys(rows, 0), {name: [0.0, 0.0] for name in rows}
    for tensor in tensors:
        name = tensor.name
        while name and name not in rows:
            name = name.rpartition(".")[0]
        if name in rows:
            sizes[name] += sum(entry.bytes for entry in tensor.written.values())
            errors[name] = [a + b for a, b in zip(errors[name], tensor.squares, strict=True)]
    ratios = {name: (error / of) ** 0.5 if of else None for name, (error, of) in errors.items()}
    return replace(report, rows=tuple(replace(r, bytes=sizes[r.name], error=ratios[r.name]) for r in report.rows))


def _model_config(source: Path) -> JsonObject:
    config = model_folders.read_config("quantize_folder", source)
    if config.get("quantization_config"):
        raise ValueError(f"quantize_folder: {source} is quantized already; give the folder of the float model")
    return config


def _class(source: Path) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of a folder's model, and its configuration."""
    own = model_folders.transformers_config("quantize_folder", source)
    named = (own.architectures or ["none"])[0]
    model_class = model_folders.model_class(own, named)
    if model_class is None or not issubclass(model_class, transformers.PreTrainedModel):
        raise ValueError(
            f"quantize_folder: {source}: architectures of config.json must name a model of transformers, got "
            f"{shown(named)}; give one of model_type {own.model_type!r}"
        )
    return model_class, own


def _check_sizes(source: Path, model: PreTrainedModel, entries: Sequence[Entry]) -> None:
    """Raise ValueError if the model's tensors that the files lack, or have in other shapes, are larger than the files:
    the conversion of a layer takes time and memory by its size in the configuration.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    for entry in entries:
        for name in _names_in(model, entry.name):
            if shapes.get(name) == entry.shape:
                del shapes[name]
    lacking = {name: math.prod(shape) for name, shape in shapes.items()}
    given = sum(math.prod(entry.shape) for entry in entries)
    for entry in entries:
        if 0 in entry.shape:
            raise ValueError(
                f"quantize_folder: {source}: tensor {shown(entry.name)} has shape {entry.shape}, and must have elements"
                "; download the folder again"
            )
    if sum(lacking.values()) > given:
        name = max(lacking, key=lambda name: lacking[name])
        raise ValueError(
            f"quantize_folder: {source}: the files have {given} elements, and the model by config.json has "
            f"{sum(lacking.values())} that are in none of them, such as {shown(name)} of shape {shapes[name]}; "
            "download the folder again"
        )


def _names_in(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """The names that a tensor of a file may have in the model."""
    prefix = f"{model.base_model_prefix}."
    return name, prefix + name, name.removeprefix(prefix)


def _convert(model: PreTrainedModel, config: HopConfig) -> HopConfig:
    """Convert the model's layers. Returns the configuration with the rules that apply to it."""
    quantizer = HopQuantizer(config, pre_quantized=False)
    quantizer.validate_environment()
    quantizer._process_model_before_weight_loading(model)
    if config.exact:
        remedy = "give them an integer scheme, and modules_to_not_convert=[]"
        check_layers("quantize_folder", model, lambda name, module: isinstance(module, Layer), remedy)
    return quantizer.quantization_config


def _files(source: Path) -> list[Path]:
    index = source / _INDEX
    if index.is_file():
        names = from_json(index.read_bytes(), str(index)).get("weight_map")
        listed = sorted(set(names.values())) if isinstance(names, dict) else []
        if not listed or any(not isinstance(n, str) or Path(n).name != n for n in listed):
            raise ValueError(f"quantize_folder: {index}: weight_map must map names to files in the same folder")
        return [source / name for name in listed]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"quantize_folder: {source} has no files *.safetensors; save the model in that format first"
        )
    return files


def _begin(target: Path, source: Path, config: HopConfig, paths: Sequence[Path]) -> None:
    """Write the record of inputs and settings, or check that an existing one is the same."""
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    wanted = {"folder": str(source.resolve()), "files": files, "quantization_config": config.to_dict()}
    record = target / _RECORD
    with naming(target):
        target.mkdir(parents=True, exist_ok=True)
    names = os.listdir(target)
    if _RECORD not in names:
        if not all(map(is_temporary, names)):
            raise FileExistsError(f"quantize_folder: {target} holds other files; give a folder that is new or empty")
        with (
            suppress(FileExistsError),
            whole_file(record, replace=False) as file,
        ):  # of concurrent calls, only one writes it
            file.write(_json(wanted))
    if from_json(record.read_bytes(), f"quantize_folder: {record}") != json.loads(json.dumps(wanted)):
        raise FileExistsError(
            f"quantize_folder: {target} was started with another folder, other files or another scheme, see {record}; "
            "give another one"
        )


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _finish(source: Path, target: Path, places: dict[str, str], config: JsonObject) -> None:
    for path in source.iterdir() if source.is_dir() else ():
        is_weights = path.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
        if path.is_file() and not is_weights and path.name not in (_CONFIG, _INDEX):
            with path.open("rb") as file, whole_file(target / path.name) as copy:
                shutil.copyfileobj(file, copy)
    if len(set(places.values())) > 1:
        size = sum((target / name).stat().st_size for name in set(places.values()))
        write_whole(target / _INDEX, _json({"metadata": {"total_size": size}, "weight_map": places}))
    write_whole(target / _CONFIG, _json(config))


class _PlannedTensor:
    """A tensor of the folder, and the entries to write for it."""

    def __init__(self, entry: Entry, model: PreTrainedModel) -> None:
        self.entry = entry
        self.name, layer = _layer(model, entry)  # its name in the model
        self.quantizer = None if layer is None else layer.frozen_quantizer()
        self.signed = layer is not None and layer.signed_scales()
        self.squares = [0.0, 0.0]  # sums of squares of errors and of values
        self.written = {entry.name: entry}
        if self.quantizer is not None:
            proto = TensorProto(entry.shape, entry.dtype, quantizer=self.quantizer)
            names = [f"{entry.name}:{b.name}" for b in proto.buffers()]
            pairs = zip(names, proto.buffers(), strict=True)
            self.written = {name: Entry(name, b.dtype, tuple(b.shape), 0, 0) for name, b in pairs}

    def write(self, header: Header | GGUFTensors, writer: Writer) -> None:
        if self.quantizer is None:
            for start, part in header.raw(self.entry):
                writer.write(self.entry.name, start, part)
            return
        for first, last in self._rows(self.quantizer):
            floats = header.rows(self.entry, first, last)
            weight = quantize_weight(self.quantizer, floats, signed=self.signed)
            self._measure(floats, weight)
            for name, data in weight.buffers().items():
                key = f"{self.entry.name}:{name}"
                rows, whole = data.shape[0], self.written[key].shape[0]
                at = 0 if rows == whole else first * whole // self.entry.shape[0]
                writer.write_rows(key, at, data)

    def _measure(self, floats: Tensor, weight: Tensor) -> None:
        flat, rounded = floats.reshape(-1), dequantize(weight).reshape(-1)
        for start in range(0, flat.numel(), _AT_ONCE):
            x = flat[start : start + _AT_ONCE].double()
            self.squares[0] += float((rounded[start : start + _AT_ONCE].double() - x).square().sum())
            self.squares[1] += float(x.square().sum())

    def _rows(self, q: Quantizer) -> Iterator[tuple[int, int]]:
        """The ranges of rows to quantize at a time; all rows unless every scale covers only some."""
        rows, *rest = self.entry.shape
        units = {blocks.per_dimension(block, len(self.entry.shape))[0] for _, block in q.stored().values()}
        size = max(_AT_ONCE // max(torch.Size(rest).numel(), 1), 1)
        if -1 in units or q.flat:
            size = rows
        else:
            most = max(units, default=1)
            size = -(-size // most) * most
            size = rows if any(most % u for u in units) or rows % most else size
        return ((first, min(first + size, rows)) for first in range(0, rows, size))


def _layer(model: PreTrainedModel, entry: Entry) -> tuple[str, Layer | Weight | None]:
    """The name of a tensor in the model, and the layer that quantizes it; None if it stays in floats."""
    for name in _names_in(model, entry.name):
        try:
            layer = weight_of(model, name)
        except AttributeError:  # no module of that name
            continue
        if layer is None:
            continue
        if tuple(layer.weight.shape) != entry.shape or not entry.dtype.is_floating_point:
            raise ValueError(
                f"quantize_folder: tensor {entry.name!r} is {entry.dtype} of {entry.shape}, and the model has floats "
                f"of {tuple(layer.weight.shape)}"
            )
        return name, layer
    return entry.name, None


def _file_metadata(planned: Iterable[_PlannedTensor]) -> dict[str, str]:
    """The metadata of the quantized tensors, for hop.storage.load_file."""
    description = {
        t.entry.name: {
            "quantizer": str(t.quantizer),
            "shape": list(t.entry.shape),
            "dtype": str(t.entry.dtype),
            "usages": ["rowwise"],
        }
        for t in planned
        if t.quantizer is not None
    }
    return {"format": "pt", "hop": json.dumps(description)}
