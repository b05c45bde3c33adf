"""Quantizer: a frozen value that defines how a float tensor is converted to codes and scales, and back.

    x ≈ (decode(codes) - zero_point) · s        one s, and one zero point, per block
    x ≈ codes · s - m                           for a rule with offsets (hop.scale_rules.StoredScales)

It has no side effects: `quantize` converts floats to buffers, `dequantize` converts buffers to float32, and `buffers`
describes the buffers. Everything is core ATen.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hop.numerics import blocks, estimators, layouts, memory_format, packing, spelling
from hop.numerics.blocks import Block
from hop.numerics.estimators import Derivatives, Estimator
from hop.numerics.formats import Format
from hop.numerics.hadamard import Hadamard
from hop.numerics.layouts import Layout, Tiled
from hop.numerics.rule import Blocks, Found, Rule
from hop.numerics.scale_rules import Amax
from hop.numerics.spelling import Value

__all__ = ["Quantizer"]


@dataclass(frozen=True, eq=False, repr=False)
class Quantizer(Value):
    """The conversion of float tensors to codes and scales: format, blocks, and scale rule.

    Args:
        format: the number format of elements.
        block: which elements share a scale: sizes over the last dimensions, -1 for a whole one (hop.numerics.blocks).
        scale: the rule that finds a block's scale (hop.scale_rules).
        stochastic: whether elements are rounded up or down at random, without bias, rather than to nearest.
        hadamard: a transform of the column-wise copy before it is quantized.
        flat: whether blocks run over the flattened tensor; `block` then has one size.
        layout: the storage form of codes, None for the plain one (hop.layouts).
        gradient: a replacement for the derivative of rounding (hop.estimators); None for straight-through.

    Two quantizers are equal if their fields are. A subclass that is not itself a frozen dataclass, and so does not
    declare its fields, is equal only to itself.
    """

    format: Format
    block: Block = (-1, -1)
    scale: Rule = Amax()
    stochastic: bool = False
    hadamard: Hadamard | None = None
    flat: bool = False
    layout: Layout | None = None
    gradient: Estimator | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", blocks.checked(self.block))
        if not isinstance(self.format, Format):
            raise TypeError(
                f"format must be one of hop.formats, got {spelling.shown(self.format)}; give one such as "
                "hop.formats.INT8"
            )
        if self.format.is_for_scales:
            raise ValueError(
                f"format must be a format of elements, but {self.format!r} is for scales; give one such as "
                "hop.formats.INT8"
            )
        if not isinstance(self.scale, Rule):
            raise TypeError(
                f"scale must be a rule, got {spelling.shown(self.scale)}; give one such as hop.scale_rules.Amax()"
            )
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(
                f"hadamard must be a Hadamard or None, got {spelling.shown(self.hadamard)}; give "
                "hop.hadamard.Hadamard()"
            )
        spelling.flag(self.stochastic, "stochastic")
        spelling.flag(self.flat, "flat")
        if self.stochastic and self.format.is_codebook:
            raise ValueError(
                f"stochastic=True: {self.format.name} is a codebook, which only rounds to nearest; use stochastic=False"
            )
        if self.flat and len(self.block) != 1:
            raise ValueError(f"flat=True needs a block of one size, got {self.block}; give one such as (256,)")
        if self.flat and self.hadamard is not None:
            raise ValueError(
                f"flat=True and hadamard={self.hadamard} exclude each other, because a flat tensor has no columns; "
                "leave one out"
            )
        self.scale.check(self.format, self.block)
        if self.format.bits > 8 and self.scale.has_zero_point():
            raise ValueError(
                f"scale={self.scale}: {self.format.name} does not support zero points, because its sums need 64 bits "
                "already; use a rule without one"
            )
        if self.layout is not None:
            layouts.check(self.layout, self.format, self.scale, self.flat)
        if self.gradient is not None:
            estimators.check(self.gradient, self.format, self.stochastic)
        if spelling.declares_fields(type(self)):
            str(self)  # raises TypeError for a field without a textual form

    @staticmethod
    def parse(text: str) -> "Quantizer":
        """The quantizer that `str` spells as `text`. Raises ValueError with the position of an error."""
        return _parse(text)

    # ---- buffers

    def buffers(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The name, shape and dtype of each buffer of a tensor of `shape`, in order."""
        rows = self.rows(shape)
        codes, dtype = tuple(shape), self.format.dtype
        if self.layout is not None:
            self.layout.check_shape(shape)
            codes, dtype = self.layout.held(shape, self.format)
        elif self.per_byte() > 1:
            last = rows or [1]
            codes, dtype = (*last[:-1], packing.packed_size(last[-1], self.format.bits)), torch.uint8
        result = {"codes": (codes, dtype)}
        for name, (dtype, block) in self.stored().items():
            result[name] = (tuple(blocks.counts(rows, block)), dtype)
        return result

    def stored(self) -> dict[str, tuple[torch.dtype, Block]]:
        """The name, dtype and block of each buffer other than the codes: those of the rule,
        then those of the layout.
        """
        by_rule = self.stored_by_rule()
        return by_rule if self.layout is None else by_rule | self.layout.stored(self.format)

    def stored_by_rule(self) -> dict[str, tuple[torch.dtype, Block]]:
        """The buffers of the rule, which determine the values together with the codes."""
        return self.scale.stored(self.format, self.block)

    def per_byte(self) -> int:
        """The number of codes per byte."""
        if self.layout is not None:
            return self.layout.per_byte(self.format)
        return 8 // self.format.bits if self.format.bits in packing.PACKED else 1

    def is_tiled(self) -> bool:
        """Whether codes are stored in another order, with dimensions that differ from the tensor's."""
        return self.layout is not None and self.layout.tiled

    def is_dense(self) -> bool:
        """Whether codes are stored in fewer bytes than in the plain layout."""
        return self.layout is not None and self.layout.is_dense

    @property
    def plain(self) -> "Quantizer":
        """The quantizer with the plain layout."""
        return self if self.layout is None else replace(self, layout=None)

    @property
    def tiles(self) -> Tiled | None:
        """The layout's tiles; None for other layouts."""
        return None if self.layout is None else self.layout.tiles

    def is_decoded(self) -> bool:
        """Whether decoded values are stored instead of codes."""
        return self.layout is not None and self.layout.is_decoded

    @property
    def given_block(self) -> Block:
        """The block of elements that share a scale given by the caller."""
        return self.block if self.scale.outer_block is None else self.scale.outer_block

    def keeps_memory_format(self) -> bool:
        """Whether codes and dequantized values keep channels_last: each code is one byte at its element's position."""
        return self.layout is None and not self.flat and self.per_byte() == 1

    def adds_noise(self) -> bool:
        """Whether training uses floats with random noise instead of codes."""
        return self.gradient is not None and self.gradient.adds_noise

    def is_random(self) -> bool:
        """Whether it needs random bits: for stochastic rounding, or for noise."""
        return self.stochastic or self.adds_noise()

    def shares_scale(self) -> bool:
        """Whether the row-wise and the column-wise copy share one scale."""
        whole = all(b == -1 for _, block in self.stored_by_rule().values() for b in block)
        return whole and not self.flat and self.hadamard is None

    def rows(self, shape: Sequence[int]) -> list[int]:
        """The shape that blocks run over."""
        return [functools.reduce(operator.mul, shape, 1)] if self.flat else list(shape)

    def of_batch(self, ndim: int) -> "Quantizer":
        """The quantizer of a batch whose members have `ndim` dimensions and are each quantized by this one.

        Blocks of a flat tensor must not span members.
        """
        if self.flat:
            return self
        return self.of_blocks(lambda block: (1, *blocks.per_dimension(block, ndim)))

    def transposed(self, ndim: int) -> "Quantizer":
        """The quantizer that gives the transposed codes and scales for transposed matrices, of `ndim` dimensions."""

        def swap(block: Block) -> Block:
            *lead, rows, columns = blocks.per_dimension(block, max(ndim, 2))
            return (*lead, columns, rows)

        return replace(self, block=swap(self.block), scale=self.scale.of_blocks(swap), hadamard=None)

    def of_blocks(self, change: Callable[[Block], Block]) -> "Quantizer":
        """The quantizer with `change` applied to its block, and to those of its rule."""
        return replace(self, block=change(self.block), scale=self.scale.of_blocks(change))

    # ---- quantizing and dequantizing

    def quantize(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Quantize `x`, floating point of any dtype and shape, to the buffers that `buffers` describes.

        Args:
            scale, zero_point: replace the rule; in the shapes of their buffers.
            noise: random integers of x's shape, int32 of 24 bits or uint8, for stochastic rounding.
        """
        shape, (tensors, y) = self.find(x, scale, zero_point)
        noise = None if noise is None else blocks.split(noise.reshape(shape), self.block)[0]
        cut = self.format.encode(y, noise, *self._zero(tensors))
        codes = self._held(cut, shape, x.shape, tensors)
        codes = memory_format.like(codes, x) if self.keeps_memory_format() else codes
        if scale is not None:  # a given scale belongs to the caller, and may be expanded
            tensors = tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)
        by_rule = zip(self.stored_by_rule(), tensors, strict=True)
        stored = {name: blocks.gather(t, len(shape)) for name, t in by_rule}
        return {"codes": codes} | stored | self._beside(cut, shape, x.shape)

    def dequantize(self, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Dequantize a tensor of `shape` to float32."""
        rows, cut, tensors = self._cut(buffers, shape)
        if self.layout is not None and self.layout.is_decoded:
            values = self.layout.numbers(cut, self.format, self.scale, tensors)
            return blocks.merge(values * self.scale.scale_of(tensors, self.format), rows).reshape(shape)
        x = blocks.merge(self._decode(cut, tensors, rows), rows).reshape(shape)
        return memory_format.like(x, buffers["codes"]) if self.keeps_memory_format() else x

    def packed(self, buffers: Mapping[str, Tensor], shape: Sequence[int], layout: Layout | None) -> dict[str, Tensor]:
        """The buffers of a tensor of `shape` with its codes converted to `layout`; None for the plain one."""
        if self.is_decoded():
            raise ValueError(
                f"weight has decoded values (layout={self.layout}), which cannot become codes again; keep the tensor "
                "that was packed"
            )
        if layout is not None:
            layout.check_shape(shape)
        rows, cut, tensors = self._cut(buffers, shape)
        to = replace(self, layout=layout)
        by_rule = {name: buffers[name] for name in self.stored_by_rule()}
        return {"codes": to._held(cut, rows, shape, tensors)} | by_rule | to._beside(cut, rows, shape)

    def scales_of_elements(self, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """s, and the zero point if there is one, of each element of a tensor of `shape`."""
        rows, cut, tensors = self._cut(buffers, shape)

        def whole(t: Tensor) -> Tensor:
            return blocks.merge(t.expand(cut.shape), rows).reshape(shape)

        zero_point = whole(tensors[1]) if self.scale.has_zero_point() else None
        return whole(self.scale.scale_of(tensors, self.format)), zero_point

    def with_codes(self, buffers: Mapping[str, Tensor], codes: Tensor) -> dict[str, Tensor]:
        """The buffers with new `codes`, one per element, in the tensor's shape."""
        rows = self.rows(codes.shape)
        cut, _ = blocks.split(codes.reshape(rows), self.block)
        tensors = [blocks.spread(buffers[name], self.block) for name in self.stored_by_rule()]
        by_rule = {name: buffers[name] for name in self.stored_by_rule()}
        packed = self._held(cut, rows, codes.shape, tensors)
        return {"codes": packed} | by_rule | self._beside(cut, rows, codes.shape)

    def fake_quantize(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """dequantize(quantize(x)) in float32; with noise instead of rounding if the gradient adds it and `noise` is
        given.
        """
        shape, (tensors, y) = self.find(x, scale, zero_point)
        values = self._of_numbers(self._rounded(y, noise, shape, tensors), self._served(tensors, shape))
        out = blocks.merge(values, shape).reshape(x.shape)
        return memory_format.like(out, x) if self.keeps_memory_format() else out

    def find(self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None) -> tuple[list[int], Found]:
        """The shape that blocks run over, the rule's stored tensors, and x in units of the format, both split into
        blocks.
        """
        shape = self.rows(x.shape)
        cut, dims = blocks.split(x.to(torch.float32).reshape(shape), self.block, fill=self.scale.padding())
        parts = self._blocks(cut, dims, len(shape), x.dtype)
        if scale is None:
            return shape, self.scale.find(parts, self.format)
        if zero_point is not None:
            codes = zero_point.round() if zero_point.is_floating_point() else zero_point
            zero_point = blocks.spread(codes.clamp(self.format.min, self.format.max).to(self.format.dtype), self.block)
        return shape, self.scale.given(parts, blocks.spread(scale, self.block), zero_point, self.format)

    def derivatives(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, noise: Tensor | None = None
    ) -> Derivatives:
        """The straight-through derivatives of fake_quantize, and x in units of the scale."""
        shape, (tensors, y) = self.find(x, scale, zero_point)
        zero, served = self._zero(tensors), self._served(tensors, shape)
        values = self._rounded(y, noise, shape, tensors)
        inside = self.format.inside(y, *zero)
        step = torch.where(y.isnan(), 0.0, values - torch.where(inside, y, 0.0))
        below = torch.where(inside, 0.0, -self.scale.scale_of(served, self.format))
        units = y.nan_to_num(0.0)
        return Derivatives(*(blocks.merge(d, shape).reshape(x.shape) for d in (inside, step, below, units)))

    def scale_slope(self, x: Tensor, scale: Tensor) -> Tensor | float:
        """The derivative of each block's s with respect to the given `scale`."""

        def largest(cut: Tensor, dims: list[int]) -> Tensor:
            return self._blocks(cut, dims, len(self.rows(x.shape)), x.dtype).amax()

        amax = self.per_block(x.to(torch.float32), largest)
        return self.scale.slope(amax, scale.to(torch.float32), self.format)

    def spread(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """Expand scales to a tensor of `shape` with the scale of each element's block."""
        rows = self.rows(shape)
        ones, _ = blocks.split(torch.ones(rows, device=scale.device), self.block)
        return blocks.merge(ones * blocks.spread(scale, self.block), rows).reshape(shape)

    def per_block(self, x: Tensor, reduce: Callable[..., Tensor] = torch.Tensor.sum) -> Tensor:
        """reduce(x, dims) over each block of x; by default the sum."""
        shape = self.rows(x.shape)
        cut, dims = blocks.split(x.reshape(shape), self.block)
        reduced = reduce(cut, dims)
        return blocks.gather(reduced.reshape([1 if i in dims else n for i, n in enumerate(cut.shape)]), len(shape))

    def combined(self, values: Tensor, op: str, block: Block) -> Tensor:
        """Combine as Blocks.combined does, for a tensor with one element per block."""
        return values

    def _blocks(self, x: Tensor, dims: list[int], ndim: int, dtype: torch.dtype) -> Blocks:
        return Blocks(x, dims, blocks.places(self.block, ndim), dtype, self.block)

    def _rounded(self, y: Tensor, noise: Tensor | None, rows: list[int], tensors: Sequence[Tensor]) -> Tensor:
        """The rounded values of y, in units of the format, split into blocks."""
        zero, noise = self._zero(tensors), None if noise is None else blocks.split(noise.reshape(rows), self.block)[0]
        if noise is not None and self.adds_noise():
            return estimators.with_noise(self.gradient, self.format, y, noise, zero)
        served = self._zero(self._served(tensors, rows))
        return self.format.decode(self.format.encode(y, noise, *zero), *served)

    def _held(self, cut: Tensor, rows: list[int], shape: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
        """The stored codes of a tensor of `shape`, from codes split into blocks."""
        if self.layout is not None:
            packed = self.layout.pack(cut, self.format, self.scale, tensors)
            return self.layout.arrange(blocks.merge(packed, rows).reshape(shape), self.format)
        codes = blocks.merge(cut, rows)
        return self.format.pack(codes.reshape(rows or [1])) if self.per_byte() > 1 else codes.reshape(shape)

    def _beside(self, cut: Tensor, rows: list[int], shape: Sequence[int]) -> dict[str, Tensor]:
        """The layout's additional buffers, from codes split into blocks."""
        return (
            {} if self.layout is None else self.layout.additional(blocks.merge(cut, rows).reshape(shape), self.format)
        )

    def _cut(self, buffers: Mapping[str, Tensor], shape: Sequence[int]) -> tuple[list[int], Tensor, list[Tensor]]:
        """The shape that blocks run over, the codes, and the rule's tensors, both split into blocks."""
        rows = self.rows(shape)
        codes = buffers["codes"]
        if self.layout is not None:
            additional = {name: buffers[name] for name in self.layout.stored(self.format)}
            codes = self.layout.restore(codes, shape, self.format, additional)
        elif self.per_byte() > 1:
            codes = self.format.unpack(codes, rows[-1] if rows else 1)
        cut, _ = blocks.split(codes.reshape(rows), self.block)
        return rows, cut, [blocks.spread(buffers[name], self.block) for name in self.stored_by_rule()]

    def _decode(self, codes: Tensor, tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        tensors = self._served(tensors, rows)
        return self._of_numbers(self.format.decode(codes, *self._zero(tensors)), tensors)

    def _of_numbers(self, values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        values = values * self.scale.scale_of(tensors, self.format)
        offset = self.scale.offset_of(tensors)
        return values if offset is None else self._apart(values) - self._apart(offset)

    def _apart(self, product: Tensor) -> Tensor:
        """Marks a product that must be rounded before anything is added to it."""
        return product

    def _served(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> Sequence[Tensor]:
        """The rule's tensors, repeated so that there is one element per block."""
        if not self.scale.is_compound:
            return tensors
        stored, places = list(self.stored_by_rule().values()), blocks.places(self.block, len(rows))
        return blocks.served(tensors, stored, self.block, places[: len(rows)])

    def _zero(self, tensors: Sequence[Tensor]) -> tuple[Tensor | int, ...]:
        """The code of 0, for formats that need it."""
        if self.scale.has_zero_point():
            return (tensors[1],)
        return (self.scale.zero(self.format),) if self.format.is_integer else ()


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Quantizer:
    return spelling.read(text, Quantizer)
