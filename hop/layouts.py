"""Layouts: other forms of the codes of a quantized tensor, which a kernel reads faster. None is the plain form.

A layout is a frozen value, a field of the quantizer; hop.pack brings a tensor to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hop.formats import Float, Format
from hop.scaling import Rule
from hop.spelling import Value


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Value):
    """What all layouts share: one element of `dtype` for each code."""

    dtype: torch.dtype = torch.bfloat16

    def check(self, format: Format, rule: Rule) -> None:
        """Raise ValueError if tensors of `format` cannot be laid out so."""

    def pack(self, codes: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """What is held of `codes`; `tensors` are those beside them, in shapes that broadcast."""
        raise NotImplementedError

    def numbers(self, held: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """The numbers of the codes, float32."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Decoded(Layout):
    """decode(codes) · fold, in bfloat16: what a product in bfloat16 multiplies.

    fold is the part of the step that has few bits (hop.scaling.Rule.fold): the power of two of MX, the e4m3 of NVFP4.
    The product is exact, so that the numbers are found again by division; but bfloat16 has fewer bits below 2^-126."""

    def check(self, format: Format, rule: Rule) -> None:
        if not isinstance(format, Float) or self.dtype != torch.bfloat16:
            raise ValueError(f"layout={self} is for formats of floats, in bfloat16; got {format.name}")

    def pack(self, codes: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        numbers = format.decode(codes)
        return (numbers * rule.fold(tensors) if rule.folds() else numbers).to(self.dtype)

    def numbers(self, held: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        held = held.to(torch.float32)
        if not rule.folds():
            return held
        fold = rule.fold(tensors)
        return torch.where(fold == 0, held, held / fold)
