"""Run a .tflite file in TensorFlow Lite Micro, through the interpreter of the package `tflite-micro`, and read every
tensor.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.tflite.reading import FileTensor, content, read_graph

_LEAST, _FACTOR = 2**20, 4  # arena size in bytes: a minimum, plus this factor times the bytes of tensors


class Micro:
    """A .tflite file that runs in TensorFlow Lite Micro, with access to all tensors.

    Raises, in addition to `read_graph`:
        ImportError: tflite-micro is not installed.
        ValueError: the runtime rejects the file, for example because of an unsupported operator, which it names on
            stderr.
    """

    def __init__(self, caller: str, model: Any) -> None:
        try:
            runtime: Any = import_module("tflite_micro.python.tflite_micro.runtime")
        except ImportError as error:
            raise ImportError(f"{caller}: kernels='micro' needs TFLM: pip install 'torch-hop[litert,micro]'") from error
        self.graph = read_graph(caller, model)
        data, what = content(caller, model)
        sizes = [torch.Size(t.shape).numel() * (t.dtype or torch.int64).itemsize for t in self.graph.tensors]
        try:
            self.interpreter: Any = runtime.Interpreter.from_bytes(
                data,
                arena_size=_LEAST + _FACTOR * sum(sizes),
                intrepreter_config=runtime.InterpreterConfig.kPreserveAllTensors,
            )
        except RuntimeError as error:
            raise ValueError(f"{caller}: TFLM does not accept {what}: {error}; see stderr for the operator") from error

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on the file's inputs, in order."""
        for i, x in enumerate(inputs):
            self.interpreter.set_input(x.contiguous().numpy(), i)
        self.interpreter.invoke()

    def value(self, tensor: FileTensor) -> Tensor:
        """The value of a tensor in the last run."""
        data = self.interpreter.GetTensor(tensor.index, 0)["tensor_data"]
        return torch.from_numpy(data.copy()).reshape(tensor.shape)
