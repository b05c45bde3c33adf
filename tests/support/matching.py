"""What a kernel makes of a call."""

from typing import Any

from hop.dispatch.kernel import Declined, Kernel


def reason(kernel: Kernel, call: Any) -> str:
    """Why it does not take the call, "" if it does."""
    match = kernel.match(call)
    return match.reason if isinstance(match, Declined) else ""


def computed(kernel: Kernel, call: Any) -> Any:
    """What it gives for a call that it takes."""
    match = kernel.match(call)
    assert not isinstance(match, Declined), match.reason
    return match(*getattr(call, "given", call))
