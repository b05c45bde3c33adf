"""What a linear layer saves of its operands for its backward, decided when it is called.

    y  = x · wᵀ + b      x and w as rows over the input features
    dx = dy · w          dy as rows over the output features, w as columns
    dw = dyᵀ · x         dy and x as columns

    saved of x       iff w needs a gradient
    saved of w       iff x needs a gradient
    saved at all     iff anything needs a gradient

What is saved is a copy in codes, which only this layer holds: that of the forward, where its scales can stay or leave
the sums of the backward, and otherwise the column-wise copy alone. Instead it is the operand itself, an alias, where

    the backward reads floats ("original", or an operand that the scheme leaves in floats)
    it reads which elements were clipped, or a scale learns
    the caller wants it (save_original)
"""

from dataclasses import replace
from typing import NamedTuple

from hop.numerics import schemes
from hop.numerics.copies import COLUMNWISE, ROWWISE
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import ORIGINAL, QUANTIZED, Scheme
from hop.tensor.proto import TensorProto


class Options(NamedTuple):
    """What a layer says beside its scheme.

    save_original: whether the operands are saved as they are; keep: whether the codes of the weight are returned, to be
    given again."""

    save_original: bool = False
    keep: bool = False


class Needs(NamedTuple):
    """Which operands need a gradient."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    x_scale: bool = False
    x_zero_point: bool = False
    weight_scale: bool = False
    weight_zero_point: bool = False

    def of_x(self) -> bool:
        """Whether that of the numbers of x is computed."""
        return self.x or self.x_scale or self.x_zero_point

    def of_weight(self) -> bool:
        """Whether that of the numbers of the weight is."""
        return self.weight or self.weight_scale or self.weight_zero_point


class Saved(NamedTuple):
    """What is saved of an operand: itself, or the usage of its copy, or nothing."""

    original: bool = False
    usage: str | None = None


class Contract(NamedTuple):
    """All that decides it."""

    scheme: Scheme
    needs: Needs
    options: Options
    given: tuple[bool, bool]  # whether the scales of x and of the weight are given

    def of_x(self) -> Saved:
        """What is saved of x."""
        needs = self.needs
        learns = needs.x_scale or needs.x_zero_point
        by_itself = learns or (needs.x and self._masks(self.scheme.lhs, self.given[0]))
        return self._saved(self.scheme.lhs, needs.of_weight(), by_itself, self.options.save_original)

    def of_weight(self) -> Saved:
        """What is saved of the weight."""
        needs = self.needs
        learns = needs.weight_scale or needs.weight_zero_point
        by_itself = learns or (needs.weight and self._masks(self.scheme.rhs, self.given[1]))
        alias = self.options.save_original and (needs.of_x() or needs.of_weight())
        return self._saved(self.scheme.rhs, needs.of_x() or alias, by_itself, alias)

    def kept(self) -> tuple[str, ...]:
        """The usages of the weight's codes that a caller keeps over calls: all that any of them reads."""
        q = self.scheme.rhs
        if not self.options.keep or q is None:
            return ()
        return (ROWWISE,) if self._usage(q) == ROWWISE else (ROWWISE, COLUMNWISE)

    def _saved(self, q: Quantizer | None, by_other: bool, by_itself: bool, alias: bool) -> Saved:
        if q is None or self.scheme.backward == ORIGINAL or alias or by_itself:
            return Saved(original=by_other or by_itself)
        return Saved(usage=self._usage(q)) if by_other else Saved()

    def _usage(self, q: Quantizer) -> str:
        return ROWWISE if self.scheme.backward != QUANTIZED or schemes.rows_share_scales(q) else COLUMNWISE

    def _masks(self, q: Quantizer | None, given: bool) -> bool:
        """Whether the gradient of an operand is 0 where it was clipped, or an estimator finds it."""
        own = q is not None and (given or q.scale.clips() or q.gradient is not None)
        return own and self.scheme.backward != QUANTIZED

    # ---- without data

    def copy_of_x(self, x: TensorProto) -> TensorProto | None:
        """The copy that is saved of x."""
        return _copy(x, self.scheme.lhs, self.of_x().usage)

    def copy_of_weight(self, weight: TensorProto) -> TensorProto | None:
        """The copy that is saved of the weight."""
        return _copy(weight, self.scheme.rhs, self.of_weight().usage)

    def kept_of_weight(self, weight: TensorProto) -> TensorProto | None:
        """What the caller keeps of it."""
        kept = self.kept()
        return replace(weight, quantizer=self.scheme.rhs, usages=kept, requires_grad=False) if kept else None

    def forward(self, x: TensorProto, weight: TensorProto, held: bool) -> list[TensorProto]:
        """What the forward returns after the result: the copy of x, and that of the weight, or what is to be kept of
        it unless the caller holds that already."""
        of_weight = self.kept_of_weight(weight) if self.kept() else self.copy_of_weight(weight)
        return [p for p in (self.copy_of_x(x), None if held else of_weight) if p is not None]


def _copy(of: TensorProto, q: Quantizer | None, usage: str | None) -> TensorProto | None:
    return None if usage is None else replace(of, quantizer=q, usages=(usage,), requires_grad=False)
