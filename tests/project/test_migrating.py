"""Each row of docs/migrating.md, run: their call and ours on one model, and what the page says of the difference."""

import importlib.util
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
from parameterized import parameterized

from docs import make
from hop.compat import versions
from tests.support.migrating import LIBRARIES
from tests.support.migrating.row import NONE, holds, result, sides, size

CASES = [(f"{lib.name}_{i}", lib, row) for lib in LIBRARIES for i, row in enumerate(lib.rows)]


def skip_without(package: str, needs: str) -> None:
    """Skip where the package is not installed, or this machine lacks what its call needs."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    if not found:
        pytest.skip(f"{package} is not installed")
    if needs == "mslk" and importlib.util.find_spec(needs) is None:
        pytest.skip("mslk is not installed, which their call needs")
    least = {"": (0, 0), "cuda": (8, 9), "mslk": (8, 9), "blackwell": (10, 0)}[needs]
    if needs and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= least):
        pytest.skip(f"their call needs a GPU of compute capability {least[0]}.{least[1]}")


class TestMigrating(unittest.TestCase):
    @parameterized.expand(CASES)
    @pytest.mark.quick(3)
    def test_row(self, _name, library, row):
        skip_without(library.package, row.needs)
        if versions.version() < (least := max(library.least, row.least)):
            pytest.skip(f"{library.name}: this call does so from torch {least} on")
        with tempfile.TemporaryDirectory() as folder:
            self.check(row, *sides(library, row, Path(folder)))

    def check(self, row, their, our):
        for fact in row.facts:
            assert holds(fact, their, our), fact
        want = result(row, their)
        assert want.isfinite().all()
        if our is None:
            assert row.ours == NONE
            return
        got = result(row, our)
        for model in (our.model, our.mixed):  # no float model comes near by itself
            assert not hasattr(model, "hop_report") or model.hop_report.converted
        distance = ((got - want).norm() / want.norm()).item()
        assert got.shape == want.shape and distance <= row.bound, f"{distance:.3g} > {row.bound}"
        if row.size is not None:
            ratio = size(our.model.state_dict()) / size(their.model.state_dict())
            assert abs(ratio / row.size - 1) <= 0.1, f"state_dict: ours is {ratio:.3g} of theirs"

    def test_page_has_every_row(self):
        page = (make.DOCS / "migrating.md").read_text()
        assert page == make.page("migrating.md"), "run make tables"
        assert all(row.differs in page for _, _, row in CASES)
