"""SharedInput: the codes of an input that several layers read, found once; and Source, where they come from if what
computes the input finds them too.

The first layer that is called leaves its codes for the others. What they compute are the same bits: codes are handed on
for the very tensor, unchanged, and once to each layer.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn

from hop.impls.quantize import is_plain, quantize
from hop.numerics.quantizer import Quantizer


class _Codes(NamedTuple):
    """What one layer found, for the others."""

    of: Any  # a weak reference to the input
    version: int | None  # of the input; None where PyTorch counts none
    quantizer: Quantizer
    codes: Any
    taken: set[int]  # the layers that have had them

    def fits(self, x: Tensor, q: Quantizer) -> bool:
        """Whether they are those of x as it is now."""
        return self.of() is x and self.version == _version(x) and self.quantizer == q


class SharedInput:
    """The codes of the input that layers have in common.

    Args:
        size: how many layers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: _Codes | None = None  # replaced as a whole: threads may run a model at once

    def __reduce__(self) -> Any:  # a copy of a model holds no codes of the original
        return SharedInput, (self.size,)

    def codes(self, layer: nn.Module, q: Quantizer, x: Tensor) -> Tensor:
        """hop.quantize(q, x): what another layer found of this very tensor, or found now. x itself where something
        watches or transforms the call, and the layer quantizes by itself."""
        if not is_plain(q, x):
            return x
        last = self._last
        if last is not None and last.fits(x, q) and id(layer) not in last.taken:
            last.taken.add(id(layer))
            if len(last.taken) >= self.size:
                self._last = None
            return last.codes
        codes = quantize(q, x)
        self._last = _Codes(weakref.ref(x, self._forget), _version(x), q, codes, {id(layer)})
        return codes

    def _forget(self, of: Any) -> None:
        """Drop the codes of an input that is no more."""
        last = self._last
        if last is not None and last.of is of:
            self._last = None


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
        y._hop_left = _Left(weakref.ref(y), _version(y), self, q, codes)
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
        if left.quantizer != q or left.version != _version(x):
            return None
        source._unread = False
        return left.codes


def _version(x: Tensor) -> int | None:
    """How often x was changed in place; None in inference mode, where PyTorch does not count."""
    return None if x.is_inference() else x._version
