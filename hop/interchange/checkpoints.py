"""Read other tools' safetensors checkpoints according to the quantization_config in config.json.

    for name, tensor in hop.interchange.open_checkpoint("folder").items():
        ...

A quantized weight becomes a QuantizedTensor with the values that the tool which wrote it computes; other tensors are
unchanged. Files are memory-mapped, and a tensor is read on access, without materializing the weight in floats.

Needs the package `safetensors`: pip install 'torch-hop[safetensors]'.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hop.interchange import compressed_tensors, float_checkpoints, gptq, torch_files, torchao_files
from hop.interchange.compressed_activations import (
    SCALE,
    ZERO_POINT,
    Activation,
    args_for,
    read_activation,
    read_modelopt_activation,
)
from hop.interchange.files import checked_path
from hop.interchange.packed import Config, Parts, Weight
from hop.numerics.spelling import JsonObject, from_json, shown
from hop.tensor.storage import read_tensor

__all__ = ["Checkpoint", "open_checkpoint"]


class WeightKind(NamedTuple):
    """A way to store a weight: the suffixes of its tensors' names after a common prefix."""

    needs: tuple[str, ...]  # required suffixes
    may: tuple[str, ...]  # optional suffixes
    result: str  # the suffix of the weight's name
    read: Callable[[Parts, Config], Weight]


