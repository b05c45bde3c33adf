"""QuantizedTensor itself."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hop.compat import eager, memory, subclasses
from hop.compat.imports import when_imported
from hop.compat.patches import KEYED
from hop.compat.values import cache_key
from hop.dispatch import plan
from hop.dispatch.operand import Operand
from hop.kernels.cpu import forms
from hop.numerics import blocks, copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import flag, shown
from hop.tensor import table
from hop.tensor.buffers.operators import buffers_operator, dequantize_buffers, dequantize_operator


class QuantizedTensor(Tensor):
    """A float tensor that is held as codes and scales.

    It has the shape and the float dtype (the appearance dtype) of what it stands for; `dequantize` gives those numbers.
    `hop.quantize` makes one. What ATen operators do with it is listed in docs/quantized_tensor.md.

    Args:
        buffers: what hop.numerics.copies.describe lists for the quantizer, the shape and the usages, in that order;
            dense, on one device.
        quantizer: how the buffers are read.
        shape: of the tensor that it stands for.
        dtype: a floating-point dtype that it appears in.
        requires_grad: whether it collects a gradient, a plain tensor of its shape and dtype.

    A buffer, or the quantizer, may be assigned anew: by one of the same form. Names, shapes, dtypes and devices of
    buffers are checked then and here; their memory is, by each operator of this library that reads it. A buffer has no
    gradient and no tangent of its own.

    Raises:
        TypeError: an argument is of another type, or dtype no floating-point one.
        ValueError: the buffers are not those that the quantizer describes for the shape.
    """

    quantizer: Quantizer
    _names: tuple[str, ...] = ()
    _form: forms.Form | None = None  # found when it is first asked for
    _kind: plan.Kind | None = None  # the same

    # The buffers, of which a tensor has those that its quantizer and its usages need.
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    global_amax: Tensor
    code_sums: Tensor
    high_codes: Tensor
    offset: Tensor
    outer_scale: Tensor
    outer_offset: Tensor

    __torch_function__ = subclasses.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: "type[QuantizedTensor]",
        buffers: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        _check(buffers, quantizer, shape, dtype)
        flag(requires_grad, "QuantizedTensor: requires_grad")
        return _empty(cls, buffers, quantizer, shape, dtype, requires_grad)

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> None:
        _fill(self, buffers, quantizer)

    @staticmethod
    def fitting(
        buffers: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """The tensor of buffers that are known to fit: what an operator of ours has made, or a view of what does."""
        t = _empty(QuantizedTensor, buffers, quantizer, shape, dtype, requires_grad)
        _fill(t, buffers, quantizer)
        return t

    @staticmethod
    def fresh(
        names: tuple[str, ...],
        buffers: Sequence[Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> "QuantizedTensor":
        """As `fitting`, of contiguous buffers that were just made on the CPU, with a byte for each code. 1 µs."""
        t: QuantizedTensor = subclasses.make_contiguous_wrapper(QuantizedTensor, shape, dtype)
        attributes = vars(t)
        attributes.update(zip(names, buffers, strict=True))
        attributes["quantizer"], attributes["_names"] = quantizer, names
        return t

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "quantizer":
            _check(self.buffers(), value, tuple(self.shape), self.dtype)
            vars(self).update(_form=None, _kind=None)
        elif name in _BUFFERS:
            self._check_assigned(name, value)
        super().__setattr__(name, value)

    def _check_assigned(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise AttributeError(
                f"a QuantizedTensor by {self.quantizer} with usages {self.usages} has the buffers {self._names}, and "
                f"none named {name!r}; make a tensor with it"
            )
        described = copies.describe(self.quantizer, self.shape, self.usages)
        copies.check_one(next(b for b in described if b.name == name), value, self.device)
        _refuse_tangents((value,))

    @property
    def operand(self) -> Operand:
        """What holds it, of which `check` has been asked."""
        self.check()
        attributes = vars(self)
        return Operand(self.quantizer, tuple(attributes[name] for name in self._names), self.usages, tuple(self.shape))

    def fits(self) -> bool:
        """Whether it still has the form and the memory that its quantizer describes."""
        attributes, form = vars(self), self._form or form_of(self)
        buffers = [attributes[name] for name in self._names]
        if self.device.type == "cpu":
            return form.fits(buffers)
        pairs = zip(buffers, form.described, strict=True)
        return all(t.shape == shape and t.dtype is dtype and memory.holds(t) for t, (_, shape, dtype) in pairs)

    def check(self) -> None:
        """Raise ValueError where a buffer has lost its form since it was assigned, by `resize_`, `set_` or the like,
        and RuntimeError where it has lost its memory; in eager mode, as graphs know the sizes of what they trace."""
        if eager.is_plain_eager():
            attributes, form = vars(self), self._form or form_of(self)
            buffers = [attributes[name] for name in self._names]
            if not form.fits(buffers):
                if self.numel():  # an empty part of a DTensor may hold the scale of the block that was cut off last
                    copies.check(form.described, buffers)
                memory.check(buffers)
        elif any(map(_is_known_not_to_be, self.buffers().values(), self._described())):
            copies.check(self._described(), list(self.buffers().values()))

    def _described(self) -> list[copies.Buffer]:
        return copies.describe(self.quantizer, self.shape, self.usages)

    def buffers(self) -> dict[str, Tensor]:
        """The tensors that hold the data, by name, in the order of hop.numerics.copies.describe."""
        return {name: getattr(self, name) for name in self._names}

    def rebuilt(
        self,
        buffers: Mapping[str, Tensor],
        *,
        quantizer: Quantizer | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "QuantizedTensor":
        """A tensor like this one with other buffers: what is not said stays, the appearance dtype above all."""
        return QuantizedTensor.fitting(
            buffers, quantizer or self.quantizer, self.shape if shape is None else shape, dtype or self.dtype
        )

    def numbers(self) -> Tensor:
        """The numbers that it stands for, in its dtype, below autograd: hop.dequantize has the gradient."""
        self.check()
        buffers = list(self.buffers().values())
        return dequantize_buffers(str(self.quantizer), buffers, list(self.usages), list(self.shape), self.dtype)

    @property
    def usages(self) -> tuple[str, ...]:
        """The copies that it holds: "rowwise", "columnwise"."""
        return copies.of(self._names)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers().values())  # symbolic sizes too

    def data_ptr(self) -> int:
        """0, as for any tensor without storage of its own, also where it is a view at an offset."""
        return 0

    @property
    def data(self) -> Any:
        """The same tensor for which autograd does not look."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Any) -> None:
        if not isinstance(new, QuantizedTensor):
            raise TypeError(
                f"data of a QuantizedTensor must be another, got {shown(new)}; write numbers with copy_, which "
                "quantizes them. What writes to a weight (PEFT's PiSSA, DoRA and IA3, resize_token_embeddings) needs "
                "that layer in floats: call model.set_submodule(name, layer.to_float()) of a layer of hop.nn before, "
                "and assign torch.nn.Parameter(hop.dequantize(weight)) in any other module"
            )
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        _fill(self, new.buffers(), new.quantizer)

    def share_memory_(self) -> "QuantizedTensor":
        """Move the buffers to memory that other processes can share."""
        for buffer in self.buffers().values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers lie in such memory."""
        return all(cast(bool, buffer.is_shared()) for buffer in self.buffers().values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer}, "
            f"usages={self.usages}, device={self.device}, nbytes={self.nbytes}{grad})"
        )

    # ---- what PyTorch asks of a subclass

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self._names), (self.quantizer, self.dtype)

    _stable_hash_for_caching = cache_key

    @staticmethod
    def __tensor_unflatten__(
        buffers: dict[str, Tensor], context: Any, shape: Sequence[int], strides: Sequence[int]
    ) -> "QuantizedTensor":
        quantizer, dtype = context
        return QuantizedTensor.fitting(buffers, quantizer, shape, dtype)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return table.apply(op, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # 8-bit floats go as bytes: pickle, without torch.save, cannot read them back (torch 2.13)
        buffers = [
            b.view(torch.uint8) if b.is_floating_point() and b.itemsize == 1 else b for b in self.buffers().values()
        ]
        described = (str(self.quantizer), tuple(self.shape), self.dtype, self.usages, self.requires_grad)
        return _loaded, (buffers, *described, isinstance(self, torch.nn.Parameter))


_BUFFERS = frozenset(
    prefix + name
    for prefix in ("", copies.COLUMNWISE + "_")
    for name in (
        *("codes", "scale", "zero_point", "global_amax", "code_sums"),
        *("high_codes", "offset", "outer_scale", "outer_offset"),
    )
)


def _check(buffers: Any, quantizer: Any, shape: Any, dtype: Any) -> None:
    """Raise TypeError or ValueError for what makes no QuantizedTensor."""
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantizer must be a Quantizer, got {shown(quantizer)}; give one such as hop.presets.INT8_ROW")
    if dtype not in copies.APPEARANCES:
        raise TypeError(
            f"dtype of a QuantizedTensor must be floating point, float16, bfloat16, float32 or float64; got {dtype!r}; "
            "take one of them"
        )
    sizes = blocks.checked_shape("QuantizedTensor", shape)
    if not isinstance(buffers, Mapping):
        raise TypeError(
            f"buffers must be a mapping from names to tensors, got {shown(buffers)}; give one such as t.buffers()"
        )
    names: list[str] = list(buffers)  # pyright: ignore[reportUnknownArgumentType]
    usages = copies.of(names)
    described = copies.describe(quantizer, sizes, copies.checked(quantizer, usages)) if usages else []
    if not usages or names != [b.name for b in described]:
        wanted = [b.name for b in described or copies.describe(quantizer, sizes, (copies.ROWWISE,))]
        raise ValueError(f"buffers must be {wanted}, in this order, for {quantizer}; got {names}; give all of them")
    copies.check(described, list(buffers.values()))  # pyright: ignore[reportUnknownArgumentType]


def _empty(
    cls: type[QuantizedTensor],
    buffers: Mapping[str, Tensor],
    quantizer: Quantizer,
    shape: Sequence[int],
    dtype: torch.dtype,
    requires_grad: bool,
) -> QuantizedTensor:
    codes = buffers.get("codes")
    if codes is None:
        (codes, *_), strides, offset = buffers.values(), subclasses.contiguous_strides(shape), 0
    else:  # laid out as its codes are, which is how a compiled program tells views apart
        strides, offset, per_byte = codes.stride(), codes.storage_offset(), quantizer.per_byte()
        if quantizer.is_tiled():
            strides, offset = subclasses.contiguous_strides(shape), 0
        elif per_byte > 1:
            offset *= per_byte
            if quantizer.flat or not shape:
                strides = subclasses.contiguous_strides(shape)
            else:
                strides = [*(n * per_byte for n in strides[:-1]), 1]
    return subclasses.make_wrapper(cls, shape, strides, offset, dtype, codes.device, requires_grad)


def _fill(t: QuantizedTensor, buffers: Mapping[str, Tensor], quantizer: Quantizer) -> None:
    """Let t hold buffers that were checked."""
    _refuse_tangents(buffers.values())
    vars(t).update(buffers, quantizer=quantizer, _names=tuple(buffers))


def _is_known_not_to_be(buffer: Tensor, described: copies.Buffer) -> bool:
    """Whether a buffer has another dtype or shape than is described, whatever value symbolic sizes have."""
    _, shape, dtype = described
    if buffer.dtype != dtype or buffer.dim() != len(shape):
        return True
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(buffer.shape, shape, strict=True))


def _refuse_tangents(buffers: Iterable[Tensor]) -> None:
    dual = eager.is_dual_level_open() and not torch.compiler.is_compiling()
    if dual and any(map(eager.has_tangent, buffers)):
        raise NotImplementedError(
            "QuantizedTensor: a buffer carries a tangent, which would be lost: the tensor itself carries one, of "
            "its own shape. Give the scale to hop.quantize or hop.fake_quantize, which follow it"
        )


def kind_of(t: Any) -> plan.Kind:
    """What t has in common with others that kernels take alike: quantizer, buffers, shape and device."""
    values = (t.quantizer, t._names, tuple(t.shape), t.device)
    vars(t)["_kind"] = result = plan.kind(values, t._names[0], t.dim() > 2)
    return result


def form_of(t: Any) -> forms.Form:
    """The names, shapes and dtypes that the buffers of t must have; its sizes are numbers."""
    form = vars(t)["_form"] = _form(t.quantizer, tuple(t.shape), t._names)
    return form


@functools.lru_cache(maxsize=4096)
def _form(quantizer: Quantizer, shape: tuple[int, ...], names: tuple[str, ...]) -> forms.Form:
    return forms.Form(copies.describe(quantizer, shape, copies.of(names)))


def _loaded(
    buffers: list[Tensor],
    quantizer: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    usages: tuple[str, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """A tensor from a file, whose parts may not fit together."""
    parsed = Quantizer.parse(quantizer)
    described = copies.describe(parsed, shape, copies.checked(parsed, usages))
    dtypes = [b.dtype if b.dtype.is_floating_point and b.dtype.itemsize == 1 else None for b in described]
    if len(buffers) == len(dtypes):
        pairs = zip(buffers, dtypes, strict=True)
        buffers = [b.view(dtype) if dtype and b.dtype == torch.uint8 else b for b, dtype in pairs]
    copies.check(described, buffers)
    named = {b.name: buffer for b, buffer in zip(described, buffers, strict=True)}
    loaded = QuantizedTensor(named, parsed, shape, dtype, requires_grad)
    return torch.nn.Parameter(loaded, requires_grad) if is_parameter else loaded


for _operator in (buffers_operator, dequantize_operator):
    _operator.plain |= {QuantizedTensor}
torch.serialization.add_safe_globals([QuantizedTensor, _loaded])
KEYED.append(QuantizedTensor)


def operand(x: Any) -> Any:
    """A QuantizedTensor as an Operand, in a list too; anything else as it is."""
    if isinstance(x, list | tuple) and not isinstance(x, Operand):
        return [operand(v) for v in cast(list[Any], x)]
    return x.operand if isinstance(x, QuantizedTensor) else x


def _register_collation() -> None:
    """Let batches of a DataLoader's workers be stacked as in its own process, without a plain tensor to write to."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.stack(batch)

    default_collate_fn_map[QuantizedTensor] = stack


when_imported("torch.utils.data._utils.collate", _register_collation)
plan.register_wrapper(QuantizedTensor, kind_of)
