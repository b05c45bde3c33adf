"""Views of a quantized tensor: how a change of shape carries over to its buffers.

Each buffer has the dimensions of the tensor, and one of its elements serves a unit of them: one code an element, or, if
packed, several along the last dimension; one scale a block. So a buffer is a grid of units, of sizes 1, -1 (a whole
dimension) or more, and a view of the tensor is a view of each grid, if no unit is cut.

A function here returns the new tensor, or raises Cut, which says why there is none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop import blocks, copies
from hop.blocks import Block
from hop.scaling import TwoLevel
from hop.tensor.table import Cut

Units = Block


def units(t: Any) -> dict[str, Units]:
    """The units of each buffer, over the dimensions of t. Raises Cut if t has other than row-wise buffers."""
    if t.usages != (copies.ROWWISE,):
        raise Cut("its column-wise copy would go stale")
    ndim = t.dim()
    per_byte = t.quantizer.per_byte()
    found = {"codes": (1,) * (ndim - 1) + (per_byte,) if ndim else ()}
    for name, (_, block) in t.quantizer.stored().items():
        found[name] = blocks.per_dimension(block, ndim)
    return found


def rebuild(t: Any, shape: Sequence[int], grids: dict[str, tuple[Tensor, Units]]) -> Any:
    """The tensor of `shape` with these grids, with t's quantizer if that still describes them."""
    per_byte = t.quantizer.per_byte()
    codes = grids["codes"][1]
    if any(u != 1 and n != 1 for u, n in zip(codes[:-1], shape[:-1], strict=True)) or (
        codes and codes[-1] != per_byte and shape[-1] != 1
    ):
        raise Cut(f"{per_byte} codes share a byte along its last dimension")
    buffers = {name: grid for name, (grid, _) in grids.items()}
    quantizer = t.quantizer
    if any(not _same(quantizer.stored()[n][1], u, shape) for n, (_, u) in grids.items() if n != "codes"):
        if any(not isinstance(u, int) for _, sizes in grids.values() for u in sizes):
            raise Cut("its blocks would have a symbolic size")
        rule = quantizer.scale
        if isinstance(rule, TwoLevel):
            rule = replace(rule, outer=grids["global_amax"][1] or (-1,))
        quantizer = replace(quantizer, block=grids["scale"][1] or (-1,), scale=rule)
    return t.rebuilt(buffers, quantizer=quantizer, shape=shape)


def _same(block: Block, wanted: Units, shape: Sequence[int]) -> bool:
    own = blocks.per_dimension(block, len(shape))
    return all(a == b or n == 1 for a, b, n in zip(own, wanted, shape, strict=True))


def each(t: Any, shape: Sequence[int], change: Callable[[Tensor, Units], tuple[Tensor, Units]]) -> Any:
    """The tensor of `shape` whose grids are what `change` makes of t's."""
    if t.quantizer.flat:
        raise Cut("its blocks run over the flattened tensor")
    own = units(t)
    return rebuild(t, shape, {name: change(grid, own[name]) for name, grid in t.buffers().items()})


# ---- the views


def alias(t: Any) -> Any:
    return t.rebuilt({name: grid.view(grid.shape) for name, grid in t.buffers().items()})


def permute(t: Any, dims: Sequence[int]) -> Any:
    if list(dims) == list(range(t.dim())):
        return alias(t)
    dims = [d % t.dim() for d in dims]
    return each(t, [t.shape[d] for d in dims], lambda g, u: (g.permute(dims), tuple(u[d] for d in dims)))


def transpose(t: Any, a: int, b: int) -> Any:
    dims = list(range(t.dim()))
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return permute(t, dims)


def unsqueeze(t: Any, dim: int) -> Any:
    dim %= t.dim() + 1
    shape = [*t.shape[:dim], 1, *t.shape[dim:]]
    if t.quantizer.flat:
        return reshape(t, shape)
    return each(t, shape, lambda g, u: (_grid(g, t).unsqueeze(dim), (*u[:dim], 1, *u[dim:])))


