"""Decide which form of its operands a linear layer saves for the backward.

    y  = x · wᵀ + b     x and w as rows over the input features
    dx = dy · w         dy as rows over the output features, w as columns
    dw = dyᵀ · x        dy and x as columns

    x is saved        iff w needs a gradient
    w is saved        iff x needs a gradient
    neither is saved  if nothing needs a gradient

The saved form is a quantized copy that only this layer references: the forward's codes if the backward can use their
scales or factor them out of its sums, otherwise only the column-wise copy. The operand itself is saved (an alias) if

    the backward reads floats ("original", or an operand that the scheme leaves in floats),
    the backward needs the mask of clipped elements, or a scale learns, or
    the caller requests it (save_original).
"""

from dataclasses import replace
from typing import NamedTuple

from hop.numerics import schemes
from hop.numerics.copies import COLUMNWISE, ROWWISE
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import ORIGINAL, QUANTIZED, Scheme
from hop.tensor.proto import TensorProto


class Options(NamedTuple):
    """Options of a layer in addition to its scheme.

    save_original: save the operands themselves. keep: also return the weight's codes, to be passed as `held` later.
    """

    save_original: bool = False
    keep: bool = False


class Needs(NamedTuple):
    """Flags: the operands that need a gradient."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    x_scale: bool = False
    x_zero_point: bool = False
    weight_scale: bool = False
    weight_zero_point: bool = False

    def of_x(self) -> bool:
        """Whether the gradient of x's dequantized values is needed."""
        return self.x or self.x_scale or self.x_zero_point

    def of_weight(self) -> bool:
        """Whether the gradient of the weight's dequantized values is needed."""
        return self.weight or self.weight_scale or self.weight_zero_point


class Saved(NamedTuple):
    """The saved form of an operand: itself, or a usage of its quantized copy, or nothing."""

    original: bool = False
    usage: str | None = None


class Contract(NamedTuple):
    """Everything the decision depends on."""

    scheme: Scheme
    needs: Needs
    options: Options
    given: tuple[bool, bool]  # whether scales of x and of the weight are given

    def of_x(self) -> Saved:
        """The saved form of x."""
        needs = self.needs
        learns = needs.x_scale or needs.x_zero_point
        by_itself = learns or (needs.x and self._masks(self.scheme.lhs, self.given[0]))
        return self._saved(self.scheme.lhs, needs.of_weight(), by_itself, self.options.save_original)

    def of_weight(self) -> Saved:
        """The saved form of the weight."""
        needs = self.needs
        learns = needs.weight_scale or needs.weight_zero_point
        by_itself = learns or (needs.weight and self._masks(self.scheme.rhs, self.given[1]))
        alias = self.options.save_original and (needs.of_x() or needs.of_weight())
        return self._saved(self.scheme.rhs, needs.of_x() or alias, by_itself, alias)

    def kept(self) -> tuple[str, ...]:
        """The usages of the weight's codes that the caller keeps over calls: all that any call reads."""
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
        """Whether an operand's gradient is masked where it was clipped, or computed by an estimator."""
        own = q is not None and (given or q.scale.clips() or q.gradient is not None)
        return own and self.scheme.backward != QUANTIZED

    # ---- shapes only

    def copy_of_x(self, x: TensorProto) -> TensorProto | None:
        """The saved copy of x, without data; None for none."""
        return _copy(x, self.scheme.lhs, self.of_x().usage)

    def copy_of_weight(self, weight: TensorProto) -> TensorProto | None:
        """The saved copy of the weight, without data; None for none."""
        return _copy(weight, self.scheme.rhs, self.of_weight().usage)

    def kept_of_weight(self, weight: TensorProto) -> TensorProto | None:
        """The copy of the weight that the caller keeps, without data; None for none."""
        kept = self.kept()
        return replace(weight, quantizer=self.scheme.rhs, usages=kept, requires_grad=False) if kept else None

    def forward(self, x: TensorProto, weight: TensorProto, held: bool) -> list[TensorProto]:
        """Descriptions of the forward's additional results: the copies of x and of the weight.

        If the caller keeps the weight's codes, its copy is returned only when the caller does not have it yet.
        """
        of_weight = self.kept_of_weight(weight) if self.kept() else self.copy_of_weight(weight)
        return [p for p in (self.copy_of_x(x), None if held else of_weight) if p is not None]


def _copy(of: TensorProto, q: Quantizer | None, usage: str | None) -> TensorProto | None:
    return None if usage is None else replace(of, quantizer=q, usages=(usage,), requires_grad=False)
