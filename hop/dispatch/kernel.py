"""Kernels: fast implementations, each of which says which calls it supports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """A fast implementation of a call.

    `declines(call)` returns None if `run(call)` gives what the reference gives, otherwise the reason why it does not
    take the call. It looks at shapes, dtypes, strides and devices, never at data, so that it answers for fakes too.
    A leaf does not compute by ATen operators: in a compiled program its call stands as hop::run
    (hop.dispatch.compiled). A native one computes by operators of the native library, which stand there themselves.
    """

    name: str
    declines: Callable[[Any], str | None]
    run: Callable[[Any], Tensor | list[Tensor]]
    leaf: bool = False
    native: bool = False
