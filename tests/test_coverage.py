"""No (operator, route) pair is left out of both suites, and no listed operator is left out of the cases."""

import itertools
import unittest

from tests import test_distributed, test_meaning, test_routes
from tests.cases import OPERATORS
from tests.routes import ROUTES

# The operators that out_dtype promises, and the routes of a new operator of ours.
PROMISED_OPERATORS = (
    "mm bmm addmm baddbmm matmul linear mv dot convolution conv1d conv2d conv3d conv_transpose2d add sub mul "
    "mul_scalar div div_scalar sum mean cumsum clamp avg_pool2d embedding"
).split()
PROMISED_ROUTES = (
    "eager full_path reference fake make_fx functionalize vmap jit_trace flops grad double_backward jvp func aot_eager "
    "aot_eager_dynamic aot_eager_training inductor inductor_dynamic inductor_training export_strict export_nonstrict "
    "save_load run_decompositions aotinductor dtensor"
).split()


class TestCoverage(unittest.TestCase):
    def test_every_promised_operator_has_a_case(self):
        assert set(PROMISED_OPERATORS) == {o.name for o in OPERATORS}

    def test_every_promised_route_exists(self):
        assert set(PROMISED_ROUTES) == {r.name for r in ROUTES} | {"dtensor"}

    def test_every_pair_is_in_a_suite(self):
        covered = test_routes.COVERED | test_distributed.COVERED
        missing = set(itertools.product(PROMISED_OPERATORS, PROMISED_ROUTES)) - covered
        assert not missing, sorted(missing)

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
