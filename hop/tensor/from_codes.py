"""from_codes: create a quantized tensor from existing codes, scales and zero points.

hop_from_buffers(quantizer, buffers, shape, dtype) -> QuantizedTensor      in graphs
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat import dynamo, eager
from hop.compat.pytree import ArgsKwargs
from hop.dispatch.composite import Composite
from hop.numerics import copies
from hop.numerics.formats import Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor.buffers.operators import buffers_operator
from hop.tensor.parameters import in_buffer_dtype
from hop.tensor.quantized import QuantizedTensor


class FromBuffers(Composite[QuantizedTensor]):
    """The operator hop_from_buffers, so that a graph contains the tensor rather than only its buffers."""

    parts = buffers_operator

    def check(
        self, quantizer: str, buffers: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, /
    ) -> ArgsKwargs:
        return (quantizer, list(buffers), list(shape), dtype), {}

    def reference(
        self, quantizer: str, buffers: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, /
    ) -> QuantizedTensor:
        parsed = Quantizer.parse(quantizer)
        named = zip(copies.names(parsed, (copies.ROWWISE,)), buffers, strict=True)
        return QuantizedTensor(dict(named), parsed, tuple(shape), dtype)


from_buffers_operator = FromBuffers("hop_from_buffers")


def tensor_of_buffers(
    quantizer: str, buffers: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
) -> QuantizedTensor:
    """The tensor of buffers that are known to fit, by the operator."""
    return from_buffers_operator(quantizer, buffers, shape, dtype)


dynamo.allow_in_graph(tensor_of_buffers)


def from_codes(
    quantizer: Quantizer,
    codes: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None = None,
    *,
    global_amax: Tensor | float | None = None,
    axis: int | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedTensor:
    """Create a quantized tensor from codes that were computed elsewhere.

    A buffer that already has the quantizer's form is used without a copy.

    Args:
        quantizer: how to read the codes, such as `Quantizer(formats.INT8, (1, -1), Static(affine=True))`.
        codes: one code per element, of the dtype of the quantizer's format, or of any integer dtype if that is an
            integer format; or several per byte, as hop.quantize stores them, together with `shape`.
        scale: the scale that the quantizer stores: floats, or the codes of its scales, such as e8m0; a number, any
            shape that broadcasts to one scale per block, or, with `axis`, a vector.
        zero_point: the codes of 0, for a quantizer with zero points; any integer dtype, in the shapes of `scale`.
        global_amax: float32, for a quantizer that stores it (two-level scales).
        axis: the dimension of `codes` that a vector of scales and zero points corresponds to.
        shape: the shape of the tensor; by default that of `codes`.
        dtype: the floating-point dtype the tensor appears in.

    Returns:
        A QuantizedTensor of `shape` on the device of `codes`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape does not match; or, in eager mode on the CPU, a code or zero point is outside of the format.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"from_codes: quantizer must be a Quantizer, got {shown(quantizer)}; give one such as hop.presets.INT8_ROW"
        )
    if not isinstance(codes, Tensor):
        raise TypeError(f"from_codes: codes must be a tensor, got {shown(codes)}; make one with torch.tensor")
    if quantizer.is_tiled():
        raise ValueError(f"from_codes: {quantizer} is a packed form; give the quantizer without it, then call hop.pack")
    sizes = tuple(codes.shape) if shape is None else tuple(shape)
    if axis is not None and (
        isinstance(axis, bool) or not isinstance(axis, int) or not -len(sizes) <= axis < len(sizes)
    ):
        raise ValueError(f"from_codes: axis must be a dimension of {sizes}, got {axis!r}; give one, or None")
    given = {"scale": scale, "zero_point": zero_point, "global_amax": global_amax}
    buffers: dict[str, Tensor] = {}
    for buffer in copies.describe(quantizer, sizes, (copies.ROWWISE,)):
        if buffer.name == "codes":
            buffers["codes"] = _codes(quantizer, codes, sizes, buffer)
        elif buffer.name not in given:
            raise ValueError(
                f"from_codes: {quantizer} stores {buffer.name!r}, which from_codes does not take; make the tensor with "
                "hop.TensorProto(...).create_tensor"
            )
        else:
            value = given.pop(buffer.name)
            if value is None:
                raise ValueError(f"from_codes: {buffer.name} must be given for {quantizer}, got None")
            buffers[buffer.name] = _broadcast(
                quantizer, buffer, value, codes, None if axis is None else axis % len(sizes)
            )
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"from_codes: {name} must be None for {quantizer}, which stores none; got {shown(value)}")
    return tensor_of_buffers(str(quantizer), list(buffers.values()), list(sizes), dtype)


def _codes(q: Quantizer, codes: Tensor, shape: tuple[int, ...], buffer: copies.Buffer) -> Tensor:
    format, integers = q.format, not codes.dtype.is_floating_point and codes.dtype != torch.bool
    if tuple(codes.shape) != shape:  # several per byte
        copies.check_one(buffer, codes, None)
        return codes
    if codes.dtype != format.dtype and not (format.is_integer and integers):
        kind = "an integer dtype" if format.is_integer else str(format.dtype)
        raise TypeError(f"from_codes: codes must be of {kind} for {format.name}, got {codes.dtype}; cast them")
    if not format.dtype.is_floating_point:
        low, high = (format.low, format.high) if isinstance(format, Integer) else (0, 2**format.bits - 1)
        _check_range("codes", codes, low, high, format.name)
    codes = codes.to(format.dtype)
    return codes if q.per_byte() == 1 else format.pack(codes.reshape(q.rows(shape) or [1]))


def _broadcast(q: Quantizer, buffer: copies.Buffer, value: object, codes: Tensor, axis: int | None) -> Tensor:
    """Convert a scale, zero point or amax to the form of its buffer."""
    if axis is not None and isinstance(value, Tensor) and value.dim() == 1:
        value = value.reshape([-1 if d == axis else 1 for d in range(len(buffer.shape))])
    value = in_buffer_dtype("from_codes", q, buffer, value, codes.device)
    try:
        return value.expand(tuple(buffer.shape)).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"from_codes: {buffer.name} must broadcast to {tuple(buffer.shape)}, one for each block of {q}, got "
            f"{tuple(value.shape)}; give it such a shape, or a vector with axis="
        ) from error


def _check_range(name: str, x: Tensor, low: int, high: int, format: str) -> None:
    """Raise ValueError for integers outside low..high, if the data can be read without synchronizing a device."""
    if torch.compiler.is_compiling() or not eager.is_plain_eager() or not x.is_cpu or x.numel() == 0:
        return
    least, most = (int(v) for v in torch.aminmax(x))
    if least < low or most > high:
        wrong = least if least < low else most
        raise ValueError(
            f"from_codes: {name} must be from {low} to {high} for {format}, got {wrong}; give such integers"
        )
