"""Matrix products on GPUs: the leaf operator of cutlass_kernels, which is imported when a GPU asks for it."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hop.compat import eager, inductor

if TYPE_CHECKING:
    from cutlass_kernels.product import Product


@functools.cache
def kernels() -> Any:
    """cutlass_kernels.operators, which registers cutlass_kernels::mm."""
    from cutlass_kernels import operators

    return operators


def ahead() -> Any:
    """cutlass_kernels.ahead, which compiles kernels without a GPU too."""
    from cutlass_kernels import ahead

    return ahead


if torch.cuda.is_available():  # a compiled program that is read from a cache holds the operator, and traces nothing
    kernels()


def takes(x: Tensor) -> bool:
    """Whether products of x may be the leaf operator: on a GPU, and not in what other runtimes read."""
    return x.is_cuda and (eager.is_plain_eager() or inductor.is_compiling_for_here())


def mm(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> Tensor:
    """A product of two matrices, or of batches of them, in which what cutlass_kernels.product says may be fused."""
    return kernels().mm(lhs, rhs, out_dtype, **fused)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def nibble_mm(*args: Any, **kwargs: Any) -> Tensor:
    """A product by codes of 4 bits, as cutlass_kernels.nibbles.mm says."""
    from cutlass_kernels import nibbles

    return nibbles.mm(*args, **kwargs)


def run(product: "Product") -> Tensor:
    """What `mm` gives for a product."""
    given = {name: value for name, value in vars(product).items() if name not in ("lhs", "rhs", "out")}
    return mm(product.lhs, product.rhs, product.out, **{n: v for n, v in given.items() if v is not None})


def declines(product: "Product") -> str | None:
    """Why no kernel computes a product with all that is fused into it, or None.

    PyTorch's own operators compute products of integers without it; what follows them Inductor fuses better."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    asked = kernels().routes(product, torch.cuda.get_device_capability(product.lhs.device))
    name, reason = asked[-1]
    if reason is None and not (name == "public" and not product.lhs.dtype.is_floating_point):
        return None
    return "; ".join(f"{name}: {reason or 'fuses nothing'}" for name, reason in asked)


def prepared(product: "Product") -> Any:
    """`mm` for products like one, without the dispatcher and the checks."""
    return kernels().prepared(product)


def product(lhs: Tensor, rhs: Tensor, out_dtype: torch.dtype, **fused: Any) -> "Product":
    """What a kernel is asked for."""
    from cutlass_kernels.product import Product

    return Product(lhs, rhs, out_dtype, **fused)
