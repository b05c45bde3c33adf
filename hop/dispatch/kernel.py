"""Kernel: a fast implementation, which says which calls it supports, and prepares plans of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hop.dispatch.plan import Plan


@dataclass(frozen=True)
class Kernel:
    """A fast implementation of a call.

    `declines(call)` returns None if `run(call)` gives what the reference gives, otherwise the reason why it does not
    take the call. It looks at shapes, dtypes, strides and devices, never at data, so that it answers for fakes too.
    `planned(call, general)` returns a plan in fewer steps than `general`, which checks and describes each call anew and
    to which it leaves whatever turns out not to be as it was described; or None.
    A leaf does not compute by ATen operators: in a compiled program its call stands as hop::run
    (hop.dispatch.compiled). A native one computes by operators of the native library, which stand there themselves.
    """

    name: str
    declines: Callable[[Any], str | None]
    run: Callable[[Any], Tensor | list[Tensor]]
    planned: Callable[[Any, Plan], Plan | None] | None = None
    leaf: bool = False
    native: bool = False

    def supports(self, call: Any) -> bool:
        """Whether it takes the call."""
        return self.declines(call) is None

    def prepare(self, call: Any, general: Plan) -> Plan:
        """A plan of calls like this one, which it supports."""
        return (self.planned and self.planned(call, general)) or general
