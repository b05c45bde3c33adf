"""Shared by targets that write or read files: the file in memory, and unique names."""

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hop.compat.files import write_whole
from hop.numerics.spelling import shown


@dataclass(frozen=True)
class Model:
    """A file: its bytes, and the tensor name and dimension order of each node of the program."""

    buffer: bytes
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_whole(path, self.buffer)


class Names(set[str]):
    """A set of unique names."""

    def free(self, name: str) -> str:
        """Reserve and return `name`, or the first of name_1, name_2, ... that is not taken."""
        unique, n = name, 1
        while unique in self:
            unique, n = f"{name}_{n}", n + 1
        self.add(unique)
        return unique


def content(caller: str, model: object, kind: type[Model], file: str) -> tuple[bytes, str]:
    """The bytes of a model (a `kind`, bytes, or the path of a file), and a name for error messages.

    Args:
        caller: the function's name, for errors.
        file: a description of the file, such as "a .tosa file".

    Raises:
        TypeError: the model has another type.
        OSError: the file does not exist, or cannot be read.
    """
    if isinstance(model, kind):
        return model.buffer, "model"
    if isinstance(model, bytes):
        return model, "model"
    if isinstance(model, str | Path):
        return Path(model).read_bytes(), str(model)
    name = kind.__name__
    raise TypeError(
        f"{caller}: model must be a {name}, the path of {file}, or its bytes, got {shown(model)}; write one with "
        f"hop.export.to_{name.removesuffix('Model').lower()}"
    )


def argument_names(names: Iterable[str]) -> list[str]:
    """Unique argument names from the names in a file."""
    unique, result = Names(["self"]), list[str]()
    for name in names:
        identifier = re.sub(r"\W", "_", name.partition(":")[0], flags=re.ASCII) or "x"
        starts_badly = identifier[0].isdigit() or identifier[0] == "_" or keyword.iskeyword(identifier)
        result.append(unique.free(f"x_{identifier}" if starts_badly else identifier))
    return result