def squeeze(t: Any, dims: Sequence[int]) -> Any:
    gone = {d % t.dim() for d in dims if t.dim() and t.shape[d] == 1}
    kept = [d for d in range(t.dim()) if d not in gone]
    shape = [t.shape[d] for d in kept]
    return reshape(t, shape)


def expand(t: Any, shape: Sequence[int]) -> Any:
    added = len(shape) - t.dim()
    old = [1] * added + list(t.shape)
    shape = [o if n == -1 else n for o, n in zip(old, shape, strict=True)]
    if added:
        t = reshape(t, old)
    grown = [o != n for o, n in zip(old, shape, strict=True)]
    if not any(grown):
        return alias(t)

    def change(grid: Tensor, own: Units) -> tuple[Tensor, Units]:
        # the numbers of an expanded dimension are equal, and so are their scales
        new = tuple((1 if u != -1 else -1) if g else u for g, u in zip(grown, own, strict=True))
        sizes = [(-1 if u == -1 else n) if g else -1 for g, u, n in zip(grown, new, shape, strict=True)]
        return grid.expand(sizes), new

    return each(t, shape, change)


def narrow(t: Any, dim: int, start: int, end: int, step: int = 1) -> Any:
    """Elements start, start + step, ... below end, which lie inside the dimension."""
    size = t.shape[dim]
    shape = list(t.shape)
    shape[dim] = -(-(end - start) // step)
    if start == 0 and end == size and step == 1:
        return alias(t)
    if t.quantizer.flat:
        return _narrow_flat(t, dim, start, end, step, shape)

    def change(grid: Tensor, own: Units) -> tuple[Tensor, Units]:
        u = own[dim]
        if u == -1:
            return grid, own
        if u != 1 and (step != 1 or start % u or (end % u and end != size)):
            raise Cut(f"{u} elements along dimension {dim} share a byte or a scale, and {start}:{end}:{step} cuts them")
        return grid[(slice(None),) * dim + (slice(start // u, -(-end // u), step),)], own

    return each(t, shape, change)


def _narrow_flat(t: Any, dim: int, start: int, end: int, step: int, shape: list[int]) -> Any:
    rest = 1
    for n in t.shape[dim + 1 :]:
        rest *= n
    (block,) = t.quantizer.block
    first, last = start * rest, end * rest
    if any(n != 1 for n in t.shape[:dim]) or step != 1 or first % block or (last % block and end != t.shape[dim]):
        raise Cut(
            f"blocks of {block} run over the flattened tensor, and {start}:{end}:{step} of dimension {dim} cuts them"
        )
    per_byte = t.quantizer.per_byte()
    if block % per_byte:
        raise Cut(f"{per_byte} codes share a byte")
    buffers = {}
    for name, grid in t.buffers().items():
        unit = block if name != "codes" else per_byte
        if name == "codes" and t.quantizer.per_byte() == 1:
            buffers[name] = grid[(slice(None),) * dim + (slice(start, end),)]
        else:
            buffers[name] = grid[first // unit : -(-last // unit)]
    return t.rebuilt(buffers, shape=shape)


def select(t: Any, dim: int, index: int) -> Any:
    dim %= t.dim()
    part = narrow(t, dim, index, index + 1)
    return squeeze(part, [dim])


def reshape(t: Any, shape: Sequence[int]) -> Any:
    """A view of another shape with the same elements in the same order."""
    if t.quantizer.flat:
        codes = t.codes if t.quantizer.per_byte() > 1 else t.codes.view(shape)
        rest = {name: grid for name, grid in t.buffers().items() if name != "codes"}
        return t.rebuilt({"codes": codes, **rest}, shape=shape)
    own = units(t)
    grids = {}
    parts = _groups(list(t.shape), list(shape))
    for name, grid in t.buffers().items():
        new: list[Any] = []
        for old_dims, new_dims in parts:
            new += _regroup([(t.shape[d], own[name][d]) for d in old_dims], [shape[d] for d in new_dims])
        counts = [1 if u == -1 else -(-n // u) for n, u in zip(shape, new, strict=True)]
        if name == "codes" and t.quantizer.per_byte() > 1:
            counts = counts or [1]  # a single number has no dimension, its byte has one
        grids[name] = (grid.view(counts), tuple(new))
    return rebuild(t, shape, grids)


def cat(tensors: Sequence[Any], dim: int) -> Any:
    """Side by side, if each but the last ends with a block. Not a view."""
    first = tensors[0]
    dim %= first.dim()
    if any(getattr(t, "quantizer", None) != first.quantizer for t in tensors):
        raise Cut("not all of the tensors have its quantizer")
    if first.quantizer.flat:
        raise Cut("its blocks run over the flattened tensor")
    sizes = [t.shape[dim] for t in tensors]
    grids = {}
    for name, u in units(first).items():
        if len(tensors) > 1 and (u[dim] == -1 or any(n % u[dim] for n in sizes[:-1])):
            raise Cut(f"a scale or a byte is shared along dimension {dim}, and {sizes} do not end where a block does")
        grids[name] = torch.cat([t.buffers()[name] for t in tensors], dim)
    shape = [sum(sizes) if d == dim else n for d, n in enumerate(first.shape)]
    return first.rebuilt(grids, shape=shape)


def as_strided(t: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
    """A reshape, a permutation, or a run along one dimension, told by its strides."""
    numel = math.prod(size)
    if offset == 0 and numel == t.numel() and t.is_contiguous() and list(stride) == _contiguous(size):
        return reshape(t, size)
    if offset == 0 and len(size) == t.dim():
        own, wanted = list(zip(t.shape, t.stride(), strict=True)), list(zip(size, stride, strict=True))
        if sorted(own) == sorted(wanted):
            dims: list[int] = []
            for pair in wanted:
                dims.append(next(d for d, o in enumerate(own) if o == pair and d not in dims))
            return permute(t, dims)
    if len(size) == t.dim() and list(stride) == list(t.stride()):
        for dim in sorted(range(t.dim()), key=lambda d: -t.stride(d)):
            start, offset = divmod(offset, t.stride(dim)) if t.stride(dim) else (0, offset)
            if start + size[dim] > t.shape[dim]:
                break
            t = narrow(t, dim, start, start + size[dim])
        else:
            if offset == 0:
                return t
    raise Cut(f"size {list(size)} and stride {list(stride)} are no reshape, permutation or slice of it")


def _contiguous(size: Sequence[int]) -> list[int]:
    return [math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size))]


def _grid(grid: Tensor, t: Any) -> Tensor:
    """The packed codes of a single number have a dimension that the number has not."""
    return grid.reshape(()) if t.dim() == 0 else grid


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions of equal product, side by side."""
    if 0 in old:
        return [(list(range(len(old))), list(range(len(new))))]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [], []
        left = right = 1
        if i < len(old):
            a.append(i)
            left, i = old[i], i + 1
        if j < len(new):
            b.append(j)
            right, j = new[j], j + 1
        while left != right:
            if (left < right or j == len(new)) and i < len(old):
                a.append(i)
                left, i = left * old[i], i + 1
            else:
                b.append(j)
                right, j = right * new[j], j + 1
        found.append((a, b))
    return found


def _regroup(old: list[tuple[int, Any]], new: list[int]) -> list[Any]:
    """The units of dimensions of sizes `new`, which hold the elements of dimensions of (size, unit) `old` in order."""
    if [n for n, _ in old] == new:
        return [u for _, u in old]
    real = [(n, u) for n, u in old if n != 1]
    places = [i for i, n in enumerate(new) if n != 1]
    if all(u == 1 for _, u in real):
        return [1] * len(new)
    if all(u == -1 for _, u in real):
        return [-1] * len(new)
    *front, (size, last) = real
    if len(places) == len(real):  # only ones come or go
        found: list[Any] = [1] * len(new)
        for i, (_, u) in zip(places, real, strict=True):
            found[i] = u
        return found
    unit = size if last == -1 else last
    inner = new[places[-1]]
    if any(u != 1 for _, u in front) or (front and size % unit) or (len(places) > 1 and inner % unit):
        raise Cut(f"blocks of {[u for _, u in old]} over {[n for n, _ in old]} are none over {new}")
    found = [1] * len(new)
    found[places[-1]] = unit
    return found
