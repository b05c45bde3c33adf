"""Reports: what is measured is what independent arithmetic gives; programs pair by modules; pages are safe."""

import json
import math
import re
import unittest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
import hop.export
import hop.report
from hop import presets
from hop.numerics import copies
from hop.numerics.schemes import Scheme
from hop.report import page
from hop.report.nodes import path_of
from hop.report.pairing import pairs
from hop.report.spread import Spread
from hop.report.summary import summary
from hop.report.values import type_of
from hop.tensor.buffers.operators import quantize_buffers
from tests.support.report_models import Small, encoders, quantized, report, small

aten = torch.ops.aten


class TestSpread(unittest.TestCase):
    @parameterized.expand([("normal", torch.randn(5000)), ("tiny", torch.randn(77) * 1e-6), ("ones", torch.ones(3))])
    def test_against_numpy(self, _name, x):
        found = Spread.of(x)
        counts, edges = np.histogram(x.numpy(), bins=64, range=(-found.limit, found.limit))
        assert (found.low, found.high, found.count) == (x.min().item(), x.max().item(), x.numel())
        assert sum(found.bins) == x.numel() and edges[-1] >= found.high
        assert np.abs(np.array(found.bins) - counts).sum() <= 2  # one number at an edge, in float32 and float64

    def test_sum_is_that_of_both(self):
        torch.manual_seed(0)
        small, large = torch.randn(400) / 8, torch.randn(300) * 5
        both = Spread.of(small) + Spread.of(large)
        whole = Spread.of(torch.cat([small, large]))
        assert both == whole and both == Spread.of(large) + Spread.of(small)

    def test_what_is_not_finite_is_counted(self):
        found = Spread.of(torch.tensor([math.nan, math.inf, -2.0, 0.0]))
        assert (found.count, found.rest, found.zeros, found.low, found.high) == (4, 2, 1, -2.0, 0.0)
        none = Spread.of(torch.full((3,), math.nan))
        assert none.limit == 0 and (none + found).bins == found.bins and (found + none).rest == 5


class TestTypes(unittest.TestCase):
    @parameterized.expand(
        [
            (torch.zeros(2), "float32", "float", 32),
            (torch.zeros(2, dtype=torch.bool), "bool", "integer", 8),
            (torch.zeros(2).to(torch.float8_e4m3fn), "float8_e4m3fn", "low-bit", 8),
            (hop.quantize(presets.INT8_ROW, torch.randn(2, 32)), "int8 by 1×all", "low-bit", 8),
            (hop.quantize(presets.NVFP4, torch.randn(2, 32)), "e2m1 by 1×16", "low-bit", 4),
            (hop.quantize(presets.FP8_TENSOR, torch.randn(2, 32)), "e4m3 by tensor", "low-bit", 8),
        ]
    )
    def test_names(self, x, name, kind, bits):
        found = type_of(x)
        assert found is not None and (found.name, found.kind, found.bits) == (name, kind, bits)


