"""Views, copies and padding of codes in a .tosa file."""

from hop.export.targets.integer.arguments import permutation, slice_range
from hop.export.targets.integer.steps import Step
from hop.export.targets.integer.values import Codes, Order, common_order, tensor
from hop.export.targets.tosa.file import File
from hop.export.targets.tosa.scales import same


def viewed(step: Step) -> None:
    x, name = step.arg(0), step.op._schema.name.removeprefix("aten::")
    plain = x.is_alike(step.result) and (step.low, step.high) == (None, None)
    if name in ("clone", "contiguous", "alias", "detach"):
        if plain:
            step.result.tensors.update(x.tensors)
            return
        order = common_order([x])
        same(step, tensor(step.file, x, order), x, order)
    elif name in ("permute", "transpose", "t", "movedim"):
        by = permutation(step, x)
        if plain:  # the same tensors, relabeled
            step.result.tensors.update({tuple(by.index(d) for d in order): t for order, t in x.tensors.items()})
            return
        order = step.result.plain
        output = step.file.tensor(f"{step.result.name}_view", step.result.shape, x.dtype)
        same(step, step.file.transposed(tensor(step.file, x), by, output), x, order)
    elif name in ("slice", "narrow", "select"):
        _slice(step, x, name)
    else:
        same(step, reshaped(step.file, tensor(step.file, x), step.result.shape), x, step.result.plain)


def reshaped(file: File, x: str, shape: tuple[int, ...]) -> str:
    if file.sizes[x] == tuple(shape):
        return x
    return file.made("RESHAPE", [x, file.shape(shape)], f"{x}_reshaped", shape, file.dtypes[x])


def sliced(file: File, x: str, begin: list[int], shape: list[int]) -> str:
    """A contiguous slice."""
    if file.sizes[x] == tuple(shape):
        return x
    inputs = [x, file.shape(begin), file.shape(shape)]
    return file.made("SLICE", inputs, f"{x}_part", shape, file.dtypes[x])


def _slice(step: Step, x: Codes, name: str) -> None:
    dim, start, stop, stride = slice_range(step, x, name)
    if stop <= start:
        raise NotImplementedError(f"it has no elements: sizes {step.result.shape}; TOSA's tensors must have some")
    order: Order = x.plain if name == "select" else common_order([x])
    output, at = tensor(step.file, x, order), order.index(dim)
    output = _strided(step.file, output, at, (start, stop, stride))
    result = step.result.plain if name == "select" else order
    same(step, reshaped(step.file, output, tuple(step.result.shape[d] for d in result)), x, result)


def _strided(file: File, x: str, dim: int, places: tuple[int, int, int]) -> str:
    """Every stride-th element along a dimension: because TOSA has no strided slice, reshape to rows of `stride` and
    take the first of each.
    """
    start, stop, stride = places
    begin, sizes = [0] * len(file.sizes[x]), list(file.sizes[x])
    count = -(-(stop - start) // stride)
    begin[dim], sizes[dim] = start, min(count * stride, sizes[dim] - start)
    if stride == 1:
        sizes[dim] = stop - start
        return sliced(file, x, begin, sizes)
    x = sliced(file, x, begin, sizes)
    if short := count * stride - sizes[dim]:
        x = pads(file, x, [(0, short if d == dim else 0) for d in range(len(sizes))], 0)
    rows = [*sizes[:dim], count, stride, *sizes[dim + 1 :]]
    x = reshaped(file, x, tuple(rows))
    rows[dim + 1] = 1
    return sliced(file, x, [0] * len(rows), rows)


def pads(file: File, x: str, sides: list[tuple[int, int]], fill: int) -> str:
    dtype, shape = file.dtypes[x], [n + a + b for n, (a, b) in zip(file.sizes[x], sides, strict=True)]
    inputs = [x, file.shape([n for pair in sides for n in pair]), file.constant([fill], dtype)]
    return file.made("PAD", inputs, f"{x}_padded", shape, dtype)


def padded(step: Step) -> None:
    """Pad codes with a constant code."""
    x, flat, fill = step.arg(0), list(step.arg(1)), int(step.arg(2, 0))
    if any(n < 0 for n in flat):
        raise NotImplementedError(f"TOSA's padding must be 0 or more, got {flat}; slice instead")
    order, rank = common_order([x]), len(x.shape)
    sides = [(0, 0)] * (rank - len(flat) // 2) + list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    step.result.tensors[order] = pads(step.file, tensor(step.file, x, order), [sides[d] for d in order], fill)
