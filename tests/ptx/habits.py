"""Choices that the hardware leaves open, fixed for a whole run: a habit for each behaviour a kernel must not rely on.

A kernel is right if its results are the same under every habit and all of their combinations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# What is in flight, in the order in which it is let go of once nobody can run.
KINDS = ("load", "arrival", "read", "write")


@dataclass(frozen=True)
class Habits:
    """Rates are chances at each turn: 1 is at once; 0 is as late as can be, when nobody can run or it is waited for."""

    load: float = 1.0  # that a bulk copy lands in shared memory
    arrival: float = 1.0  # that an arrival reaches the mbarrier of another block
    read: float = 1.0  # that a bulk store has read shared memory
    write: float = 1.0  # that its bytes are in global memory
    products: float = 1.0  # that a committed group of wgmma runs before the wait for it
    order: str = "oldest"  # of what is in flight, which comes first: "oldest", "newest", "any"
    warps: str = "turns"  # who runs: "turns", the "first" that can, the "last" that can, "any", "loyal" to some
    turns: float = 1.0  # that it is another warp's turn, after an instruction whose effect others may see
    yields: float = 1.0  # that others run before a wait for one's own copies or products ends
    gives_up: bool = False  # whether a wait for an mbarrier gives up once before it comes true

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Habits:
        """A mixture, other in each run."""

        def one_of(*choices: Any) -> Any:
            return choices[int(rng.integers(len(choices)))]

        rates = {kind: one_of(0.0, 0.02, 0.3, 0.9) for kind in KINDS}
        return cls(
            **rates,
            products=one_of(0.0, 0.5),
            order="any",
            warps=one_of("any", "loyal"),
            turns=one_of(0.0, 0.05, 0.5),
            yields=one_of(0.0, 0.5, 1.0),
            gives_up=one_of(False, True),
        )


# By name, what each does other than the first, in which all happens at once and warps take turns.
HABITS: dict[str, dict[str, Any]] = {
    "prompt": {},
    "late_loads": {"load": 0.0, "arrival": 0.0},
    "reordered_loads": {"load": 0.0, "arrival": 0.0, "order": "newest"},
    "late_stores": {"read": 0.0, "write": 0.0},
    "late_products": {"products": 0.0},
    "first_ahead": {"warps": "first", "turns": 0.0},
    "last_ahead": {"warps": "last", "turns": 0.0},
    "others_stop": {"warps": "first"},
    "impatient": {"gives_up": True},
}


def habits(*names: str) -> Habits:
    """The combination of the named habits."""
    changes: dict[str, Any] = {}
    for name in names:
        changes |= HABITS[name]
    return replace(Habits(), **changes)
