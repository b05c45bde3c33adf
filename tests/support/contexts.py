"""Contexts that are entered for the length of a test."""

import unittest
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def enter(test: unittest.TestCase, *contexts: AbstractContextManager[Any]) -> list[Any]:
    """Enter contexts until `test` is over, as TestCase.enterContext of Python 3.11 does; the value of each."""
    values = []
    for context in contexts:
        values.append(context.__enter__())
        test.addCleanup(context.__exit__, None, None, None)
    return values


def trace_for_hopper(test: unittest.TestCase) -> None:
    """Until `test` is over, programs are traced as on a machine with a Hopper GPU."""
    enter(
        test,
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("hop.compat.inductor.is_compiling_for_here", lambda: True),
    )
