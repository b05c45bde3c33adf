"""Each record of cutlass_kernels.patches tells which versions of a package have the fault: it shows there alone."""

import ast
import contextlib
import unittest
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parameterized import parameterized

import cutlass_kernels
from cutlass_kernels import patches, registry
from cutlass_kernels.patches import PATCHES, TESTED

SOURCES = Path(cutlass_kernels.__file__).parent
PLAIN = registry.Case(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, tile=(64, 64))
FUSED = replace(PLAIN, scaled=True)
# By the name of a record: the case whose kernel does not compile without it, where a warning is an error.
FAULTS = {"multiprocessors": FUSED, "moved_schedulers": PLAIN, "superseded_divisors": FUSED}


@contextlib.contextmanager
def taken_back(name: str):
    PATCHES[name].active = False
    try:
        yield
    finally:
        PATCHES[name].active = True


def compiles(case: registry.Case) -> bool:
    """Whether a kernel does without a warning."""
    from cuda.pathfinder import DynamicLibNotFoundError  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            registry.compile_for("100a", case, 148)
        except (DynamicLibNotFoundError, DeprecationWarning):
            return False
    return True


@pytest.mark.full
@pytest.mark.skipif(registry.missing() is not None, reason=registry.missing() or "")
class TestFaults:
    @pytest.mark.parametrize("name", FAULTS)
    def test_shows_without_the_patch_in_the_versions_named(self, name):
        if name == "multiprocessors" and torch.cuda.is_available():
            pytest.skip("the device that is here answers")
        with taken_back(name):
            assert compiles(FAULTS[name]) != PATCHES[name].is_needed

    @pytest.mark.parametrize("name", FAULTS)
    def test_does_not_show_with_it(self, name):
        assert compiles(FAULTS[name])

    def test_nothing_stays_changed(self):
        import cutlass.utils  # pyright: ignore[reportMissingImports]

        own = cutlass.utils.HardwareInfo
        with patches.multiprocessors(148):
            assert cutlass.utils.HardwareInfo is not own or not PATCHES["multiprocessors"].is_needed
        assert cutlass.utils.HardwareInfo is own


class TestRecords(unittest.TestCase):
    def test_each_has_a_case(self):
        assert FAULTS.keys() == PATCHES.keys()

    @parameterized.expand(list(PATCHES))
    def test_some_tested_version_has_the_fault(self, name):
        assert any(map(PATCHES[name].has_fault, TESTED[PATCHES[name].package]))

    @parameterized.expand(list(TESTED))
    @unittest.skipIf(registry.missing() is not None, registry.missing() or "")
    def test_this_version_is_among_those_tested(self, package):
        assert patches.installed(package) in TESTED[package]

    def test_other_versions_are_left_alone(self):
        patch = patches.Patch("", "pytest", "", lambda: contextlib.ExitStack(), since=(1, 0), until=(2, 0))
        assert [patch.has_fault(v) for v in ((0, 9), (1, 0), (1, 9, 9), (2, 0))] == [False, True, True, False]
        assert isinstance(patch(), contextlib.nullcontext)

    @pytest.mark.full
    def test_nothing_else_is_changed(self):
        """No other module sets an attribute of what it imports."""
        for path in SOURCES.glob("*.py"):
            if path.name == "patches.py":
                continue
            tree = ast.parse(path.read_text())
            calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            assert not calls & {"setattr", "delattr"}, path
            imported = {
                (alias.asname or alias.name).split(".")[0]
                for n in ast.walk(tree)
                if isinstance(n, ast.Import | ast.ImportFrom)
                for alias in n.names
            }
            targets = [t for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets]
            assert not [t.lineno for t in targets if isinstance(t, ast.Attribute) and root(t) in imported], path


def root(node: ast.expr) -> str:
    """`a` of a.b.c"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
