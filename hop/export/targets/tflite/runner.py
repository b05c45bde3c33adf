# pyright: reportMissingImports=false
"""Run .tflite files in LiteRT and in TensorFlow Lite Micro, and read every tensor."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hop.export.targets.integer.graph import FileTensor
from hop.export.targets.tflite.reading import content, read_graph

KERNELS = {"reference": "BUILTIN_REF", "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"}
_LEAST, _FACTOR = 2**20, 4  # arena size in bytes: a minimum, plus this factor times the bytes of tensors


class LiteRT:
    """A .tflite file that runs in LiteRT, with access to all tensors.

    Args:
        caller: the function's name, for errors.
        model: as for `content`.
        kernels: "reference", or "optimized" for the runtime's CPU kernels, without delegates.

    Raises, in addition to `read_graph`:
        ImportError: LiteRT is not installed.
        ValueError: `kernels` is neither of these, or LiteRT rejects the file.
    """

    def __init__(self, caller: str, model: object, kernels: str) -> None:
        if kernels not in KERNELS:
            raise ValueError(
                f"{caller}: kernels must be one of {(*KERNELS, 'micro')}, got {kernels!r}; take one of them"
            )
        data, what = content(caller, model)
        self.graph = read_graph(caller, data, what)
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        kind = getattr(OpResolverType, KERNELS[kernels])
        try:
            self.interpreter: Any = Interpreter(
                model_content=data, experimental_op_resolver_type=kind, experimental_preserve_all_tensors=True
            )
            self.interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{caller}: LiteRT does not accept {what}: {error}") from error

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on the file's inputs, in order."""
        for index, x in zip(self.graph.inputs.values(), inputs, strict=True):
            self.interpreter.set_tensor(index, x.contiguous().numpy())
        self.interpreter.invoke()

    def value(self, tensor: FileTensor) -> Tensor:
        """The value of a tensor in the last run."""
        return torch.from_numpy(np.array(self.interpreter.get_tensor(tensor.index)))


class Micro:
    """A .tflite file that runs in TensorFlow Lite Micro (package `tflite-micro`), with access to all tensors.

    Raises, in addition to `read_graph`:
        ImportError: tflite-micro is not installed.
        ValueError: the runtime rejects the file, for example because of an unsupported operator, which it names on
            stderr.
    """

    def __init__(self, caller: str, model: object) -> None:
        try:
            runtime: Any = import_module("tflite_micro.python.tflite_micro.runtime")
        except ImportError as error:
            raise ImportError(f"{caller}: kernels='micro' needs TFLM: pip install 'torch-hop[litert,micro]'") from error
        data, what = content(caller, model)
        self.graph = read_graph(caller, data, what)
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
