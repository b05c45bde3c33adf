"""Each version of torch lacks what hop.compat.versions says it lacks, and no more; bounds are what is tested."""

import io
import re
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parameterized import parameterized
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

import hop
from hop import presets
from hop.compat import versions

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()


# By the name of a lack: whether what it is about works here.
def replaces_in_programs() -> bool:
    try:
        torch.compile(lambda x: (x, replace(presets.INT8_ROW, block=(1, 16))), backend="eager", fullgraph=True)(
            torch.zeros(2)
        )
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def casts_saturate() -> bool:
    x = torch.full((1, 1), 500.0)
    return hop.out_dtype(torch.ops.aten.add.Tensor, torch.float8_e4m3fn, x, x).float().item() == 448


def scan_has_gradients() -> bool:
    x = torch.ones(3, 2, requires_grad=True)
    scan(lambda c, row: (c + row.sin(), c * 2), torch.zeros(2), x)[0].sum().backward()
    return torch.allclose(x.grad, x.cos())  # type: ignore[arg-type]


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


def saves_associative_scans() -> bool:
    program = torch.export.export(Sums(), (torch.ones(3, 2),))
    try:
        torch.export.save(program, io.BytesIO())
    except (torch._export.serde.serialize.SerializeError, RuntimeError) as error:
        assert "lazy_load_decompositions" in str(error), error
        return False
    return True


PROBES: dict[str, Callable[[], bool]] = {
    "replace_in_programs": replaces_in_programs,
    "casts_saturate": casts_saturate,
    "scan_gradients": scan_has_gradients,
    "saved_associative_scans": saves_associative_scans,
}


class TestLacks(unittest.TestCase):
    def test_each_has_a_probe(self):
        assert PROBES.keys() == versions.LACKS.keys()

    @parameterized.expand(list(PROBES), skip_on_empty=True)
    @pytest.mark.quick(2)
    def test_shows_where_it_is_said_to(self, name):
        works, lack = PROBES[name](), versions.LACKS[name]
        assert works != lack.shows(), f"{name} {'works' if works else 'does not work'} with torch {versions.version()}"

    def test_some_tested_version_lacks_each(self):
        for name, lack in versions.LACKS.items():
            assert any(map(lack.shows, versions.TESTED)), name


class TestBounds(unittest.TestCase):
    def test_torch(self):
        (major, low), (_, high) = versions.TESTED[0], versions.TESTED[-1]
        assert f'"torch>={major}.{low},<{major}.{high + 1}"' in PROJECT

    def test_python(self):
        minors = [int(m) for m in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PROJECT)]
        assert f'requires-python = ">=3.{minors[0]},<3.{minors[-1] + 1}"' in PROJECT
        assert minors == list(range(minors[0], minors[-1] + 1))
