"""QuantizedTensor, the tensor subclass."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hop.compat import eager, memory, subclasses
from hop.compat.eager import OpOverload
from hop.compat.patches import KEYED
from hop.compat.pytree import Args
from hop.compat.subclasses import stack_in_batches
from hop.compat.values import cache_key
from hop.dispatch import plan
from hop.dispatch.operand import Operand
from hop.kernels.cpu import forms
from hop.numerics import blocks, copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import flag, shown
from hop.tensor import table
from hop.tensor.buffers.operators import buffers_operator, dequantize_buffers, dequantize_operator
from hop.tensor.parameters import fitted


class QuantizedTensor(Tensor):
    """A float tensor stored as codes and scales.

    It has the shape and the float dtype (the appearance dtype) of the tensor it represents; `dequantize` returns the
    values. `hop.quantize` creates one. docs/quantized_tensor.md lists what ATen operators do with it.

    Args:
        buffers: the buffers that hop.numerics.copies.describe lists for the quantizer, the shape and the usages, in
            that order; dense, on one device. A scale or zero point may be one number, or a tensor of shape (), for
            all blocks; a zero point may have any integer dtype. Codes are not copied.
        quantizer: how the buffers are read.
        shape: the shape of the represented tensor.
        dtype: the floating-point dtype it appears in.
        requires_grad: whether it accumulates a gradient, a plain tensor of its shape and dtype.

    A buffer or the quantizer may be replaced by one of the same form. Names, shapes, dtypes and devices of buffers are
    checked then and here; their memory is checked by each operator of this library that reads it. A buffer has no
    separate gradient or tangent.

    Raises:
        TypeError: an argument has the wrong type, or dtype is not a floating-point one.
        ValueError: the buffers do not match the quantizer's description for the shape; or, in eager mode on the CPU,
            a zero point of another dtype is not a code of the format.
    """

    quantizer: Quantizer
    _names: tuple[str, ...] = ()
    _form: forms.Form | None = None  # computed when first needed
    _kind: plan.Kind | None = None  # computed when first needed

    # The buffers. A tensor has those that its quantizer and usages need.
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
        buffers: Mapping[str, Tensor | float],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        described = _described(buffers, quantizer, shape, dtype)
        fitting = fitted(quantizer, described, buffers)
        copies.check(described, list(fitting.values()))
        flag(requires_grad, "QuantizedTensor: requires_grad")
        t = _empty(cls, fitting, quantizer, shape, dtype, requires_grad)
        _fill(t, fitting, quantizer)
        return t

    def __init__(
        self,
        buffers: Mapping[str, Tensor | float],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> None:
        """Nothing: `__new__` has assigned the buffers."""

    @staticmethod
    def fitting(
        buffers: Mapping[str, Tensor],
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """Create a tensor from buffers that are known to match: results of our operators, or views of such."""
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
        """Create a tensor as `fitting` does, from new contiguous CPU buffers with one byte per code. Takes 1 µs."""
        t: QuantizedTensor = subclasses.make_contiguous_wrapper(QuantizedTensor, shape, dtype)
        attributes = vars(t)
        attributes.update(zip(names, buffers, strict=True))
        attributes["quantizer"], attributes["_names"] = quantizer, names
        return t

    def __setattr__(self, name: str, value: object) -> None:
        if name == "quantizer":
            buffers = self.buffers()
            copies.check(_described(buffers, value, tuple(self.shape), self.dtype), list(buffers.values()))
            vars(self).update(_form=None, _kind=None)
        elif name in _BUFFERS:
            self._check_assigned(name, value)
        super().__setattr__(name, value)

    def _check_assigned(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise AttributeError(
                f"a QuantizedTensor by {self.quantizer} with usages {self.usages} has the buffers {self._names}, but "
                f"none named {name!r}; create a tensor that has it"
            )
        described = copies.describe(self.quantizer, self.shape, self.usages)
        copies.check_one(next(b for b in described if b.name == name), value, self.device)
        _refuse_tangents((value,))

    @property
    def operand(self) -> Operand:
        """The tensor's buffers and quantizer as an Operand, after `check`."""
        self.check()
        attributes = vars(self)
        return Operand(self.quantizer, tuple(attributes[name] for name in self._names), self.usages, tuple(self.shape))

    def fits(self) -> bool:
        """Whether the buffers still have the form that the quantizer describes, and their memory."""
        attributes, form = vars(self), self._form or form_of(self)
        buffers = [attributes[name] for name in self._names]
        if self.device.type == "cpu":
            return form.fits(buffers)
        pairs = zip(buffers, form.described, strict=True)
        return all(t.shape == shape and t.dtype is dtype and memory.holds(t) for t, (_, shape, dtype) in pairs)

    def check(self) -> None:
        """Raise if a buffer has changed since it was assigned. In eager mode only, as graphs know the sizes of their
        inputs.

        Raises:
            ValueError: a buffer has lost its form, by `resize_`, `set_` or the like.
            RuntimeError: a buffer has lost its memory.
        """
        if eager.is_plain_eager():
            attributes, form = vars(self), self._form or form_of(self)
            buffers = [attributes[name] for name in self._names]
            if not form.fits(buffers):
                if self.numel():  # an empty part of a DTensor may keep the scale of the last, incomplete block
                    copies.check(form.described, buffers)
                memory.check(buffers)
        elif any(map(_is_known_not_to_be, self.buffers().values(), self._described())):
            copies.check(self._described(), list(self.buffers().values()))

    def _described(self) -> list[copies.Buffer]:
        return copies.describe(self.quantizer, self.shape, self.usages)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, in the order of hop.numerics.copies.describe."""
        return {name: getattr(self, name) for name in self._names}

    def rebuilt(
        self,
        buffers: Mapping[str, Tensor],
        *,
        quantizer: Quantizer | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "QuantizedTensor":
        """A tensor like this one with other buffers; arguments that are None keep their value."""
        return QuantizedTensor.fitting(
            buffers, quantizer or self.quantizer, self.shape if shape is None else shape, dtype or self.dtype
        )

    def numbers(self) -> Tensor:
        """The dequantized values in this tensor's dtype, below autograd; hop.dequantize has the gradient."""
        self.check()
        buffers = list(self.buffers().values())
        return dequantize_buffers(str(self.quantizer), buffers, list(self.usages), list(self.shape), self.dtype)

    @property
    def usages(self) -> tuple[str, ...]:
        """The copies that it has: "rowwise", "columnwise"."""
        return copies.of(self._names)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of all buffers."""
        # works with symbolic sizes
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers().values())

    def data_ptr(self) -> int:
        """Return 0, as for any tensor without storage, even for a view with an offset."""
        return 0

    @property
    def data(self) -> "QuantizedTensor":
        """The tensor, detached from autograd."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: object) -> None:
        if not isinstance(new, QuantizedTensor):
            raise TypeError(
                f"data of a QuantizedTensor must be another, got {shown(new)}; use copy_ to quantize plain values. "
                "Code that writes to a weight needs that layer in floats: import hop.integrations before you use PEFT "
                "or resize_token_embeddings; else call model.set_submodule(name, layer.to_float()) for a layer of "
                "hop.nn first, and assign torch.nn.Parameter(hop.dequantize(weight)) in any other module"
            )
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        _fill(self, new.buffers(), new.quantizer)

    def share_memory_(self) -> "QuantizedTensor":
        """Move the buffers to shared memory."""
        for buffer in self.buffers().values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers are in shared memory."""
        return all(cast(bool, buffer.is_shared()) for buffer in self.buffers().values())

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer}, "
            f"usages={self.usages}, device={self.device}, nbytes={self.nbytes}{grad})"
        )

    # ---- called by PyTorch

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype]]:
        return list(self._names), (self.quantizer, self.dtype)

    _stable_hash_for_caching = cache_key

    @staticmethod
    def __tensor_unflatten__(
        buffers: dict[str, Tensor], context: tuple[Quantizer, torch.dtype], shape: Sequence[int], strides: Sequence[int]
    ) -> "QuantizedTensor":
        quantizer, dtype = context
        return QuantizedTensor.fitting(buffers, quantizer, shape, dtype)

    @classmethod
    def __torch_dispatch__(
        cls, op: OpOverload, types: object, args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        return table.apply(op, args, kwargs or {})

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Tensor], Args]:
        # store 8-bit floats as bytes: pickle, without torch.save, cannot read them back (torch 2.13)
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


def _described(buffers: object, quantizer: object, shape: object, dtype: object) -> list[copies.Buffer]:
    """The form that the buffers of a QuantizedTensor must have. Raises TypeError or ValueError for other arguments."""
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantizer must be a Quantizer, got {shown(quantizer)}; give one such as hop.presets.INT8_ROW")
    if dtype not in copies.APPEARANCES:
        raise TypeError(
            f"dtype of a QuantizedTensor must be floating point, float16, bfloat16, float32 or float64; got {dtype!r}; "
            "use one of them"
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
    return described


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
    else:  # with the strides of its codes, by which a compiled program distinguishes views
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
    """Assign buffers that were checked to t."""
    _refuse_tangents(buffers.values())
    vars(t).update(buffers, quantizer=quantizer, _names=tuple(buffers))


def _is_known_not_to_be(buffer: Tensor, described: copies.Buffer) -> bool:
    """Whether a buffer's dtype or shape differs from its description for any value of symbolic sizes."""
    _, shape, dtype = described
    if buffer.dtype != dtype or buffer.dim() != len(shape):
        return True
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(buffer.shape, shape, strict=True))


