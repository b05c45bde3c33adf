"""Match a kernel with a call, for tests."""

from typing import Any

from hop.dispatch.kernel import Declined, Kernel


def reason(kernel: Kernel, call: Any) -> str:
    """The reason why a kernel declines a call, "" if it accepts."""
    match = kernel.match(call)
    return match.reason if isinstance(match, Declined) else ""


def computed(kernel: Kernel, call: Any) -> Any:
    """The result of a kernel for a call that it must accept."""
    match = kernel.match(call)
    assert not isinstance(match, Declined), match.reason
    return match(*getattr(call, "given", call))
