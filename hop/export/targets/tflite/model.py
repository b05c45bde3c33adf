"""to_tflite."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch.export import ExportedProgram

from hop.dispatch.operators import Family
from hop.export.rewrite.program import check_program
from hop.export.targets.integer.model import Model
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.writer import Writer
from hop.export.targets.tflite.file import File
from hop.export.targets.tflite.operators import WRITTEN
from hop.export.targets.tflite.views import padded


class TfliteModel(Model):
    """A .tflite file.

    Args:
        buffer: its bytes.
        tensors: for each node of the program with codes, the name of the file's tensor, and which of the node's
            dimensions each of its dimensions is; (0, 2, 3, 1) has channels last.
    """


def to_tflite(program: ExportedProgram) -> TfliteModel:
    """Convert an integer program to a .tflite file whose reference kernels return the same codes.

    The file's inputs and outputs are the codes of the program's, with their scales and zero points, named in the
    signature `serving_default`. Sizes are static.

    Args:
        program: from `to_integer` with `target=hop.export.targets.TFLITE` (int8), or with `TFLITE_16X8` (int16
            activations and int8 weights).

    Raises:
        ImportError: LiteRT is not installed.
        TypeError: `program` is not an ExportedProgram.
        NotImplementedError: a node is not an operator on int8 or int16 codes, or has no counterpart in TFLite; the
            message names it.
    """
    check_program(program, "to_tflite")
    return _Writer(program, File()).written()


class _Writer(Writer):
    caller, runtime, model = "to_tflite", "TFLite", TfliteModel
    converters: ClassVar[Mapping[Family, Callable[[Step], None]]] = WRITTEN
    padded = staticmethod(padded)
