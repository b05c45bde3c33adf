"""Tensor and sequence parallelism of a linear layer: what its operands are on one of several processes.

    mode     weight of this process   forward                    backward
    column   (N / size, K)            x as it is                 dx summed over processes
    row      (N, K / size)            y summed over processes    dy as it is

With `sequence` the rows between such layers are spread over the processes:

    column   x of (M / size, K) is gathered; dx is summed, and each process keeps its rows
    row      y is summed, and each process keeps its rows, (M / size, N); dy is gathered

Without a process group this process stands for all, as if each held what it holds: shapes, dtypes and sums without
communication.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import process_groups

NONE, COLUMN, ROW = MODES = ("none", "column", "row")


class Parallel(NamedTuple):
    """How a linear layer is spread over processes.

    Args:
        mode: "none", "column" (each process has some of the output features) or "row" (some of the input features).
        size: how many processes.
        sequence: whether the first dimension of what lies between layers is spread too.
        group: the name of their process group (`torch.distributed.ProcessGroup.group_name`), None for a model of one.
    """

    mode: str = NONE
    size: int = 1
    sequence: bool = False
    group: str | None = None

    def check(self) -> None:
        """Raise ValueError unless the fields go together."""
        if self.mode not in MODES:
            raise ValueError(f"parallel: mode must be one of {MODES}, got {self.mode!r}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"parallel: size must be the number of processes, 1 or more; got {self.size!r}")
        if self.mode == NONE and (self.size != 1 or self.sequence):
            raise ValueError(
                f"parallel: mode 'none' is for one process, got size={self.size}, sequence={self.sequence}; take mode "
                "'column' or 'row'"
            )

    def check_rows(self, rows: Any) -> None:
        """Raise ValueError unless results of so many rows can be spread."""
        if self.spreads_output() and rows % self.size:
            raise ValueError(
                f"parallel: the first size of the input must be a multiple of size={self.size}, over which the rows of "
                f"the result are spread; got {rows}"
            )

    def gathers_input(self) -> bool:
        """Whether the rows that are multiplied are those of all processes."""
        return self.mode == COLUMN and self.sequence

    def spreads_output(self) -> bool:
        """Whether this process keeps a part of the rows of the result."""
        return self.mode == ROW and self.sequence

    def input(self, x: Tensor) -> Tensor:
        """The rows that this process multiplies, of those of its input."""
        return self._gathered(x) if self.gathers_input() else x

    def input_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of those rows."""
        return (shape[0] * self.size, *shape[1:]) if self.gathers_input() else tuple(shape)

    def output(self, y: Tensor) -> Tensor:
        """What this process returns, of its product."""
        return self._summed(y) if self.mode == ROW else y

    def grad_output(self, grad: Tensor) -> Tensor:
        """The gradient of its product, of that of what it returned."""
        return self._gathered(grad) if self.spreads_output() else grad

    def grad_input(self, grad: Tensor) -> Tensor:
        """The gradient of its input, of that of the rows that it multiplied."""
        return self._summed(grad) if self.mode == COLUMN else grad

    def output_rows(self, rows: Any) -> Any:
        """The first size of the output, of that of the input."""
        if not self.sequence:
            return rows
        return rows * self.size if self.mode == COLUMN else rows // self.size

    def _gathered(self, x: Tensor) -> Tensor:
        if self.group is None:
            return torch.cat([x] * self.size)
        return process_groups.all_gather(x, self.size, self.group)

    def _summed(self, x: Tensor) -> Tensor:
        if self.group is not None:
            return process_groups.sum_over_processes(x, self.size, self.group, scatter=self.sequence)
        return (x[: x.shape[0] // self.size] if self.sequence else x) * self.size
