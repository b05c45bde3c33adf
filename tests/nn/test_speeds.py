"""Remarks about schemes that are slower than floats on this CPU."""

import unittest
from unittest import mock

import torch
from parameterized import parameterized

import hop
from hop.kernels.cpu import native
from hop.nn.models import speeds
from hop.numerics.schemes import named


def at_level(level: str):
    return mock.patch.object(native.library(), "path", level)


class TestSpeeds(unittest.TestCase):
    @parameterized.expand([(level, name) for level, own in speeds.table().items() for name in own["schemes"]])
    def test_report_names_a_faster_scheme(self, level, name):
        with at_level(level):
            model = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), name)
            text = str(model.hop_report)
            times = speeds.table()[level]["schemes"]
            slow = max(times[name]) > 1
            assert slow == (f"at CPU level {level} a layer takes" in text), text
            for i, rows in enumerate(("1 row", "128 rows")):
                best = min(times, key=lambda other: times[other][i])
                assert (times[name][i] > 1) == (f"with {rows}, {best!r} takes {times[best][i]:.2f}" in text), text

    def test_all_are_schemes(self):
        for own in speeds.table().values():
            assert all(named(name) is not None for name in own["schemes"])

    def test_nothing_of_unknown_levels_and_schemes(self):
        with at_level("neon"):
            assert speeds.slower(named("int4")) is None
        with at_level("amx"):
            assert speeds.slower(named("int4")) is not None
            assert speeds.slower(hop.schemes.INT8_STATIC) is None
