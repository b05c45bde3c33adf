"""The rules of QuantizedTensor.

A rule is written once for all operators that it serves; its docstring is the text in the documentation's table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hop.compat import eager, subclasses
from hop.compat.eager import OpOverload
from hop.compat.pytree import Kwargs
from hop.numerics import copies
from hop.tensor import views
from hop.tensor.buffers.noise import drawn_noise
from hop.tensor.buffers.operators import quantize_buffers
from hop.tensor.quantized import QuantizedTensor
from hop.tensor.table import IndivisibleError, implements, refuse_training

aten = torch.ops.aten


# ---- copies and conversions


@implements(aten.detach.default, aten.alias.default)
def same(op: OpOverload, t: QuantizedTensor) -> QuantizedTensor:
    """the same buffers"""
    return _each(op, t)


@implements(aten.clone.default)
def clone(
    op: OpOverload, t: QuantizedTensor, *, memory_format: torch.memory_format = torch.preserve_format
) -> QuantizedTensor:
    """fresh buffers; a memory format applies to the codes"""
    t.check()
    buffers = {name: b.clone(memory_format=_format(t, name, memory_format)) for name, b in t.buffers().items()}
    return t.rebuilt(buffers)


@implements(aten._pin_memory.default)
def pinned(op: OpOverload, t: QuantizedTensor, device: torch.device | None = None) -> QuantizedTensor:
    """buffers in pinned memory"""
    return _each(lambda b: b.pin_memory(), t)


@implements(aten.is_pinned.default)
def is_pinned(op: OpOverload, t: QuantizedTensor, device: torch.device | None = None) -> bool:
    """whether all buffers are"""
    return all(b.is_pinned() for b in t.buffers().values())


@implements(aten._to_copy.default)
def to_copy(
    op: OpOverload,
    t: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """fresh buffers; a float dtype becomes the appearance dtype, any other dtype and 8-bit floats dequantize"""
    t.check()
    dtype = dtype or t.dtype
    if dtype not in copies.APPEARANCES or layout not in (None, torch.strided):
        return op(
            t.numbers(),
            dtype=dtype,
            layout=layout,
            device=device,
            pin_memory=pin_memory,
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    def moved(name: str, b: Tensor) -> Tensor:
        kept = _format(t, name, memory_format)
        return b.to(device=device or b.device, non_blocking=non_blocking, copy=True, memory_format=kept)

    packing = t.quantizer.layout
    if packing is not None and device is not None and not packing.suits(torch.device(device)):
        t = views.unpacked(t)
    new = t.rebuilt({name: moved(name, b) for name, b in t.buffers().items()}, dtype=dtype)
    return new.pin_memory() if pin_memory else new


@implements(aten.view.dtype)
def view_dtype(op: OpOverload, t: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """the same tensor if the dtype is the same, otherwise an error"""
    if dtype != t.dtype:
        raise RuntimeError(
            f"view(dtype={dtype}) of a QuantizedTensor of {t.dtype}: its bits are codes, not {t.dtype}. For values in "
            f"another dtype use .to({dtype}), for the codes .codes"
        )
    return views.alias(t)


@implements(aten.is_same_size.default)
def is_same_size(op: OpOverload, t: Tensor, other: Tensor) -> bool:
    """whether the shapes are equal"""
    return t.shape == other.shape


@implements(aten._has_same_storage_numel.default)
def has_same_storage(op: OpOverload, t: Tensor, other: Tensor) -> bool:
    """always true, because its tangent is a plain tensor"""
    return True


# ---- views


@implements(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(op: OpOverload, t: QuantizedTensor, size: Sequence[int], *_strides: object) -> QuantizedTensor:
    """a view, unless it would split a block"""
    return views.reshape(t, subclasses.inferred_size(size, t.numel()))


@implements(aten.as_strided.default)
def as_strided(
    op: OpOverload, t: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """a view, if other rules can create one with these strides, as for torch.compile; otherwise an error"""
    return views.as_strided(t, size, stride, t.storage_offset() if storage_offset is None else storage_offset)


@implements(aten.t.default)
def t(op: OpOverload, t: QuantizedTensor) -> QuantizedTensor:
    """a view, unless codes share a byte"""
    if t.dim() > 2:
        raise IndivisibleError("it has more than two dimensions")
    return views.permute(t, list(range(t.dim()))[::-1])


@implements(aten.transpose.int)
def transpose(op: OpOverload, t: QuantizedTensor, a: int, b: int) -> QuantizedTensor:
    """a view, unless codes share a byte along one of the dimensions"""
    return views.transpose(t, a, b)


@implements(aten.permute.default)
def permute(op: OpOverload, t: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    """a view, unless codes share a byte along a moved dimension"""
    return views.permute(t, dims)


@implements(aten.unsqueeze.default)
def unsqueeze(op: OpOverload, t: QuantizedTensor, dim: int) -> QuantizedTensor:
    """a view, unless codes share a byte and the new dimension is the last"""
    return views.unsqueeze(t, dim)


@implements(aten.squeeze.default)
def squeeze(op: OpOverload, t: QuantizedTensor) -> QuantizedTensor:
    """a view, unless codes would then share a byte that do not before"""
    return views.squeeze(t, range(t.dim()))


@implements(aten.squeeze.dim, aten.squeeze.dims)
def squeeze_dims(op: OpOverload, t: QuantizedTensor, dims: int | Sequence[int]) -> QuantizedTensor:
    """as squeeze"""
    return views.squeeze(t, [dims] if isinstance(dims, int) else dims)


@implements(aten.expand.default)
def expand(op: OpOverload, t: QuantizedTensor, size: Sequence[int], *, implicit: bool = False) -> QuantizedTensor:
    """a view, unless blocks run over the flattened tensor, or codes would share a byte that do not before"""
    return views.expand(t, size)


@implements(aten.slice.Tensor)
def slice_(
    op: OpOverload, t: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    """a view, unless it would split a block"""
    dim = views.dimension(dim, t.dim())
    if step < 1:
        raise IndivisibleError(f"a step of {step}")
    size = t.shape[dim]
    first, last = (min(max(n + size if n < 0 else n, 0), size) for n in (start or 0, size if end is None else end))
    return views.narrow(t, dim, first, max(first, last), step)


@implements(aten.select_copy.int)
def select_copy(op: OpOverload, t: QuantizedTensor, dim: int, index: int) -> Tensor:
    """codes, unless it would split a block"""
    return t.select(dim, index).clone()


@implements(aten.select.int)
def select(op: OpOverload, t: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    """a view, unless it would split a block"""
    dim = views.dimension(dim, t.dim())
    return views.select(t, dim, views.dimension(index, t.shape[dim]))


@implements(aten.split.Tensor)
def split(op: OpOverload, t: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    """views, unless they would split a block"""
    n = t.shape[views.dimension(dim, t.dim())]
    if size < 1:
        raise IndivisibleError(f"parts of {size}")
    return split_sizes(op, t, [min(size, n - start) for start in range(0, n, size)] if n else [0], dim)


@implements(aten.split_with_sizes.default)
def split_sizes(op: OpOverload, t: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    """views, unless they would split a block"""
    dim = views.dimension(dim, t.dim())
    if sum(sizes) != t.shape[dim] or any(n < 0 for n in sizes):
        raise IndivisibleError(f"{sizes} do not sum to {t.shape[dim]}")
    offsets = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [views.narrow(t, dim, end - n, end) for n, end in zip(sizes, offsets, strict=True)]


@implements(aten.unbind.int)
def unbind(op: OpOverload, t: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    """views, unless they would split a block"""
    dim = views.dimension(dim, t.dim())
    return [views.select(t, dim, i) for i in range(t.shape[dim])]


@implements(aten.cat.default)
def cat(op: OpOverload, tensors: Sequence[Tensor], dim: int = 0) -> QuantizedTensor:
    """codes and scales concatenated if all have one quantizer and no block is split, each part with its scales;
    otherwise dequantized
    """
    _check(tensors)
    return views.cat([x for x in tensors if x.shape != (0,)] or tensors, dim)


@implements(aten.stack.default)
def stack(op: OpOverload, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """a batch of tensors with one quantizer, each with its own scales; otherwise as cat"""
    _check(tensors)
    first = tensors[0]
    if dim in (0, -first.dim() - 1) and all(_is_row_wise_like(x, first) for x in tensors):
        buffers = {name: torch.stack([x.buffers()[name] for x in tensors]) for name in first.buffers()}
        return first.rebuilt(
            buffers, quantizer=first.quantizer.of_batch(first.dim()), shape=(len(tensors), *first.shape)
        )
    return views.cat([views.unsqueeze(x, dim) if isinstance(x, QuantizedTensor) else x for x in tensors], dim)


@implements(aten.stack.out)
def stack_out(op: OpOverload, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    """the result of stack, written to `out`"""
    return out.copy_(aten.stack.default(tensors, dim))


@implements(aten.cat.out)
def cat_out(op: OpOverload, tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    """the result of cat, written to `out`"""
    return out.copy_(aten.cat.default(tensors, dim))


def _is_row_wise_like(x: object, first: object) -> bool:
    """Whether x is a quantized tensor like `first` that can become a member of a batch."""
    if not isinstance(x, QuantizedTensor) or not isinstance(first, QuantizedTensor):
        return False
    q = x.quantizer
    batched = not q.flat and not q.is_tiled() and x.usages == (copies.ROWWISE,)
    return batched and (q, x.shape, x.dtype) == (first.quantizer, first.shape, first.dtype)


# ---- new tensors


@implements(aten.empty_like.default)
def empty_like(op: OpOverload, t: QuantizedTensor, **options: object) -> Tensor:
    """an uninitialized quantized tensor; a plain one within another operator"""
    return _empty(t, t.shape, options) if _is_quantized(t, options) else _plain_like(op, t, **options)


@implements(aten.new_empty.default)
def new_empty(op: OpOverload, t: QuantizedTensor, size: Sequence[int], **options: object) -> Tensor:
    """an uninitialized quantized tensor; a plain one within another operator"""
    return _empty(t, size, options) if _is_quantized(t, options) else _plain_like(op, t, size, **options)


@implements(aten.zeros_like.default)
def zeros_like(op: OpOverload, t: QuantizedTensor, **options: object) -> Tensor:
    """a quantized tensor of zeros; a plain one within another operator"""
    zeros = _plain_like(op, t, **options)
    return quantized_like(t, zeros) if _is_quantized(t, options) else zeros


@implements(aten.new_zeros.default)
def new_zeros(op: OpOverload, t: QuantizedTensor, size: Sequence[int], **options: object) -> Tensor:
    """a quantized tensor of zeros; a plain one within another operator"""
    zeros = _plain_like(op, t, size, **options)
    return quantized_like(t, zeros) if _is_quantized(t, options) else zeros


def _is_quantized(t: QuantizedTensor, options: Mapping[str, object]) -> bool:
    """Whether a new tensor like t is quantized: it has a float dtype, and Python code requested it.

    C++ operators that are composed of others, and gradient formulas, write into new tensors step by step, such as
    `scalar - t` by empty_like, fill_ and sub_. Codes would round at each step. PyTorch's Python functions always pass
    pin_memory, and C++ code does not.
    """
    return "pin_memory" in options and (options.get("dtype") or t.dtype) in copies.APPEARANCES


def _empty(t: QuantizedTensor, size: Sequence[int], options: Kwargs) -> QuantizedTensor:
    device = options.get("device") or t.device
    described = copies.describe(t.quantizer, size, t.usages)
    buffers = {b.name: torch.empty(b.shape, dtype=b.dtype, device=device) for b in described}
    return t.rebuilt(buffers, shape=size, dtype=options.get("dtype") or t.dtype)


def _plain_like(op: OpOverload, t: QuantizedTensor, *size: Sequence[int], **options: object) -> Tensor:
    described = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return op(described, *size, **(options | {"device": options.get("device") or t.device}))


# ---- writing


@implements(aten.copy_.default)
def copy_(op: OpOverload, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """buffers if both have one quantizer and shape; otherwise dequantized from, quantized anew into"""
    if not isinstance(to, QuantizedTensor):
        return to.copy_(_numbers(source), non_blocking)
    if not (eager.is_plain_eager() or isinstance(source, QuantizedTensor)):
        refuse_training(str(op), to)  # Dynamo records an optimizer's addcdiv_ as copy_
    write(to, source, non_blocking)
    return to


@implements(aten.zero_.default)
def zero_(op: OpOverload, t: QuantizedTensor) -> QuantizedTensor:
    """zeros, quantized"""
    write(t, torch.zeros(t.shape, device=t.device, dtype=t.dtype))
    return t


# ---- reading


@implements(aten.equal.default)
def equal(op: OpOverload, a: Tensor, b: Tensor) -> bool:
    """whether the dequantized values are equal"""
    return a.shape == b.shape and torch.equal(_numbers(a), _numbers(b))


@implements(aten.dequantize.self)
def dequantize(op: OpOverload, t: QuantizedTensor) -> Tensor:
    """hop.dequantize, without a gradient"""
    return t.numbers()


# ---- helpers


def quantized_like(t: QuantizedTensor, x: Tensor) -> QuantizedTensor:
    """Quantize x like t, with the same copies. Uses t's scale if the quantizer has no rule to find one."""
    q = t.quantizer
    scale = zero_point = noise = None
    if q.scale.missing() is not None:
        if x.shape == t.shape and x.device == t.device:
            scale, zero_point = t.scale, t.zero_point if q.scale.has_zero_point() else None
        else:
            ones = {n: torch.ones(s, dtype=d, device=x.device) for n, (s, d) in q.buffers(x.shape).items()}
            scale, zero_point = ones["scale"], ones.get("zero_point")
        scale = q.scale.given_of(scale, q.format)
    if q.stochastic:
        noise = drawn_noise(x)
    buffers = quantize_buffers(str(q), x, scale, zero_point, noise, list(t.usages))
    names = copies.names(q, t.usages)
    return QuantizedTensor.fitting(dict(zip(names, buffers, strict=True)), q, x.shape, x.dtype)


