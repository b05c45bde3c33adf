"""Kernel: a fast implementation, which matches a call once: to a plan that computes it, or to the reason why not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hop.dispatch.plan import Plan


class Declined(Exception):
    """Why a kernel does not take a call: raised where the call is described to it, returned by `Kernel.match`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decline(reason: str | None) -> None:
    """Raise Declined for a reason; None is no reason."""
    if reason is not None:
        raise Declined(reason)


@dataclass(frozen=True)
class Kernel:
    """A fast implementation of calls.

    `prepare(call)` returns a plan that gives what the reference gives, for this call and for those that share its key
    (hop.dispatch.plan), or raises Declined. It looks at shapes, dtypes, strides and devices, never at data, so that it
    answers for fakes too. The plan holds none of the call's tensors.
    A native kernel computes by operators of the native library, which stand in compiled programs themselves.
    """

    name: str
    prepare: Callable[[Any], Plan]
    native: bool = False

    def match(self, call: Any) -> Plan | Declined:
        """The plan of a call, or why the kernel does not take it."""
        try:
            return self.prepare(call)
        except Declined as declined:
            return declined.with_traceback(None)  # whose frames hold tensors
