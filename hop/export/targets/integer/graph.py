"""The content of a file of another runtime: tensors, operators, inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {
    "FLOAT32": torch.float32,
    "FLOAT64": torch.float64,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Quantization:
    """The scales and zero points of a tensor's codes, along a dimension if there are several."""

    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    dimension: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file; constants have `data`. The sizes of one that `is_bound` are upper bounds."""

    index: int
    name: str
    shape: tuple[int, ...]
    kind: str  # the schema's name of the dtype
    quantization: Quantization | None
    data: Tensor | None
    is_bound: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype; None if there is none."""
        return DTYPES.get(self.kind)

    @property
    def units(self) -> tuple[float, int] | None:
        """The scale and zero point if there is exactly one."""
        q = self.quantization
        return (q.scales[0], q.zeros[0]) if q is not None and len(q.scales) == 1 else None


@dataclass(frozen=True)
class FileOperator:
    """An operator of a file. An omitted input is None."""

    index: int
    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    option: Callable[[str, object], object]  # reads a field of its options, given a default


@dataclass(frozen=True)
class FileGraph:
    """The first subgraph of a file. Inputs and outputs are tensors by their names in the signature, if there is one."""

    tensors: tuple[FileTensor, ...]
    operators: tuple[FileOperator, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]
