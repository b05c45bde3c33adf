"""Warn when a model runs in eval mode before it is frozen."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_said = False


def of_freeze() -> None:
    """Warn, once per process, that a layer in eval mode quantizes its weight in each call."""
    global _said
    if _said or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    _said = True
    warnings.warn(
        "hop.nn: a layer in eval mode quantizes its weight, and does so in each call; call hop.nn.freeze(model), or "
        "hop.quantize_, to quantize weights once. Ignore this while validating a model that still trains. "
        "This is shown once",
        stacklevel=6,
    )


@contextmanager
def silent() -> Iterator[None]:
    """Suppress the warning, where it would be wrong."""
    global _said
    before, _said = _said, True
    try:
        yield
    finally:
        _said = before
