"""What the benchmark says of its own numbers."""

import json
import os
import subprocess
import sys
import unittest
from dataclasses import asdict, replace
from unittest import mock

import pytest
from parameterized import parameterized

from benchmarks import highlights, performance, roofline
from benchmarks.__main__ import forced, updated
from benchmarks.performance import GUIDE, PAGE, PICTURE, TABLES, appendix, guide, page
from benchmarks.reasons import REASONS, reason
from benchmarks.roofline import DRAWN, file_of
from benchmarks.running import here, ratio
from benchmarks.timing import Row, interleaved
from examples.common import json_rows
from hop.kernels.cpu.native import LEVELS, LEVELS_OF
from hop.nn.models import speeds
from tests import levels


class TestRow(unittest.TestCase):
    @parameterized.expand(
        [
            ("fast_enough", Row("g", "c", 1.0, "p", 0.96, "<= 1.05"), True, "1.04"),
            ("too_slow", Row("g", "c", 1.0, "p", 0.94, "<= 1.05"), False, "1.06"),
            ("many_times", Row("g", "c", 0.1, "p", 9.0, "<= 0.0125"), True, "0.011"),
            ("much_slower", Row("g", "c", 31.0, "p", 1.0, "<= 3"), False, "31"),
            ("little_over", Row("g", "c", 0.0036, "p", 0.002, "<= 2 µs"), True, "+1.60 µs"),
            ("much_over", Row("g", "c", 0.0046, "p", 0.002, "<= 2 µs"), False, "+2.60 µs"),
            ("less", Row("g", "c", 0.001, "p", 0.002, "<= 2 µs"), True, "-1.00 µs"),
            ("milliseconds", Row("g", "c", 3.5, "p", 1.0, "<= 2 ms"), False, "+2.50 ms"),
            ("seconds", Row("g", "c", 100.0, "p", 0.0, "<= 0.15 s"), True, "+0.10 s"),
            ("no_target", Row("g", "c", 2.0, "p", 1.0), None, "2.00"),
        ]
    )
    def test_target(self, _name, row, met, shown):
        assert row.met is met and ratio(row) == shown

    @parameterized.expand([(">= 0.95",), ("<= 3 times",), ("<= x",), ("3",)])
    def test_no_target_in_another_direction(self, target):
        with self.assertRaisesRegex(ValueError, "target must be '<= NUMBER'"):
            Row("g", "c", 1.0, "p", 1.0, target).met  # noqa: B018


class TestTiming(unittest.TestCase):
    def test_slower_takes_longer(self):
        fast, slow = interleaved([lambda: sum(range(100)), lambda: sum(range(10_000))], rounds=3)
        assert slow > 10 * fast


class TestPage(unittest.TestCase):
    def test_shows_the_results_on_disk(self):
        assert PAGE.read_text() == page(PAGE.read_text()), "run python -m benchmarks --page"
        assert GUIDE.read_text() == guide(GUIDE.read_text()), "run python -m benchmarks --page"
        assert TABLES.read_text() == appendix(TABLES.read_text()), "run python -m benchmarks --page"

    def test_picture_is_of_the_results_on_disk(self):
        assert PICTURE.read_text() == highlights.draw(performance.results()), "run python -m benchmarks --page"

    def test_speeds_are_of_the_results_on_disk(self):
        written = json_rows(highlights.speeds(performance.results())) + "\n"
        assert speeds.FILE.read_text() == written, "run python -m benchmarks --page"

    def test_names_the_level_of_each_table(self):
        for path in file_of(DRAWN).parent.glob("cpu_*.json"):
            held = json.loads(path.read_text())
            (own,) = (levels for levels in LEVELS_OF.values() if held["machine"] in levels[1:])
            assert path == file_of(held["level"]) and own.index(held["level"]) <= own.index(held["machine"])
            assert f"## CPU level `{held['level']}`" in TABLES.read_text()
        assert here()["level"] in (*LEVELS, "off")

    def test_a_forced_level_is_named(self):
        (held, *_) = performance.results()
        forced = held | {"level": "avx2", "machine": "amx"}
        assert "forced on a machine with level `amx`" in performance.level(forced)
        assert "forced" not in performance.level(held | {"machine": held["level"]})

    def test_all_that_misses_has_a_reason(self):
        """And each reason is that of a row."""
        missed = [(held["level"], Row(**r)) for held in performance.results() for r in held["rows"]]
        missed = [(level, row) for level, row in missed if row.met is False]
        assert missed and all(reason(level, row) for level, row in missed), "say why in benchmarks/reasons.py"
        assert {reason(level, row) for level, row in missed} == {*REASONS}

    def test_without_a_reason(self):
        row = Row("g", "c", 2.0, "p", 1.0, "<= 1")
        assert reason("amx", row) == "" and performance.verdict("amx", row) == "<= 1 missed"

    def test_ten_rows(self):
        first, *more = performance.results()
        assert len(highlights.TEN) == len(highlights.ten(first)) == 10
        for held in (first, *more):
            whole = len({row["group"] for row in held["rows"]}) > 1  # more than one group
            assert len(highlights.ten(held)) == 10 * whole
        with self.assertRaisesRegex(ValueError, "must match one row"):
            highlights.ten(first | {"rows": first["rows"] * 2})

    def test_update(self):
        held = json.loads(file_of(DRAWN).read_text()) | here()
        first, new = Row(**held["rows"][0]), Row("g", "c", 1.0, "p", 2.0)
        got = updated(held, [replace(first, ours_ms=0.5), new])
        assert got["rows"] == [held["rows"][0] | {"ours_ms": 0.5}, *held["rows"][1:], asdict(new)]
        with self.assertRaisesRegex(ValueError, "threads 99"):
            updated(held | {"threads": 99}, [new])


