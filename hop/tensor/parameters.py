"""Scales and zero points as users give them, numbers or tensors of other dtypes, converted to tensors of buffers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.memory import PLAIN
from hop.compat.pytree import tree_leaves
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown

T = TypeVar("T")
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}) | frozenset(
    getattr(torch, name) for name in ("uint16", "uint32", "uint64")
)
_NUMBERS = (int, torch.SymInt, float, torch.SymFloat)  # a tuple, because Dynamo of torch 2.11 does not support |
_PARAMETERS = ("scale", "zero_point", "global_amax")
_FIND = "find one with hop.calibration"
_INT64 = torch.iinfo(torch.int64)


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is a number that may replace a tensor of one element; also a symbolic one."""
    return isinstance(x, _NUMBERS) and not isinstance(x, bool)


def from_number(x: T, device: torch.device, dtype: torch.dtype = torch.float32) -> T | Tensor:
    """A number as a tensor of shape () in `dtype`; anything else unchanged."""
    return torch.full((), x, dtype=dtype, device=device) if is_number(x) else x


def as_tensors(given: Mapping[str, Any], operands: Iterable[object]) -> list[Any]:
    """Scales and zero points by name, numbers as tensors on the device of the operands."""
    device = next((x.device for x in tree_leaves(list(operands)) if isinstance(x, Tensor)), torch.device("cpu"))
    integers = {name for name, x in given.items() if name.endswith("zero_point") and isinstance(x, int)}
    return [from_number(x, device, torch.int64 if n in integers else torch.float32) for n, x in given.items()]


def zero_point(where: str, given: object, q: Quantizer, dtype: torch.dtype, device: torch.device) -> object:
    """Integer zero points, or one number, in the dtype of their buffer; no copy of those that have it.

    Others are returned unchanged, floats as float32. `where` starts the error text: the function and the argument.

    Raises:
        ValueError: one is not a code of the format. In graphs and on GPUs, where values are not read, integers in
            tensors become the nearest code.
    """
    if isinstance(given, _NUMBERS[2:]):
        return from_number(given, device)
    if (wrong := _wrong_code(given, q)) is not None:
        low, high = int(q.format.min), int(q.format.max)
        raise ValueError(f"{where} must be a code of {q.format.name}, from {low} to {high}; got {wrong}; {_FIND}")
    given = from_number(given, device, dtype)
    if not isinstance(given, Tensor) or given.dtype not in INTEGERS or given.dtype == dtype or dtype not in INTEGERS:
        return given
    ends = torch.iinfo(dtype)
    return _int64(given).clamp(max(int(q.format.min), ends.min), min(int(q.format.max), ends.max)).to(dtype)


def in_buffer_dtype(caller: str, q: Quantizer, buffer: copies.Buffer, value: object, device: torch.device) -> Tensor:
    """A scale, zero point or amax in the dtype of its buffer, still in its own shape.

    Raises:
        TypeError: it is neither a number nor a tensor, or a float in place of an integer, or the reverse.
        ValueError: it is on another device, or a zero point is not a code of the format.
    """
    is_float = buffer.dtype == torch.float32
    if buffer.name.endswith("zero_point"):
        value = zero_point(f"{caller}: {buffer.name}", value, q, buffer.dtype, device)
    elif is_float or isinstance(value, float):
        value = from_number(value, device)
    else:
        value = from_number(value, device, torch.int64)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{caller}: {buffer.name} must be a number or a tensor, got {shown(value)}; make one with torch.tensor"
        )
    if value.device != device:
        raise ValueError(
            f"{caller}: {buffer.name} must be on the device of codes, {device}, got one on {value.device}; "
            "move it there"
        )
    if value.dtype != buffer.dtype and (value.dtype.is_floating_point != is_float or value.dtype == torch.bool):
        kind = "floating point" if is_float else f"{buffer.dtype} or another integer dtype"
        raise TypeError(f"{caller}: {buffer.name} must be {kind} for {q}, got {value.dtype}; cast it")
    return value.to(buffer.dtype)


def fitted(q: Quantizer, described: Sequence[copies.Buffer], buffers: Mapping[str, Any]) -> dict[str, Any]:
    """The buffers of a tensor, with numbers and tensors of shape () that were given for scales and zero points
    expanded to one for each block, and integer zero points in the dtype of theirs. Others are not changed.
    """
    result = dict(buffers)
    codes = next((x for name, x in buffers.items() if name.endswith("codes")), None)
    for buffer in described:
        value = buffers[buffer.name]
        if buffer.name.removeprefix("columnwise_") not in _PARAMETERS or not isinstance(codes, Tensor):
            continue
        single = is_number(value) or (isinstance(value, Tensor) and value.dim() == 0 and len(buffer.shape))
        is_cast = isinstance(value, Tensor) and value.dtype in INTEGERS and value.dtype != buffer.dtype
        if single or (is_cast and buffer.name.endswith("zero_point")):
            value = in_buffer_dtype("QuantizedTensor", q, buffer, value, codes.device)
            result[buffer.name] = value.expand(tuple(buffer.shape)).contiguous() if single else value
    return result


def _wrong_code(given: object, q: Quantizer) -> int | None:
    """An integer that is not a code of the format; None if there is none or the values cannot be read."""
    low, high = q.format.min, q.format.max
    if is_number(given):
        return None if low <= given <= high else int(given)
    if torch.compiler.is_compiling() or not eager.is_plain_eager():
        return None
    if not isinstance(given, Tensor) or type(given) not in PLAIN or not given.is_cpu:
        return None
    if given.dtype not in INTEGERS or not given.numel():
        return None
    if given.dtype == q.format.dtype and high - low == 255:  # every value of the dtype is a code
        return None
    if given.numel() == 1:
        n = int(given.item())
        return None if low <= n <= high else n
    wide = _int64(given)
    outside = (wide < low) | (wide > high)
    return int(given[outside][0].item()) if bool(outside.any()) else None


def _int64(x: Tensor) -> Tensor:
    wide = x.to(torch.int64)
    return torch.where(wide < 0, _INT64.max, wide) if x.dtype == torch.uint64 else wide
