# pyright: reportMissingImports=false
"""A .tflite file in LiteRT: every tensor of a run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.tflite.reading import FileTensor, content, graph_of

KERNELS = {"reference": "BUILTIN_REF", "optimized": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"}


class LiteRT:
    """A file that runs, whose tensors can all be read.

    Args:
        model: what `content` takes.
        kernels: "reference", or "optimized": those of the runtime for CPUs, without delegates.

    Raises, beside what `graph_of` does:
        ImportError: LiteRT is not installed.
        ValueError: `kernels` is none of these, or LiteRT does not take the file.
    """

    def __init__(self, caller: str, model: Any, kernels: str) -> None:
        if kernels not in KERNELS:
            raise ValueError(
                f"{caller}: kernels must be one of {(*KERNELS, 'micro')}, got {kernels!r}; take one of them"
            )
        self.graph = graph_of(caller, model)
        data, what = content(caller, model)
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        kind = getattr(OpResolverType, KERNELS[kernels])
        try:
            self.interpreter: Any = Interpreter(
                model_content=data, experimental_op_resolver_type=kind, experimental_preserve_all_tensors=True
            )
            self.interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{caller}: LiteRT does not take {what}: {error}") from error

    def run(self, inputs: Sequence[Tensor]) -> None:
        """Run on the tensors of the file's inputs, in their order."""
        for index, x in zip(self.graph.inputs.values(), inputs, strict=True):
            self.interpreter.set_tensor(index, x.contiguous().numpy())
        self.interpreter.invoke()

    def value(self, tensor: FileTensor) -> Tensor:
        """What a tensor held after the last run."""
        return torch.from_numpy(self.interpreter.get_tensor(tensor.index).copy())
