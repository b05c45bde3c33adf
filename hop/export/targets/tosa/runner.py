"""Run .tosa files in TOSA's reference model, and return the tensors of codes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hop.export.targets.integer.graph import FileGraph, FileOperator, FileTensor
from hop.export.targets.tosa.reference_model import ReferenceModel

_CODES = (torch.int8, torch.int16)


class TosaRuntime:
    """Runs a .tosa file and reads its tensors of codes; raises the errors of ReferenceModel."""

    def __init__(self, caller: str, data: bytes, what: str) -> None:
        self.model = ReferenceModel(caller, data, what)
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
