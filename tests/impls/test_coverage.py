"""No (operator, route) pair is left out of both suites, and no listed operator is left out of the cases."""

import itertools
import unittest
from pathlib import Path

from tests import levels
from tests.coverage import (
    PAGE,
    PROMISED_LEAVES,
    PROMISED_OPERATORS,
    PROMISED_QUANTIZED,
    PROMISED_ROUTES,
    PROMISED_SCALED,
    page,
    suite,
)
from tests.distributed import test_out_dtype as test_distributed
from tests.impls import test_meaning, test_routes
from tests.support.cases import OPERATORS
from tests.support.leaves import LEAVES
from tests.support.quantized import QUANTIZED
from tests.support.routes import ROUTES
from tests.support.scaled import SCALED


def _only_in_longer_suites(test) -> bool:
    return any(mark.name in ("full", "exhaustive") for mark in getattr(test, "pytestmark", ()))


class TestCoverage(unittest.TestCase):
    def test_every_promised_operator_has_a_case(self):
        assert set(PROMISED_OPERATORS) == {o.name for o in OPERATORS}
        assert set(PROMISED_LEAVES) == {leaf.name for leaf in LEAVES}
        assert set(PROMISED_SCALED) == {o.name for o in SCALED}
        assert set(PROMISED_QUANTIZED) == {o.name for o in QUANTIZED}

    def test_every_promised_route_exists(self):
        assert set(PROMISED_ROUTES) == {r.name for r in ROUTES} | {"dtensor"}

    def test_every_pair_is_in_a_suite(self):
        promised = itertools.product((*PROMISED_OPERATORS, *PROMISED_LEAVES), PROMISED_ROUTES)
        missing = [pair for pair in promised if not suite(*pair)]
        assert not missing, missing
        covered = test_routes.COVERED_SCALED | test_distributed.COVERED_SCALED
        assert set(itertools.product(PROMISED_SCALED, PROMISED_ROUTES)) <= covered
        covered = test_routes.COVERED_QUANTIZED | test_distributed.COVERED_QUANTIZED
        assert set(itertools.product(PROMISED_QUANTIZED, PROMISED_ROUTES)) <= covered

    def test_the_page_shows_it(self):
        assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.coverage"

    def test_the_suites_run_what_they_say(self):
        """The pairs are read off the generated tests themselves."""
        suites = [
            (test_routes.TestLeaves if operator in PROMISED_LEAVES else test_routes.TestRoutes, operator, route)
            for operator, route in test_routes.COVERED
        ]
        suites += [(test_routes.TestScaled, operator, route) for operator, route in test_routes.COVERED_SCALED]
        suites += [(test_routes.TestQuantized, operator, route) for operator, route in test_routes.COVERED_QUANTIZED]
        for cls, operator, route in suites:
            tests = {n: getattr(cls, n) for n in dir(cls) if n.startswith("test_")}
            if cls is test_routes.TestLeaves:  # they are compiled in the programs of out_dtype
                other = test_routes.TestRoutes
                tests |= {n: getattr(other, n) for n in dir(other) if n.startswith("test_compiled_program_")}
            names = list(tests)
            if cls in (test_routes.TestLeaves, test_routes.TestRoutes):  # make test runs all of these
                names = [n for n, test in tests.items() if not _only_in_longer_suites(test)]
            single = any(n.startswith("test_single_") and n.endswith(f"_{route}_{operator}") for n in names)
            program = any("program_" in n and n.endswith((f"_{route}", f"_{route}_0")) for n in names)
            assert single or program, (operator, route)

    def test_every_format_is_in_the_full_suite(self):
        names = [n for n in dir(test_meaning.TestAgainstOracle) if n.startswith("test_value_")]
        assert len(names) == len(test_meaning.PAIRS)

    def test_what_levels_of_cpu_run_is_there(self):
        assert [name for name in levels.FILES if not (Path(__file__).parents[1] / name).is_file()] == []
