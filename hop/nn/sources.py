"""Source: where the codes of an input come from, if what computes the input finds them too."""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from hop.impls.quantize import is_plain
from hop.nn.sharing import version
from hop.numerics.quantizer import Quantizer


class _Left(NamedTuple):
    """What a source has left with its result."""

    of: Any  # a weak reference to the result, for a copy has the attribute too
    version: int | None  # of the result
    source: "Source"
    quantizer: Quantizer | None  # None: nothing, but it takes orders
    codes: Any

    def __reduce__(self) -> Any:  # type: ignore[override]
        return _Left, (_nothing, 0, self.source, None, None)


def _nothing() -> None:
    """A reference to nothing."""


class Source:
    """Who computes an input of layers, and its codes in the same pass if they were asked for after the last one."""

    def __init__(self) -> None:
        self._wanted: Quantizer | None = None
        self._unread = False

    def __reduce__(self) -> Any:
        return Source, ()

    def wanted(self) -> Quantizer | None:
        """The quantizer that a reader asked for; None again after codes that nobody read."""
        if self._unread:
            self._wanted, self._unread = None, False
        return self._wanted

    def offer(self, y: Tensor) -> Tensor:
        """y, whose readers may ask for codes."""
        return self._with(y, None, None)

    def leave(self, q: Quantizer, y: Tensor, codes: Tensor) -> Tensor:
        """y, with the codes that hop.quantize(q, y) gives."""
        self._unread = True
        return self._with(y, q, codes)

    def _with(self, y: Any, q: Quantizer | None, codes: Any) -> Tensor:
        y._hop_left = _Left(weakref.ref(y), version(y), self, q, codes)
        return y

    @staticmethod
    def codes(q: Quantizer, x: Any) -> Tensor | None:
        """hop.quantize(q, x), if what has computed x has left it; or else it is asked to, from the next time on."""
        left: _Left | None = getattr(x, "_hop_left", None)
        if left is None or not is_plain(q, x) or left.of() is not x:
            return None
        source = left.source
        if left.quantizer is None:
            source._wanted = q
        if left.quantizer != q or left.version != version(x):
            return None
        source._unread = False
        return left.codes
