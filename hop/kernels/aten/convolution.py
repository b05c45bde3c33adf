"""Integer convolution as a matrix product of patches: (N, C, *S) int8, uint8 or int16 -> (N, O, *T) int32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat import inductor
from hop.kernels.aten import integer


class Convolution(NamedTuple):
    """A convolution with the arguments of aten.convolution; lists have one entry per spatial dimension.

    x is (N, C, *S); weight is (O, C / groups, *kernel), or (C, O / groups, *kernel) if transposed.
    """

    x: Tensor
    weight: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether the result has channels_last format: if the input or the weight has, and is not also contiguous."""
    if x.is_contiguous() and weight.is_contiguous():
        return False
    return any(not t.is_contiguous() and t.movedim(1, -1).is_contiguous() for t in (x, weight))


def lay_out(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Bring `out`, the convolution of x and weight, to the memory format of `convolve`."""
    if x.dim() < weight.dim():  # one example without a batch dimension
        return lay_out(out.unsqueeze(0), x.unsqueeze(0), weight).squeeze(0)
    if not channels_last(x, weight):
        return out.contiguous()
    last = out.movedim(1, -1)
    return out if last.is_contiguous() else last.contiguous().movedim(-1, 1)


def convolve(conv: Convolution, way: str | None = None) -> Tensor:
    """Convolve exactly modulo 2^32, without bias; the result is contiguous or channels_last.

    `way` is one of those of hop.kernels.aten.integer.
    """
    keep_last = channels_last(conv.x, conv.weight)
    if torch.int32 in (conv.x.dtype, conv.weight.dtype) and not conv.transposed and max(conv.dilation) == 1:
        out = torch.ops.aten.convolution(conv.x.to(torch.int32), conv.weight.to(torch.int32), None, *conv[2:])
        return lay_out(out, conv.x, conv.weight)
    if conv.transposed:
        conv = as_plain(conv)
    n, groups = conv.x.shape[0], conv.groups
    out_channels, per_group, *kernel = conv.weight.shape
    patches = _patches(conv)  # (N, *T, groups, *kernel, C / groups)
    spatial = patches.shape[1 : 1 + len(kernel)]
    terms = per_group * math.prod(kernel)
    filters = conv.weight.movedim(1, -1)
    if groups == 1:
        rows, filters = patches.reshape(-1, terms), filters.reshape(out_channels, terms)
        if n == 1 and rows.dtype == torch.int8 and not keep_last:  # (O, T) is the layout of the result
            return integer.mm(filters, rows.t(), way=way).view(1, out_channels, *spatial)
        out = integer.mm(rows, filters.t(), way=way).view(n, *spatial, out_channels)
    else:
        rows = patches.movedim(1 + len(kernel), 0).reshape(groups, -1, terms)
        filters = filters.reshape(groups, out_channels // groups, terms)
        out = integer.bmm(rows, filters.mT, way=way).view(groups, n, *spatial, out_channels // groups)
        out = out.movedim(0, -2).flatten(-2).contiguous()
    out = out.movedim(-1, 1)
    return out if keep_last else out.contiguous()


def _patches(conv: Convolution) -> Tensor:
    """The patches of the padded input, as a view: (N, *T, groups, *kernel, C / groups).

    Each output element multiplies one patch. Channels come last, so that a copy moves runs of channels.
    """
    kernel = conv.weight.shape[2:]
    x = conv.x.movedim(1, -1)
    if any(conv.padding):
        pad = [0, 0]
        for p in reversed(conv.padding):
            pad += [p, p]
        x = torch.nn.functional.pad(x, pad)
    x = x.contiguous()
    n, *size, channels = x.shape
    batch, *strides, _ = x.stride()
    along, inside, spatial = [], [], []
    for s, k, length, d, step in zip(strides, kernel, size, conv.dilation, conv.stride, strict=True):
        along.append(s * step)
        inside.append(s * d)
        spatial.append((length - d * (k - 1) - 1) // step + 1)
    per_group = channels // conv.groups
    shape, by = (n, *spatial, conv.groups, *kernel, per_group), (batch, *along, per_group, *inside, 1)
    return inductor.as_strided(x, shape, by)


def as_plain(conv: Convolution) -> Convolution:
    """Convert a transposed convolution to a plain one.

    Its input has stride - 1 zeros between elements, and its kernel is flipped.
    """
    x, kernel = conv.x, conv.weight.shape[2:]
    for dim, step in enumerate(conv.stride, start=2):
        if step > 1:
            x = torch.nn.functional.pad(x.unsqueeze(dim + 1), [0, 0] * (x.dim() - dim - 1) + [0, step - 1])
            x = x.flatten(dim, dim + 1)
            x = x.narrow(dim, 0, x.shape[dim] - (step - 1))
    pad: list[int] = []
    for k, d, p, extra in reversed(list(zip(kernel, conv.dilation, conv.padding, conv.output_padding, strict=True))):
        pad += [d * (k - 1) - p, d * (k - 1) - p + extra]
    x = torch.nn.functional.pad(x, pad)  # a negative amount crops
    spatial = list(range(2, x.dim()))
    channels, *rest = conv.weight.shape
    per_group = conv.weight.reshape(conv.groups, channels // conv.groups, *rest)
    weight = per_group.transpose(1, 2).flatten(0, 1).flip(spatial)  # (O, C / groups, *kernel)
    ones, zeros = [1] * len(spatial), [0] * len(spatial)
    return Convolution(x, weight, ones, zeros, conv.dilation, False, zeros, conv.groups)
