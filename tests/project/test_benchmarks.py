"""What the benchmark says of its own numbers."""

import json
import unittest
from dataclasses import asdict, replace

from parameterized import parameterized

from benchmarks import roofline
from benchmarks.__main__ import PAGE, page, updated
from benchmarks.roofline import DRAWN, file_of
from benchmarks.running import here, ratio
from benchmarks.timing import Row, interleaved
from hop.kernels.cpu.native import LEVELS


class TestRow(unittest.TestCase):
    @parameterized.expand(
        [
            ("fast_enough", Row("g", "c", 1.0, "p", 0.96, ">= 0.95"), True, "0.96"),
            ("too_slow", Row("g", "c", 1.0, "p", 0.94, ">= 0.95"), False, "0.94"),
            ("many_times", Row("g", "c", 0.1, "p", 9.0, ">= 80"), True, "90"),
            ("little_over", Row("g", "c", 0.0036, "p", 0.002, "<= 2 µs"), True, "+1.60 µs"),
            ("much_over", Row("g", "c", 0.0046, "p", 0.002, "<= 2 µs"), False, "+2.60 µs"),
            ("less", Row("g", "c", 0.001, "p", 0.002, "<= 2 µs"), True, "-1.00 µs"),
            ("milliseconds", Row("g", "c", 3.5, "p", 1.0, "<= 2 ms"), False, "+2.50 ms"),
            ("seconds", Row("g", "c", 100.0, "p", 0.0, "<= 0.15 s"), True, "+0.10 s"),
            ("times", Row("g", "c", 3.2, "p", 1.0, "<= 3 times"), False, "3.2 times"),
            ("fewer_times", Row("g", "c", 2.5, "p", 1.0, "<= 3 times"), True, "2.5 times"),
            ("no_target", Row("g", "c", 2.0, "p", 1.0), None, "0.50"),
        ]
    )
    def test_target(self, _name, row, met, shown):
        assert row.met is met and ratio(row) == shown


class TestTiming(unittest.TestCase):
    def test_slower_takes_longer(self):
        fast, slow = interleaved([lambda: sum(range(100)), lambda: sum(range(10_000))], rounds=3)
        assert slow > 10 * fast


class TestPage(unittest.TestCase):
    def test_shows_the_results_on_disk(self):
        assert PAGE.read_text() == page(PAGE.read_text()), "run make bench"

    def test_names_the_level_of_each_table(self):
        for path in file_of(DRAWN).parent.glob("cpu_*.json"):
            level = json.loads(path.read_text())["level"]
            assert path == file_of(level) and level in LEVELS
            assert f"**CPU level `{level}`**" in PAGE.read_text()
        assert here()["level"] in (*LEVELS, "off")

    def test_update(self):
        held = json.loads(file_of(DRAWN).read_text()) | here()
        first, new = Row(**held["rows"][0]), Row("g", "c", 1.0, "p", 2.0)
        got = updated(held, [replace(first, ours_ms=0.5), new])
        assert got["rows"] == [held["rows"][0] | {"ours_ms": 0.5}, *held["rows"][1:], asdict(new)]
        with self.assertRaisesRegex(ValueError, "threads 99"):
            updated(held | {"threads": 99}, [new])


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

    def test_picture(self):
        row = {"group": "decoded", "case": "fp8, packed", "ours_ms": 1.0, "peer": "bfloat16", "peer_ms": 1.0}
        work = {"operations": 2_000_000_000, "bytes": 20_000_000, "peer_bytes": 40_000_000}
        picture = roofline.draw({"rows": [row | work], "peak_tops": 6.0, "bandwidth_gbs": 30.0}).decode()
        assert "matrix unit, int8: 6 TOPS" in picture and "ours, decoded" in picture
        assert "make bench" in roofline.draw({"rows": [row]}).decode()
