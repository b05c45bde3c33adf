"""Round float32 to bfloat16 stochastically: up with the probability that preserves the expectation."""

import torch
from torch import Tensor

from hop.tensor.buffers.noise import noise


def rounded(x: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Round a float32 tensor to bfloat16 stochastically.

    Adds 16 random bits to the 16 bits that are dropped, and keeps the carry. NaNs and infinities are not changed.
    """
    low, high = noise(seed, (*x.shape, 2), stream=stream, bits=8).to(torch.int32).unbind(-1)
    carried = (x.view(torch.int32) + (low + high * 256)) & -(2**16)
    return torch.where(x.isfinite(), carried.view(torch.float32), x).to(torch.bfloat16)
