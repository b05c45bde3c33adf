"""Views of a quantized tensor: apply a change of shape to its buffers.

Each buffer has the dimensions of the tensor, and one of its elements serves a unit: one code serves an element or, if
packed, several along the last dimension; one scale serves a block. So a buffer is a grid of units of size 1, -1 (a
whole dimension) or more, and a view of the tensor is a view of each grid, if no unit is split.

The functions return the new tensor, or raise IndivisibleError with the reason.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hop.compat import subclasses
from hop.numerics import blocks, copies
from hop.numerics.layouts import Layout
from hop.numerics.quantizer import Quantizer
from hop.tensor import table, units
from hop.tensor.quantized import QuantizedTensor
from hop.tensor.table import IndivisibleError
from hop.tensor.units import Units

_T = TypeVar("_T")


def _remembering(
    plan: "functools._lru_cache_wrapper[_T]", t: QuantizedTensor, shape: Sequence[int]
) -> Callable[..., _T]:
    """`plan`, a cached function, or its uncached form if sizes are symbolic."""
    return plan if all(type(n) is int for n in (*t.shape, *shape)) else plan.__wrapped__


def each(
    t: QuantizedTensor, shape: Sequence[int], change: Callable[[Tensor, Units], tuple[Tensor, Units]]
) -> QuantizedTensor:
    """The tensor of `shape` whose grids are the results of `change` for t's."""
    if t.quantizer.flat:
        raise IndivisibleError("its blocks run over the flattened tensor")
    units_of = units.of_buffers(t.quantizer, t.usages, t.dim())
    changed = {name: change(grid, units_of[name]) for name, grid in t.buffers().items()}
    fit = _remembering(units.fitting, t, shape)
    quantizer = fit(t.quantizer, tuple((name, u) for name, (_, u) in changed.items()), tuple(shape))
    return t.rebuilt({name: grid for name, (grid, _) in changed.items()}, quantizer=quantizer, shape=shape)


def unpacked(t: QuantizedTensor) -> QuantizedTensor:
    """The tensor with its codes in plain layout."""
    q = t.quantizer
    return t.rebuilt(q.packed(t.buffers(), t.shape, None), quantizer=replace(q, layout=None))


# ---- the views


def alias(t: QuantizedTensor) -> QuantizedTensor:
    return t.rebuilt({name: getattr(t, name).detach() for name in t._names})  # faster than a view