class TestCompare(unittest.TestCase):
    def test_errors_are_those_of_the_values(self):
        """Against the values of the layers themselves, by hooks, in float64."""
        model, (_, (x,)) = Small().eval(), small()
        int8 = quantized(model)
        hooked: dict[str, torch.Tensor] = {}
        for name, m in (("float", model), ("int8", int8)):
            for own, layer in m.named_children():
                layer.register_forward_hook(lambda _m, _a, y, key=f"{name}.{own}": hooked.update({key: y.detach()}))
            m(x)
        seen = dict(hooked)  # the hooks run again in the export
        found = hop.report.compare(int8, model, (x,), runs=1)
        for own in ("first", "second"):
            (row,) = [r for r in found.rows if r.path == own]
            a, b = (seen[f"{name}.{own}"].double().numpy() for name in ("float", "int8"))
            assert row.error.sqnr == pytest.approx(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))
            assert row.error.largest == pytest.approx(np.abs(a - b).max())
            assert row.error.spread.low == pytest.approx((b - a).min(), rel=1e-5)
            assert (row.sort, row.formats, row.kind, row.module) == ("product", "int8 × int8", "low-bit", "Linear")
            layer: Any = int8.get_submodule(own)
            assert row.parameter_bytes == layer.weight.nbytes + layer.bias.nbytes
            assert row.weights.high == pytest.approx(hop.dequantize(layer.weight).max().item())
            assert row.values.high == pytest.approx(b.max()) and (row.seconds or 0) > 0
        assert found.first.path == "first" and found.first.error.before == math.inf
        assert found.rows[-1].output == 0 and found.rows[-1].error.before < math.inf

    def test_kernels_are_those_that_explain_names(self):
        _, (x,) = small()
        int8 = quantized(Small().eval())
        (row,) = [r for r in hop.report.compare(int8, data=(x,), runs=1).rows if r.path == "first"]
        codes = hop.quantize(presets.INT8_ROW, x)
        said = hop.explain(aten.linear.default, torch.float32, codes, int8.first.weight, int8.first.bias)
        assert [*row.reasons, f"{row.kernel}: chosen"] == said.splitlines()

    def test_without_a_reference(self):
        program, inputs = small()
        found = hop.report.compare(program)
        assert not found.has_reference and found.first is None and not found.losses
        assert all(row.error is None for row in found.rows) and "no reference" in found.summary
        assert "compute in floats (float32)" in found.summary and found.parameter_bytes == 4 * (
            64 * 32 + 32 + 32 * 8 + 8
        )
        again = hop.report.compare(program.module(), data=[inputs, inputs])
        assert [r.operator for r in again.rows] == [r.operator for r in found.rows]
        assert again.parameter_bytes == found.parameter_bytes
        linear, first = (next(r for r in f.rows if r.sort == "product") for f in (again, found))
        assert linear.values.count == 2 * first.values.count and linear.values.high == first.values.high

    def test_what_may_differ_elsewhere(self):
        program, (x,) = small()
        found = hop.report.compare(program)
        (row,) = [r for r in found.rows if r.path == "first"]
        assert "order of a float sum" in row.inexact and "hop.quantize_" in row.inexact
        assert "nodes may give other bits" in found.summary and row.inexact in found.to_json()
        exact = hop.quantize_(Small().eval(), "int8", exact=True)
        found = hop.report.compare(exact, data=(x,), runs=1)
        assert not any(r.inexact for r in found.rows)
        assert "Every node gives the same bits" in found.summary

    def test_equal_programs(self):
        program, inputs = small()
        found = hop.report.compare(program, program, inputs, runs=1)
        assert found.first is None and found.summary.startswith("All 3 values that correspond")

    def test_shapes_that_differ_between_inputs(self):
        _, (x,) = small()
        found = hop.report.compare(Small().eval(), quantized(Small().eval()), [(x,), (x[:5],)], runs=1)
        assert found.inputs == 2 and found.rows[-1].error.elements == 21 * 8

    def test_integer_program_and_lowered_one(self):
        """Programs that were made of one another, by passes and by a decomposition."""
        program, inputs = small()
        made = hop.export.to_scheme(program, hop.schemes.INT8_DYNAMIC).program
        lowered = hop.export.lower(made)
        found = hop.report.compare(lowered, made, inputs, runs=1)
        assert found.rows[-1].error is not None and (found.rows[-1].error.sqnr or 0) > 100
        direct = hop.report.compare(made, program, inputs, runs=1)
        kinds = [row.sort for row in direct.rows]
        assert kinds.count("quantize") == 2 and "2 × float32 to int8, 2 × int8 to float32" in direct.summary
        (q, _) = [row for row in direct.rows if row.sort == "quantize"]
        assert q.result.name == "int8 by 1×all" and [a.name for a, _ in q.changes] == ["float32"]
        said = quantize_buffers.explain(str(presets.INT8_ROW), inputs[0], None, None, None, [copies.ROWWISE])
        assert [*q.reasons, f"{q.kernel}: chosen"] == said.splitlines()

    def test_what_is_still_float(self):
        _, (x,) = small()
        int8 = quantized(Small().eval(), [("first", hop.schemes.INT8_DYNAMIC)])
        found = hop.report.compare(int8, Small().eval(), (x,), runs=1)
        assert (
            "1 of 2 products, convolutions and embeddings are still float, with 1.06 kB of parameters" in found.summary
        )
        assert [r.path for r in found.rows if r.sort == "product" and r.is_float] == ["second"]

    @parameterized.expand(
        [
            (("x",), {}, TypeError, "model must be a torch.export.ExportedProgram"),
            ((), {"data": 3}, TypeError, "data must be the tuple"),
            ((), {"data": {"y": torch.zeros(16, 64)}}, ValueError, "compare: model takes the arguments x, but inputs"),
            (
                (Small(),),
                {"data": [{"x": torch.zeros(16, 64)}, {"y": torch.zeros(1)}]},
                ValueError,
                "compare: data has arguments of different names: x=, y=",
            ),
            ((), {"data": []}, ValueError, "empty list"),
            ((), {"runs": 0}, ValueError, "runs must be an integer of at least 1, got 0"),
            ((), {"data": (torch.zeros(16, 64), torch.zeros(1))}, ValueError, "compare: model takes 1 tensors"),
        ]
    )
    def test_errors(self, args, options, error, words):
        with pytest.raises(error, match=words):
            hop.report.compare(*(args or (small()[0],)), **options)

    def test_arguments_by_name(self):
        """Of a program, of a module, and those that a program was exported with."""
        x = torch.randn(16, 64)
        program = torch.export.export(Small().eval(), (), {"x": x})
        by_place = torch.export.export(Small().eval(), (x,))
        for args in ((program, by_place, {"x": x}), (program, by_place), (Small().eval(), program, {"x": x})):
            found = hop.report.compare(*args)
            assert found.inputs == 1 and "that correspond with one of the reference are equal to it" in found.summary
        several = [{"x": x}, {"x": torch.randn(3, 64)}]
        assert hop.report.compare(Small().eval(), data=several).inputs == 2


