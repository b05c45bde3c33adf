"""SharedInput: quantize an input that several layers read only once.

The first layer called keeps the codes for the others. Results have the same bits: codes are passed on only for the same
tensor, unchanged, and once to each layer.
"""

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from hop.impls.quantize import is_plain, quantize
from hop.numerics.quantizer import Quantizer


class _Codes(NamedTuple):
    """The codes that one layer computed for the others."""

    of: weakref.ref[Tensor]  # the input
    version: int | None  # version counter of the input; None in inference mode
    quantizer: Quantizer
    codes: Tensor
    taken: set[int]  # ids of layers that have read the codes

    def fits(self, x: Tensor, q: Quantizer) -> bool:
        """Whether these are the codes of x in its current version."""
        return self.of() is x and self.version == version(x) and self.quantizer == q


class SharedInput:
    """The codes of an input that several layers read.

    Args:
        size: the number of layers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: _Codes | None = None  # replaced as a whole, because threads may run a model at once

    def __reduce__(self) -> tuple[object, ...]:  # a copied model keeps no codes of the original
        return SharedInput, (self.size,)

    def codes(self, layer: nn.Module, q: Quantizer, x: Tensor) -> Tensor:
        """hop.quantize(q, x), reusing the result of another layer for the same tensor.

        Returns x itself where a mode, hook or transform observes the call; the layer then quantizes it.
        """
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

    def _forget(self, of: object) -> None:
        """Drop the codes of an input that was freed."""
        last = self._last
        if last is not None and last.of is of:
            self._last = None


def version(x: Tensor) -> int | None:
    """PyTorch's count of in-place changes of x; None in inference mode, where it does not count."""
    return None if x.is_inference() else x._version
