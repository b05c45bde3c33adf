"""A program and a `.tosa` file, node by node: the program here, the file in TOSA's reference model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop.export.analysis.arguments import Data, parse
from hop.export.golden.reference_model import ReferenceModel
from hop.export.golden.tflite import Beside, TfliteComparison, compared
from hop.export.rewrite.program import check_program
from hop.export.targets.models import content
from hop.export.targets.tflite.reading import FileGraph, FileOperator, FileTensor
from hop.export.targets.tosa.model import TosaModel

_CALLER = "verify_tosa"
_CODES = (torch.int8, torch.int16)


@dataclass(frozen=True)
class TosaComparison(TfliteComparison):
    """What `hop.export.verify_tosa` found: rows of nodes (`a`) and of the file's tensors (`b`), and `trials`, as
    TfliteComparison has them. TOSA keeps no scales: `units` is empty."""


def verify_tosa(program: ExportedProgram, model: Any, inputs: Data) -> TosaComparison:
    """Run a program here and a .tosa file in TOSA's reference model, and compare the codes of what corresponds.

    The file takes the codes that the program makes of its inputs. Nodes and tensors correspond by their names, as
    `to_tosa` gives them; inputs and outputs by their places. Of the first node that differs it is found which
    convention of hop.requantization and hop.integer_functions gives the file's codes.

    The reference model is a program of its own, which the environment variable HOP_TOSA names, or the folder or the
    environment of Python that has it; its package, tosa-tools, pins versions that are not ours.

    Args:
        program: one of `to_integer(program, target=hop.export.targets.TOSA_1_0)`, or of quantize and dequantize nodes.
        model: a TosaModel, the path of a .tosa file, or its bytes. It is run: only for files that you trust.
        inputs: as in `verify_tflite`.

    Raises:
        ImportError: there is no reference model, or ExecuTorch is not installed, whose wheel has the schema.
        TypeError: an argument is none of these.
        OSError: there is no such file.
        ValueError: no .tosa file, or a damaged one; inputs that do not fit; or programs with different numbers or
            shapes of inputs or outputs.
        RuntimeError: the reference model stopped, with what it said.
    """
    check_program(program, _CALLER)
    given = parse(_CALLER, "inputs", inputs)
    comparison = compared(_Beside(program, _Runtime(model), _CALLER), given)
    assert isinstance(comparison, TosaComparison)
    return comparison


class _Beside(Beside):
    kind = TosaComparison


class _Runtime:
    """A file that runs, as Beside wants it."""

    def __init__(self, model: Any) -> None:
        self.model = ReferenceModel(_CALLER, *content(_CALLER, model, TosaModel, "a .tosa file"))
        names = list(self.model.tensors)
        places = {name: i for i, name in enumerate(names)}
        tensors = tuple(
            FileTensor(i, n, self.model.shape(n), self.model.tensors[n]["type"], None, None)
            for i, n in enumerate(names)
        )
        written = [(op["op"], n) for op in self.model.block.get("operators", ()) for n in op.get("outputs", ())]
        codes = {n for n in places if self.model.dtype(n) in _CODES}
        self.shown = [n for op, n in written if op != "CONST" and n in codes]
        operators = tuple(
            FileOperator(i, "", (), (places[n],), lambda name, default: default) for i, n in enumerate(self.shown)
        )
        inputs, outputs = ({n: places[n] for n in own} for own in (self.model.inputs, self.model.outputs))
        self.graph = FileGraph(tensors, operators, inputs, outputs)
        self.found: dict[str, Tensor] = {}

    def run(self, inputs: Sequence[Tensor]) -> None:
        given = dict(zip(self.model.inputs, inputs, strict=True))
        self.found = {**given, **self.model.run(given, self.shown)}

    def value(self, tensor: FileTensor) -> Tensor:
        return self.found[tensor.name]
