"""pack: a quantized tensor in the layout that products read fastest, of equal value.

hop_pack(tensor) -> tensor
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hop import _compile, copies
from hop._hop import Composite
from hop.formats import Float
from hop.layouts import Decoded, Layout
from hop.leaves import buffers_operator
from hop.quantizer import Quantizer
from hop.tensor import QuantizedTensor


def layout_for(quantizer: Quantizer) -> Layout | None:
    """The layout that products want of a weight; None for the plain one."""
    if quantizer.layout is not None or quantizer.flat or not isinstance(quantizer.format, Float):
        return quantizer.layout
    return Decoded()


class Pack(Composite):
    """hop_pack."""

    plain = Composite.plain | {QuantizedTensor}
    parts = buffers_operator

    def check(self, x: Tensor, /) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError(f"pack: weight must be a QuantizedTensor, got {type(x).__name__}")
        return (x,), {}

    def reference(self, x: Any, /) -> Tensor:
        if not isinstance(x, QuantizedTensor):
            raise TypeError(f"pack: weight must be a QuantizedTensor, as hop.quantize makes it; got {type(x).__name__}")
        q = x.quantizer
        layout = layout_for(q)
        if layout == q.layout:
            return x.rebuilt({name: b.clone() for name, b in x.buffers().items()})
        assert layout is not None
        if x.usages != (copies.ROWWISE,):
            raise ValueError(f"pack: weight must have its row-wise copy alone, got usages {x.usages}; quantize it so")
        own = {name: b if name == "codes" else b.clone() for name, b in x.buffers().items()}
        return x.rebuilt(q.packed(own, x.shape, layout), quantizer=replace(q, layout=layout))

    def differentiable(self, x: Tensor, /) -> bool:
        return True

    def gradient(self, grad: Tensor, needed: Sequence[bool], x: Tensor, /) -> list[Tensor | None]:
        return [grad]

    def batch(self, size: int, dims: Sequence[int | None], x: Tensor, /) -> tuple[Tensor, int] | None:
        (dim,) = dims
        return None if dim is None else (self(x), dim)

    def forward_mode(self, x: Tensor, /) -> Tensor:
        raise NotImplementedError("pack: a quantized tensor cannot carry a tangent")


pack_operator = Pack("hop_pack")


def pack(weight: Tensor, /) -> QuantizedTensor:
    """A quantized tensor in the layout that hop.scaled reads fastest, as a right-hand factor above all.

    Floats of 8 and 4 bits are held as the bfloat16 numbers that they stand for, the scales of MX and NVFP4 blocks and
    other powers of two multiplied in: two bytes for each element, and products need not decode them. Integers stay as
    they are.

    Args:
        weight: a QuantizedTensor of any shape, with its row-wise copy alone.

    Returns:
        A new QuantizedTensor of equal numbers, but for those below 2^-126 times the outer scale, of which bfloat16 has
        fewer; its quantizer is the weight's with a layout (hop.layouts). Its gradient is the weight's.

    Raises:
        TypeError: weight is no QuantizedTensor.
        ValueError: weight has a column-wise copy.
    """
    return pack_operator(weight)  # type: ignore[return-value]


_compile.allow_in_graph(pack)
