"""Kernel: a fast implementation, which either supports a call and returns a plan, or gives the reason why not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hop.dispatch.plan import Plan


class Declined(Exception):
    """The reason why a kernel does not support a call: raised by `prepare`, returned by `Kernel.match`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decline(reason: str | None) -> None:
    """Raise Declined for a reason; do nothing for None."""
    if reason is not None:
        raise Declined(reason)


@dataclass(frozen=True)
class Kernel:
    """A fast implementation of calls.

    `prepare(call)` returns a plan with the same result as the reference, for this call and for all calls with the same
    key (hop.dispatch.plan), or raises Declined. It looks at shapes, dtypes, strides and devices, never at data, so it
    also works for fake tensors. The plan keeps none of the call's tensors.

    A native kernel consists of operators of the native library and of ATen, which compiled programs contain as they
    are.
    """

    name: str
    prepare: Callable[[Any], Plan]
    native: bool = False

    def match(self, call: object) -> Plan | Declined:
        """The plan of a call, or the reason why the kernel does not support it."""
        try:
            return self.prepare(call)
        except Declined as declined:
            return declined.with_traceback(None)  # the traceback's frames refer to tensors
