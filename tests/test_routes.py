"""Every operator on every route, in one integer and one float format."""

import itertools
import unittest

import pytest
from parameterized import parameterized

from tests.cases import OPERATORS
from tests.routes import BATCHED, SINGLE, VALUES, Route

COVERED = {(o.name, r.name) for o, r in itertools.product(OPERATORS, SINGLE)}
COVERED |= {(o.name, r.name) for o, r in itertools.product(OPERATORS, BATCHED)}


class TestRoutes(unittest.TestCase):
    @parameterized.expand([(f"{r.name}_{o.name}", r, o) for r, o in itertools.product(SINGLE, OPERATORS)])
    def test_single(self, _name, route, operator):
        route.run(operator, VALUES)

    @parameterized.expand([(r.name, r) for r in BATCHED if not r.compiler])
    def test_program(self, _name: str, route: Route):
        route.run(OPERATORS, VALUES)

    @parameterized.expand([(r.name, r) for r in BATCHED if r.compiler])
    @pytest.mark.compiler
    def test_compiled_program(self, _name: str, route: Route):
        route.run(OPERATORS, VALUES)
