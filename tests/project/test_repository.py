"""The files that a code host reads: workflows, templates, the citation, and the hooks before a commit."""

import re
import unittest
from pathlib import Path

import pytest
from parameterized import parameterized

import hop

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HOSTED = [*WORKFLOWS, *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))]
HOSTED += [ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


class TestRepository(unittest.TestCase):
    @parameterized.expand([(path.stem, path) for path in HOSTED])
    def test_is_yaml(self, _name, path):
        yaml = pytest.importorskip("yaml")
        assert isinstance(yaml.safe_load(path.read_text()), dict)

    @parameterized.expand([(path.stem, path) for path in WORKFLOWS])
    def test_workflow_runs_what_exists(self, _name, path):
        """Each step runs a script of the repository or a target of make, and jobs may only read the repository."""
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        steps = re.findall(r"- run: (.+)", path.read_text())
        assert steps and "permissions:\n  contents: read\n" in path.read_text()
        for step in steps:
            program, *words = step.split()
            assert set(words) <= targets if program == "make" else (ROOT / program).is_file(), step

    def test_tests_run_on_both_architectures(self):
        text = (ROOT / ".github/workflows/test.yml").read_text()
        assert "run: .ci/run" in text and {"x86-64", "AArch64"} <= set(re.findall(r"cpu: ([\w-]+)", text))

    def test_hooks_use_the_pinned_ruff(self):
        pinned = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
        hooks = re.findall(r"ruff-pre-commit\n\s+rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
        assert hooks == pinned

    def test_citation_has_the_version(self):
        assert f"\nversion: {hop.__version__}\n" in (ROOT / "CITATION.cff").read_text()
