"""Tensors in other forms."""

from typing import Any

from torch import Tensor

import hop


def plain(x: Any) -> Tensor:
    """The numbers of a quantized tensor; another tensor as it is."""
    return hop.dequantize(x) if isinstance(x, hop.QuantizedTensor) else x


def channels_last(x: Tensor) -> Tensor:
    """A copy with dimension 1 innermost in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
