"""No (operator, route) pair is left out of both suites, and no listed operator is left out of the cases."""

import itertools
import unittest

from tests import test_meaning, test_routes
from tests.cases import OPERATORS
from tests.coverage import PAGE, PROMISED_OPERATORS, PROMISED_ROUTES, page, suite
from tests.routes import ROUTES


class TestCoverage(unittest.TestCase):
    def test_every_promised_operator_has_a_case(self):
        assert set(PROMISED_OPERATORS) == {o.name for o in OPERATORS}

    def test_every_promised_route_exists(self):
        assert set(PROMISED_ROUTES) == {r.name for r in ROUTES} | {"dtensor"}

    def test_every_pair_is_in_a_suite(self):
        missing = [pair for pair in itertools.product(PROMISED_OPERATORS, PROMISED_ROUTES) if not suite(*pair)]
        assert not missing, missing

    def test_the_page_shows_it(self):
        assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.coverage"

    def test_the_suites_run_what_they_say(self):
        """The pairs are read off the generated tests themselves."""
        names = [n for n in dir(test_routes.TestRoutes) if n.startswith("test_")]
        for operator, route in test_routes.COVERED:
            single = any(n.startswith("test_single_") and n.endswith(f"_{route}_{operator}") for n in names)
            program = any("program_" in n and n.endswith(f"_{route}") for n in names)
            assert single or program, (operator, route)

    def test_every_format_is_in_the_full_suite(self):
        names = [n for n in dir(test_meaning.TestAgainstOracle) if n.startswith("test_value_")]
        assert len(names) == len(test_meaning.PAIRS)
