"""Kinds of GPUs."""

import torch

Capability = tuple[int, int]
UNKNOWN: Capability = (0, 0)


def capability_of(device: torch.device | None) -> Capability:
    """The compute capability of an NVIDIA GPU; UNKNOWN for GPUs of AMD, whose numbers mean something else."""
    return UNKNOWN if torch.version.hip else torch.cuda.get_device_capability(device)
