"""The float dtype in which PyTorch multiplies fastest at a CPU level: that of the peers, and of our results."""

import torch

from hop.kernels.cpu import native

BFLOAT16 = ("amx", "avx512_bf16")
"""Levels with instructions for bfloat16; elsewhere PyTorch emulates it, which takes several times float32's time."""


def float_name(level: str) -> str:
    """The name of the dtype at a level."""
    return "bfloat16" if level in BFLOAT16 else "float32"


NAME = float_name(native.library().path)
FLOAT: torch.dtype = getattr(torch, NAME)
