"""What targets share that write the bytes of a file: the file in memory, and the names in one that is in the making."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hop.compat.files import write_whole
from hop.numerics.spelling import shown


@dataclass(frozen=True)
class Model:
    """A file: its bytes, and the names of its tensors and the orders of their dimensions, by nodes of the program."""

    buffer: bytes
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_whole(path, self.buffer)


class Names(set[str]):
    """Names that are taken."""

    def free(self, name: str) -> str:
        """`name`, or the first of name_1, name_2, ... that is not taken. It is from now on."""
        unique, n = name, 1
        while unique in self:
            unique, n = f"{name}_{n}", n + 1
        self.add(unique)
        return unique


def content(caller: str, model: Any, kind: type[Model], file: str) -> tuple[bytes, str]:
    """The bytes of a model (a `kind`, bytes, or the path of a file), and what to call them.

    Args:
        file: what the file is called, such as "a .tosa file".

    Raises:
        TypeError: it is none of these.
        OSError: there is no such file, or it cannot be read.
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
