"""Matrix products on GPUs with the operator cutlass_kernels::mm, imported when a GPU needs it."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_kernels.devices import capability_of
from hop.compat import eager, inductor

if TYPE_CHECKING:
    from cutlass_kernels.product import Product


@functools.cache
def kernels() -> ModuleType:
    """The module cutlass_kernels.operators, which registers cutlass_kernels::mm."""
    from cutlass_kernels import operators

    return operators


def ahead() -> ModuleType:
    """The module cutlass_kernels.ahead, which compiles kernels even without a GPU."""
    from cutlass_kernels import ahead

    return ahead


if torch.cuda.is_available():  # a compiled program loaded from a cache contains the operator without tracing
    kernels()


def takes(x: Tensor) -> bool:
    """Whether products of x may use the operator: x is on a GPU, and the program is not for another runtime."""
    return x.is_cuda and (eager.is_plain_eager() or inductor.is_compiling_for_here())


def mm(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: object) -> Tensor:
    """Multiply two matrices, or batches of them, with fusions as described in cutlass_kernels.product."""
    return kernels().mm(lhs, rhs, out_dtype, **fused)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9.0."""
    return torch.cuda.is_available() and capability_of(device) == (9, 0)


def nibble_mm(*args: Any, **kwargs: Any) -> Tensor:
    """Multiply by 4-bit codes, as cutlass_kernels.nibbles.mm does."""
    from cutlass_kernels import nibbles

    return nibbles.mm(*args, **kwargs)


def nibbles_decline(tensors: Sequence[Any], group: int, out_dtype: torch.dtype) -> str | None:
    """Why no kernel of ours multiplies by 4-bit codes on the GPU of the tensors; None if one does."""
    from cutlass_kernels import nibbles

    return nibbles.declines(nibbles.Asked(*tensors)._replace(group=group, out=out_dtype))


def run(product: "Product") -> Tensor:
    """Compute a product with `mm`."""
    given = {name: value for name, value in vars(product).items() if name not in ("lhs", "rhs", "out")}
    return mm(product.lhs, product.rhs, product.out, **{n: v for n, v in given.items() if v is not None})


def declines(product: "Product") -> str | None:
    """Why no kernel computes a product with all its fusions; None if one does.

    Integer products without fusions are left to PyTorch's own operators, after which Inductor fuses better.
    """
    if not torch.cuda.is_available():
        return "there is no GPU"
    asked = kernels().routes(product, capability_of(product.lhs.device))
    name, reason = asked[-1]
    if reason is None and not (name == "public" and not product.lhs.dtype.is_floating_point):
        return None
    return "; ".join(f"{name}: {reason or 'fuses nothing'}" for name, reason in asked)


def prepared(product: "Product") -> Callable[..., Tensor]:
    """A function that computes products like this one, without the dispatcher and checks."""
    return kernels().prepared(product)


def product(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> "Product":
    """Describe a product for the kernels."""
    from cutlass_kernels.product import Product

    return Product(lhs, rhs, out_dtype, **fused)
