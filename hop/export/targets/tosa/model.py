"""to_tosa."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.integer.model import Model
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.writer import Writer
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.operators import WRITTEN
from hop.export.targets.tosa.views import padded


class TosaModel(Model):
    """A .tosa file.

    Args:
        buffer: its bytes.
        tensors: for each node of the program with codes, the name of the file's tensor, and which of the node's
            dimensions each of its dimensions is; (0, 2, 3, 1) has channels last.
    """


def to_tosa(program: ExportedProgram) -> TosaModel:
    """Convert an integer program to a file of TOSA 1.0 whose operators return the same codes.

    The file's inputs and outputs are the codes of the program's; TOSA has no scales. Sizes are static.

    Args:
        program: from `to_integer` with `target=hop.export.targets.TOSA_1_0`, or with `TOSA_1_0_INT16` (16-bit
            activations).

    Raises:
        ImportError: ExecuTorch, whose wheel has the schema, is not installed.
        TypeError: `program` is not an ExportedProgram.
        NotImplementedError: a node is not an operator on int8 or int16 codes, has no counterpart in TOSA, or has
            another convention; the message names it.
    """
    check_program(program, "to_tosa")
    return _Writer(program, File()).written()


class _Writer(Writer):
    caller, runtime, model = "to_tosa", "TOSA", TosaModel
    converters: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN
    padded = staticmethod(padded)
