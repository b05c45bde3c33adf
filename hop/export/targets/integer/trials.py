"""Find the convention that reproduces a runtime's codes, by computing a call of hop.scaled with each one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from hop.compat.pytree import Kwargs
from hop.dispatch import compiled
from hop.dispatch.operators import CONVOLUTION, MATRIX, MULTIPLY, of
from hop.export.analysis.comparison import Trial
from hop.export.rewrite.target import Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers
from hop.numerics.integer.tables import FUNCTIONS
from hop.numerics.quantizer import Quantizer

# Raised if an operator does not support a convention; IndexError if a table does not cover the scales of a call.
_REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError, IndexError)
_MULTIPLIERS = (
    requantization.Reciprocal(),
    requantization.Division(),
    requantization.FloatMultiplier(),
    requantization.DoubleMultiplier(),
    requantization.WideFixedPoint(),
)
_ACTIVATIONS = ((None, None), (0.0, None), (0.0, 6.0), (-1.0, 1.0))


@dataclass(frozen=True)
class Sample:
    """A call of a program, and the runtime's codes for it, in the program's dimension order."""

    args: Sequence[Any]
    kwargs: Kwargs
    theirs: Tensor


def can_be_tried(node: Node) -> bool:
    """Whether a node computes codes by a convention."""
    return node.target is compiled.operators["hop_scaled_buffers"] and str(node.args[1]).startswith("hop1:")


def trials(node: Node, samples: Sequence[Sample], targets: Sequence[Target]) -> tuple[Trial, ...]:
    """Compute a node with the conventions of `targets` and all others of its operator, nearest to the codes first.

    The node's own activation bounds are tried first, and other bounds only if no convention reproduces the codes.
    """
    quantizer = Quantizer.parse(str(node.args[1]))
    own = quantizer.scale.requantization
    assert own is not None
    named: dict[requantization.Convention, list[str]] = {}
    for name, convention in _conventions(node.args[0], targets):
        named.setdefault(convention, []).extend([name] if name else [])
    given = own.low, own.high
    result = _run_trials(node, quantizer, named, given, samples)
    for bounds in _ACTIVATIONS:
        if bounds == given or any(t.differing == 0 for t in result):
            continue
        result += [t for t in _run_trials(node, quantizer, named, bounds, samples) if t.differing == 0]
    return tuple(sorted(result, key=lambda t: (t.differing, not t.targets)))


def _run_trials(
    node: Node,
    quantizer: Quantizer,
    named: dict[requantization.Convention, list[str]],
    bounds: tuple[float | None, float | None],
    samples: Sequence[Sample],
) -> list[Trial]:
    """The trials of conventions with given activation bounds."""
    results = []
    for convention, targets in named.items():
        tried = replace(convention, low=bounds[0], high=bounds[1])
        if (count := _differing(node, quantizer, tried, samples)) is not None:
            results.append(Trial(tried, count, tuple(dict.fromkeys(targets))))
    return results


def _conventions(op: Any, targets: Sequence[Target]) -> Iterator[tuple[str, requantization.Convention]]:
    """Conventions for an operator, each with the name of a target that uses it, or ""."""
    for target in targets:
        if op in target:
            row = target[op]
            yield target.name, row.convention
            if row.per_tensor is not None:
                yield target.name, row.per_tensor
    functions: list[integers.IntegerFunction] = [
        integers.TfliteAdd(),
        integers.TfliteMean(),
        integers.TfliteAveragePool(),
        integers.TfliteConcatenation(),
    ]
    functions += [integers.Pt2eMean(), integers.Pt2eAveragePool()]
    functions += [
        integers.OrtAdd(),
        integers.OrtMultiply(),
        integers.OrtMean(),
        integers.OrtAveragePool(),
        integers.OrtSoftmax(),
    ]
    functions += [integers.TosaAdd(), integers.TosaMean(), integers.TosaAveragePool(), integers.TosaConcatenation()]
    functions += [
        integers.TfliteSoftmax(),
        integers.TosaSoftmax(),
        integers.IBertSoftmax(),
        integers.TfliteLogSoftmax(),
        *(integers.TfliteRsqrt(), integers.TfliteHardSwish(), integers.TfliteLeakyRelu(), integers.TflitePrelu()),
        *(integers.TfliteTable(function=name) for name in FUNCTIONS),
    ]
    yield from (("", f) for f in functions if f.takes(op))
    yield from (("", c) for c in _MULTIPLIERS)
    multipliers = (
        requantization.MULTIPLIERS
        if of(op).family in (MATRIX, CONVOLUTION, MULTIPLY)
        else requantization.MULTIPLIERS[:1]
    )
    yield from (
        ("", requantization.FixedPoint(rounding=r, multiplier=m)) for r in requantization.ROUNDINGS for m in multipliers
    )


def _differing(
    node: Node, quantizer: Quantizer, convention: requantization.Convention, samples: Sequence[Sample]
) -> int | None:
    """The number of codes that differ; None if the operator does not support the convention."""
    text = str(replace(quantizer, scale=replace(quantizer.scale, requantize=convention)))
    count = 0
    for sample in samples:
        op, _, *rest = sample.args
        try:
            buffers = node.target(op, text, *rest, **sample.kwargs)  # type: ignore[operator]
        except _REFUSALS:
            return None
        count += int((buffers[0] != sample.theirs).sum())
    return count
