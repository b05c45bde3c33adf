"""Search for the scales of a weight on the CPU in C++, with the bits of hop.numerics.weight_search (native/search/)."""

import functools

import torch
from torch import Tensor

from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.cpu.quantizers import bits as bits_of
from hop.numerics import blocks
from hop.numerics.formats import E2M1
from hop.numerics.quantizer import Quantizer
from hop.numerics.weight_search import AFFINE, CODE, Search


def search_scales(
    q: Quantizer, search: Search, unit_bits: int, x: Tensor, buffers: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """The scales, and zero points, that hop.numerics.weight_search finds from those in `buffers`; None if the call is
    not supported.
    """
    if native.declines_here(x.device) or native.declines_tensor("x", x) or 0 in x.shape:
        return None
    block = blocks.per_dimension(q.block, x.dim())
    if not block or set(block[:-1]) - {1} or not (q.format.is_integer or q.format == E2M1):
        return None
    if search.kind == CODE and not (q.scale.scale_is_told and q.scale.block_scale_format is not None):
        return None
    rows = x.to(torch.float32).reshape(-1, x.shape[-1]).contiguous()
    name, zero = q.scale.given_name if search.kind != CODE else "scale", None
    scale, outer, values = buffers[name].reshape(len(rows), -1).contiguous(), None, None
    if search.kind == AFFINE:
        zero = buffers["zero_point"].to(torch.float32).reshape(scale.shape).contiguous()
    if search.kind == CODE:
        values, dtype = _values(q), scale.dtype
        if (of_rows := q.scale.outer_scale_name) is not None:
            outer = buffers[of_rows]
            if outer.numel() != 1:
                outer = outer.expand(*x.shape[:-1], 1)
            outer = outer.reshape(-1).contiguous()
        (codes,) = native_operators.search_scales(
            rows, scale.view(torch.uint8), None, outer, values, _description(q, search, unit_bits)
        )
        return {"scale": codes.view(dtype).reshape(buffers["scale"].shape)}
    found = native_operators.search_scales(rows, scale, zero, None, None, _description(q, search, unit_bits))
    made = {name: found[0].reshape(buffers[name].shape)}
    if zero is not None:
        made["zero_point"] = found[1].to(q.format.dtype).reshape(buffers["zero_point"].shape)
    return made


@functools.lru_cache(maxsize=256)
def _description(q: Quantizer, search: Search, unit_bits: int) -> str:
    words = [f"1 {search.kind} block={q.block[-1]} bits={unit_bits}"]
    if q.format.is_integer:
        words.append(f"low={int(q.format.min)} high={int(q.format.max)}")
    else:
        words.append("e2m1")
    if search.kind == CODE:
        factor = bits_of(q.scale.outer_scale_factor(q.format))
        words.append(f"last={search.last} factor={factor} slack={bits_of(search.slack)}")
    return " ".join([*words, f"candidates={','.join(str(bits_of(c)) for c in search.candidates)}"])


@functools.lru_cache(maxsize=64)
def _values(q: Quantizer) -> Tensor:
    """The value of each code of a scale, for 256 codes."""
    format = q.scale.block_scale_format
    assert format is not None
    return format.decode(torch.arange(256, dtype=torch.uint8).view(format.dtype)).to(torch.float32)
