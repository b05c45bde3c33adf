"""Which scheme a layer computes in: its own, or that of the innermost `with hop.nn.scheme(...)` of this thread.

What a layer reads in its forward is a SchemeNeeds: a scheme, and which of its roles need state. It is made once,
outside of compiled programs, which guard on what they read of it and so are compiled anew for another scheme.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import QUANTIZED, STE, Scheme

INPUT, WEIGHT, OUTPUT, GRADIENT = ROLES = ("input", "weight", "output", "gradient")
FIELDS: dict[str, str] = dict(zip(ROLES, ("lhs", "rhs", "output", "grad"), strict=True))
"""The field of Scheme, and of Scales, that each role stands for."""

Choice = Callable[[str], Quantizer | None]
"""From a role to its quantizer."""


@dataclass(frozen=True)
class SchemeNeeds:
    """A scheme as layers read it."""

    scheme: Scheme | None  # None: floats
    settled: Scheme | None  # the same without random bits: what eval mode and frozen layers compute in
    quantizes_weight: bool
    needs: tuple[tuple[str, str], ...]  # the roles whose quantizers find no scale themselves, and their spellings

    @staticmethod
    def of(scheme: Scheme | None) -> "SchemeNeeds":
        """Those of `scheme`."""
        if scheme is None:
            return SchemeNeeds(None, None, False, ())
        quantizers = [(role, getattr(scheme, field)) for role, field in FIELDS.items()]
        needs = tuple((role, str(q)) for role, q in quantizers if q is not None and q.scale.missing() is not None)
        return SchemeNeeds(scheme, scheme.to_nearest(), scheme.rhs is not None, needs)


class _Here(threading.local):
    """The schemes of the contexts that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.plans: tuple[SchemeNeeds, ...] = ()  # of the instance, for compiled programs to guard on it


_here = _Here()


class scheme:
    """A context in which layers compute in another scheme than their own. Contexts nest; each thread has its own.

        with hop.nn.scheme(hop.recipes.FP8_HYBRID):
            loss = model(x).sum()

    A backward runs as its forward was. What is computed again in the backward, by activation checkpointing, is computed
    in the scheme that is active then: pass checkpoint(..., use_reentrant=False, context_fn=hop.nn.same_scheme).

    Args:
        choice: a Scheme; or a function from a role, "input", "weight", "output" or "gradient", to its Quantizer, or to
            None to leave it in floats. It is called once for each role. With a quantizer for "gradient" the backward
            multiplies codes, without one it is that of fake quantization; None for all four means floats.

    Raises:
        TypeError: choice is neither, or returns something else.
        ValueError: the quantizers make no scheme.
    """

    def __init__(self, choice: Scheme | Choice) -> None:
        self._plan = SchemeNeeds.of(choice if isinstance(choice, Scheme) else _chosen(choice))

    def __enter__(self) -> None:
        _here.plans = (*_here.plans, self._plan)

    def __exit__(self, *error: Any) -> None:
        _here.plans = _here.plans[:-1]


def active(own: SchemeNeeds) -> SchemeNeeds:
    """The plan of a layer whose own is `own`."""
    return _here.plans[-1] if _here.plans else own


def asks_for_floats() -> bool:
    """Whether the innermost context of this thread asks for floats."""
    return bool(_here.plans) and _here.plans[-1].scheme is None


def same_scheme() -> tuple[Any, Any]:
    """What torch.utils.checkpoint takes as context_fn: contexts for the forward and for its recomputation, in which the
    scheme is the one that is active now."""
    return _Plans(_here.plans), _Plans(_here.plans)


class _Plans:
    """A context with these plans."""

    def __init__(self, plans: tuple[SchemeNeeds, ...]) -> None:
        self._plans = plans
        self._outer: tuple[SchemeNeeds, ...] = ()

    def __enter__(self) -> None:
        self._outer, _here.plans = _here.plans, self._plans

    def __exit__(self, *error: Any) -> None:
        _here.plans = self._outer


def _chosen(choice: Any) -> Scheme | None:
    if not callable(choice):
        raise TypeError(
            f"scheme: choice must be a hop.Scheme, or a function from a role to a Quantizer or None; got {choice!r}; "
            "give one such as hop.schemes.INT8_DYNAMIC"
        )
    by_role = {role: choice(role) for role in ROLES}
    for role, q in by_role.items():
        if q is not None and not isinstance(q, Quantizer):
            raise TypeError(
                f"scheme: choice({role!r}) must be a Quantizer or None, got {q!r}; give one such as "
                "hop.presets.INT8_ROW"
            )
    if all(q is None for q in by_role.values()):
        return None
    quantizers: list[Any] = list(by_role.values())
    return Scheme(*quantizers, backward=STE if by_role[GRADIENT] is None else QUANTIZED)
