"""Every operator on every route: out_dtype in one integer and one float format, the leaves, and scaled."""

import functools
import itertools
import unittest
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parameterized import parameterized

from tests.support.case import Case
from tests.support.cases import FLOAT, GRADIENT, INTEGER, OPERATORS, T
from tests.support.leaves import LEAVES, SETTINGS, Setting
from tests.support.quantized import QUANTIZED
from tests.support.routes import BATCHED, ROUTES, SINGLE, Route, compiled, vmapped
from tests.support.scaled import SCALED

VALUES = (INTEGER, FLOAT)
COVERED = {(o.name, r.name) for o, r in itertools.product((*OPERATORS, *LEAVES), ROUTES)}
COVERED_QUANTIZED = {(o.name, r.name) for o, r in itertools.product(QUANTIZED, ROUTES)}
COVERED_SCALED = {(o.name, r.name) for o, r in itertools.product(SCALED, ROUTES)}


def _of_leaves(pairs: list[tuple[Any, Setting]]) -> tuple[list[Case], list[Case]]:
    return [leaf.case(s) for leaf, s in pairs], [leaf.gradient_case(s) for leaf, s in pairs]


# Programs take minutes. The quick suite takes the first of two parts, which has every operator of out_dtype and every
# leaf. Each is made once, so that the routes of one process share its export.
TRACED = [r for r in BATCHED if not r.compiler]
COMPILED = [r for r in BATCHED if r.compiler]


def half(operators: Sequence[Any], values: Sequence[Any], part: int) -> list[tuple[Any, Any]]:
    """Every other pair, beginning with another value for each operator in turn."""
    pairs = itertools.product(enumerate(operators), enumerate(values))
    return [(o, v) for (i, o), (k, v) in pairs if (i + k + part) % 2 == 0]


@functools.cache
def program_in_parts(part: int) -> tuple[list[Case], list[Case]]:
    """Cases of out_dtype, and those that are differentiated."""
    return [o.case(f) for o, f in half(OPERATORS, VALUES, part)], [o.case(GRADIENT) for o in OPERATORS]


@functools.cache
def leaves_in_parts(part: int) -> tuple[list[Case], list[Case]]:
    """Each leaf in one setting, another for each leaf in turn; or in the remaining settings."""
    pairs = itertools.product(enumerate(LEAVES), enumerate(SETTINGS))
    return _of_leaves([(o, s) for (i, o), (k, s) in pairs if ((i + k) % len(SETTINGS) == 0) == (part == 0)])


def in_turns(routes: Sequence[Route], operators: Sequence[Any], values: Sequence[Any], part: int) -> list[Any]:
    """Each operator on each route with every other value, beginning with another in turn; or, part 1, with the rest."""
    pairs = itertools.product(enumerate(routes), enumerate(operators))
    return [(f"{r.name}_{o.name}", r, o, values[(i + k + part) % 2 :: 2]) for (i, r), (k, o) in pairs]


class TestRoutes(unittest.TestCase):
    @parameterized.expand(in_turns(SINGLE, OPERATORS, VALUES, 0))
    def test_single(self, _name, route, operator, values):
        route.run([operator.case(f) for f in values], [operator.case(GRADIENT)])

    @parameterized.expand(in_turns([r for r in SINGLE if not r.differentiates], OPERATORS, VALUES, 1))
    @pytest.mark.full
    def test_single_at_length(self, _name, route, operator, values):
        route.run([operator.case(f) for f in values], [])

    @parameterized.expand([(o.name, o) for o in OPERATORS if sum(isinstance(a, T) for a in o.args) == 3])
    @pytest.mark.full
    def test_vmap_of_any(self, _name, operator):
        vmapped([operator.case(f) for f in VALUES], [], every=True)

    @parameterized.expand([(r.name, r) for r in TRACED])
    def test_program(self, _name: str, route: Route):
        route.run(*program_in_parts(0))

    @parameterized.expand([(r.name, r) for r in TRACED if not r.differentiates])
    @pytest.mark.full
    def test_program_at_length(self, _name: str, route: Route):
        route.run(*program_in_parts(1))

    @parameterized.expand([(r.name, r) for r in COMPILED])
    @pytest.mark.compiler
    def test_compiled_program(self, _name: str, route: Route):
        """The leaves are in the same program, which takes less than two."""
        route.run(*(a + b for a, b in zip(program_in_parts(0), leaves_in_parts(0), strict=True)))

    @parameterized.expand([(r.name, r) for r in COMPILED if not r.differentiates])
    @pytest.mark.compiler
    @pytest.mark.full
    def test_compiled_program_at_length(self, _name: str, route: Route):
        route.run(*program_in_parts(1))