def write(to: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> None:
    given, shared = to.quantizer.scale.missing() is not None, _shares_scale(to)
    if shared and _is_like(source, to) and not _holds_numbers(subclasses.base(to)):
        shared = False  # 0 is 0 at any scale: FSDP2 writes a part into zeros
    if shared and not given:
        raise RuntimeError(
            f"copy_ into a part of a tensor whose elements share a scale with others, outside of the part, which would "
            f"change ({to.quantizer}). Write to the whole tensor, or dequantize it first"
        )
    if source.shape != to.shape:
        source = source.expand(to.shape)
    _check((to, source))
    if not _is_like(source, to) or shared:
        source = quantized_like(to, _numbers(source).to(device=to.device))
    for mine, other in zip(to.buffers().values(), source.buffers().values(), strict=True):
        mine.copy_(other, non_blocking)


def _is_like(source: Tensor, to: QuantizedTensor) -> TypeGuard[QuantizedTensor]:
    return isinstance(source, QuantizedTensor) and source.quantizer == to.quantizer and source.usages == to.usages


def _holds_numbers(t: Any) -> bool:
    """Whether some elements are not 0, or would not be 0 at another scale."""
    rule = t.quantizer.scale
    return rule.has_zero_point() or rule.has_offset() or bool(t.numbers().any())


def _shares_scale(t: QuantizedTensor) -> bool:
    """Whether a scale of the view t also serves elements of its base outside of t.

    This is only possible for a scale that spans a whole dimension, because views do not split other blocks.
    """
    base = subclasses.base(t)
    if not isinstance(base, QuantizedTensor) or t.numel() == base.numel():
        return False
    for name, (_, block) in base.quantizer.stored().items():
        even = set(block) <= {-1, 1}  # all scales serve equally many elements
        mine, its = t.buffers()[name].numel(), base.buffers()[name].numel()
        if -1 in block and not (even and t.numel() * its == base.numel() * mine):
            return True
    return False


def _check(tensors: Sequence[object]) -> None:
    for x in tensors:
        if isinstance(x, QuantizedTensor):
            x.check()


def _each(change: Callable[[Tensor], Tensor], t: QuantizedTensor) -> QuantizedTensor:
    return t.rebuilt({name: change(b) for name, b in t.buffers().items()})


def _format(t: QuantizedTensor, name: str, memory_format: torch.memory_format) -> torch.memory_format:
    """The memory format for copying a buffer; channels_last formats apply only to codes."""
    codes = name == "codes" and t.quantizer.per_byte() == 1
    return memory_format if codes or memory_format is torch.contiguous_format else torch.preserve_format


def _numbers(x: Tensor) -> Tensor:
    return x.numbers() if isinstance(x, QuantizedTensor) else x
