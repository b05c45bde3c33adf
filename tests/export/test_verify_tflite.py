"""Programs beside .tflite files: what corresponds, what differs, and which convention would not."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import cli
from hop.export.targets import PT2E, TFLITE
from hop.numerics.requantization import FixedPoint

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from tests.support.tflite_models import (
    Dense,
    Head,
    Layer,
    Network,
    Point,
    Residual,
    both,
    codes_of,
    networks,
    transformer,
)


def exported(model: nn.Module, *inputs: Tensor) -> Any:
    """Quantize and dequantize nodes, whose ranges are found on the inputs first."""
    with torch.no_grad():
        model(*inputs)
    return torch.export.export(model.eval(), inputs)


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    return Network(Layer(4, 6), Residual(Layer(6, 6, high=0.0)), Head(6)), torch.randn(3, 4, 9, 9)


class TestVerify(unittest.TestCase):
    def test_all_equal(self) -> None:
        """Each call that gives codes has its tensor, and none differs."""
        for model, x in (small(), (transformer(16, 1), torch.randn(2, 6, 16))):
            program = hop.export.to_integer(exported(model, x), target=TFLITE).program
            model_file = hop.export.to_tflite(program)
            found = hop.export.verify(program, model_file, [(x,), (x * 3,)])
            assert found.first is None and not found.trials and not found.units
            assert found.inputs == 2 and found.outputs[0].differing == 0
            calls = [n.name for n in program.graph.nodes if "hop_scaled" in str(n.target)]
            rows = {row.a: row for row in found.rows}
            assert set(calls) <= set(rows) and all(rows[n].elements > 0 for n in calls)

    def test_views_after_the_last_dequantize_node(self) -> None:
        """Codes are compared with codes, and differences in them are found."""

        class Viewed(nn.Module):
            def __init__(self, start: int) -> None:
                super().__init__()
                self.start = start

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = both(x, 0.05, 3)
                return y.reshape(2, 2, 16).transpose(1, 2)[:, self.start : self.start + 12], y[1]

        x = torch.randn(4, 16)
        program, other = (exported(Viewed(start), x) for start in (1, 2))
        file = hop.export.to_tflite(hop.export.to_integer(program, target=TFLITE).program)
        found = hop.export.verify(program, file, [(x,), (x * 3,)])
        assert found.first is None, found
        assert [(row.dtype, row.shape, row.differing) for row in found.outputs] == [
            (torch.int8, (2, 12, 2), 0),
            (torch.int8, (16,), 0),
        ]
        moved, same = hop.export.verify(other, file, (x,)).outputs
        assert moved.differing > 24 and same.differing == 0

    @pytest.mark.full
    def test_no_layout_is_mistaken(self) -> None:
        """Counts are those of the tensors, one by one, of a file whose other convention shows everywhere."""
        model, x = small()
        program = exported(model, x)
        ours = hop.export.to_integer(program, target=PT2E).program
        theirs = hop.export.to_integer(program, target=TFLITE).program
        found = hop.export.verify(ours, hop.export.to_tflite(theirs), (x,))
        a, b = codes_of(ours, x), codes_of(theirs, x)
        assert found.first is not None
        compared = [row for row in found.rows if row.a in a and row.b in b]
        assert len(compared) >= 4
        for row in compared:
            assert (row.differing, row.elements) == (int((a[row.a] != b[row.b]).sum()), a[row.a].numel()), row

    @pytest.mark.full
    def test_convention_is_found(self) -> None:
        """A program by another convention than the file's: the first node that differs is equal by the file's."""
        torch.manual_seed(2)
        x = torch.randn(4000, 16)
        program = exported(nn.Sequential(Point(), Dense(16, 24)), x)
        model = hop.export.to_tflite(hop.export.to_integer(program, target=TFLITE).program)
        for rounding in ("gemmlowp", "ruy"):
            ours = hop.export.to_integer(program, requantize=FixedPoint(rounding=rounding)).program
            found = hop.export.verify(ours, model, (x,))
            row = found.first
            assert row is not None and row.operator.endswith("aten.linear.default") and row.largest == 1
            best = found.trials[0]
            assert best.differing == 0 and "TFLITE" in best.targets and best in found.equal_with
            assert best.convention == TFLITE["linear.default"].convention
            own = [t for t in found.trials if t.convention == FixedPoint(rounding=rounding)]
            assert [t.differing for t in own] == [row.differing]
            assert "equal by" in str(found) and 'FixedPoint(rounding="tflite")' in str(found)

    def test_optimized_kernels(self) -> None:
        """Products of LiteRT's optimized kernels round twice, ties up."""
        torch.manual_seed(2)
        x = torch.randn(40000, 16)
        program = hop.export.to_integer(exported(nn.Sequential(Point(), Dense(16, 24)), x), target=TFLITE).program
        model = hop.export.to_tflite(program)
        assert hop.export.verify(program, model, (x,)).first is None
        found = hop.export.verify(program, model, (x,), kernels="optimized")
        if found.first is None:
            pytest.skip("LiteRT's optimized kernels round as its reference ones on this CPU")
        equal = {t.convention for t in found.equal_with}
        assert FixedPoint(rounding="ruy") in equal and FixedPoint(rounding="gemmlowp") not in equal

    def test_activation_is_found(self) -> None:
        """A file with a relu that the program has not."""
        x = torch.randn(2, 3, 8, 8)
        layer = Layer(3, 4, high=0.0)
        layer.point = Point(0.02, 0)
        with_relu = hop.export.to_integer(exported(Network(layer), x), target=TFLITE).program
        layer.high = None
        without = hop.export.to_integer(exported(Network(layer), x), target=TFLITE).program
        found = hop.export.verify(without, hop.export.to_tflite(with_relu), (x,))
        assert found.first is not None and found.first.operator.endswith("conv2d.default")
        assert any(t.convention.low == 0.0 for t in found.equal_with)

    def test_other_scale(self) -> None:
        """The file's codes have another scale: it is said, and no convention makes them equal."""
        x = torch.randn(50)

        class Sum(nn.Module):
            def __init__(self, scale: float) -> None:
                super().__init__()
                self.scale = scale

            def forward(self, x: Tensor) -> Tensor:
                x = both(x, 0.05, 3)
                return both(both(x + x, self.scale, 1) * x, 0.1, 2)

        ours, theirs = (
            hop.export.to_integer(torch.export.export(Sum(s), (x,)), target=TFLITE).program for s in (0.1, 0.11)
        )
        found = hop.export.verify(ours, hop.export.to_tflite(theirs), (x,))
        ((name, own, its),) = found.units
        assert found.first is not None and name == found.first.a and own[1] == its[1] == 1
        assert (round(own[0], 6), round(its[0], 6)) == (0.1, 0.11) and not found.equal_with
        assert f"{name}: scale 0.1" in str(found) and "no convention makes it equal" in str(found)

    def test_quantize_and_dequantize_nodes(self) -> None:
        """Nodes of another name, found by their scales and sizes."""
        model, x = small()
        program = exported(model, x)
        file = hop.export.to_tflite(hop.export.to_integer(program, target=TFLITE).program)
        found = hop.export.verify(program, file, (x,))
        assert len(found.rows) >= 6 and not found.trials
        assert all(row.a.startswith("quantize_per_tensor") and row.largest <= 4 for row in found.rows)

    def test_paths_and_bytes(self) -> None:
        model, x = small()
        program = hop.export.to_integer(exported(model, x), target=TFLITE).program
        made = hop.export.to_tflite(program)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            made.save(path)
            for given in (path, str(path), made.buffer):
                assert hop.export.verify(program, given, (x,)).first is None

    @parameterized.expand(["digits", "residual", "separable", "mobilenet"])
    @pytest.mark.full
    def test_networks(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        x = torch.randn(shape)
        program = hop.export.to_integer(exported(model, x), target=TFLITE).program
        found = hop.export.verify(program, hop.export.to_tflite(program), (x,))
        assert found.first is None and len(found.rows) >= 7


class TestErrors(unittest.TestCase):
    def setUp(self) -> None:
        model, self.x = small()
        self.program = hop.export.to_integer(exported(model, self.x), target=TFLITE).program
        self.model = hop.export.to_tflite(self.program)

    def test_arguments(self) -> None:
        given: Any = (self.model, (self.x,))
        with pytest.raises(TypeError, match=r"verify: program must be a torch.export.ExportedProgram"):
            hop.export.verify(self.model, *given)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"model must be an exported program or its module\(\), or what to_tflite"):
            hop.export.verify(self.program, 3, (self.x,))
        with pytest.raises(
            ValueError, match=r"kernels must be one of \('reference', 'optimized', 'micro'\), got 'fast'"
        ):
            hop.export.verify(self.program, *given, kernels="fast")
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "empty.tflite")).touch()
            with pytest.raises(ValueError, match=r"bytes 4 to 7 are b'TFL3', got b''"):
                hop.export.verify(self.program, path, (self.x,))
            (path := Path(folder, "x.bin")).touch()
            with pytest.raises(ValueError, match=r"model must be a .tflite, .tosa, .pte or ONNX file, got .*x.bin"):
                hop.export.verify(self.program, path, (self.x,))
        with pytest.raises(ValueError, match="kernels must be 'reference' for a program, got 'micro'; omit it"):
            hop.export.verify(self.program, self.program, (self.x,), kernels="micro")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="inputs must hold one tuple or dict"):
            hop.export.verify(self.program, self.model, [])

    @pytest.mark.full
    def test_another_program(self) -> None:
        x = torch.randn(7)

        class Two(nn.Module):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return both(both(x, 0.1, 0) + both(y, 0.1, 0), 0.2, 0)

        other = hop.export.to_integer(torch.export.export(Two(), (x, x)), target=TFLITE).program
        with pytest.raises(ValueError, match="inputs correspond by position, but program has 2 and model 1"):
            hop.export.verify(other, self.model, (x, x))
        with pytest.raises(ValueError, match=r"the input .* is torch.int8 of \(7,\), but the file's"):
            one = torch.export.export(nn.Sequential(Point(0.1), Point(0.2)), (x,))
            hop.export.verify(hop.export.to_integer(one, target=TFLITE).program, self.model, (x,))

    @pytest.mark.full
    def test_output_without_codes(self) -> None:
        """Views of floats that no codes represent, and the file's output has codes."""

        class Floats(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return both(x, 0.1, 0).sin().reshape(1, 7).permute(1, 0)

        class Codes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return both(both(x, 0.1, 0).reshape(1, 7), 0.2, 0).permute(1, 0)

        x = (torch.randn(7),)
        model = hop.export.to_tflite(hop.export.to_integer(torch.export.export(Codes(), x), target=TFLITE).program)
        with pytest.raises(ValueError, match=r"the output 'permute' is torch.float32 computed by 'sin', not .* codes"):
            hop.export.verify(torch.export.export(Floats(), x), model, x)


class TestCommand(unittest.TestCase):
    @pytest.mark.full
    def test_verify(self) -> None:
        """The answer is the exit status; --json has the conventions."""
        model, x = small()
        program = exported(model, x)
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: str(Path(folder) / name) for name in ("tflite.pt2", "pt2e.pt2", "model.tflite", "no.tflite")}
            integers = hop.export.to_integer(program, target=TFLITE).program
            torch.export.save(integers, paths["tflite.pt2"])
            torch.export.save(hop.export.to_integer(program, target=PT2E).program, paths["pt2e.pt2"])
            hop.export.to_tflite(integers).save(paths["model.tflite"])
            Path(paths["no.tflite"]).write_text("nothing")
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                assert cli.main(["verify", paths["tflite.pt2"], paths["model.tflite"]]) == 0, err.getvalue()
                assert "the outputs are equal" in out.getvalue()
                out.truncate(0)
                out.seek(0)
                words = ["verify", paths["pt2e.pt2"], paths["model.tflite"], "--at-least", "1", "--json"]
                assert cli.main(words) in (0, 1)
                found = json.loads(out.getvalue())
                assert found["first"] and found["trials"][0]["differing"] == 0
                assert found["trials"][0]["targets"] == ["TFLITE", "TFLITE_MICRO"] and found["units"] == []
                assert cli.main(["verify", paths["tflite.pt2"], paths["no.tflite"]]) == 1
                assert cli.main(["verify", paths["tflite.pt2"], paths["model.tflite"], "--kernels", "x"]) == 1
            assert "must be a .tflite file" in err.getvalue() and "kernels must be one of" in err.getvalue()
