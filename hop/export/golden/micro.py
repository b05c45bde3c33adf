"""A .tflite file in TensorFlow Lite Micro: every tensor of a run, by the interpreter of its wheel, `tflite-micro`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.tflite.reading import FileTensor, content, graph_of

_LEAST, _FACTOR = 2**20, 4  # bytes of memory for tensors and what kernels keep, and for each byte of tensors


class Micro:
    """A file that runs, whose tensors can all be read.

    Raises, beside what `graph_of` does:
        ImportError: tflite-micro is not installed.
        ValueError: it does not take the file, such as for an operator that it has not, which it names on stderr.
    """

    def __init__(self, caller: str, model: Any) -> None:
        try:
            runtime: Any = import_module("tflite_micro.python.tflite_micro.runtime")
        except ImportError as error:
            raise ImportError(f"{caller}: kernels='micro' needs TFLM: pip install 'torch-hop[litert,micro]'") from error
        self.graph = graph_of(caller, model)
        data, what = content(caller, model)
        sizes = [torch.Size(t.shape).numel() * (t.dtype or torch.int64).itemsize for t in self.graph.tensors]
        try:
            self.interpreter: Any = runtime.Interpreter.from_bytes(
                data,
                arena_size=_LEAST + _FACTOR * sum(sizes),
                intrepreter_config=runtime.InterpreterConfig.kPreserveAllTensors,
            )
        except RuntimeError as error:
            raise ValueError(f"{caller}: TFLM does not take {what}: {error}; stderr says which operator") from error

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on the tensors of the file's inputs, in their order."""
        for i, x in enumerate(inputs):
            self.interpreter.set_input(x.contiguous().numpy(), i)
        self.interpreter.invoke()

    def value(self, tensor: FileTensor) -> Tensor:
        """What a tensor held after the last run."""
        data = self.interpreter.GetTensor(tensor.index, 0)["tensor_data"]
        return torch.from_numpy(data.copy()).reshape(tensor.shape)
