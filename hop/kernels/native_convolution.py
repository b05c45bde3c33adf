"""Convolutions of integers by the native kernels: a description of a call, found once, and the pointers of each.

See native/hop.h, of which the structure here is a copy.
"""

import ctypes
import functools
from ctypes import c_char_p, c_int, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.kernels import native
from hop.kernels import native_structures as c
from hop.kernels.memory import address
from hop.kernels.native_product import failed


class _Description(ctypes.Structure):
    """hop_convolution"""

    _fields_ = [
        ("batch", c_int64),
        ("channels", c_int64),
        ("outputs", c_int64),
        ("groups", c_int64),
        ("size", c_int64 * 3),
        ("kernel", c_int64 * 3),
        ("stride", c_int64 * 3),
        ("padding", c_int64 * 3),
        ("dilation", c_int64 * 3),
        ("output_size", c_int64 * 3),
        ("input_strides", c_int64 * 5),
        ("weight_strides", c_int64 * 5),
        ("channels_last", c_int32),
        ("lhs", c.Factor),
        ("rhs", c.Factor),
        ("output", c.Output),
    ]


class Geometry(NamedTuple):
    """Sizes of a convolution: x (N, C, *S), weight (O, C / groups, *kernel), and lists of as many as S has."""

    x: tuple[int, ...]
    x_stride: tuple[int, ...]
    weight: tuple[int, ...]
    weight_stride: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first element
    padding_after: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    channels_last: bool  # of the result

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the result; sizes below 1 where the kernel is larger than the input."""
        sizes = zip(
            self.x[2:], self.weight[2:], self.stride, self.padding, self.padding_after, self.dilation, strict=True
        )
        spatial = ((n + before + after - d * (k - 1) - 1) // s + 1 for n, k, s, before, after, d in sizes)
        return (self.x[0], self.weight[0], *spatial)


def lhs(dtype: torch.dtype, zero: int | None, by_example: bool) -> c.Factor:
    """An input of int8 or uint8. Zero points are stored if `zero` is None."""
    stored = c.BYTES[dtype] if zero is None else c.NONE
    return c.Factor(c.BYTES[dtype], c.STRIDED, 0, 0, zero or 0, stored, _scale(by_example), c.no_scale())


def rhs(by_channel: bool, tiled: bool, narrow: bool) -> c.Factor:
    """A weight of int8, or of int4 in tiles."""
    layout = c.TILED if tiled else c.STRIDED
    return c.Factor(
        c.INT4 if narrow else c.BYTES[torch.int8], layout, 0, 0, 0, c.NONE, _scale(by_channel), c.no_scale()
    )


def _scale(by_row: bool) -> c.Scale:
    """Scales in contiguous memory, of each row or of all."""
    return c.Scale(c.PLAIN[torch.float32], 1.0, *((1, c.WHOLE, 1, 0) if by_row else (c.WHOLE, c.WHOLE, 0, 0)))


class Convolution(NamedTuple):
    """A convolution that the kernels take."""

    description: ctypes.Structure
    shape: tuple[int, ...]
    channels_last: bool

    def gives_codes(self) -> bool:
        """Whether it writes codes."""
        return self.description.output.format in c.BYTES.values()

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Memory for the result."""
        if not self.channels_last:
            return torch.empty(self.shape, dtype=dtype)
        n, channels, *spatial = self.shape
        return torch.empty((n, *spatial, channels), dtype=dtype).movedim(-1, 1)


def describe(geometry: Geometry, lhs: c.Factor, rhs: c.Factor, output: c.Output) -> Convolution | str:
    """The convolution, or why the kernels do not take it."""
    g, shape = geometry, geometry.output
    made = _Description(g.x[0], g.x[1], g.weight[0], g.groups)
    fields = (("size", g.x[2:], 1), ("kernel", g.weight[2:], 1), ("stride", g.stride, 1), ("padding", g.padding, 0))
    for name, values, fill in (*fields, ("dilation", g.dilation, 1), ("output_size", shape[2:], 1)):
        setattr(made, name, (c_int64 * 3)(*[fill] * (3 - len(values)), *values))
    for name, strides in (("input_strides", g.x_stride), ("weight_strides", g.weight_stride)):
        setattr(made, name, (c_int64 * 5)(*strides[:2], *[0] * (5 - len(strides)), *strides[2:]))
    made.channels_last, made.lhs, made.rhs, made.output = g.channels_last, lhs, rhs, output
    reason = _library().hop_convolution_declines(ctypes.byref(made))
    return Convolution(made, shape, g.channels_last) if reason is None else reason.decode()


def convolve_tensors(convolution: Convolution) -> tuple[Any, int]:
    """hop_convolve_tensors, and its first argument for this convolution, which has to live as long."""
    return _library().hop_convolve_tensors, ctypes.addressof(convolution.description)


def run(
    convolution: Convolution,
    x: tuple[Tensor, Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Write to `out` the convolution of x and weight, each its codes, their scales and zero points; `scale` and
    `zero_point` are those of codes."""
    addresses = map(address, (*x, *weight, bias, scale, zero_point, out))
    result = _library().hop_convolve(ctypes.addressof(convolution.description), torch.get_num_threads(), *addresses)
    if result:
        raise failed(result)
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    functions = native.library().functions
    assert functions is not None
    functions.hop_convolution_declines.argtypes = [c_void_p]
    functions.hop_convolution_declines.restype = c_char_p
    functions.hop_convolve.argtypes = [c_void_p, c_int, *[c_void_p] * 9]
    functions.hop_convolve_tensors.argtypes = [c_void_p, c_void_p, c_int, *[c_void_p] * 9]
    return functions
