"""Operators on buffers that appear in graphs, and operators that take a quantized tensor apart.

    hop_quantize_buffers(quantizer, x, scale, zero_point, noise, usages, [factor, [stream]]) -> buffers
    hop_dequantize_buffers(quantizer, buffers, usages, shape, dtype)                         -> tensor
    hop_buffers(tensor)                                                                      -> buffers
    hop_dequantize(tensor, [dtype])                                                          -> tensor

A quantizer is passed as text; buffers are a list in the order of hop.numerics.copies.describe. With a float32 factor,
x.to(float32) * factor is quantized, of x's shape. With a stream, noise is a seed, and the random bits are
hop.noise(noise, x.shape, stream=stream).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import dtensor, eager, tracing
from hop.compat.pytree import Args, ArgsKwargs
from hop.dispatch.composite import Composite
from hop.dispatch.hop import Hop
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.plan import Plan
from hop.kernels.aten import quantize as kernels
from hop.kernels.cpu import quantize as native
from hop.kernels.gpu import quantize as gpu
from hop.numerics import copies, memory_format
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor.buffers import sharding
from hop.tensor.buffers.noise import noise as random_bits

_MAKE = "make one with hop.quantize"
_Optional = Tensor | None
Usages = Sequence[str]


class QuantizeBuffers(Hop[list[Tensor]]):
    """The operator hop_quantize_buffers: (quantizer, x, scale, zero_point, noise, usages[, factor[, stream]])."""

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        return args, kwargs

    def reference(self, quantizer: str, /, *rest: Any) -> list[Tensor]:
        x, scale, zero_point, noise, usages = _given(*rest)
        return list(copies.quantize(Quantizer.parse(quantizer), x, tuple(usages), scale, zero_point, noise).values())

    def fake(
        self,
        quantizer: str,
        x: Tensor,
        scale: _Optional,
        zero_point: _Optional,
        noise: _Optional,
        usages: Usages,
        /,
        *_: object,
    ) -> list[Tensor]:
        parsed = Quantizer.parse(quantizer)
        return [
            memory_format.empty(b.shape, x, b.dtype)
            if b.name == "codes" and parsed.keeps_memory_format()
            else torch.empty(b.shape, dtype=b.dtype, device=x.device)
            for b in copies.describe(parsed, x.shape, tuple(usages))
        ]

    def kernels(self, quantizer: str, /, *rest: Any) -> Iterable[tuple[Kernel, Args]]:
        yield native.QUANTIZE, (quantizer, *rest)
        yield gpu.QUANTIZE, (quantizer, *rest)
        args = (quantizer, *_given(*rest))
        yield kernels.QUANTIZE_IN_PLACE, args
        yield kernels.QUANTIZE, args

    def shard(self, quantizer: str, /, *rest: Any) -> list[Tensor]:
        parsed, (x, *others, usages) = Quantizer.parse(quantizer), _given(*rest)
        shapes = [b.shape for b in copies.describe(parsed, x.shape, tuple(usages))]

        def of_parts(quantizer_of_part: Quantizer, *parts: Tensor) -> list[Tensor]:
            if sharding.is_shared(quantizer_of_part):
                return list(copies.quantize(quantizer_of_part, parts[0], tuple(usages), *parts[1:]).values())
            return self(quantizer, *parts, usages)

        return sharding.run(parsed, x.shape, usages, (x, *others), of_parts, shapes)


def _given(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    noise: Tensor | None,
    usages: Usages,
    factor: Tensor | None = None,
    stream: int | None = None,
) -> tuple[Tensor, _Optional, _Optional, _Optional, Usages]:
    """The tensor to quantize, scale, zero point, noise and usages, with factor and stream applied."""
    if noise is not None and stream is not None:
        noise = random_bits(noise, x.shape, stream=stream)
    return x if factor is None else x.to(torch.float32) * factor, scale, zero_point, noise, usages


class DequantizeBuffers(Hop[Tensor]):
    """The operator hop_dequantize_buffers: (quantizer, buffers, usages, shape, dtype)."""

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        return args, kwargs

    def reference(
        self, quantizer: str, buffers: Sequence[Tensor], usages: Usages, shape: Sequence[int], dtype: torch.dtype, /
    ) -> Tensor:
        parsed = Quantizer.parse(quantizer)
        named = zip(copies.names(parsed, tuple(usages)), buffers, strict=True)
        return copies.dequantize(parsed, dict(named), shape).to(dtype)

    def fake(
        self, quantizer: str, buffers: Sequence[Tensor], usages: Usages, shape: Sequence[int], dtype: torch.dtype, /
    ) -> Tensor:
        codes = buffers[0]
        if copies.ROWWISE not in usages:
            columns = torch.empty(copies.columns(shape), dtype=dtype, device=codes.device)
            return columns.t().reshape(tuple(shape))
        if Quantizer.parse(quantizer).keeps_memory_format():
            return memory_format.empty(shape, codes, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=codes.device)

    def kernels(self, /, *args: object) -> Iterable[tuple[Kernel, Args]]:
        return ((native.DEQUANTIZE, args), (gpu.DEQUANTIZE, args), (_TILES, args), (kernels.DEQUANTIZE, args))

    def shard(
        self, quantizer: str, buffers: Sequence[Tensor], usages: Usages, shape: Sequence[int], dtype: torch.dtype, /
    ) -> Tensor:
        parsed = Quantizer.parse(quantizer)

        def of_parts(_: Quantizer, *parts: Tensor) -> list[Tensor]:
            part_shape = list(shape)
            if part_shape and not parsed.flat and not parsed.is_tiled() and tuple(usages) == (copies.ROWWISE,):
                whole = tracing.known_equal(part_shape[-1] % parsed.per_byte(), 0)
                part_shape = [*parts[0].shape[:-1], parts[0].shape[-1] * parsed.per_byte() if whole else part_shape[-1]]
            return [self(quantizer, list(parts), usages, part_shape, dtype)]

        return sharding.run(parsed, shape, usages, buffers, of_parts, [shape])[0]


def _prepare_tiles(call: Args) -> Plan:
    if not Quantizer.parse(call[0]).is_tiled():
        raise Declined("for codes in tiles")
    return _dequantize_tiles


def _dequantize_tiles(
    quantizer: str, buffers: Sequence[Tensor], usages: Usages, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Convert to the plain layout, for which there are kernels, and dequantize."""
    parsed = Quantizer.parse(quantizer)
    names = copies.names(parsed, tuple(usages))
    plain = parsed.packed(dict(zip(names, buffers, strict=True)), shape, None)
    return dequantize_buffers(str(replace(parsed, layout=None)), list(plain.values()), usages, shape, dtype)


