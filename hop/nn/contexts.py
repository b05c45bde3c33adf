"""The scheme a layer computes in: its own, or that of the innermost `with hop.nn.scheme(...)` of this thread.

Layers read a SchemeNeeds in their forward: a scheme, and the roles that need scale state. It is created outside of
compiled programs, which guard on it and recompile for another scheme.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import QUANTIZED, STE, Scheme

INPUT, WEIGHT, OUTPUT, GRADIENT = ROLES = ("input", "weight", "output", "gradient")
FIELDS: dict[str, str] = dict(zip(ROLES, ("lhs", "rhs", "output", "grad"), strict=True))
"""The field of Scheme and of Scales for each role."""

Choice = Callable[[str], Quantizer | None]
"""A function from a role to its quantizer."""


@dataclass(frozen=True)
class SchemeNeeds:
    """A scheme in the form layers read."""

    scheme: Scheme | None  # None: floats
    settled: Scheme | None  # without random bits: used in eval mode and by frozen layers
    quantizes_weight: bool
    needs: tuple[tuple[str, str], ...]  # roles whose quantizers do not find scales, with the text of each

    @staticmethod
    def of(scheme: Scheme | None) -> "SchemeNeeds":
        """Create one from `scheme`."""
        if scheme is None:
            return SchemeNeeds(None, None, False, ())
        quantizers = [(role, getattr(scheme, field)) for role, field in FIELDS.items()]
        needs = tuple((role, str(q)) for role, q in quantizers if q is not None and q.scale.missing() is not None)
        return SchemeNeeds(scheme, scheme.to_nearest(), scheme.rhs is not None, needs)


class _Here(threading.local):
    """The contexts that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.plans: tuple[SchemeNeeds, ...] = ()  # on the instance, so that compiled programs guard on it


_here = _Here()


class scheme:
    """Context manager in which layers compute in another scheme than their own. Contexts nest, and belong to one
    thread.

        with hop.nn.scheme(hop.recipes.FP8_HYBRID):
            loss = model(x).sum()

    A backward uses the scheme of its forward. Activation checkpointing recomputes the forward in the scheme that is
    active during the backward, unless you pass checkpoint(..., use_reentrant=False, context_fn=hop.nn.same_scheme).

    Args:
        choice: a Scheme; or a function from a role ("input", "weight", "output" or "gradient") to its Quantizer, or to
            None to leave it in floats. It is called once per role. With a quantizer for "gradient" the backward
            multiplies codes; without one it is the backward of fake quantization. None for all four means floats.

    Raises:
        TypeError: choice has another type, or returns something else.
        ValueError: the quantizers do not form a valid scheme.
    """

    def __init__(self, choice: Scheme | Choice) -> None:
        self._plan = SchemeNeeds.of(choice if isinstance(choice, Scheme) else _chosen(choice))

    def __enter__(self) -> None:
        _here.plans = (*_here.plans, self._plan)

    def __exit__(self, *error: object) -> None:
        _here.plans = _here.plans[:-1]


def active(own: SchemeNeeds) -> SchemeNeeds:
    """The SchemeNeeds to use now, for a layer whose own is `own`."""
    return _here.plans[-1] if _here.plans else own


def asks_for_floats() -> bool:
    """Whether the innermost context of this thread selects floats."""
    return bool(_here.plans) and _here.plans[-1].scheme is None


def same_scheme() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Capture the active scheme for torch.utils.checkpoint: pass this function as its context_fn.

    Returns two contexts, for the forward and for its recomputation.
    """
    return _Plans(_here.plans), _Plans(_here.plans)


class _Plans:
    """Context manager that activates these plans."""

    def __init__(self, plans: tuple[SchemeNeeds, ...]) -> None:
        self._plans = plans
        self._outer: tuple[SchemeNeeds, ...] = ()

    def __enter__(self) -> None:
        self._outer, _here.plans = _here.plans, self._plans

    def __exit__(self, *error: object) -> None:
        _here.plans = self._outer


def _chosen(choice: object) -> Scheme | None:
    if not callable(choice):
        raise TypeError(
            f"scheme: choice must be a hop.Scheme, or a function from a role to a Quantizer or None; got {choice!r}; "
            "give one such as hop.schemes.INT8_DYNAMIC"
        )
    by_role: dict[str, Quantizer | None] = {}
    for role in ROLES:
        q = choice(role)
        if q is not None and not isinstance(q, Quantizer):
            raise TypeError(
                f"scheme: choice({role!r}) must be a Quantizer or None, got {q!r}; give one such as "
                "hop.presets.INT8_ROW"
            )
        by_role[role] = q
    if all(q is None for q in by_role.values()):
        return None
    return Scheme(*by_role.values(), backward=STE if by_role[GRADIENT] is None else QUANTIZED)
