# pyright: reportMissingImports=false
"""Run a .tflite file in LiteRT and read every tensor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.tflite.reading import FileTensor, content, read_graph

KERNELS = {"reference": "BUILTIN_REF", "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"}


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

    def __init__(self, caller: str, model: Any, kernels: str) -> None:
        if kernels not in KERNELS:
            raise ValueError(
                f"{caller}: kernels must be one of {(*KERNELS, 'micro')}, got {kernels!r}; take one of them"
            )
        self.graph = read_graph(caller, model)
        data, what = content(caller, model)
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
        return torch.from_numpy(self.interpreter.get_tensor(tensor.index).copy())
