"""torch.nn's classes whose names are private, and what they keep."""

from typing import Any

from torch.nn.modules import conv

ConvNd: Any = conv._ConvNd


def padding_at_ends(convolution: Any) -> list[int]:
    """The padding of a convolution at both ends of each dimension, the last dimension first, as torch.nn.functional.pad
    takes it."""
    return convolution._reversed_padding_repeated_twice