def permute(t: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    if list(dims) == list(range(t.dim())):
        return alias(t)
    dims = [dimension(d, t.dim()) for d in dims]
    if len(set(dims)) != t.dim():
        raise IndivisibleError(f"{dims} is not a permutation")
    layout = t.quantizer.layout
    as_columns = None if layout is None or dims != [1, 0] else layout.transposed()
    if layout is not None and as_columns is not None:
        return _transposed(t, layout, as_columns)
    return each(t, [t.shape[d] for d in dims], lambda g, u: (g.permute(dims), tuple(u[d] for d in dims)))


def _transposed(t: QuantizedTensor, layout: Layout, as_columns: Layout) -> QuantizedTensor:
    """The same codes in `as_columns`, the layout of the transposed matrix."""
    q, shape = t.quantizer, t.shape[::-1]
    of_codes = layout.of_transposed
    grids = {name: of_codes(grid) if name == "codes" else grid.t() for name, grid in t.buffers().items()}
    units_of = {name: blocks.per_dimension(block, 2)[::-1] for name, (_, block) in q.stored().items()}
    return t.rebuilt(grids, quantizer=replace(units.with_units(q, units_of, shape), layout=as_columns), shape=shape)


def transpose(t: QuantizedTensor, a: int, b: int) -> QuantizedTensor:
    dims = list(range(t.dim()))
    a, b = dimension(a, t.dim() or 1), dimension(b, t.dim() or 1)
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return permute(t, dims)


def unsqueeze(t: QuantizedTensor, dim: int) -> QuantizedTensor:
    dim = dimension(dim, t.dim() + 1)
    shape = [*t.shape[:dim], 1, *t.shape[dim:]]
    if t.quantizer.flat:
        return reshape(t, shape)
    return each(t, shape, lambda g, u: (_grid(g, t).unsqueeze(dim), (*u[:dim], 1, *u[dim:])))


def squeeze(t: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    gone = {dimension(d, t.dim() or 1) for d in dims}
    return reshape(t, [n for d, n in enumerate(t.shape) if n != 1 or d not in gone])


def expand(t: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    added = len(shape) - t.dim()
    if added < 0:
        raise IndivisibleError("there are fewer sizes than dimensions")
    old = [1] * added + list(t.shape)
    shape = [o if n == -1 else n for o, n in zip(old, shape, strict=True)]
    if added:
        t = reshape(t, old)
    grown = [o != n for o, n in zip(old, shape, strict=True)]
    if not any(grown):
        return alias(t)

    def change(grid: Tensor, own: Units) -> tuple[Tensor, Units]:
        # values of an expanded dimension are equal, and so are their scales
        new = tuple((1 if u != -1 else -1) if g else u for g, u in zip(grown, own, strict=True))
        sizes = [(-1 if u == -1 else n) if g else -1 for g, u, n in zip(grown, new, shape, strict=True)]
        return grid.expand(sizes), new

    return each(t, shape, change)


def narrow(t: QuantizedTensor, dim: int, start: int, end: int, step: int = 1) -> QuantizedTensor:
    """Elements start, start + step, ... below end, all inside the dimension."""
    size = t.shape[dim]
    shape = list(t.shape)
    shape[dim] = -(-(end - start) // step)
    if not 0 <= start <= end <= size:
        raise IndivisibleError(f"{start}:{end} is out of range")
    if start == 0 and end == size and step == 1:
        return alias(t)
    if t.quantizer.flat:
        return _narrow_flat(t, dim, start, end, step, shape)

    def change(grid: Tensor, own: Units) -> tuple[Tensor, Units]:
        u = own[dim]
        # A scale of the whole dimension is shared by all processes that get a part.
        shared = table.is_moving() and units.is_whole(u, size) and grid is not t.codes
        if u == -1 or shared:
            return grid, own
        ends = start == 0 and step == 1 and table.is_moving()  # a copy follows, whose last block may be incomplete
        if (_cuts(start, end, u, size) and not ends) or (u != 1 and step != 1):
            raise IndivisibleError(
                f"{u} elements along dimension {dim} share a byte or a scale, and {start}:{end}:{step} cuts them"
            )
        return grid[(slice(None),) * dim + (slice(start // u, -(-end // u), step),)], own

    return each(t, shape, change)


def _narrow_flat(t: QuantizedTensor, dim: int, start: int, end: int, step: int, shape: list[int]) -> QuantizedTensor:
    rest = math.prod(t.shape[dim + 1 :])
    first, last = start * rest, end * rest
    (block,) = t.quantizer.block
    buffers = {}
    for name, grid in t.buffers().items():
        unit = block if name != "codes" else t.quantizer.per_byte()
        cuts = unit != -1 and _cuts(first, last, unit, t.numel()) and not (first == 0 and table.is_moving())
        if any(n != 1 for n in t.shape[:dim]) or step != 1 or cuts:
            raise IndivisibleError(
                f"{'a block' if unit == -1 else unit} of its elements in a row share a byte or a scale, and "
                f"{start}:{end}:{step} of dimension {dim} cuts them"
            )
        if unit == -1:
            buffers[name] = grid
        elif name == "codes" and unit == 1:
            buffers[name] = grid[(slice(None),) * dim + (slice(start, end),)]
        else:
            buffers[name] = grid[first // unit : -(-last // unit)]
    return t.rebuilt(buffers, shape=shape)


def _cuts(start: int, end: int, unit: int, size: int) -> bool:
    """Whether start:end of a row of `size` elements splits a unit."""
    return unit != 1 and (start % unit != 0 or (end % unit != 0 and end != size))


def select(t: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    return squeeze(narrow(t, dim, index, index + 1), [dim])


def reshape(t: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """A view of another shape with the same elements in the same order."""
    if list(shape) == list(t.shape):
        return alias(t)
    if t.quantizer.flat:
        codes = t.codes if t.quantizer.per_byte() > 1 else t.codes.view(shape)
        return t.rebuilt({**t.buffers(), "codes": codes}, shape=shape)
    new = tuple(shape)
    quantizer, sizes = _remembering(_reshaped, t, new)(t.quantizer, t.usages, tuple(t.shape), new)
    if 0 in new:  # nothing to share
        buffers = {name: grid.new_ones(sizes[name]) for name, grid in t.buffers().items()}
    else:
        buffers = {name: grid.view(sizes[name]) for name, grid in t.buffers().items()}
    return t.rebuilt(buffers, quantizer=quantizer, shape=new)


@functools.lru_cache(maxsize=4096)
def _reshaped(
    quantizer: Quantizer, usages: copies.Usages, old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[Quantizer, dict[str, tuple[int, ...]]]:
    """The quantizer after a reshape, and the shape of each buffer."""
    units_of = units.of_buffers(quantizer, usages, len(old))
    if 0 in new:
        return quantizer, {name: size for name, (size, _) in quantizer.buffers(new).items()}
    parts = units.groups(old, new)
    regrouped = {name: units.regrouped(u, old, new, parts) for name, u in units_of.items()}
    quantizer = units.fitting.__wrapped__(quantizer, tuple(regrouped.items()), new)
    sizes = {
        name: tuple(1 if u == -1 else -(-n // u) for n, u in zip(new, us, strict=True))
        for name, us in regrouped.items()
    }
    if quantizer.per_byte() > 1:
        sizes["codes"] = sizes["codes"] or (1,)  # a single number has no dimension, but its byte has one
    return quantizer, sizes


def cat(tensors: Sequence[Tensor], dim: int) -> QuantizedTensor:
    """Concatenate tensors if each but the last ends with a block. Not a view."""
    parts = [t for t in tensors if isinstance(t, QuantizedTensor)]
    if len(parts) < len(tensors) or len({(t.quantizer, t.usages) for t in parts}) > 1:
        raise IndivisibleError("not all of the tensors have its quantizer and its copies")
    first = parts[0]
    dim = dimension(dim, first.dim())
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in parts)
    if any([*t.shape[:dim], *t.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]] for t in parts):
        raise IndivisibleError("the tensors differ in other sizes")
    parts = [t for t in parts if t.shape[dim] != 0] or [first]
    if len(parts) > 1:
        parts = [separable(t, dim) for t in parts]
        first = parts[0]
    quantizer = joined(first, [t.shape[dim] for t in parts], dim, shape)
    grids = {}
    for name, grid in first.buffers().items():
        grids[name] = torch.cat([t.buffers()[name] for t in parts], min(dim, grid.dim() - 1))
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in parts])
    return first.rebuilt(grids, quantizer=quantizer, shape=shape, dtype=dtype)


def joined(t: QuantizedTensor, sizes: Sequence[int], dim: int, shape: Sequence[int]) -> Quantizer:
    """The quantizer of a tensor of `shape`, a concatenation of parts like t with `sizes` along `dim`.

    If one scale serves a whole dimension of each part, the parts keep their scales: each part is a block of the result.
    """
    q, rows = t.quantizer, shape
    if q.flat:
        if any(n != 1 for n in shape[:dim]):
            raise IndivisibleError("its blocks run over the flattened tensor")
        rest = math.prod(shape[dim + 1 :])
        sizes, dim, rows = [n * rest for n in sizes], 0, [math.prod(shape)]
        blocks_of = {"codes": (q.per_byte(),)} | {name: block for name, (_, block) in q.stored().items()}
    else:
        blocks_of = units.of_buffers(q, t.usages, t.dim())
    if len(sizes) == 1:
        return q
    new = {name: (*u[:dim], _joint(name, u[dim], sizes, dim), *u[dim + 1 :]) for name, u in blocks_of.items()}
    if q.flat:
        return units.with_units(q, new, rows)
    return _remembering(units.fitting, t, shape)(q, tuple(new.items()), tuple(shape))


def separable(t: QuantizedTensor, dim: int) -> QuantizedTensor:
    """t prepared as a part of a larger tensor along `dim`.

    A second scale, which must serve whole dimensions or single blocks (hop.scale_rules.TwoLevel), is repeated to serve
    single blocks along it.
    """
    q = t.quantizer
    if q.flat or q.scale.outer_block is None:
        return t
    units_of = units.of_buffers(q, t.usages, t.dim())
    name = q.scale.given_name
    inner, outer = units_of["scale"], units_of[name]
    if inner[dim] == -1 or outer[dim] != -1:
        return t
    given = t.buffers()[name]
    sizes = list(given.shape)
    sizes[dim] = -(-t.shape[dim] // inner[dim])
    finer = units.block_of((*outer[:dim], inner[dim], *outer[dim + 1 :]))
    buffers = t.buffers() | {name: given.expand(sizes).contiguous()}
    rule = q.scale.of_blocks(lambda _: finer)
    return t.rebuilt(buffers, quantizer=replace(q, block=units.block_of(inner), scale=rule))


def refined(t: QuantizedTensor, dim: int) -> QuantizedTensor:
    """t with smaller blocks that divide its size along `dim` if the last one is incomplete:
    more scales, same values.
    """
    units_of, n = units.of_buffers(t.quantizer, t.usages, t.dim()), t.shape[dim]
    ragged = {
        name: u for name, u in units_of.items() if name != "codes" and not units.is_whole(u[dim], n) and n % u[dim]
    }
    if not ragged:
        return t
    buffers = t.buffers()
    for name, u in ragged.items():
        unit = math.gcd(n, u[dim])
        units_of[name] = (*u[:dim], unit, *u[dim + 1 :])
        buffers[name] = buffers[name].repeat_interleave(u[dim] // unit, dim).narrow(dim, 0, n // unit).contiguous()
    return t.rebuilt(buffers, quantizer=units.with_units(t.quantizer, units_of, t.shape))


def _joint(name: str, unit: int, sizes: Sequence[int], dim: int) -> int:
    """The unit along a dimension for concatenated parts of `sizes`."""
    first, *_, last = sizes
    if unit != -1 and all(n % unit == 0 for n in sizes[:-1]):
        return unit
    if name != "codes" and units.is_whole(unit, first) and all(n == first for n in sizes[:-1]) and last <= first:
        return first
    shared = "a byte" if name == "codes" else "a scale"
    raise IndivisibleError(
        f"{'all' if unit == -1 else unit} elements along dimension {dim} share {shared}, but parts of {list(sizes)} "
        "do not end at multiples of that"
    )


def as_strided(t: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: Any) -> QuantizedTensor:
    """The view of t with these strides and this offset, as torch.compile requests views."""
    if t.numel() == 0 and 0 in size:
        return reshape(t, size)
    if tuple(size) == tuple(t.shape) and offset == t.storage_offset():
        if tuple(stride) == tuple(t.stride()):
            return alias(t)  # keeps its blocks, also along dimensions with one element
        contiguous = tuple(stride) == subclasses.contiguous_strides(size)
        if contiguous and t.quantizer.per_byte() > 1 and t.codes.is_contiguous():
            return alias(t)  # each row may end with an incomplete byte
    far = sorted((d for d, n in enumerate(size) if n != 1 and stride[d] != 0), key=lambda d: -stride[d])
    sizes, strides = [size[d] for d in far], [stride[d] for d in far]
    ones = [n if d in far else 1 for d, n in enumerate(size)]
    for make, (n, s) in itertools.product((_run, _box), ((sizes, strides), _merged(sizes, strides))):
        try:
            falling = permute(t, sorted(range(t.dim()), key=lambda d: -t.stride(d)))
            result = make(falling, n, s, offset - t.storage_offset())
            result = reshape(result, subclasses.inferred_size(sizes, result.numel()))
            result = permute(result, sorted(range(len(far)), key=lambda i: far[i]))
            result = expand(reshape(result, ones), size)
        except (IndivisibleError, RuntimeError):  # RuntimeError: PyTorch's own, if a buffer has no such view
            continue
        if result.numel() == 0:
            return result
        got, wanted = ([s for n, s in zip(size, own, strict=True) if n != 1] for own in (result.stride(), stride))
        if got == wanted and result.storage_offset() == offset:
            return result
    raise RuntimeError(
        f"as_strided of a QuantizedTensor of shape {tuple(t.shape)}, strides {t.stride()} and offset "
        f"{t.storage_offset()}: size {tuple(size)}, strides {tuple(stride)} and offset {offset} are not a view that "
        "its blocks and bytes allow; dequantize it first"
    )


def _merged(sizes: list[int], strides: list[int]) -> tuple[list[int], list[int]]:
    """The fewest dimensions with the same elements in the same order."""
    merged: list[tuple[int, int]] = []
    for n, s in zip(sizes, strides, strict=True):
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    return [n for n, _ in merged], [s for _, s in merged]


def _run(t: QuantizedTensor, sizes: list[int], strides: list[int], offset: int) -> QuantizedTensor:
    """Consecutive elements of t, from `offset` on."""
    numel = math.prod(sizes)
    for dim, n in enumerate(t.shape):
        rest = math.prod(t.shape[dim + 1 :])
        if rest and offset % rest == 0 and numel % rest == 0:
            return narrow(t, dim, offset // rest, (offset + numel) // rest)
        if n != 1:
            break
    raise IndivisibleError("no dimension has them")


def _box(t: QuantizedTensor, sizes: list[int], strides: list[int], offset: int) -> QuantizedTensor:
    """A range of each dimension of t."""
    left = list(zip(sizes, strides, strict=True))
    for d in range(t.dim()):
        step = t.stride(d)
        if t.shape[d] == 1 or step == 0:
            continue
        start, offset = divmod(offset, step)
        n, s = left.pop(0) if left and left[0][1] >= step else (1, step)
        if s % step:
            raise IndivisibleError(f"dimension {d} has stride {step}, which does not divide {s}")
        t = narrow(t, d, start, start + (n - 1) * (s // step) + 1, s // step)
    return t


def _grid(grid: Tensor, t: QuantizedTensor) -> Tensor:
    """Remove the dimension that the packed codes of a single number have."""
    return grid.reshape(()) if t.dim() == 0 else grid


def dimension(dim: int, ndim: int) -> int:
    """`dim` counted from the front. Raises IndivisibleError if out of range, so that PyTorch's operator raises its
    error.
    """
    if not -ndim <= dim < ndim:
        raise IndivisibleError(f"dimension {dim} of {ndim}")
    return dim % ndim
