"""Convolutions, plain and transposed, in low precision."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hop.compat.eager import OpOverload
from hop.compat.modules import ConvNd, ConvTransposeNd, output_padding, padding_at_ends
from hop.compat.pytree import Args
from hop.nn.layers.base import Layer
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import for_convolution

aten = torch.ops.aten


class _Convolution(Layer, ConvNd):
    """Base class of Conv1d, Conv2d and Conv3d."""

    op: OpOverload

    def _call(self, x: Tensor) -> tuple[OpOverload, Args]:
        sides = padding_at_ends(self)
        padding = sides[::-2]
        if self.padding_mode != "zeros":
            x = functional.pad(x, sides, mode=self.padding_mode)
            padding = [0] * len(padding)
        elif sides[::2] != sides[1::2]:  # "same" may pad one more element at the end
            x = functional.pad(x, sides)
            padding = [0] * len(padding)
        options = (list(self.stride), list(padding), list(self.dilation), self.groups)
        return self.op, (x, self.weight, self.bias, *options)

    def _sample(self) -> Tensor:
        sizes = zip(self.dilation, self.kernel_size, padding_at_ends(self)[::-2], strict=True)
        return self._empty(1, self.in_channels, *(max(d * (k - 1), p) + 1 for d, k, p in sizes))

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        sides = padding_at_ends(self)
        sizes: list[int] = []
        for i, n in enumerate(one[1:]):
            at = 2 * (len(one) - 2 - i)
            span = self.dilation[i] * (self.kernel_size[i] - 1)
            sizes.append((n + sides[at] + sides[at + 1] - span - 1) // self.stride[i] + 1)
        return (self.out_channels, *sizes)

    def weight_quantizer(self, q: Quantizer) -> Quantizer:
        return for_convolution(q, self.weight.dim())


class Conv1d(_Convolution, nn.Conv1d):
    """torch.nn.Conv1d in low precision. Arguments and errors as for Linear."""

    float_type = nn.Conv1d
    example_dims = 2
    op = aten.conv1d.default


class Conv2d(_Convolution, nn.Conv2d):
    """torch.nn.Conv2d in low precision. Arguments and errors as for Linear."""

    float_type = nn.Conv2d
    example_dims = 3
    op = aten.conv2d.default


class Conv3d(_Convolution, nn.Conv3d):
    """torch.nn.Conv3d in low precision. Arguments and errors as for Linear."""

    float_type = nn.Conv3d
    example_dims = 4
    op = aten.conv3d.default


class _Transposed(Layer, ConvTransposeNd):
    """Base class of ConvTranspose1d, ConvTranspose2d and ConvTranspose3d."""

    is_packable = False  # there are no native kernels
    channels_dim = 1
    op: OpOverload

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        return self._compute(input, output_size)

    def _call(self, x: Tensor, output_size: Sequence[int] | None = None) -> tuple[OpOverload, Args]:
        added = self.output_padding if output_size is None else output_padding(self, x, output_size)
        lists = (list(self.stride), list(self.padding), list(added))
        return self.op, (x, self.weight, self.bias, *lists, self.groups, list(self.dilation))

    def _sample(self) -> Tensor:
        # the result has at least one element
        return self._empty(1, self.in_channels, *(2 * p + 1 for p in self.padding))

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        lists = (self.stride, self.padding, self.dilation, self.kernel_size, self.output_padding)
        sizes = zip(one[1:], *lists, strict=True)
        return (self.out_channels, *((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, s, p, d, k, more in sizes))

    def weight_quantizer(self, q: Quantizer) -> Quantizer:
        return for_convolution(q, self.weight.dim(), transposed=True)


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d in low precision. Arguments and errors as for Linear.

    All groups share the weight's scales. The weight is never packed, because no kernel reads a packed one.
    """

    float_type = nn.ConvTranspose1d
    example_dims = 2
    op = aten.conv_transpose1d.default


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d in low precision, as ConvTranspose1d."""

    float_type = nn.ConvTranspose2d
    example_dims = 3
    op = aten.conv_transpose2d.input


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d in low precision, as ConvTranspose1d."""

    float_type = nn.ConvTranspose3d
    example_dims = 4
    op = aten.conv_transpose3d.input


CONVOLUTIONS = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
