"""The bytes that a process gives to collectives."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hop.compat import subclasses


class Wire(TorchDispatchMode):
    """Inside, `nbytes` counts what this process sends: the operands of the collectives beneath all rules of tensor
    subclasses, each once, whatever the number of processes that get it. `dtypes` are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(subclasses.is_foreign_subclass, types)):
            return NotImplemented  # its rule comes first, and calls operators on plain tensors
        if op.namespace in ("c10d", "_c10d_functional") and op.name().split("::")[1] not in _LOCAL:
            for x in tree_leaves(args[_SENT.get(op.name().split("::")[1], 0)]):
                assert isinstance(x, Tensor)
                self.nbytes += x.numel() * x.element_size()
                self.dtypes.add(x.dtype)
        return op(*args, **(kwargs or {}))


_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
_SENT = dict.fromkeys(("allgather_", "_allgather_base_", "scatter_", "gather_", "alltoall_", "alltoall_base_"), 1)
"""Which argument is sent, of operators that are given what they write into first."""
