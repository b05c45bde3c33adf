"""Units: how many elements of a quantized tensor one element of a buffer serves along each dimension.

A unit is 1, -1 (a whole dimension) or more: one code serves an element or, if packed, several along the last dimension;
one scale serves a block. This module also finds the quantizer for buffers of given units.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from hop.numerics import blocks, copies
from hop.numerics.blocks import Block
from hop.numerics.quantizer import Quantizer
from hop.tensor.table import IndivisibleError

Units = Block


def of_buffers(quantizer: Quantizer, usages: copies.Usages, ndim: int) -> dict[str, Units]:
    """The units of each buffer of a tensor of `ndim` dimensions. Raises IndivisibleError for other than row-wise
    buffers.
    """
    if usages != (copies.ROWWISE,):
        raise IndivisibleError("its column-wise copy would go stale")
    if quantizer.is_tiled():
        raise IndivisibleError(
            f"its layout={quantizer.layout} is for whole tensors only; hop.unpack(x) returns the plain layout"
        )
    result: dict[str, Units] = {"codes": (1,) * (ndim - 1) + (quantizer.per_byte(),) if ndim else ()}
    for name, (_, block) in quantizer.stored().items():
        result[name] = blocks.per_dimension(block, ndim)
    return result


@functools.lru_cache(maxsize=4096)
def fitting(quantizer: Quantizer, named: tuple[tuple[str, Units], ...], shape: tuple[int, ...]) -> Quantizer:
    """The quantizer for a tensor of `shape` whose buffers have these units; `quantizer` itself if it matches."""
    per_byte = quantizer.per_byte()
    new = dict(named)
    codes = new["codes"]
    if any(u != 1 and n != 1 for u, n in zip(codes[:-1], shape[:-1], strict=True)) or (
        codes and codes[-1] != per_byte and shape[-1] != 1
    ):
        raise IndivisibleError(f"{per_byte} codes share a byte along its last dimension")
    return with_units(quantizer, new, shape)


def with_units(quantizer: Quantizer, new: dict[str, Units], shape: Sequence[int]) -> Quantizer:
    """The quantizer for a tensor of `shape` whose scales have these units."""
    if all(_same(block, new[name], shape) for name, (_, block) in quantizer.stored().items()):
        return quantizer
    if quantizer.layout is not None and not quantizer.is_tiled():
        for name, (_, block) in quantizer.layout.stored(quantizer.format).items():
            if not _same(block, new[name], shape):
                raise IndivisibleError(f"{name} share bytes along its last dimension")
    rule = quantizer.scale
    try:
        rule = rule.of_blocks(lambda _: block_of(new[rule.given_name]))
        return replace(quantizer, block=block_of(new["scale"]), scale=rule)
    except ValueError as error:
        raise IndivisibleError(f"no quantizer can have its blocks: {error}") from error


def block_of(units: Units) -> Block:
    """The shortest block with these units. Symbolic sizes are specialized, because quantizers need integers."""
    block = tuple(int(u) for u in units) or (-1,)
    while len(block) > 2 and block[0] == (-1 if block[1] == -1 else 1):  # hop.numerics.blocks adds these in front
        block = block[1:]
    return block


def _same(block: Block, wanted: Units, shape: Sequence[int]) -> bool:
    sizes = blocks.per_dimension(block, len(shape))
    pairs = zip(sizes, wanted, shape, strict=True)
    return all(a == b or (n != 0 and is_whole(a, n) and is_whole(b, n)) for a, b, n in pairs)


def is_whole(unit: int, n: int) -> bool:
    """Whether one unit covers a dimension of size n."""
    return unit == -1 or unit >= n


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest consecutive groups of dimensions with equal products; no size is 0."""
    result: list[tuple[list[int], list[int]]] = []
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
        result.append((a, b))
    return result


def regrouped(own: Units, old: Sequence[int], new: Sequence[int], parts: list[tuple[list[int], list[int]]]) -> Units:
    result: list[int] = []
    for old_dims, new_dims in parts:
        result += _regroup([(old[d], own[d]) for d in old_dims], [new[d] for d in new_dims])
    return tuple(result)


def _regroup(old: list[tuple[int, int]], new: list[int]) -> list[int]:
    """The units of dimensions of sizes `new` that contain the elements of `old`, dimensions of
    (size, unit), in order.
    """
    real = [(n, u) for n, u in old if n != 1]
    if [n for n, _ in old] == new:
        return [u for _, u in old]
    if all(u == 1 for _, u in real):
        return [1] * len(new)
    if all(u == -1 for _, u in real):
        return [-1] * len(new)
    cut = IndivisibleError(f"units of {[u for _, u in old]} over {[n for n, _ in old]} are none over {new}")
    # Units cover a whole number of consecutive elements, or, if ragged, a shorter run at the very end.
    run, behind, ragged = 1, 1, False
    for n, u in reversed(real):
        if ragged or (u != 1 and run != behind):
            raise cut
        if u != 1:
            size = n if is_whole(u, n) else u
            run, ragged = behind * size, n % size != 0
        behind = behind * n
    sizes: list[int] = []
    for i, n in reversed(list(enumerate(new))):
        if run % n == 0:
            sizes.append(n if run != 1 else 1)
            run = run // n
        elif n % run == 0 or all(m == 1 for m in new[:i]):
            sizes.append(run)
            run = 1
        else:
            raise cut
    return sizes[::-1]
