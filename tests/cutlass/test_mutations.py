"""Mistakes in how a Hopper kernel synchronizes, all of which the emulator must find; and right kernels, whose results
no habit of the hardware changes."""

import itertools
import re

import pytest

import cutlass_kernels

if reason := cutlass_kernels.missing():
    pytest.skip(reason, allow_module_level=True)

from tests.mutations import HARMLESS, KERNELS, MUTATIONS
from tests.mutations.patterns import EVERY
from tests.ptx import HABITS

# For each habit a mutation that it finds; all but the first are right where everything happens at once.
QUICK = {
    "consumers do not wait": "prompt",
    "release in one's own block alone": "late_loads",
    "empty after one consumer": "reordered_loads",
    "store not waited for": "late_stores",
    "two groups left under way": "late_products",
    "proxy fence after the barrier": "first_ahead",
    "no barrier after the initialization": "last_ahead",
    "sums taken before they are read": "others_stop",
    "a wait that gave up counts": "impatient",
}
ALL_LATE = ("late_loads", "late_stores", "late_products", "impatient")


class TestRight:
    @pytest.mark.parametrize(("kernel", "ahead"), [*zip(KERNELS, itertools.cycle(["first_ahead", "last_ahead"]))])
    @pytest.mark.full
    def test_when_all_is_late(self, kernel, ahead):
        assert KERNELS[kernel].outcome(KERNELS[kernel].host, *ALL_LATE, ahead) == ""

    @pytest.mark.full
    @pytest.mark.parametrize(("kernel", "ahead"), [*zip(KERNELS, itertools.cycle(["last_ahead", "first_ahead"]))])
    def test_when_all_is_late_and_the_other_is_ahead(self, kernel, ahead):
        assert KERNELS[kernel].outcome(KERNELS[kernel].host, *ALL_LATE, ahead) == ""

    @pytest.mark.full
    @pytest.mark.parametrize("habit", HABITS)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_under_each_habit(self, kernel, habit):
        assert KERNELS[kernel].outcome(KERNELS[kernel].host, habit) == ""

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("both", [*itertools.combinations(HABITS, 2)], ids="+".join)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_under_two_habits(self, kernel, both):
        assert KERNELS[kernel].outcome(KERNELS[kernel].host, *both) == ""

    @pytest.mark.full
    @pytest.mark.parametrize("name", HARMLESS)
    def test_without_what_it_can_do_without(self, name):
        for names in [*((habit,) for habit in HABITS), (*ALL_LATE, "first_ahead"), (*ALL_LATE, "last_ahead")]:
            assert HARMLESS[name].outcome(*names) == "", names


class TestMutations:
    @pytest.mark.parametrize("name", QUICK)
    @pytest.mark.quick(9)
    def test_one_for_each_habit(self, name):
        mutation, habit = MUTATIONS[name], QUICK[name]
        assert re.search(mutation.shows, mutation.outcome(habit))
        assert habit == "prompt" or mutation.outcome("prompt") == ""

    @pytest.mark.full
    @pytest.mark.parametrize("name", MUTATIONS)
    def test_caught(self, name):
        """By each habit that finds it; where all do, by the first."""
        mutation = MUTATIONS[name]
        for names in mutation.caught_by[: 1 if mutation.caught_by == EVERY else None]:
            assert re.search(mutation.shows, mutation.outcome(*names.split("+"))), names

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", MUTATIONS)
    def test_caught_by_these_habits_alone(self, name):
        mutation = MUTATIONS[name]
        found = {habit: mutation.outcome(habit) for habit in HABITS}
        assert {habit for habit, outcome in found.items() if outcome} == set(mutation.caught_by) & set(HABITS)
        assert all(re.search(mutation.shows, outcome) for outcome in found.values() if outcome)

    def test_each_habit_finds_what_none_would_without(self):
        found = {habit for m in MUTATIONS.values() if "prompt" not in m.caught_by for habit in m.caught_by}
        assert found >= set(HABITS) - {"prompt"}
        assert set(QUICK.values()) == set(HABITS)

    @pytest.mark.full
    def test_differ(self):
        """No two are the same change, and each is caught by some habit."""
        texts = [m.host.ptx for m in (MUTATIONS | HARMLESS).values()] + [k.host.ptx for k in KERNELS.values()]
        assert len(set(texts)) == len(texts) == 103
        assert all(m.caught_by and m.shows for m in MUTATIONS.values())
