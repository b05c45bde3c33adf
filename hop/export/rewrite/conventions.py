"""The conventions by which a program's results are requantized: one for all sums, or a target's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from hop.dispatch.operators import CONVOLUTION, INTERPOLATE, LHS, MATRIX, RHS, aten, of
from hop.export.rewrite.code_floats import Held
from hop.export.rewrite.program import value
from hop.export.rewrite.pt2e import PT2E
from hop.export.rewrite.target import Limits, Row, Target
from hop.numerics.integer.functions import Pt2eAveragePool, Pt2eMean, Pt2eResizeBilinear
from hop.numerics.requantization import Convention, Reciprocal, Requantization

_PRODUCTS = (MATRIX, CONVOLUTION)
_IN_ORDER = (Pt2eMean, Pt2eAveragePool, Pt2eResizeBilinear)


@dataclass(frozen=True)
class Conventions:
    """Determines how each operator's codes are computed."""

    requantize: Requantization | None  # None with a target, and by default, which means PT2E's conventions
    target: Target | None = None
    floats: Requantization = Reciprocal()  # by which nodes that are left quantize floats

    @classmethod
    def of(cls, requantize: object, target: object) -> "Conventions":
        """Check the arguments of to_integer."""
        if requantize is not None and not isinstance(requantize, Requantization):
            raise TypeError(
                f"to_integer: requantize must be a convention of hop.requantization or None, got {requantize!r}; give "
                "one such as hop.requantization.TFLITE"
            )
        if target is not None and not isinstance(target, Target):
            raise TypeError(
                f"to_integer: target must be a hop.export.targets.Target or None, got {target!r}; give one such as "
                "hop.export.targets.TFLITE"
            )
        if requantize is not None and target is not None:
            raise ValueError(
                f"to_integer: requantize must be None where target is given, got {requantize!r} and {target.name}; the "
                "target determines how sums are requantized: leave requantize out"
            )
        return cls(requantize, target)

    @property
    def integers_only(self) -> bool:
        return self.target is not None and self.target.integer_only

    def missing(self, node: Node) -> str | None:
        """The error message if the target does not have the operator, else None."""
        if self.target is None or node.target in self.target:  # type: ignore[operator]
            return None
        return self.target.missing(str(node.target))

    def check_left(self, node: Node, reason: str) -> None:
        """Raise ValueError if a node would stay in floats although the target only has integers."""
        if self.integers_only:
            assert self.target is not None
            raise ValueError(
                f"to_integer: node {node.name!r} ({node.target}) would stay in floats, which target {self.target.name} "
                f"does not support: {reason.splitlines()[0]}"
            )

    def rule(self, node: Node, operands: Mapping[Node, Held], codes: torch.dtype) -> Convention:
        """The convention for the codes, of dtype `codes`, of a node's result."""
        roles = of(node.target)
        gives_sum = roles.family in _PRODUCTS and all(roles.find(role, node.args) in operands for role in (LHS, RHS))
        if self.target is None and self.requantize is not None:
            return Reciprocal() if self.requantize.exact and not gives_sum else self.requantize
        row = PT2E[node.target] if self.target is None else self._row(node.target, codes)  # type: ignore[index]
        if isinstance(row.convention, _IN_ORDER) and not _is_in_order(node, operands):
            return Reciprocal()
        if roles.family in _PRODUCTS and row.per_tensor is not None:
            weight = operands.get(roles.find(RHS, node.args))  # type: ignore[call-overload]
            if weight is not None and (weight.is_whole() or value(weight.codes).shape[0] == 1):
                return row.per_tensor
        return row.convention

    def limits(self, node: Node) -> Limits:
        """The limits of the target's kernel for a node."""
        return Limits() if self.target is None or node.target not in self.target else self.target[node.target].limits  # type: ignore[operator,index]

    def rescaling_rule(self, codes: torch.dtype) -> Convention:
        """The target's convention for converting codes to another scale."""
        return self._row(aten.clone.default, codes).convention

    def _row(self, op: Any, codes: torch.dtype) -> Row:
        assert self.target is not None
        name = str(codes).removeprefix("torch.")
        if name not in self.target.dtypes:
            raise ValueError(f"target {self.target.name} has codes of {' and '.join(self.target.dtypes)}, got {name}")
        if op not in self.target:
            raise ValueError(self.target.missing(str(op)))
        return self.target[op]


def _is_in_order(node: Node, operands: Mapping[Node, Held]) -> bool:
    """Whether the order of PT2E's float summation is known for a mean, pool or resize.

    It is for static sizes, float32, and an operand with one scale. Otherwise the sum is computed exactly, as for
    operators without such a convention.
    """
    x: Any = node.args[0]
    sizes = list(value(x).shape)
    known = x in operands and operands[x].is_whole() and operands[x].dtype == torch.float32 and not node.kwargs
    if not known or not all(isinstance(n, int) for n in sizes[1:]):
        return False
    if node.target is aten.mean.dim:
        dims = sorted(d % len(sizes) for d in node.args[1] or range(len(sizes)))  # type: ignore[union-attr]
        follows = dims == list(range(dims[0], dims[-1] + 1)) and len(dims) < len(sizes)
        return follows and all(isinstance(sizes[d], int) for d in dims)
    if of(node.target).family is INTERPOLATE:
        return True
    spatial = of(node.target).spatial
    if not str(node.target).startswith("aten.adaptive"):
        return True
    out = list(node.args[1])  # type: ignore[call-overload]
    return spatial < 3 and all(n % m == 0 for n, m in zip(sizes[-spatial:], out, strict=True))