class TestLeaves(unittest.TestCase):
    @parameterized.expand(in_turns(SINGLE, LEAVES, SETTINGS, 0))
    def test_single(self, _name, route, leaf, settings):
        route.run(*_of_leaves([(leaf, s) for s in settings]))

    @parameterized.expand(in_turns(SINGLE, LEAVES, SETTINGS, 1))
    @pytest.mark.full
    def test_single_at_length(self, _name, route, leaf, settings):
        route.run(*_of_leaves([(leaf, s) for s in settings]))

    @parameterized.expand([(r.name, r) for r in TRACED])
    def test_program(self, _name: str, route: Route):
        route.run(*leaves_in_parts(0))

    @parameterized.expand([(r.name, r) for r in TRACED])
    @pytest.mark.full
    def test_program_at_length(self, _name: str, route: Route):
        route.run(*leaves_in_parts(1))

    @parameterized.expand([(r.name, r) for r in COMPILED])
    @pytest.mark.compiler
    @pytest.mark.full
    def test_compiled_program_at_length(self, _name: str, route: Route):
        route.run(*leaves_in_parts(1))


QUICK = ("inductor",)  # of the larger operators
# Which call of an operator the quick suite takes on a traced route. The last three share one export.
TURNS = {r.name: min(i, 5) for i, r in enumerate(TRACED)}
ROUTES_IN_HALVES = [(f"{r.name}_{half}", r, half) for half in (0, 1) for r in TRACED]  # routes of one export in a row


@functools.cache
def in_turn(quantized: bool, half: int, turn: int, quick: bool) -> tuple[list[Case], list[Case]]:
    """One call of each ATen operator with one of its gradients; or, not `quick`, the others."""
    families: dict[Any, list[Any]] = {}
    for operator in QUANTIZED if quantized else SCALED[half::2]:
        families.setdefault(operator.op, []).append(operator)
    cases, gradients = [], []
    for family in families.values():
        for i, operator in enumerate(family):
            chosen = i == turn % len(family)
            cases += [operator.case()] if chosen == quick else []
            found = operator.gradient_cases()
            gradients += [case for k, case in enumerate(found) if (chosen and k == turn % len(found)) == quick]
    return cases, gradients


def singles(operators: Sequence[Any], quick: bool) -> list[tuple[str, Route, Any]]:
    """Each route with one call of each ATen operator, another in turn; or, not `quick`, with the others."""
    families: dict[Any, list[Any]] = {}
    for operator in operators:
        families.setdefault(operator.op, []).append(operator)
    triples = itertools.product(enumerate(SINGLE), families.values())
    return [
        (f"{r.name}_{o.name}", r, o)
        for (turn, r), family in triples
        for i, o in enumerate(family)
        if (i == turn % len(family)) == quick
    ]


@functools.cache
def scaled_program(part: int, parts: int = 2) -> tuple[list[Case], list[Case]]:
    """Every other operator of scaled at once, or one in `parts`."""
    operators = SCALED[part::parts]
    return [o.case() for o in operators], [case for o in operators for case in o.gradient_cases()]