_METHODS: dict[str, tuple[WeightKind, ...]] = {
    "compressed-tensors": (
        WeightKind(
            ("weight_packed", "weight_scale"),
            ("weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx"),
            "weight",
            compressed_tensors.read_packed,
        ),
        WeightKind(("weight", "weight_scale"), ("weight_zero_point",), "weight", compressed_tensors.read_plain),
    ),
    "fp8": (WeightKind(("", "_scale_inv"), (), "", float_checkpoints.read_fp8_blocks),),
    "gptq": (WeightKind(("qweight", "scales"), ("qzeros", "g_idx"), "weight", gptq.read_gptq),),
    "auto-round": (WeightKind(("qweight", "scales"), ("qzeros", "g_idx"), "weight", gptq.read_auto_round),),
    "awq": (
        WeightKind(("qweight", "scales", "scaled_zeros"), (), "weight", gptq.read_llm_awq),
        WeightKind(("qweight", "scales"), ("qzeros",), "weight", gptq.read_awq),
    ),
    "modelopt": (
        WeightKind(("weight", "weight_scale_2"), ("weight_scale",), "weight", float_checkpoints.read_nvfp4),
        WeightKind(("weight", "weight_scale"), (), "weight", float_checkpoints.read_fp8),
        WeightKind(("", "_weight_scale", "_weight_scale_2"), (), "", float_checkpoints.read_stacked_nvfp4),
        WeightKind(("", "_weight_scale"), (), "", float_checkpoints.read_stacked_fp8),
        WeightKind(("", "_scale_inv"), (), "", float_checkpoints.read_fp8_blocks),
    ),
    "mxfp4": (WeightKind(("_blocks", "_scales"), (), "", float_checkpoints.read_mxfp4),),
    "bitsandbytes": (
        WeightKind(
            ("", ".quant_state.bitsandbytes__nf4"),
            (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
            "",
            float_checkpoints.read_nf4,
        ),
        WeightKind(("weight", "SCB"), ("weight_format",), "weight", float_checkpoints.read_int8),
    ),
    "torchao": (WeightKind(("_qdata",), torchao_files.OPTIONAL, "", torchao_files.read),),
}
"""The kinds of each quant_method."""

_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8")
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32")  # safetensors' names of the dtypes of codes
_SCALES = re.compile(r"[._](\w*_)?(scales?|zero_points?|absmax|quant_map|quant_state)(?![a-z])")  # after codes
_SCALES_OF_MODULES = ("scales", "qzeros", "SCB", "weight_scale", "weight_scale_inv", "scale")


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read on access.

    Attributes:
        path: the file or folder, which must not change while this object is in use.
        config: its quantization_config; empty if it has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = path if path.is_dir() else path.parent
        model = from_json(_text(folder / "config.json"), str(folder / "config.json"))
        self.config = _quantization(folder, model)
        files, listed = _files(path)
        self._files: dict[str, Any] = {}
        for file in files:
            opened = _opened(file)
            for name in opened.keys():  # noqa: SIM118  safe_open is not iterable
                if name in self._files:
                    raise ValueError(f"{path}: tensor {shown(name)} is in two files; leave one out")
                self._files[name] = opened
        for name in listed:
            if name not in self._files:
                raise ValueError(
                    f"{path}: the index lists tensor {shown(name)}, which no file has; download them again"
                )
        self._indexed = compressed_tensors.with_target_sets(self.config, path)
        if self.config.get("quant_method", "torchao") == "torchao":
            self._add_torchao()
        self._kinds = _weights_of_kinds(self._files, self._methods(self.config))
        if torchao_files.TENSORS in self._indexed:
            self._kinds = {torchao_files.parameter_name(name): kind for name, kind in self._kinds.items()}
        taken = {name for _, parts in self._kinds.values() for name in parts.values()}
        self._sorted = sorted(self._files)
        self._names = dict.fromkeys([*self._kinds, *(name for name in self._files if name not in taken)])

    def _add_torchao(self) -> None:
        """Add torchao's metadata in the files, which name the method also without a config.json."""
        tensors = torchao_files.metadata_of(dict.fromkeys(self._files.values()), self.path)
        if tensors or self.config:
            self.config = {"quant_method": "torchao", **self.config}
            self._indexed = {**self.config, torchao_files.TENSORS: tensors}

    def _methods(self, config: Config) -> Iterable[WeightKind]:
        method: Any = config.get("quant_method")
        if not config:
            return ()
        method = "modelopt" if method in _MODELOPT else method
        if not isinstance(method, str) or method not in _METHODS:
            raise ValueError(
                f"{self.path}: the quant_method of config.json is {shown(method)}; those that are read are "
                f"{', '.join(_METHODS)}"
            )
        return _METHODS[method]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kinds:
            return self._read(name).tensor
        if name in self._files and (scale := self._scale_of(name)) is not None:
            raise ValueError(
                f"{self.path}: tensor {shown(name)} would be read as codes without their scale, {shown(scale)}: "
                f"quant_method of config.json is {shown(self.config.get('quant_method'))}, whose weights have no such "
                "scale; name the method that wrote them"
            )
        return self._plain(name)

    def _scale_of(self, name: str) -> str | None:
        """The name of a tensor that scales the codes in `name`; None if they are not codes or there is none."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _CODES:
            return None
        module, dot, leaf = name.rpartition(".")
        if leaf in ("weight", "qweight", "weight_packed"):
            for end in _SCALES_OF_MODULES:
                if (scale := module + dot + end) in self._names:
                    return scale
        if dtype == "I16":  # codes in words of 16 bits have one of these names
            return None
        at = bisect_right(self._sorted, name)
        while at < len(self._sorted) and self._sorted[at].startswith(name):
            if _SCALES.match(self._sorted[at], len(name)):
                return self._sorted[at]
            at += 1
        return None

    def permutation(self, name: str) -> Tensor | None:
        """The file's column of each column of a weight whose columns were sorted by group; None for other weights.

        With p = permutation(name), the file's x @ W.T is x[..., p] @ w.T of the tensor that was read, and W is
        w.dequantize()[:, argsort(p)].
        """
        _, names = self._kinds.get(name, (None, {}))
        return self._read(name).permutation if any(end.endswith("g_idx") for end in names) else None

    def activation(self, name: str) -> Activation | None:
        """How the input of a weight's layer is quantized, by compressed-tensors' configuration or the input_scale of
        ModelOpt's fp8; None if it is not.

        Raises ValueError if this library has no such quantizer, or its static scale is missing.
        """
        method: Any = self.config.get("quant_method")
        if method not in ("compressed-tensors", *_MODELOPT) or name not in self._kinds:
            return None
        start = name.removesuffix("weight")
        names = {end: start + end for end in (SCALE, ZERO_POINT) if start + end in self._files}
        parts = Parts(name, {end: self._plain(each) for end, each in names.items()})
        try:
            if method in _MODELOPT:
                return read_modelopt_activation(parts, is_nvfp4="weight_scale_2" in self._kinds[name][1])
            args = args_for(parts, compressed_tensors.groups_for(parts, self._indexed))
            return None if args is None else read_activation(parts, args)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _read(self, name: str) -> Weight:
        kind, names = self._kinds[name]
        try:
            return kind.read(Parts(name, {end: self._plain(each) for end, each in names.items()}), self._indexed)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _plain(self, name: str) -> Tensor:
        return read_tensor(self._files[name], name, str(self.path))

    def __contains__(self, name: object) -> bool:  # Mapping's version reads the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors)"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a safetensors checkpoint, whose tensors are read one by one.

    Args:
        path: a folder with config.json and one or several safetensors files, or one such file next to its config.json.
            A file of torch.save (.pt or .pth, such as llm-awq's) is read with weights_only=True.

    Returns:
        A mapping from names to tensors: quantized weights as QuantizedTensors that appear in the dtype to which their
            tool dequantizes them, others unchanged, in private copy-on-write memory.

    Raises:
        TypeError: path is not a path.
        FileNotFoundError: the file or folder does not exist, or has no safetensors.
        ImportError: safetensors is not installed.
        ValueError: a file is damaged or truncated, or the quantization method is not supported; on access, the parts of
            a tensor do not fit together (the message names it).
    """
    return Checkpoint(checked_path("open_checkpoint", path, "folder"))


def _text(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b"{}"


def _quantization(folder: Path, model: JsonObject) -> JsonObject:
    """The quantization_config of a model."""
    text: Any = model.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    quantization: Any = model.get("quantization_config") or inner
    if not quantization and (modelopt := folder / "hf_quant_config.json").is_file():  # written by ModelOpt
        quantization = {"quant_method": "modelopt", "hf_quant_config": from_json(modelopt.read_bytes(), str(modelopt))}
    quantization = quantization or {}
    if not isinstance(quantization, dict):
        raise ValueError(f"{folder / 'config.json'}: quantization_config must be an object, got {shown(quantization)}")
    return quantization


def _files(path: Path) -> tuple[list[Path], Iterable[str]]:
    """The files of a checkpoint, and the tensor names in its index."""
    if path.is_file():
        return [path], ()
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"open_checkpoint: {path} has no files *.safetensors; give a folder that has")
        return files, ()
    weight_map: Any = from_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: weight_map must map names to files in the same folder, got {shown(weight_map)}")
    places = weight_map
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
            raise ValueError(
                f"{index}: weight_map must map names to files in the same folder, but {shown(name)} is in {shown(file)}"
            )
    return [path / file for file in sorted(set(places.values()))], places


def _opened(file: Path) -> Any:
    if file.suffix in torch_files.SUFFIXES:
        return torch_files.TorchFile(file)
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "hop.interchange.open_checkpoint needs the package safetensors: pip install 'torch-hop[safetensors]'"
        ) from error
    try:
        return safetensors.safe_open(str(file), "pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {shown(error)}") from error


def _weights_of_kinds(
    names: Mapping[str, Any], kinds: Iterable[WeightKind]
) -> dict[str, tuple[WeightKind, dict[str, str]]]:
    """The weights of these kinds by name, each with its tensors' names by suffix."""
    weights: dict[str, tuple[WeightKind, dict[str, str]]] = {}
    for kind in kinds:
        for name in names:
            start = name.removesuffix(kind.needs[0])
            if start + kind.needs[0] == name and all(start + end in names for end in kind.needs):
                suffixes = [end for end in (*kind.needs, *kind.may) if start + end in names]
                weights.setdefault(start + kind.result, (kind, {end: start + end for end in suffixes}))
    return weights
