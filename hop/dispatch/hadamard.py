"""hop::hadamard, a transform that ATen lacks: hop.scaled computes it in a single pass.

    hop::hadamard(x, size)    x · H / √size of each block of the last dimension, for the Hadamard matrix H
                              in Sylvester's order

H is the product of log2(size) sparse matrices, and the transform is computed as that many stages. A stage replaces two
elements a and b that are half a block apart by the adjacent elements a + b and a - b, each rounded. After the last
stage the block is in order. So the order of summation is fixed for any number of rows. The product with 1 / √size comes
last.

H / √size is symmetric and orthogonal: the transform is its own inverse and its own derivative.
"""

import torch
from torch import Tensor

from hop.numerics.hadamard import check_size
from hop.numerics.tables import float32

_library = torch.library.Library("hop", "FRAGMENT")
_library.define("hadamard(Tensor x, int size) -> Tensor", tags=(torch.Tag.flexible_layout,))


def _hadamard(x: Tensor, size: int) -> Tensor:
    check_size(size, x.shape, "hop::hadamard: size")
    y = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        a, b = y.chunk(2, -1)
        y = torch.stack((a + b, a - b), -1).flatten(-2)
    factor = size**-0.5
    return (y * (factor if x.dtype == torch.float64 else float32(factor))).flatten(-2)


# with only the first, PyTorch 2.15 loops under vmap, and warns
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _library.impl("hadamard", _hadamard, _key)

HADAMARD = torch.ops.hop.hadamard.default