class TestScaled(unittest.TestCase):
    @parameterized.expand(singles(SCALED, quick=True))
    def test_single(self, _name, route, operator):
        route.run([operator.case()], operator.gradient_cases())

    @parameterized.expand(singles(SCALED, quick=False))
    @pytest.mark.full
    def test_single_at_length(self, _name, route, operator):
        route.run([operator.case()], operator.gradient_cases())

    @parameterized.expand(ROUTES_IN_HALVES)
    def test_program(self, _name: str, route: Route, half: int):
        route.run(*in_turn(False, half, TURNS[route.name], quick=True))

    @parameterized.expand(ROUTES_IN_HALVES)
    @pytest.mark.full
    def test_program_at_length(self, _name: str, route: Route, half: int):
        route.run(*in_turn(False, half, TURNS[route.name], quick=False))

    @parameterized.expand([(f"{r.name}_{part}", r, part) for r in COMPILED if r.name in QUICK for part in range(4)])
    @pytest.mark.compiler
    @pytest.mark.quick(4)  # Inductor takes a minute for each
    def test_compiled_program(self, _name: str, route: Route, part: int):
        route.run(*scaled_program(part, 4))

    @parameterized.expand([(f"{r.name}_{part}", r, part) for r in COMPILED if r.name not in QUICK for part in (0, 1)])
    @pytest.mark.compiler
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_compiled_program_at_length(self, _name: str, route: Route, part: int):
        route.run(*scaled_program(part))


@functools.cache
def quantized_program(part: int = 0, parts: int = 1) -> tuple[list[Case], list[Case]]:
    """All operators of quantized at once, or one in `parts`."""
    operators = QUANTIZED[part::parts]
    return [o.case() for o in operators], [case for o in operators for case in o.gradient_cases()]


class TestQuantized(unittest.TestCase):
    @parameterized.expand(singles(QUANTIZED, quick=True))
    def test_single(self, _name, route, operator):
        route.run([operator.case()], operator.gradient_cases())

    @parameterized.expand(singles(QUANTIZED, quick=False))
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_single_at_length(self, _name, route, operator):
        route.run([operator.case()], operator.gradient_cases())

    @parameterized.expand([(r.name, r) for r in TRACED])
    def test_program(self, _name: str, route: Route):
        route.run(*in_turn(True, 0, TURNS[route.name], quick=True))

    @parameterized.expand([(r.name, r) for r in TRACED])
    @pytest.mark.full
    def test_program_at_length(self, _name: str, route: Route):
        route.run(*in_turn(True, 0, TURNS[route.name], quick=False))

    @parameterized.expand([(f"{r.name}_{part}", r, part) for r in COMPILED if r.name in QUICK for part in (0, 1)])
    @pytest.mark.compiler
    @pytest.mark.quick(2)
    def test_compiled_program(self, _name: str, route: Route, part: int):
        route.run(*quantized_program(part, 2))

    @parameterized.expand([(r.name, r) for r in COMPILED if r.name not in QUICK])
    @pytest.mark.compiler
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_compiled_program_at_length(self, _name: str, route: Route):
        route.run(*quantized_program())


@pytest.mark.compiler
@pytest.mark.exhaustive
class TestCppWrapper(unittest.TestCase):
    """The route inductor, where Inductor writes the program that calls its kernels in C++ too."""

    @parameterized.expand(
        [
            ("out_dtype", program_in_parts, (0, 1)),
            ("leaves", leaves_in_parts, (0, 1)),
            ("scaled", scaled_program, (0, 1)),
            ("quantized", quantized_program, None),
        ]
    )
    def test_program(self, _name: str, cases: Any, parts: tuple[int, ...] | None):
        for given in [()] if parts is None else [(part,) for part in parts]:
            with torch._inductor.config.patch(cpp_wrapper=True):
                compiled(cases(*given)[0], backend="inductor", dynamic=False)
