"""The model of a GGUF file as quantize_folder reads it: float32 tensors by transformers' names, one at a time."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hop.impls.quantize import dequantize
from hop.integrations import gguf_models, gguf_tensors
from hop.integrations.tokens import load_tokenizer
from hop.interchange import open_gguf
from hop.interchange.safetensors_files import Entry
from hop.numerics.spelling import JsonObject, shown
from hop.tensor import QuantizedTensor


class GGUFModel:
    """A file's model: its class, configuration and constructor options in transformers."""

    def __init__(self, path: Path) -> None:
        self.file = open_gguf(path)
        self.kind = gguf_models.model_of(self.file)
        self.config = gguf_models.config_of(self.file, self.kind)
        self.config.architectures = [self.kind.model_class]
        self.model_class: Any = getattr(transformers, self.kind.model_class)
        self.options = self.kind.options
        self.files = self.file.files

    def described(self) -> JsonObject:
        """The content of config.json."""
        return json.loads(self.config.to_json_string()) | {"dtype": "float32"}

    def header(self, model: Any) -> "GGUFTensors":
        """The tensors for a model on the meta device, without those tied to others."""
        tied = getattr(model, "all_tied_weights_keys", {}) if self.config.tie_word_embeddings else {}
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
        wanted, given = (sum(map(math.prod, s)) for s in (shapes.values(), map(self.file.shape, self.file)))
        if wanted > given:  # before a file of that size is begun
            raise ValueError(
                f"quantize_folder: {self.file.path}: its tensors have {given} elements, and the model by its "
                f"configuration {wanted}; it is incomplete: download it again"
            )
        return GGUFTensors(self, {name: Entry(name, torch.float32, shape, 0, 0) for name, shape in shapes.items()})


class GGUFTensors:
    """The tensors of a model, with the interface of hop.interchange.safetensors_files.Header.

    Attributes:
        path: its name is that of the file to write.
        entries: the tensors by their names in transformers.
    """

    path = Path("model.safetensors")

    def __init__(self, model: GGUFModel, entries: Mapping[str, Entry]) -> None:
        self.model, self.entries = model, entries
        self._current: Tensor | None = None

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    def names(self) -> Iterator[str]:
        """The tensors in the order of the file; `rows` reads the last one.

        Raises ValueError for a tensor that is missing, superfluous, or has another shape than in the model.
        """
        missing, path = set(self.entries), self.model.file.path
        for name, tensor in gguf_tensors.tensors_of(self.model.file, self.model.kind.layout, self.model.config):
            if name not in missing or tuple(tensor.shape) != self.entries[name].shape:
                wanted = self.entries[name].shape if name in self.entries else "no such tensor"
                raise ValueError(
                    f"quantize_folder: {path}: tensor {shown(name)} has shape {tuple(tensor.shape)}, and the model by "
                    f"its configuration has {wanted}; convert the model again"
                )
            missing.discard(name)
            self._current = tensor
            yield name
        if missing:
            raise ValueError(
                f"quantize_folder: {path}: missing tensors of the model: {shown(sorted(missing))}; download it again"
            )

    def rows(self, entry: Entry, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of the current tensor."""
        assert self._current is not None
        part = self._current[first:last] if self._current.dim() else self._current
        return (dequantize(part) if isinstance(part, QuantizedTensor) else part).to(torch.float32)

    def raw(self, entry: Entry) -> Iterator[tuple[int, Tensor]]:
        """The bytes of the current tensor, some rows at a time, each with its offset in the tensor."""
        rows = entry.shape[0] if entry.shape else 1
        step = max(2**22 * rows // max(entry.bytes // 4, 1), 1)
        for first in range(0, rows, step):
            data = self.rows(entry, first, min(first + step, rows)).contiguous().flatten().view(torch.uint8)
            yield first * (entry.bytes // rows), data


def save_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file to a folder, if the file has one."""
    if "tokenizer.ggml.tokens" in open_gguf(path).metadata:
        load_tokenizer(path).save_pretrained(folder)
