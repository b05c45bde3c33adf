"""Targets: values that say which integers a runtime computes."""

import json
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hop
from hop.export.targets import ONNX_QDQ, PT2E, TFLITE, Row, Target
from hop.numerics.integer.functions import TfliteAdd, TfliteAveragePool, TfliteConcatenation, TfliteMean
from hop.numerics.requantization import GEMMLOWP, FixedPoint
from tests.support.tflite_models import Layer, Point, both


class Pair(nn.Module):
    """A layer, an addition, and a function that TFLite has not."""

    def __init__(self, last: Any = F.relu) -> None:
        super().__init__()
        self.layer, self.last, self.points = Layer(4, 4, 1), last, nn.ModuleList([Point(), Point(), Point()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.points[0](x)
        return self.points[2](self.last(self.points[1](x + self.layer(x))))


def exported(model: nn.Module) -> Any:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        model(x)
    return torch.export.export(model, (x,))


def conventions(program: Any) -> str:
    return " ".join(str(n.args[1]) for n in program.graph.nodes if "hop_scaled" in str(n.target))


class TestToInteger(unittest.TestCase):
    @pytest.mark.full
    def test_rows(self) -> None:
        program, report = hop.export.to_integer(exported(Pair()), target=TFLITE)
        assert not report.left and len(report.rewritten) == 3
        assert "TfliteAdd()" in conventions(program) and 'rounding="gemmlowp"' in conventions(program)

    @pytest.mark.full
    def test_default_is_pt2e(self) -> None:
        program = exported(Pair())
        own, named = (hop.export.to_integer(program, **given).program for given in ({}, {"target": PT2E}))
        x = program.example_inputs[0][0]
        assert conventions(own) == conventions(named) and torch.equal(own.module()(x), named.module()(x))

    @pytest.mark.full
    def test_missing_row(self) -> None:
        program = exported(Pair(lambda x: torch.cumsum(x, -1)))
        with pytest.raises(ValueError, match=r"'cumsum'.*no row for aten.cumsum.default; the nearest are"):
            hop.export.to_integer(program, target=TFLITE)
        report = hop.export.to_integer(program, target=replace(TFLITE, integer_only=False)).report
        assert [row.node for row in report.left] == ["cumsum"] and "nearest" in report.left[0].detail

    def test_floats_raise(self) -> None:
        class Ends(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return both(x, 0.1, 0) + both(y, 0.1, 0)

        program = torch.export.export(Ends(), (torch.randn(4), torch.randn(4)))
        with pytest.raises(ValueError, match=r"'add'.*would stay in floats"):
            hop.export.to_integer(program, target=TFLITE)

    def test_flatten_of_permuted(self) -> None:
        """A reshape of what lies transposed becomes a copy and a view of another name."""

        class Flat(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return both(both(x, 0.1, 0).permute(2, 0, 1).flatten(1), 0.2, 3)

        x = torch.randn(2, 3, 4)
        program, report = hop.export.to_integer(torch.export.export(Flat(), (x,)), target=TFLITE)
        assert not report.left
        # From a scale to twice it: the mantissa is 2^30, the shift 0, so that what is rounded is n / 2, ties up.
        codes = (x / 0.1).round().permute(2, 0, 1).flatten(1)
        wanted = torch.floor(codes / 2 + 0.5) * 0.2
        torch.testing.assert_close(program.module()(x), wanted)

    def test_both_raise(self) -> None:
        program: Any = exported(Pair())
        with pytest.raises(ValueError, match=r"requantize must be None where target is given"):
            hop.export.to_integer(program, target=TFLITE, requantize=GEMMLOWP)
        with pytest.raises(TypeError, match=r"target must be a hop.export.targets.Target"):
            hop.export.to_integer(program, target=GEMMLOWP)


class TestValue(unittest.TestCase):
    def test_json(self) -> None:
        for target in (TFLITE, PT2E, ONNX_QDQ):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "target.json"
                target.save(path)
                assert Target.load(path) == target
                path.write_text(path.read_text().replace("hop1:", "hop9:", 1))
                with pytest.raises(ValueError, match=r"target.json is not a file written by Target.save: row 0"):
                    Target.load(path)
                for text in (
                    '{"a":' * 10**5,
                    '{"hop_target": 1, "rows": ' + "[" * 500 + "]" * 500 + "}",
                    '{"hop_target": 2}',
                ):
                    path.write_text(text)
                    with pytest.raises(ValueError, match=r"target.json is not a file written by"):
                        Target.load(path)
                path.write_text("[]")
                with pytest.raises(ValueError, match="is not a file written by"):
                    Target.load(path)

    def test_small_files_with_much_of_one(self) -> None:
        """A row of 200,000 times one operator, and of an operator with a long name."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "t.json"
        for operators in (["add.Tensor"] * 200_000, ["x" * 200_000]):
            row = {"operators": operators, "convention": str(GEMMLOWP), "source": "", "per_tensor": None}
            data = {"hop_target": 1, "name": "n", "integer_only": True, "dtypes": ["int8"], "rows": [row]}
            path.write_text(json.dumps(data))
            with pytest.raises(ValueError, match="is not a file written by") as caught:
                Target.load(path)
            assert len(str(caught.value)) < 1000

    def test_table_and_diff(self) -> None:
        assert "TfliteAveragePool()" in TFLITE.table() and "QuantizedMeanOrSum" in TFLITE.table()
        other = replace(TFLITE, rows=(Row(("add.Tensor",), GEMMLOWP), *TFLITE.rows[:2]))
        with pytest.raises(ValueError, match="in one row"):
            replace(TFLITE, rows=(Row(("add.Tensor",), GEMMLOWP), *TFLITE.rows))
        lines = TFLITE.diff(other).splitlines()
        assert any(line.split() == ["add.Tensor", "TfliteAdd()", 'FixedPoint(rounding="gemmlowp")'] for line in lines)
        assert any(line.split()[0] == "mean.dim" and line.split()[-1] == "none" for line in lines)
        assert not TFLITE.diff(TFLITE)

    def test_wrong_rows(self) -> None:
        with pytest.raises(ValueError, match=r"conv2d.default"):
            Row(("conv2d",), GEMMLOWP)
        with pytest.raises(TypeError, match="convention must be a value"):
            Row(("conv2d.default",), None)  # type: ignore[arg-type]
        with pytest.raises(KeyError, match=r"no row for cumsum.default"):
            TFLITE["cumsum.default"]


def _divided(n: int, shift: int) -> int:
    """n / 2^shift to the nearest, ties away from zero, in Python's integers."""
    whole, rest = divmod(abs(n), 2**shift)
    return (whole + (2 * rest >= 2**shift)) * (1 if n >= 0 else -1)


def _twice(n: int, m: float) -> int:
    """n times m below 1, rounded twice, as gemmlowp does."""
    import math

    fraction, exponent = math.frexp(m)
    mantissa = math.floor(fraction * 2**31 + 0.5)
    mantissa, exponent = (2**30, exponent + 1) if mantissa == 2**31 else (mantissa, exponent)
    return _divided((n * 2 ** max(exponent, 0) * mantissa + 2**30) >> 31, max(-exponent, 0))


class TestArithmetic(unittest.TestCase):
    """Conventions against the same in Python's own integers."""

    def setUp(self) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randint(-128, 128, (2, 3, 4, 6), dtype=torch.int8).unbind(0)
        self.s, self.t, self.out = (torch.tensor(v) for v in (0.0213, 0.0371, 0.0457))

    def clamped(self, values: list[int]) -> list[int]:
        return [max(-128, min(127, v)) for v in values]

    def test_add(self) -> None:
        args = (self.x, self.s, 3, self.out, -5, hop.formats.INT8)
        twice = 2 * float(torch.maximum(self.s, self.t))
        pairs = list(zip(self.x.flatten().tolist(), self.y.flatten().tolist(), strict=True))
        for sign in (1, -1):
            y = TfliteAdd().codes(*args, other=self.y, other_scale=self.t, other_zero_point=-9, subtracts=sign < 0)
            sums = [
                _twice((a - 3) << 20, float(self.s) / twice) + sign * _twice((b + 9) << 20, float(self.t) / twice)
                for a, b in pairs
            ]
            wanted = [_twice(n, twice / (float(self.out) * 2**20)) - 5 for n in sums]
            assert y.flatten().tolist() == self.clamped(wanted)

    def test_mean(self) -> None:
        y = TfliteMean().codes(self.x, self.s, 3, self.s, 7, hop.formats.INT8, rest=([2],), dims=[2])
        # A scale over itself is 2^30 · 2^(1 - 31); of 6 elements the mantissa is 2^30 · 2^2 / 6.
        sums = [sum(row) - 6 * 3 for row in self.x.reshape(12, 6).tolist()]
        wanted = [_divided((n * (2**32 // 6) + 2**30) >> 31, 1) + 7 for n in sums]
        assert y.shape == (3, 4) and y.flatten().tolist() == self.clamped(wanted)

    def test_average_pool(self) -> None:
        op = torch.ops.aten.avg_pool2d.default
        y = TfliteAveragePool().codes(
            self.x, self.s, 3, self.s, 3, hop.formats.INT8, op=op, rest=([2, 2],), dims=[1, 2]
        )
        windows = self.x.to(torch.int64).unfold(1, 2, 2).unfold(2, 2, 2).sum((-1, -2))
        assert y.flatten().tolist() == [_divided(n, 2) for n in windows.flatten().tolist()]
        rest = ([2, 2], [2, 2], [1, 1])  # counted padding has the code of 0
        y = TfliteAveragePool().codes(self.x, self.s, 3, self.s, 3, hop.formats.INT8, op=op, rest=rest, dims=[1, 2])
        padded = torch.nn.functional.pad(self.x.to(torch.int64), (1, 1, 1, 1), value=3)
        windows = padded.unfold(1, 2, 2).unfold(2, 2, 2).sum((-1, -2))
        assert y.flatten().tolist() == [_divided(n, 2) for n in windows.flatten().tolist()]

    def test_concatenation(self) -> None:
        others = [(self.y, self.t, -9)]
        y = TfliteConcatenation().codes(self.x, self.out, -5, self.out, -5, hop.formats.INT8, others=others, dim=1)
        assert torch.equal(y[:, :4], self.x)
        wanted = [_twice(n + 9, float(self.t) / float(self.out)) - 5 for n in self.y.flatten().tolist()]
        assert y[:, 4:].flatten().tolist() == self.clamped(wanted)

    def test_multiplier(self) -> None:
        """In which dtype it is found shows where a product of scales is rounded."""
        s, t, out = (torch.tensor(v) for v in (0.1, 0.3, 0.7))
        n = torch.arange(-(2**24), 2**24, 4099, dtype=torch.int64)
        found = [FixedPoint(multiplier=m).steps(n * 100, s, t, out) for m in ("float64", "float32_product", "float32")]
        exact = [
            s.double() * t.double() / out.double(),
            (s * t).double() / out.double(),
            (s * t / out).double(),
        ]
        for steps, m in zip(found, exact, strict=True):
            assert ((steps - n * 100 * m).abs() <= 0.55).all()
        assert not torch.equal(found[0], found[1])
        with pytest.raises(ValueError, match="multiplier must be one of"):
            FixedPoint(multiplier="float16")
