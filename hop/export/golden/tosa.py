"""verify_tosa: compare a program with a `.tosa` file, run by TOSA's reference model, node by node."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop.export.analysis.arguments import Data, parse
from hop.export.golden.reference_model import ReferenceModel
from hop.export.golden.tflite import FileRunner, TfliteComparison, run_comparison
from hop.export.rewrite.program import check_program
from hop.export.targets.models import content
from hop.export.targets.tflite.reading import FileGraph, FileOperator, FileTensor
from hop.export.targets.tosa.model import TosaModel

_CALLER = "verify_tosa"
_CODES = (torch.int8, torch.int16)


@dataclass(frozen=True)
class TosaComparison(TfliteComparison):
    """The result of `hop.export.verify_tosa`: as TfliteComparison, but without `units`, because TOSA files have no
    scales.
    """


def verify_tosa(program: ExportedProgram, model: Any, inputs: Data) -> TosaComparison:
    """Run a program here and a .tosa file in TOSA's reference model, and compare the codes of corresponding nodes.

    The file gets the codes that the program computes from its inputs. Nodes and tensors correspond by name, as
    `to_tosa` names them; inputs and outputs by position. For the first node that differs, it is determined which
    convention of hop.requantization and hop.integer_functions reproduces the file's codes.

    The reference model is a separate program. The environment variable HOP_TOSA names it, its folder, or the Python
    environment that has it; its package, tosa-tools, pins other versions than ours.

    Args:
        program: a program from `to_integer(program, target=hop.export.targets.TOSA_1_0)`, or with quantize and
            dequantize nodes.
        model: a TosaModel, the path of a .tosa file, or its bytes. It is executed, so pass only files that you trust.
        inputs: as for `verify_tflite`.

    Raises:
        ImportError: the reference model is missing, or ExecuTorch, whose wheel has the schema.
        TypeError: an argument has the wrong type.
        OSError: the file does not exist.
        ValueError: the file is not a .tosa file or is damaged; the inputs do not fit; or the two differ in the number
            or shapes of inputs or outputs.
        RuntimeError: the reference model failed; the message has its output.
    """
    check_program(program, _CALLER)
    given = parse(_CALLER, "inputs", inputs)
    comparison = run_comparison(_FileComparison(program, _Runtime(model), _CALLER), given)
    assert isinstance(comparison, TosaComparison)
    return comparison


class _FileComparison(FileRunner):
    kind = TosaComparison


class _Runtime:
    """Runs the file for `FileRunner`."""

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
