"""A call of an operator of ours, in the form that the routes take it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

DEVICE = "cpu"  # where the operands lie: the option --device of pytest


@dataclass(frozen=True, eq=False)  # each is equal to itself alone
class Case:
    function: Callable[..., Tensor]  # the call, as a function of its tensors alone
    tensors: list[Tensor]
    check: Callable[[Tensor], None]  # fails unless a result is right
    reference: Callable[..., Tensor]  # the operator's own reference, of the same tensors
    inner: Callable[..., Tensor]  # plain PyTorch of the same tensors, with the derivatives that the call has
    nodes: int = 1  # how many nodes of ours its graph has
    nodes_below: int = 0  # the same of a graph that was traced below autograd, 0 for as many
    bound: float = 0.0  # how far a right result may be off; 0: not at all
    differentiable: bool = True  # by its floats
    smooth: bool = True  # differences come near its derivative, in float64
    keeps_nodes_under_vmap: bool = True

    def on_device(self) -> "Case":
        """The case with its tensors on DEVICE. What it must give was found on the CPU, to which results are brought."""
        if DEVICE == "cpu":
            return self

        def check(got: Tensor) -> None:
            assert got.device.type == DEVICE, f"the result lies on {got.device}, and not on {DEVICE}"
            self.check(got.cpu())

        return replace(self, tensors=[x.to(DEVICE) for x in self.tensors], check=check)
