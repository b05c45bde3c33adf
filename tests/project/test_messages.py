"""Every message that a user can cause names the argument, its value, the rule, and what to do: eager and traced."""

import unittest

import pytest
import torch
from parameterized import parameterized
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.wrong_calls import WRONG
from tests.support.wrong_calls.row import Wrong, missing

ROWS = [(row.name, row) for row in WRONG]
TRACED = [(row.name, row) for row in WRONG if row.traced]


def said(row: Wrong) -> str:
    """The message of a wrong call, of the error that its row names."""
    try:
        row.call()
    except row.error as error:
        assert type(error) is row.error, f"{row.name}: {type(error).__name__}"
        return str(error)
    except Exception as error:
        raise AssertionError(f"{row.name}: {type(error).__name__} instead of {row.error.__name__}: {error}") from error
    raise AssertionError(f"{row.name}: nothing was raised")


class TestMessages(unittest.TestCase):
    @parameterized.expand(ROWS)
    @pytest.mark.quick(5)
    def test_four_parts(self, _name, row):
        message = said(row)
        assert not (lacks := missing(row, message)), f"{', '.join(lacks)} missing in: {message}"

    @parameterized.expand(TRACED)
    @pytest.mark.full
    def test_compiled(self, _name, row):
        """Dynamo wraps what a call raises while it traces, and keeps its words."""
        torch.compiler.reset()
        with self.assertRaises(Exception) as caught:
            torch.compile(row.call, backend="eager", fullgraph=True)()
        assert said(row) in str(caught.exception), str(caught.exception)

    @parameterized.expand(TRACED)
    @pytest.mark.quick(3)
    def test_make_fx(self, _name, row):
        with self.assertRaises(row.error) as caught:
            make_fx(lambda: row.call())()
        assert str(caught.exception) == said(row)

    def test_enough(self):
        assert len({row.name for row in WRONG}) == len(WRONG) >= 150
        assert len(TRACED) >= 40

    def test_what_lacks_a_part_is_found(self):
        row = Wrong("", TypeError, lambda: None, "x", "[1]", "must be a tensor", "make one with torch.tensor")
        assert missing(row, "f: x must be a tensor, got [1]; make one with torch.tensor") == []
        assert missing(row, "f: max must be a tensor, got [1]; make one with torch.tensor") == ["argument"]
        assert missing(row, "f: x must be a tensor, got list; make one with torch.tensor") == ["value"]
        assert missing(row, "f: x is wrong, got [1]; make one with torch.tensor") == ["rule"]
        assert missing(row, "f: x must be a tensor, got [1]") == ["remedy"]
        for remedy in ("torch.tensor", "make", "make ()"):
            assert missing(row._replace(remedy=remedy), f"x must be a tensor, got [1]; {remedy}") == ["remedy"]