_TILES = Kernel("tiles", _prepare_tiles)

quantize_buffers = QuantizeBuffers("hop_quantize_buffers")
dequantize_buffers = DequantizeBuffers("hop_dequantize_buffers")


class Buffers(Composite[list[Tensor]]):
    """The operator hop_buffers."""

    def check(self, x: Tensor, /) -> ArgsKwargs:
        return (x,), {}

    def reference(self, x: Any, /) -> list[Tensor]:
        return list(x.buffers().values())


buffers_operator = Buffers("hop_buffers")


class Dequantize(Composite[Tensor]):
    """The operator hop_dequantize."""

    def check(self, x: Tensor, dtype: torch.dtype | None = None, /) -> ArgsKwargs:
        if not isinstance(x, Tensor):
            raise TypeError(f"dequantize: x must be a QuantizedTensor, got {shown(x)}; {_MAKE}")
        if dtype is None or dtype == x.dtype:
            return (x,), {}
        if not isinstance(dtype, torch.dtype) or dtype not in copies.APPEARANCES:
            raise TypeError(
                f"dequantize: dtype must be float16, bfloat16, float32 or float64, got {dtype!r}; use one of them"
            )
        return (x, dtype), {}

    def reference(self, x: Any, dtype: torch.dtype | None = None, /) -> Tensor:
        if not hasattr(x, "quantizer"):
            raise TypeError(f"dequantize: x must be a QuantizedTensor, got {shown(x)}; {_MAKE}")
        x.check()
        tensors = list(x.buffers().values())
        return dequantize_buffers(str(x.quantizer), tensors, list(x.usages), list(x.shape), dtype or x.dtype)

    def explain(self, /, *args: Any) -> str:
        (x, *dtypes), _ = self.check(*args)
        buffers = list(x.buffers().values())
        given = [str(x.quantizer), buffers, list(x.usages), list(x.shape), *(dtypes or [x.dtype])]
        return dequantize_buffers.explain(*given)

    def differentiable(self, /, *args: object) -> bool:
        return True

    def forward_mode(self, x: Tensor, /, *dtype: torch.dtype) -> Tensor:
        return eager.with_tangent(self(eager.primal(x), *dtype), x)

    def gradient(self, grad: Tensor, needed: Sequence[bool], x: Tensor, /, *dtype: torch.dtype) -> list[_Optional]:
        # the tensor represents its dequantized values, so gradients pass through
        return [grad.to(x.dtype), *[None] * len(dtype)]

    def batch(
        self, size: int, dims: Sequence[int | None], x: Tensor, /, *dtype: torch.dtype
    ) -> tuple[Tensor, int] | None:
        return None if dims[0] is None else (self(x, *dtype), dims[0])

    def _of_parts(self, x: Tensor, /, *dtype: torch.dtype) -> Tensor:
        """Each process dequantizes its part of a DTensor."""
        local = dtensor.own_part(x)
        if not dtensor.is_dtensor(x) or not hasattr(local, "quantizer"):
            return self.reference(x, *dtype)
        placed = dtensor.Sharding([], x.device_mesh, x.placements, x.shape, x.stride())
        return dtensor.make_dtensor(self.reference(local, *dtype), placed)


dequantize_operator = Dequantize("hop_dequantize")
