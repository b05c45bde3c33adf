# pyright: reportMissingTypeStubs=false
"""Run a .pte file in ExecuTorch and return its outputs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hop.export.targets.integer.graph import FileGraph, FileTensor
from hop.numerics.spelling import shown

_KINDS = {  # the format's numbers of dtypes, which are those of PyTorch's ScalarType
    0: "UINT8",
    1: "INT8",
    2: "INT16",
    3: "INT32",
    4: "INT64",
    11: "BOOL",
    5: "FLOAT16",
    6: "FLOAT32",
    7: "FLOAT64",
    15: "BFLOAT16",
}


class ExecuTorch:
    """A .pte file that runs in ExecuTorch, with access to its outputs; its other tensors share memory.

    Raises:
        ImportError: ExecuTorch is not installed.
        ValueError: ExecuTorch rejects the file.
        NotImplementedError: the file has several methods, or inputs or outputs other than tensors.
    """

    def __init__(self, caller: str, data: bytes, what: str) -> None:
        self.caller = caller
        try:
            from executorch.runtime import Runtime
        except ImportError as error:
            raise ImportError(f"{caller} needs ExecuTorch: pip install 'torch-hop[executorch]'") from error
        try:
            self.program = Runtime.get().load_program(data)  # keeps the memory that the method reads
            names = sorted(self.program.method_names)
            if len(names) != 1:
                raise NotImplementedError(f"{caller}: {what} has the methods {shown(names)}, but must have one")
            self.method: Any = self.program.load_method(names[0])
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            raise ValueError(f"{caller}: ExecuTorch does not accept {what}: {error}; see stderr") from error
        about = self.method.metadata
        tensors: list[FileTensor] = []
        for which, count, meta in (
            ("input", about.num_inputs(), about.input_tensor_meta),
            ("output", about.num_outputs(), about.output_tensor_meta),
        ):
            for i in range(count):
                try:
                    its = meta(i)
                except RuntimeError as error:
                    raise NotImplementedError(f"{caller}: {what}: {which} {i} is not a tensor: {error}") from error
                kind = _KINDS.get(int(its.dtype()), f"type {its.dtype()}")
                sizes = tuple(its.sizes())  # the largest ones
                tensors.append(FileTensor(len(tensors), f"{which}_{i}", sizes, kind, None, None, is_bound=True))
        inputs, outputs = tensors[: about.num_inputs()], tensors[about.num_inputs() :]
        self.graph = FileGraph(tuple(tensors), (), *({t.name: t.index for t in end} for end in (inputs, outputs)))
        self.found: list[Any] = []

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on the file's inputs, in order."""
        copies = [x.contiguous() for x in inputs]
        try:
            outputs = self.method.execute(copies)
        except RuntimeError as error:
            raise RuntimeError(f"{self.caller}: ExecuTorch stopped: {error}; see stderr") from error
        self.found = [*copies, *(y.clone() for y in outputs)]

    def value(self, tensor: FileTensor) -> Tensor:
        """The value of an output in the last run."""
        return self.found[tensor.index]
