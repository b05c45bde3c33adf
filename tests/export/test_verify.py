"""hop.export.verify: what it pairs, and its figures, against the same figures from values that numpy sees."""

import itertools
import math
import operator
import re
import types
import unittest
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx.traceback import NodeSource

import hop
from hop import presets
from hop.export import lower, verify
from hop.export.analysis.provenance import ancestries
from hop.export.rewrite.program import copy_graph, emit, with_graph
from tests.impls.test_integer_chain import NETWORKS, Ours, held, inputs
from tests.support.files import reloaded

aten = torch.ops.aten


class Chain(nn.Module):
    """A network of tests.impls.test_integer_chain, as a module."""

    def __init__(self, network: str, rule: str, *, codes: bool = False) -> None:
        super().__init__()
        self.p = nn.ParameterDict({name: nn.Parameter(t, requires_grad=False) for name, t in held(network).items()})
        self.network, self.rule, self.codes = network, rule, codes

    def forward(self, x: Tensor) -> Any:
        y = NETWORKS[self.network](Ours(self.p, self.rule), x)
        return y if self.codes else hop.dequantize(y)


def chain(rule: str = "float_multiplier", **options: Any) -> Any:
    return export(Chain("perceptron", rule, **options).eval(), (inputs("perceptron"),))


class Net(nn.Module):
    """float -> float, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).relu()
        return self.second(h), (h * 10).round().to(torch.int32)


class Named(nn.Module):
    """Arguments that are nested."""

    def forward(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        return x * more["factor"] + more["shift"][0]


def replaced(program: Any, name: str, function: Any) -> Any:
    """The program with function(value) where others read the value of a node."""
    graph = copy_graph(program)
    node = next(n for n in graph.nodes if n.name == name)
    users = list(node.users)
    made = emit(node.next, function, node)
    for user in users:
        user.replace_input_with(node, made)
    return with_graph(program, graph)


def pair(a: Tensor, b: Tensor) -> Any:
    """The row of two programs whose results are `a` and `b`."""

    class Held(nn.Module):
        def __init__(self, t: Tensor) -> None:
            super().__init__()
            self.t = nn.Buffer(t)

        def forward(self, x: Tensor) -> Tensor:
            return self.t.clone()

    x = (torch.zeros(1),)
    found = verify(export(Held(a), x), export(Held(b), x), x)
    (row,) = found.rows
    assert row.output == 0 and found.outputs == (row,) and (found.first is row) == bool(row.differing)
    return row


class TestFigures(unittest.TestCase):
    def test_of_floats(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=(5, 7)).astype(np.float32)
        b[:3] = a[:3]
        row = pair(torch.from_numpy(a), torch.from_numpy(b))
        d = a.astype(np.float64) - b
        assert (row.dtype, row.shape, row.elements, row.differing) == (torch.float32, (5, 7), 35, 14)
        assert row.largest == np.abs(d).max()
        assert math.isclose(row.sqnr, 10 * math.log10((a.astype(np.float64) ** 2).sum() / (d**2).sum()))

    @parameterized.expand([(str(d).split(".")[1], d) for d in (torch.int8, torch.uint8, torch.int32, torch.int64)])
    def test_of_integers(self, _name, dtype):
        info = torch.iinfo(dtype)
        a = torch.tensor([info.min, 5, 7, info.max], dtype=dtype)
        b = torch.tensor([info.max, 5, 6, info.max], dtype=dtype)
        row = pair(a, b)
        assert (row.differing, row.largest, row.sqnr) == (2, info.max - info.min, None)
        assert type(row.largest) is int

    def test_of_unsigned_64_bits(self):
        row = pair(torch.tensor([0, 1], dtype=torch.uint64), torch.tensor([2**64 - 1, 1], dtype=torch.uint64))
        assert (row.differing, row.largest) == (1, 2**64 - 1)

    def test_of_booleans_and_nothing(self):
        row = pair(torch.tensor([True, False]), torch.tensor([True, True]))
        assert (row.differing, row.largest, row.sqnr) == (1, 1, None)
        row = pair(torch.zeros(0, 3), torch.zeros(0, 3))
        assert (row.elements, row.differing, row.largest, row.sqnr) == (0, 0, 0.0, math.inf)

    def test_of_what_is_not_finite(self):
        inf, nan = math.inf, math.nan
        same = torch.tensor([inf, -inf, nan, 1.0, 0.0])
        row = pair(same, torch.tensor([inf, -inf, nan, 1.0, -0.0]))
        assert (row.differing, row.largest, row.sqnr) == (0, 0.0, inf)
        row = pair(same, torch.tensor([inf, -inf, nan, 2.0, 0.0]))
        assert (row.differing, row.largest, row.sqnr) == (1, 1.0, 0.0)
        row = pair(same, torch.tensor([inf, inf, nan, 2.0, 0.0]))
        assert (row.differing, row.largest, row.sqnr) == (2, inf, -inf)
        row = pair(same, torch.tensor([inf, -inf, 3.0, 1.0, 0.0]))
        assert row.differing == 1 and math.isnan(row.largest) and row.sqnr == -inf
        row = pair(torch.zeros(2), torch.ones(2))
        assert row.sqnr == -inf and row.largest == 1.0

    @parameterized.expand([(name,) for name in ("INT8_ROW", "INT8_ROW_AFFINE", "INT4_32", "MXFP8", "NVFP4")])
    def test_of_quantized_tensors(self, name):
        """By their codes and by their numbers."""
        q = presets.PRESETS[name]

        class Quantized(nn.Module):
            def __init__(self, factor: float) -> None:
                super().__init__()
                self.factor = factor

            def forward(self, x: Tensor) -> Tensor:
                return hop.quantize(q, x * self.factor)

        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        a, b = (export(Quantized(f), (x,)) for f in (1.0, -1.25))
        row = verify(a, b, (x,)).outputs[0]
        s, t = hop.quantize(q, x), hop.quantize(q, x * -1.25)
        n, m = hop.dequantize(s).double(), hop.dequantize(t).double()
        assert (row.elements, row.dtype, row.shape) == (256, s.codes.dtype, (4, 64))  # type: ignore[attr-defined]
        assert math.isclose(row.sqnr or 0, 10 * math.log10(n.square().sum() / (n - m).square().sum()))
        if name.startswith("INT8"):
            codes = s.codes.long() - t.codes.long()  # type: ignore[attr-defined]
            assert row.largest == int(codes.abs().max()) and type(row.largest) is int
            assert row.differing == int(((codes != 0) | (n != m)).sum()) > 0  # equal codes, other scales
        elif name == "INT4_32":  # two codes to a byte
            steps = [t.reshape(4, 2, 32) / u.scale.reshape(4, 2, 1) for t, u in ((n, s), (m, t))]  # type: ignore[attr-defined]
            assert row.largest == int((steps[0].round() - steps[1].round()).abs().max())
        else:
            assert row.largest == float((n - m).abs().max()) and row.differing == int((n != m).sum())
        assert verify(a, a, (x,)).first is None

    def test_of_several_inputs(self):
        """Figures are those of all elements together."""
        torch.manual_seed(0)
        a, b = Net(), Net()
        given = [(torch.randn(n, 8),) for n in (2, 3, 4)]
        shapes = ({0: Dim("n")},)
        programs = [export(m, given[0], dynamic_shapes=shapes) for m in (a, b)]
        found = verify(*programs, given)
        with torch.no_grad():
            x = torch.cat([x for (x,) in given])
            (s, n), (t, m) = a(x), b(x)
        first, second = found.outputs
        assert first.elements == s.numel() and found.inputs == 3 and first.shape == (2, 4)
        noise = (s.double() - t).square().sum()
        assert math.isclose(first.sqnr or 0, 10 * math.log10(s.double().square().sum() / noise), rel_tol=1e-6)
        assert (second.differing, second.largest) == (int((n != m).sum()), int((n - m).abs().max()))


class TestPairs(unittest.TestCase):
    def test_a_rewritten_program(self):
        """Nodes that an edit does not touch correspond by name; the first that differs is what reads the edit."""
        program = export(Net(), (torch.randn(2, 8),))
        other = replaced(program, "relu", lambda t: t * 1.001)
        found = verify(program, other, (torch.randn(2, 8),))
        assert [(r.a, r.b) for r in found.rows] == [
            (n, n) for n in ("linear", "relu", "linear_1", "mul", "round_1", "to")
        ]
        assert [r.differing > 0 for r in found.rows][:4] == [False, False, True, True]
        assert found.first is found.rows[2] and (found.only_a, found.only_b) == (0, 1)
        assert verify(program, program, (torch.randn(2, 8),)).first is None

    @pytest.mark.full
    def test_a_lowered_program(self):
        """A node corresponds with the result of what it became; a quantized tensor by its codes."""
        x = inputs("perceptron")
        program = chain()
        lowered = lower(program)
        found = verify(program, lowered, [(x,), (x * 3,)])
        assert found.first is None
        pairs = {r.a: r for r in found.rows}
        names = ("hop_quantize", "hop_scaled", "hop_scaled_1", "hop_scaled_2")
        assert {pairs[n].dtype for n in names} == {torch.int8}
        assert pairs["hop_dequantize"].output == 0 and found.only_a == 0
        # the oracle: the codes in eager mode are those of the lowered program's node
        want = Chain("perceptron", "float_multiplier", codes=True)(x)
        (got,) = [v for n, v in values(lowered, x) if n == pairs["hop_scaled_2"].b]
        assert torch.equal(got, want.codes)

    @parameterized.expand(
        [
            ("lowered_first", 1, 0),
            ("one_step", 2, 1),
            ("the_other_way", 1, 2),
            ("two_steps_apart", 0, 2),
            ("modules", 3, 4),
        ]
    )
    @pytest.mark.full
    def test_programs_of_any_generation(self, _name, i, j):
        """Each operator's codes, by what the first program calls it, or by the operator that gave its buffers."""
        x = inputs("perceptron")
        program = chain()
        buffers = program.run_decompositions({})
        made = (program, lower(program), buffers, program.module(), lower(buffers).module())
        found = verify(made[i], made[j], (x,))
        assert found.first is None and found.outputs[0].elements == 144
        wanted = {"hop_quantize", "hop_scaled", "hop_scaled_1", "hop_scaled_2", "hop_dequantize"}
        of_a, of_b = {r.a for r in found.rows}, {r.b for r in found.rows}
        for graph, names in ((made[i].graph, of_a), (made[j].graph, of_b)):
            paired = [(n, origin[0]) for n, origin in ancestries(graph).items() if n.name in names]
            assert {origin for n, origin in paired if n.meta["val"].numel() > 1} == wanted

    @pytest.mark.full
    def test_after_a_file(self):
        program = chain()
        lowered = lower(program)
        found = verify(program, reloaded(lowered), (inputs("perceptron"),))
        assert found.first is None and "hop_scaled_1" in {r.a for r in found.rows}

    @pytest.mark.full
    def test_a_change_in_the_middle_is_found_across_a_lowering(self):
        program = chain()
        changed = chain()
        w = hop.dequantize(changed.state_dict["p.w2"]) + 0.05
        changed.state_dict["p.w2"] = nn.Parameter(hop.quantize(presets.INT8_ROW, w), requires_grad=False)
        found = verify(program, lower(changed), (inputs("perceptron"),))
        assert found.first is not None and found.first.a == "hop_scaled_1"
        assert found.first.dtype == torch.int8 and type(found.first.largest) is int
        shown = str(found)
        assert "hop_scaled_1" in shown and "hop_dequantize (output 0)" in shown and "hop_quantize" not in shown

    @pytest.mark.full
    def test_quantized_outputs(self):
        """Decompositions take them apart into their buffers."""
        program = chain(codes=True)
        found = verify(program, lower(program), (inputs("perceptron"),))
        names = [r.a for r in found.outputs]
        assert names == [f"hop_scaled_2.{n}" for n in ("codes", "scale", "zero_point")] and found.first is None
        assert verify(program, chain(codes=True), (inputs("perceptron"),)).outputs[0].a == "hop_scaled_2"

    def test_names_of_another_generation_are_chance(self):
        """A relu of the lowered program that has the name of another node of the first one comes from elsewhere."""

        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.silu(x) * torch.sigmoid(x + 1)

        x = (torch.randn(3, 4),)
        program = export(Twice(), x)
        lowered = lower(program)
        ours, theirs = ({n.name for n in p.graph.nodes if n.op == "call_function"} for p in (program, lowered))
        assert "sigmoid" in ours & theirs  # of x + 1 in one, of silu in the other
        found = verify(program, lowered, x)
        assert {r.a: r.b for r in found.rows}["sigmoid"] == "sigmoid_1"
        assert all(r.differing == 0 or (r.sqnr or 0) > 100 for r in found.rows)

    @pytest.mark.full
    def test_ancestries(self):
        program = chain()
        lowered = lower(program)
        (depth,) = {len(names) for names in ancestries(lowered.graph).values()}
        assert depth > 1 and {names[0] for names in ancestries(lowered.graph).values()} >= {"hop_scaled"}
        graph = copy_graph(lowered)
        node = next(n for n in graph.nodes if n.target is aten.mm.default)
        made = emit(node.next, lambda t: t + 1, node)
        assert ancestries(graph)[made] == (None,) * (depth - 1) + (made.name,)
        made.meta["from_node"] = [NodeSource(node), NodeSource(node)]  # of several, none is the one
        assert ancestries(graph)[made] == (None,) * (depth - 1) + (made.name,)


