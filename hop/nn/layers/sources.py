"""Source: lets the producer of a layer's input emit it in quantized form, too."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hop.impls.quantize import is_plain
from hop.nn.layers.sharing import version
from hop.numerics.quantizer import Quantizer

_LEFT = "_hop_left"


class _Left(NamedTuple):
    """The attribute that a source attaches to its result."""

    of: Callable[[], Tensor | None]  # weak reference to the result, because copies get the attribute too
    version: int | None  # version counter of the result
    source: "Source"
    quantizer: Quantizer | None  # None: no codes, but the source accepts requests
    codes: Tensor | None

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]
        return _Left, (_nothing, 0, self.source, None, None)


def _nothing() -> None:
    """A substitute for a dead weak reference."""


class Source:
    """Lets a norm or activation emit quantized output once a consumer has requested it."""

    def __init__(self) -> None:
        self._wanted: Quantizer | None = None
        self._unread = False

    def __reduce__(self) -> tuple[object, ...]:
        return Source, ()

    def wanted(self) -> Quantizer | None:
        """The quantizer a reader requested; reset to None if the last codes were not read."""
        if self._unread:
            self._wanted, self._unread = None, False
        return self._wanted

    def offer(self, y: Tensor) -> Tensor:
        """Mark y as a tensor whose readers may request codes."""
        return self._with(y, None, None)

    def leave(self, q: Quantizer, y: Tensor, codes: Tensor) -> Tensor:
        """Attach the codes hop.quantize(q, y) to y."""
        self._unread = True
        return self._with(y, q, codes)

    def _with(self, y: Tensor, q: Quantizer | None, codes: Tensor | None) -> Tensor:
        setattr(y, _LEFT, _Left(weakref.ref(y), version(y), self, q, codes))
        return y

    @staticmethod
    def codes(q: Quantizer, x: Tensor) -> Tensor | None:
        """hop.quantize(q, x) if the producer of x attached it; else request it for the next call, and return None."""
        left: _Left | None = getattr(x, _LEFT, None)
        if left is None or not is_plain(q, x) or left.of() is not x:
            return None
        source = left.source
        if left.quantizer is None:
            source._wanted = q
        if left.quantizer != q or left.version != version(x):
            return None
        source._unread = False
        return left.codes
