"""Convolutions of two networks against oneDNN's, as torch.compile calls it.

Both sides prepack weights. Inputs are uint8 with a zero point, channels last; weights are int8 with a scale per output
channel; there is a bias.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hop
from benchmarks.cases import integers
from benchmarks.native import at_most
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved
from hop import formats, requantization, scale_rules

aten, onednn = torch.ops.aten, torch.ops.onednn
_STATIC = hop.Quantizer(
    formats.UINT8, scale=scale_rules.Static(affine=True, requantize=requantization.FloatMultiplier())
)
_SCALE, _ZERO = 0.02, 128  # scale and zero point of inputs and results


class Layer(NamedTuple):
    """`times` convolutions of images of size x size, with `groups` channel groups, padded to keep the size."""

    times: int
    inputs: int
    outputs: int
    kernel: int
    size: int
    stride: int = 1
    groups: int = 1

    @property
    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Stride, padding and dilation."""
        return [self.stride] * 2, [self.kernel // 2] * 2, [1, 1]


def _depthwise(times: int, channels: int, size: int, stride: int = 1) -> Layer:
    return Layer(times, channels, channels, 3, size, stride, channels)


RESNET50 = [
    Layer(1, 3, 64, 7, 224, 2),
    *(Layer(1, 64, 64, 1, 56), Layer(3, 64, 64, 3, 56), Layer(4, 64, 256, 1, 56), Layer(2, 256, 64, 1, 56)),
    *(Layer(1, 256, 128, 1, 56), Layer(1, 128, 128, 3, 56, 2), Layer(1, 256, 512, 1, 56, 2)),
    *(Layer(4, 128, 512, 1, 28), Layer(3, 512, 128, 1, 28), Layer(3, 128, 128, 3, 28)),
    *(Layer(1, 512, 256, 1, 28), Layer(1, 256, 256, 3, 28, 2), Layer(1, 512, 1024, 1, 28, 2)),
    *(Layer(6, 256, 1024, 1, 14), Layer(5, 1024, 256, 1, 14), Layer(5, 256, 256, 3, 14)),
    *(Layer(1, 1024, 512, 1, 14), Layer(1, 512, 512, 3, 14, 2), Layer(1, 1024, 2048, 1, 14, 2)),
    *(Layer(3, 512, 2048, 1, 7), Layer(2, 2048, 512, 1, 7), Layer(2, 512, 512, 3, 7)),
]
"""He et al. 2015, "Deep Residual Learning for Image Recognition", with the strides in its 3x3 convolutions."""

MOBILENETV2_DEPTHWISE = [
    *(_depthwise(1, 32, 112), _depthwise(1, 96, 112, 2), _depthwise(1, 144, 56), _depthwise(1, 144, 56, 2)),
    *(_depthwise(2, 192, 28), _depthwise(1, 192, 28, 2), _depthwise(4, 384, 14), _depthwise(2, 576, 14)),
    *(_depthwise(1, 576, 14, 2), _depthwise(3, 960, 7)),
]
"""Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks"."""


def calls(layer: Layer, batch: int, output: torch.dtype) -> tuple[Any, Any, Any]:
    """Our convolution and oneDNN's on the same codes, and one of floats, as functions that allocate their results."""
    shape = (batch, layer.inputs, layer.size, layer.size)
    codes = integers(*shape, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    weight = integers(layer.outputs, layer.inputs // layer.groups, layer.kernel, layer.kernel)
    scales, bias = torch.rand(layer.outputs) * 1e-3 + 1e-4, torch.randn(layer.outputs)
    one = torch.full((1, 1, 1, 1), _SCALE), torch.full((1, 1, 1, 1), _ZERO, dtype=torch.uint8)
    x = hop.QuantizedTensor(
        {"codes": codes, "scale": one[0], "zero_point": one[1]}, hop.presets.UINT8_TENSOR_AFFINE, shape, torch.float32
    )
    stored = {"codes": weight, "scale": scales.view(-1, 1, 1, 1)}
    w = hop.pack(hop.QuantizedTensor(stored, hop.presets.INT8_CONV, weight.shape, torch.float32))
    lists, quantized = layer.lists, output == torch.uint8
    given = {"output_scale": one[0], "output_zero_point": one[1]} if quantized else {}

    def ours() -> Tensor:
        args = (x, w, bias, *lists, layer.groups)
        return hop.scaled(aten.conv2d.default, _STATIC if quantized else output, *args, **given)

    zeros = torch.zeros(layer.outputs, dtype=torch.int32)
    packed = onednn.qconv_prepack(weight, scales, _SCALE, _ZERO, *lists, layer.groups, list(shape))
    to = (_SCALE, _ZERO, output) if quantized else (1.0, 0, output)

    def peer() -> Tensor:
        args = (codes, _SCALE, _ZERO, packed, scales, zeros, bias, *lists, layer.groups)
        return onednn.qconv2d_pointwise(*args, *to, "none", [], "")

    left, right = (torch.randn(t).to(FLOAT, memory_format=torch.channels_last) for t in (shape, weight.shape))

    def plain() -> Tensor:
        return torch.nn.functional.conv2d(left, right, bias.to(FLOAT), *lists, layer.groups)

    return ours, peer, plain


def timed(layers: Sequence[Layer], batch: int, output: torch.dtype) -> list[list[float]]:
    """Milliseconds of `calls` for each layer."""
    return [interleaved(calls(layer, batch, output), rounds=25) for layer in layers]


def convolutions() -> Iterator[Row]:
    """The geometric mean over all convolutions of a network."""
    for network, layers in (("ResNet-50", RESNET50), ("MobileNetV2, depthwise", MOBILENETV2_DEPTHWISE)):
        counts = [layer.times for layer in layers]
        for batch in (1, 8):
            for output in (torch.uint8, FLOAT):
                ours, peer, floats = (
                    statistics.geometric_mean([ms for ms, n in zip(side, counts, strict=True) for _ in range(n)])
                    for side in zip(*timed(layers, batch, output), strict=True)
                )
                case = f"{network}, batch {batch}, to {str(output).removeprefix('torch.')}"
                yield Row("int8 conv2d", case, ours, "onednn.qconv2d", peer, at_most(1, 1))  # at avx2 its sums saturate
                target = at_most(None, None, 0.6) if network == "ResNet-50" else ""
                yield Row("int8 conv2d", case, ours, f"{NAME} conv2d", floats, target)


GROUPS = [convolutions]
