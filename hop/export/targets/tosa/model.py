"""Programs of integers as .tosa files."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.models import Model
from hop.export.targets.tflite.model import Writer
from hop.export.targets.tflite.steps import Step
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.operators import WRITTEN
from hop.export.targets.tosa.views import padded


class TosaModel(Model):
    """A .tosa file.

    Args:
        buffer: its bytes.
        tensors: for each node of the program that holds codes, the name of the file's tensor and which dimension of the
            node's each of its dimensions is; (0, 2, 3, 1) has channels last.
    """


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
    return _Writer(program, File()).written()


class _Writer(Writer):
    caller, runtime, model = "to_tosa", "TOSA", TosaModel
    written_families: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN
    padded = staticmethod(padded)
