"""quantize_weight: quantize a weight with the scales of least squared error."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from hop.compat.memory import PLAIN
from hop.impls.quantize.operator import quantize
from hop.kernels.cpu.search import search_scales
from hop.numerics import blocks, copies, weight_search
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST, Static
from hop.numerics.spelling import flag, shown
from hop.numerics.weight_search import AFFINE, CODE, Search, Units
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.operators import quantize_buffers

_AT_ONCE = 2**22  # elements that are searched at a time, unless a row has more


@torch.no_grad()
def quantize_weight(quantizer: Quantizer, weight: Tensor, *, signed: bool = False) -> QuantizedTensor:
    """Quantize a weight with scales, and zero points, of least squared error.

    The result is an ordinary one of `quantizer`: only its scales and codes differ from those of hop.quantize, which
    uses the rule's formula. For integer formats and e2m1 of up to 6 bits in blocks of up to 1024 elements, it tries
    several scales for each block (hop.numerics.weight_search), in about the time of quantizing twice; other quantizers
    give what hop.quantize gives. It has no gradient, and takes float weights, as they are: use hop.quantize for
    activations, and for weights that were trained with hop.fake_quantize. Fake tensors and DTensors get the rule's
    scales.

    Args:
        quantizer: a Quantizer that rounds to nearest.
        weight: a float tensor.
        signed: whether scales may be negative, so that the largest element of a block can get the extra negative code
            of int2 to int6, such as -8, if it is positive too. Only for `Amax` rules; integer backends refuse such
            scales.
    """
    flag(signed, "quantize_weight: signed")
    search, bits = _search_of(quantizer, signed)
    result: QuantizedTensor = quantize(quantizer, weight)  # type: ignore[assignment]
    if search is None or bits is None or not _has_values(weight):
        return result
    q, buffers = quantizer, dict(result.buffers())
    buffers |= _by_rows(q, search, bits, weight.detach(), {name: buffers[name] for name in q.stored_by_rule()})
    if q.scale.outer_block is None:
        given, scale = q, buffers["scale"]
    else:
        given = replace(q, scale=Static(), hadamard=None)
        scale = q.scale.scale_of([buffers[name] for name in q.stored_by_rule()], q.format)
        scale = torch.where(scale == 0, LARGEST, scale)
    zero = buffers["zero_point"] if search.kind == AFFINE else None
    codes, *_ = quantize_buffers(str(given), weight.detach(), scale, zero, None, (copies.ROWWISE,))
    return QuantizedTensor(buffers | {"codes": codes}, q, tuple(weight.shape), weight.dtype)


def _has_values(weight: Tensor) -> bool:
    """Whether there are values to search for: not in fake and meta tensors, nor in parts on other processes."""
    return type(weight.detach()) in PLAIN and not weight.is_meta and weight.numel() > 0 and weight.dim() > 0


def _search_of(q: Quantizer, signed: bool) -> tuple[Search | None, int | None]:
    """The search of a quantizer, and the bits of its units; None if it has none."""
    if not isinstance(q, Quantizer):
        raise TypeError(
            f"quantize_weight: quantizer must be a Quantizer, got {shown(q)}; give one such as hop.presets.INT4_32"
        )
    cannot = q.is_random() or q.flat or q.layout is not None or -1 in q.block
    search = None if cannot else q.scale.weight_search(q.format, signed)
    if search is None:
        return None, None
    steps = int(q.format.max - q.format.min) if search.kind == AFFINE else 0
    return search, weight_search.bits_of_units(q.format, math.prod(q.block), steps)


def _by_rows(q: Quantizer, search: Search, bits: int, x: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales and zero points found, some rows at a time."""
    count = max(_AT_ONCE // max(x[:1].numel(), 1), 1)
    if len(x) <= count or x.dim() < 2 or blocks.per_dimension(q.block, x.dim())[0] != 1:
        return _searched(q, search, bits, x, buffers)
    parts = [
        _searched(
            q,
            search,
            bits,
            x[start : start + count],
            {name: b[start : start + count] if len(b) == len(x) else b for name, b in buffers.items()},
        )
        for start in range(0, len(x), count)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _searched(q: Quantizer, search: Search, bits: int, x: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    native = search_scales(q, search, bits, x, buffers)
    return reference(q, search, bits, x, buffers) if native is None else native


def reference(q: Quantizer, search: Search, bits: int, x: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales and zero points found, by PyTorch's operators."""
    cut, dims = blocks.split(x.to(torch.float32), q.block)
    units = Units.of(cut, dims, bits, search.kind == AFFINE)
    first, *rest = (blocks.spread(buffers[name], q.block) for name in q.stored_by_rule())
    if search.kind == CODE:
        codes = first.view(torch.uint8).to(torch.int32)

        def scale_of(codes: Tensor) -> Tensor:
            return q.scale.scale_of([codes.to(torch.uint8).view(first.dtype), *rest], q.format)

        found = [weight_search.choose(search, units, q.format, codes, scale_of).to(torch.uint8).view(first.dtype)]
    else:
        zero = rest[0].to(torch.float32) if rest else None
        found = weight_search.fit(search, units, bits, q.format, first, zero)
    names = list(q.stored_by_rule())[: len(found)]
    tensors = (blocks.gather(t.to(buffers[name].dtype), x.dim()) for name, t in zip(names, found, strict=True))
    return {name: t.reshape(buffers[name].shape) for name, t in zip(names, tensors, strict=True)}