class TestPairing(unittest.TestCase):
    @pytest.mark.full
    def test_programs_exported_each_on_its_own(self):
        """Each product pairs with that of its own module, though none has its name."""
        model, int8 = encoders()
        found = pairs(int8.graph, model.graph)
        products = [(a, b) for a, b in found if "hop_quantized" in a.name]
        assert len(products) == 37 and all(path_of(a) == path_of(b) != "" for a, b in found if path_of(a))
        assert len(found) == len({b for _, b in found}) and not {a.name for a, _ in products} & {
            b.name for _, b in found
        }

    def test_names_do_not_pair_across_modules(self):
        """One layer is float in both: its name in the one is that of another layer in the other."""
        model = Small().eval()
        _, (x,) = small()
        half = torch.export.export(quantized(model, [("first", hop.schemes.INT8_DYNAMIC)]), (x,))
        found = {a.name: b.name for a, b in pairs(half.graph, small()[0].graph)}
        assert found["linear"] == "linear_1" and found["hop_quantized"] == "linear"

    @pytest.mark.full
    def test_all_of_an_encoder(self):
        found = report()
        unpaired = [r.name for r in found.rows if r.error is None and r.sort != "input"]
        assert not unpaired and found.first.path == "words"
        assert math.isfinite(found.rows[-1].error.sqnr) and found.losses[0].error.added > 0


class TestReport(unittest.TestCase):
    def test_json_is_strict(self):
        found = json.loads(report().to_json(), parse_constant=self.fail)
        assert len(found["rows"]) == len(report().rows) and found["rows"][1]["error"]["before"] == "inf"

    def test_data_frame_and_picture(self):
        pytest.importorskip("pandas")
        frame = report().to_dataframe()
        assert list(frame.index) == [r.name for r in report().rows] and frame.loc["hop_quantized", "sqnr"] > 20
        figure = report().plot()
        assert len(figure.axes) == 2 and len(figure.axes[1].patches) == len(report().losses)

    def test_words_leave_out_what_reads_the_same(self):
        """A loss that is none in the digits that a sentence has."""
        loss = report().losses[1]
        for before, is_said in ((40.301, False), (40.6, True)):
            row = replace(loss, error=replace(loss.error, sqnr=40.299, before=before))
            assert row.error.added > 0
            said = " ".join(summary((report().first, row), True, 1))
            assert (f"{row.name} ({row.path}) from" in said) == is_said

    def test_row(self):
        assert report().row("hop_quantized").path == "words" and "hop_quantized" in str(report())
        with pytest.raises(KeyError, match="no row is named 'x'"):
            report().row("x")

    def test_page_escapes(self):
        """Whatever a program names its nodes, none of it becomes a tag."""
        evil = "</script><img src=x onerror=alert(1)>&amp;<!--\u2028"
        rows = tuple(replace(row, name=evil, path=evil) for row in report().rows[:3])
        made = replace(report(), rows=rows, name=evil).html()
        assert "<img" not in made and made.count("</script>") == 2 and "<!--" not in made
        data = re.findall(r'id="data">(.*?)</script>', made, re.S)[0]
        assert json.loads(data)["report"]["rows"][0]["name"] == evil

    def test_page_needs_nothing_else(self):
        made = report().html()
        assert "http://www.w3.org/2000/svg" in made
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|<link|src=", made)
        assert "default-src 'none'" in made.replace("&#x27;", "'")

    def test_embedded(self):
        text = page.embedded({"a": "</script>&<!--"})
        assert not set("<>&") & set(text) and json.loads(text) == {"a": "</script>&<!--"}


