"""Tensors in other forms."""

from typing import Any

from torch import Tensor

import hop


def plain(x: Any) -> Tensor:
    """The numbers of a quantized tensor; another tensor as it is."""
    return hop.dequantize(x) if isinstance(x, hop.QuantizedTensor) else x


def channels_last(x: Tensor) -> Tensor:
    """A copy whose dimension 1 lies innermost."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