class TestLevel(unittest.TestCase):
    def benchmarks(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("HOP_NATIVE", "ATEN_CPU_CAPABILITY")}
        command = [sys.executable, "-m", "benchmarks", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    @pytest.mark.full
    def test_is_forced_with_pytorch(self):
        if "portable" not in levels.HERE:
            self.skipTest("there are no native kernels")
        done = self.benchmarks("--level", "portable", "wrappers")
        assert done.returncode == 0, done.stderr
        assert f"level portable, machine {levels.BEST}, capability DEFAULT" in done.stdout
        assert "QuantizedTensor.view" in done.stdout

    def test_that_the_cpu_lacks(self):
        with (
            mock.patch.object(levels, "HERE", ("portable",)),
            self.assertRaisesRegex(SystemExit, "needs the CPU level"),
        ):
            forced("amx")


class TestRoofline(unittest.TestCase):
    def test_points(self):
        work = {"operations": 8_000_000_000, "bytes": 20_000_000, "peer_bytes": 40_000_000}
        rows = [
            Row("decoded", "fp8, packed", 4.0, "bfloat16", 8.0, **work),
            Row("decoded", "fp8, packed", 5.0, "ours, int8", 8.0, **work),
            Row("decoded", "fp8 of another kind", 5.0, "peak", 8.0),
        ]
        assert roofline.ours(rows, "decoded") == [("fp8", 400.0, 2.0)]
        assert roofline.peers(rows) == [("bfloat16", 200.0, 1.0)]

    def test_labels_cover_nothing(self):
        points = [(float(x), 0.0) for x in range(12)]
        spots = roofline.free_spots(points, points)
        labels = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(points, spots, strict=True)]
        width, height = roofline.LABEL
        for i, (x, y) in enumerate(labels):
            assert all(abs(x - a) >= width or abs(y - b) >= height for a, b in labels[:i])

    @pytest.mark.full
    def test_picture(self):
        row = {"group": "decoded", "case": "fp8, packed", "ours_ms": 1.0, "peer": "bfloat16", "peer_ms": 1.0}
        work = {"operations": 2_000_000_000, "bytes": 20_000_000, "peer_bytes": 40_000_000}
        picture = roofline.draw({"rows": [row | work], "peak_tops": 6.0, "bandwidth_gbs": 30.0}).decode()
        assert "matrix unit, int8: 6 TOPS" in picture and "ours, decoded" in picture
        assert "make bench" in roofline.draw({"rows": [row]}).decode()


class TestResults(unittest.TestCase):
    @parameterized.expand([(path.name, path) for path in sorted(file_of(DRAWN).parent.glob("*.json"))])
    def test_are_written_a_row_a_line(self, _name, path):
        text = path.read_text()
        assert json_rows(json.loads(text)) + "\n" == text

    def test_long_rows_are_written_over_several_lines(self):
        short, long = {"case": "a", "of": {"b": 1}}, {"losses": [1.5] * 200, "case": {"é": []}}
        lines = json_rows({"rows": [short, long, []], "none": {}}).splitlines()
        assert json.dumps(short) == lines[2].strip(" ,") and '  "losses": [1.5' in lines[4] and len(lines) == 11
        assert json.loads("".join(lines)) == {"rows": [short, long, []], "none": {}}
