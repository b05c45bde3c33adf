"""pack: a quantized tensor in the layout that products read fastest, with equal values; unpack: in the plain layout.

hop_pack(tensor, layout) -> tensor        `layout` as text, "" for the plain layout
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import dynamo, eager
from hop.compat.profiling import observed
from hop.compat.pytree import ArgsKwargs
from hop.dispatch.composite import Composite
from hop.kernels.cpu import native
from hop.kernels.cpu import product as native_product
from hop.numerics import blocks, copies, spelling
from hop.numerics.layouts import Decoded, Layout, Summed, Tiled, has_plain_codes, sums_first
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.operators import buffers_operator


def layout_for(quantizer: Quantizer, ndim: int, device: str) -> Layout | None:
    """The layout that products on `device` prefer for a weight of `ndim` dimensions; None for the plain one."""
    if quantizer.layout is not None or quantizer.flat or quantizer.format.is_codebook:
        return quantizer.layout
    if not quantizer.scale.scale_is_told:
        return None  # products read such scales with plain codes only, if at all
    block = blocks.per_dimension(quantizer.block, ndim)
    is_weight = ndim == 2 or (ndim > 2 and set(block[1:]) == {-1})  # of a linear layer or a convolution
    is_read = native.library().missing is None and native_product.format_word(quantizer.format) is not None
    columns = ndim == 2 and sums_first(block)
    # Sums over the whole summed dimension are useless for groups, which have separate scales.
    whole = all(blocks.per_dimension(b, 2)[0 if columns else 1] == -1 for _, b in quantizer.stored().values())
    sums = ndim == 2 and quantizer.format.is_integer and whole
    if is_weight and device == "cpu" and is_read:
        return Tiled(columns, sums=sums)
    if device == "cuda" and sums and quantizer.format.bits == 8:
        return Summed(columns)
    return Decoded() if quantizer.format.is_float else None


class Pack(Composite[QuantizedTensor]):
    """The operator hop_pack."""

    plain = Composite.plain | {QuantizedTensor}
    parts = buffers_operator

    def check(self, x: Tensor, layout: str, /) -> ArgsKwargs:
        if not isinstance(x, Tensor):
            raise TypeError(_no_weight(x))
        return (x, layout), {}

    def reference(self, x: Any, layout: str, /) -> QuantizedTensor:
        q, wanted = _quantizer(x), (spelling.read(layout, Layout) if layout else None)
        x.check()
        if wanted == q.layout:
            return x.rebuilt({name: b.clone() for name, b in x.buffers().items()})
        if x.usages != (copies.ROWWISE,):
            raise ValueError(f"pack: weight must have only the row-wise copy, got usages {x.usages}; quantize it so")
        if wanted is not None:
            wanted.check(q.format, q.scale)
            wanted.check_shape(x.shape)
        packed = _natively(x, wanted) if q.layout is None else None
        if packed is not None:
            rest = {name: b.clone() for name, b in x.buffers().items() if name != "codes"}
            if wanted is not None and wanted.stored(q.format):
                codes = q.format.unpack(x.codes, x.shape[-1]) if q.per_byte() > 1 else x.codes
                rest |= wanted.additional(codes, q.format)
            return x.rebuilt({"codes": packed} | rest, quantizer=replace(q, layout=wanted))
        as_they_lie = has_plain_codes(q.layout) and has_plain_codes(wanted)
        buffers = {n: b.clone() if n != "codes" or as_they_lie else b for n, b in x.buffers().items()}
        return x.rebuilt(q.packed(buffers, x.shape, wanted), quantizer=replace(q, layout=wanted))

    def differentiable(self, x: Tensor, layout: str, /) -> bool:
        return True

    def gradient(self, grad: Tensor, needed: Sequence[bool], x: Tensor, layout: str, /) -> list[Tensor | None]:
        return [grad, None]

    def batch(self, size: int, dims: Sequence[int | None], x: Tensor, layout: str, /) -> tuple[Tensor, int] | None:
        return None if dims[0] is None else (self(x, layout), dims[0])

    def forward_mode(self, x: Tensor, layout: str, /) -> QuantizedTensor:
        return eager.with_tangent(self(eager.primal(x), layout), x)  # type: ignore[return-value]


pack_operator = Pack("hop_pack")


def _natively(x: QuantizedTensor, wanted: Layout | None) -> Tensor | None:
    """Plain codes in tiles, laid out by native code; None if it does not support the layout."""
    if wanted is not None and (tiles := wanted.of_matrix) is not None:
        is_matrix = True
        if not len(x) or not _is_native(x, tiles, is_matrix):
            return None
        return torch.stack([native_product.tiles(codes, x.quantizer.format, tiles) for codes in x.codes])
    tiles, is_matrix = None if wanted is None else wanted.tiles, x.dim() == 2
    if tiles is None or not _is_native(x, tiles, is_matrix):
        return None
    codes = x.codes if is_matrix else x.codes.movedim(1, -1).flatten(1)
    return native_product.tiles(codes, x.quantizer.format, tiles)


def _is_native(x: QuantizedTensor, layout: Tiled, is_matrix: bool) -> bool:
    """Whether native code can lay it out.

    Codes that share bytes must do so along the summed dimension, in whole bytes.
    """
    if not (eager.is_plain_eager() and x.codes.is_cpu and type(x.codes) is Tensor):
        return False
    whole = x.quantizer.per_byte() == 1 or (is_matrix and not layout.columns and x.shape[-1] % 2 == 0)
    is_read = native_product.format_word(x.quantizer.format) is not None
    return whole and is_read and native.library().declines() is None


def _no_weight(x: object) -> str:
    return f"pack: weight must be a QuantizedTensor, got {spelling.shown(x)}; make one with hop.quantize"


def _quantizer(x: object) -> Quantizer:
    if not isinstance(x, QuantizedTensor):
        raise TypeError(_no_weight(x))
    return x.quantizer


def pack(weight: Tensor, /, layout: Layout | None = None) -> QuantizedTensor:
    """Convert a quantized tensor to the layout that hop.scaled reads fastest, mainly as the right-hand factor.

    On the CPU, codes of 8 and 4 bits are stored in tiles (hop.layouts.Tiled). This takes the same memory except for
    padding of the last tiles, and four bytes for the sum of each row of integers. Views of such a tensor are plain,
    dequantized tensors. On a GPU, 8-bit integer codes stay in place and get these sums (hop.layouts.Summed). Without
    native kernels, and on other devices, floats are stored as bfloat16 values (hop.layouts.Decoded). A tensor that is
    moved to a device whose kernels do not read its layout is unpacked. Weights with StoredScales, such as those of GGUF
    files, keep their layout: products read them fastest as they are, with the same result for a row in every batch.

    Args:
        weight: a QuantizedTensor with only the row-wise copy.
        layout: one of hop.layouts; None for the fastest on this machine.

    Returns:
        A new QuantizedTensor with equal values (but see Decoded); its quantizer is the weight's with a layout.
        Gradients
        pass through unchanged.

    Raises:
        TypeError: weight is not a QuantizedTensor, or layout is not a layout.
        ValueError: weight has a column-wise copy, or cannot be stored in `layout`.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(
            f"pack: layout must be one of hop.layouts, or None for the fastest; got {spelling.shown(layout)}; give one "
            "such as hop.layouts.Tiled()"
        )
    if not isinstance(weight, Tensor) and (watched := observed(pack, (weight, layout), {})) is not None:
        return watched
    if layout is None and isinstance(weight, QuantizedTensor):
        layout = layout_for(weight.quantizer, weight.dim(), weight.device.type)
    return pack_operator(weight, "" if layout is None else str(layout))


def unpack(weight: Tensor, /) -> QuantizedTensor:
    """Convert a packed tensor to the plain layout, with equal values.

    Args:
        weight: a QuantizedTensor in the plain layout or in tiles.

    Raises:
        TypeError: weight is not a QuantizedTensor.
        ValueError: weight has decoded values, from which codes cannot be restored.
    """
    return pack_operator(weight, "")


dynamo.allow_in_graph(pack)
dynamo.allow_in_graph(unpack)
