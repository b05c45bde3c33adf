"""A word to somebody who forgot to freeze a model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_said = False


def of_freeze() -> None:
    """Warn, once in a process, that a layer quantizes its weight in a call that nothing will learn from."""
    global _said
    if _said or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    _said = True
    warnings.warn(
        "hop.nn: a layer in eval mode quantizes its weight, and will in each call; call hop.nn.freeze(model), or "
        "hop.quantize_, to quantize weights once. In the validation of a model that still trains nothing is wrong. "
        "This is said once",
        stacklevel=6,
    )


@contextmanager
def silent() -> Iterator[None]:
    """Where it would not be true."""
    global _said
    before, _said = _said, True
    try:
        yield
    finally:
        _said = before
