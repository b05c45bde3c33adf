"""SharedInput: the codes of an input that several layers read, found once.

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
        return self.of() is x and self.version == version(x) and self.quantizer == q


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
        self._last = _Codes(weakref.ref(x, self._forget), version(x), q, codes, {id(layer)})
        return codes

    def _forget(self, of: Any) -> None:
        """Drop the codes of an input that is no more."""
        last = self._last
        if last is not None and last.of is of:
            self._last = None


def version(x: Tensor) -> int | None:
    """How often x was changed in place; None in inference mode, where PyTorch does not count."""
    return None if x.is_inference() else x._version