def values(program: Any, *args: Tensor) -> list[tuple[str, Any]]:
    """Names and values of all nodes."""
    found: list[tuple[str, Any]] = []

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            out = super().run_node(n)
            found.append((n.name, out))
            return out

    module = program.module()
    Recorder(module).run(*args)
    return found


class TestRunning(unittest.TestCase):
    def test_activations_are_not_kept(self):
        """At no time more than a few values of a deep program are alive."""
        alive: set[int] = set()
        most = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal most
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor) and out.numel() == 1000:
                    alive.add(id(out))
                    weakref.finalize(out, alive.discard, id(out))
                    most = max(most, len(alive))
                return out

        class Deep(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                for _ in range(60):
                    x = x.sin()
                return x

        x = torch.randn(1000)
        program = export(Deep(), (x,))
        with Watch():
            found = verify(program, program, [(x,)] * 3)
        assert len(found.rows) == 60 and 0 < most < 20, most

    def test_buffers_that_a_program_writes_to_stay(self):
        class Counter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.count = nn.Buffer(torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(1)
                return x + self.count

        x = torch.ones(3)
        program = export(Counter(), (x,))
        lowered = program.run_decompositions({})
        for other in (program, lowered, program.module()):
            found = verify(program, other, [(x,), (x,)])
            assert found.first is None, str(found)
        assert torch.equal(program.state_dict["count"], torch.zeros(3)) and torch.equal(x, torch.ones(3))

    def test_numbers_and_nothing_as_outputs(self):
        class Odd(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return {"a": x + 1, "b": 3, "c": None}

        x = (torch.ones(2),)
        program = export(Odd(), x)
        found = verify(program, program, x)
        assert [(r.output, r.differing) for r in found.outputs] == [(0, 0), (1, 0)]

    def test_arguments_by_name(self):
        """Programs that were exported with arguments by place, by name and both, in each pairing."""
        x, more = torch.randn(2, 8), {"factor": torch.tensor(3.0), "shift": [torch.randn(8)]}
        given = {"more": more, "x": x}
        programs = [
            export(Named(), (x, more)),
            export(Named(), (x,), {"more": more}),
            export(Named(), (), given),
            export(Named(), (), {"x": x, "more": more}),
        ]
        wanted = Named()(**given)
        for a, b in itertools.product(programs, repeat=2):
            for first, second in itertools.product((a, a.module()), (b, b.module())):
                found = verify(first, second, [given, types.MappingProxyType({"x": 2 * x, "more": more})])
                (row,) = found.outputs
                assert (row.differing, row.elements, found.inputs) == (0, 2 * wanted.numel(), 2)
        other = export(Named(), (), {"x": x, "more": {"factor": more["factor"], "shift": [x]}})
        with pytest.raises(ValueError, match="the inputs are nested as"):
            verify(other, other, {"x": x, "more": [more]})
        for program, shown in zip(programs, ("x, more", "x, more=", "more=, x=", "x=, more="), strict=True):
            for wrong, got in (({"x": x}, "x="), ({**given, "mask": x}, "more=, x=, mask=")):
                message = f"verify: program takes the arguments {shown}, but inputs have {got}; give a dict of all"
                for form in (program, program.module()):
                    with pytest.raises(ValueError, match=re.escape(message)):
                        verify(form, program, wrong)
        with pytest.raises(ValueError, match="model takes the arguments x, more=, but inputs have 2 by place"):
            verify(programs[0], programs[1], (x, more))

    def test_errors(self):
        x = torch.randn(2, 8)
        program = export(Net(), (x,))
        with pytest.raises(TypeError, match=r"model must be an exported program or its module\(\), .*got Net"):
            verify(program, Net(), (x,))  # type: ignore[arg-type]
        for bad, got in (
            ({1: x}, "a dict with the keys [1]"),
            ([x], "a tensor of torch.float32 and shape (2, 8) on cpu at 0"),
            ("x", "'x' at 0"),
            ([{"x": x}, None], "None at 1"),
        ):
            words = (
                f"a dict of arguments by name, or a list of such tuples or dicts; got {got}; give (x,) for one tensor"
            )
            with pytest.raises(TypeError, match=f"{re.escape(words)}$"):
                verify(program, program, bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="program takes 1 tensors or numbers, but inputs have 2"):
            verify(program, program, (x, x))
        with pytest.raises(ValueError, match="the inputs are nested as"):
            verify(program, program, ([x],))
        one = export(nn.Linear(8, 4), (x,))
        with pytest.raises(ValueError, match="program has 2 and model 1"):
            verify(program, one, (x,))
        with pytest.raises(ValueError, match=r"output 0 has different shapes: \(2, 4\) and \(2, 5\)"):
            verify(one, export(nn.Linear(8, 5), (x,)), (x,))

    def test_the_table(self):
        torch.manual_seed(0)
        x = torch.randn(2, 8)
        program = export(Net(), (x,))
        text = str(verify(program, replaced(program, "linear", operator.neg), (x,))).splitlines()
        assert text[0] == "6 pairs on 1 input, 1 equal; without a counterpart: 0 and 1"
        columns = [i for i in range(len(text[1])) if all(line[i : i + 1] in (" ", "") for line in text[1:])]
        assert len(columns) >= 8 and text[1].startswith("node ") and text[1].endswith("SQNR dB")
        assert "linear_1 (output 0)" in "\n".join(text)
