"""Programs of integers as .tosa files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.tflite.model import Writer
from hop.export.targets.tflite.steps import Step
from hop.export.targets.tflite.values import Order
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.operators import WRITTEN
from hop.export.targets.tosa.views import padded


@dataclass(frozen=True)
class TosaModel:
    """A .tosa file.

    Args:
        buffer: its bytes.
        tensors: for each node of the program that holds codes, the name of the file's tensor and which dimension of the
            node's each of its dimensions is; (0, 2, 3, 1) has channels last.
    """

    buffer: bytes
    tensors: Mapping[str, tuple[str, Order]] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_bytes(self.buffer)


def to_tosa(program: ExportedProgram) -> TosaModel:
    """A program that `to_integer(program, target=hop.export.targets.TOSA_1_0)` gave, or `TOSA_1_0_INT16` of activations
    of 16 bits, as a file of TOSA 1.0, whose operators give the same codes.

    Inputs and outputs of the file are the codes of those of the program; TOSA keeps no scales. Sizes are static.

    Raises:
        ImportError: ExecuTorch is not installed, whose wheel has the schema.
        TypeError: `program` is no ExportedProgram.
        NotImplementedError: a node is no operator on codes of int8 or int16, or one that has no form in TOSA, or its
            convention is not TOSA's. It is named.
    """
    check_program(program, "to_tosa")
    return _Writer(program).written()


class _Writer(Writer):
    caller, runtime = "to_tosa", "TOSA"
    written_families: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN

    def new_file(self) -> Any:
        return File()

    def padded(self, step: Step) -> None:
        padded(step)

    def model(self, buffer: bytes, tensors: Mapping[str, tuple[str, Order]]) -> TosaModel:
        return TosaModel(buffer, tensors)