class TestToScheme(unittest.TestCase):
    @parameterized.expand([(name, scheme) for name, scheme in hop.report.CANDIDATES.items()])
    @pytest.mark.full
    def test_is_what_the_modules_compute(self, _name, scheme):
        """Layers of hop.nn in the same scheme give the same, but for how kernels sum floats; of any number of rows."""
        _, (x,) = small()
        program = torch.export.export(Small().eval(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        made = hop.export.to_scheme(program, scheme)
        assert len(made.report.rewritten) == 2 and not made.report.left
        wanted = quantized(Small().eval(), scheme)(x)
        run = made.program.module()
        torch.testing.assert_close(run(x), wanted, rtol=1e-4, atol=1e-4)
        assert run(x[:3]).shape == (3, 8)

    def test_convolutions_and_embeddings(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.words = torch.nn.Embedding(50, 16)
                self.conv1, self.conv2 = torch.nn.Conv1d(16, 8, 3, padding=1), torch.nn.Conv2d(1, 4, 3, stride=2)

            def forward(self, ids):
                return self.conv2(self.conv1(self.words(ids).mT).unsqueeze(1))

        model, ids = Net().eval(), (torch.arange(40).reshape(2, 20),)
        made = hop.export.to_scheme(torch.export.export(model, ids), hop.schemes.INT8_DYNAMIC)
        assert [row.detail for row in made.report.rewritten] == ["float × int8", "int8 × int8", "int8 × int8"]
        torch.testing.assert_close(made.program.module()(*ids), quantized(model)(*ids), rtol=1e-5, atol=1e-5)

    def test_shared_weight_is_held_once(self):
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.randn(32, 32))

            def forward(self, x):
                return torch.nn.functional.linear(torch.nn.functional.linear(x, self.w), self.w)

        program = torch.export.export(Tied(), (torch.randn(2, 32),))
        made = hop.export.to_scheme(program, hop.schemes.INT8_DYNAMIC).program
        assert list(made.state_dict) == ["w_codes_0"] and list(program.state_dict) == ["w"]

    def test_what_cannot_be_rewritten_is_left(self):
        class Normed(Small):
            def forward(self, x):
                return torch.nn.functional.linear(self.first(x), self.second.weight / self.second.weight.norm())

        made = hop.export.to_scheme(torch.export.export(Normed(), small()[1]), hop.schemes.INT8_DYNAMIC)
        (left,) = made.report.left
        assert left.node == "linear_1" and "not a parameter" in left.detail and len(made.report.rewritten) == 1

    @parameterized.expand(
        [
            (hop.schemes.INT8_STATIC, ValueError, "has a static scale"),
            (Scheme(None, replace(presets.INT8_ROW, stochastic=True)), ValueError, "rounds stochastically"),
            (Scheme(None, presets.INT8_ROW, output=presets.INT8_TENSOR), ValueError, "quantizes results"),
            (presets.INT8_ROW, TypeError, "must be a hop.Scheme"),
        ]
    )
    def test_errors(self, scheme, error, words):
        with pytest.raises(error, match=words):
            hop.export.to_scheme(small()[0], scheme)
