"""Decode 8-bit floats."""

import torch
from torch import Tensor

# e5m2 is the upper half of float16: PyTorch's cast is a shift, as fast as a table.
_BY_TABLE = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
# Below this number of elements a cast is faster than creating the table.
_SMALL = 2**12


def decode(x: Tensor) -> Tensor:
    """The float32 values of an 8-bit float tensor of any shape; on the CPU up to twice as fast as
    `x.to(torch.float32)`.
    """
    if x.dtype not in _BY_TABLE or not x.is_cpu or x.numel() < _SMALL:
        return x.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).to(torch.float32)
    transposed = x.dim() > 1 and not x.is_contiguous() and x.mT.is_contiguous()
    dense = x.mT if transposed else x.contiguous()
    values = table.index_select(0, dense.view(torch.uint8).reshape(-1).to(torch.int32)).view(dense.shape)
    return values.mT if transposed else values