def _refuse_tangents(buffers: Iterable[Tensor]) -> None:
    dual = eager.is_dual_level_open() and not torch.compiler.is_compiling()
    if dual and any(map(eager.has_tangent, buffers)):
        raise NotImplementedError(
            "QuantizedTensor: a buffer has a tangent, which would be lost: only the tensor itself can have one, of "
            "its own shape. Give the scale to hop.quantize or hop.fake_quantize, which follow it"
        )


def kind_of(t: QuantizedTensor) -> plan.Kind:
    """The cache key of plans for t: quantizer, buffers, shape and device."""
    values = (t.quantizer, t._names, tuple(t.shape), t.device)
    vars(t)["_kind"] = result = plan.kind(values, t._names[0], t.dim() > 2)
    return result


def form_of(t: QuantizedTensor) -> forms.Form:
    """The names, shapes and dtypes that the buffers of t must have; sizes must be concrete."""
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
) -> Tensor:
    """Create a tensor from unpickled parts, after checking that they match."""
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


def operand(x: object) -> Any:
    """Convert a QuantizedTensor to an Operand, also in lists; anything else is returned unchanged."""
    if isinstance(x, list | tuple) and not isinstance(x, Operand):
        return [operand(v) for v in x]
    return x.operand if isinstance(x, QuantizedTensor) else x


stack_in_batches(QuantizedTensor)
plan.register_wrapper(QuantizedTensor, kind_of)
