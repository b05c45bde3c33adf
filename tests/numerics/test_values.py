"""Quantizers as values: spelling, equality, pickles, constants of compiled programs, refusal in exported ones."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import unittest
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from parameterized import parameterized

import hop
from hop import formats, presets, scale_rules
from hop.numerics import spelling
from hop.numerics.hadamard import Hadamard
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, Microscaling, MinMax, Static, TwoLevel

OTHERS = {
    "floor": Quantizer(formats.INT8, (2, 3, -1), Amax(floor=1e-7)),
    "eps": Quantizer(formats.E5M2, (1, -1), CurrentScaling(power_of_two=True, eps=0.5)),
    "inner": Quantizer(formats.E2M1, (1, 16), TwoLevel(inner=formats.E5M2)),
    "signs": Quantizer(formats.E2M1, (1, 16), TwoLevel(), stochastic=True, hadamard=Hadamard((1, -1, -1, 1))),
    "own format": Quantizer(formats.Float("e3m2", 6, torch.uint8, 3, 2, 3, 0x1F), (1, 32), Microscaling()),
    "own book": Quantizer(formats.Codebook('a "book"', 2, torch.uint8, (-1.5, 0.0, 0.25)), (64,), flat=True),
    "own exponent": Quantizer(formats.E4M3, (1, 32), Microscaling(formats.PowerOfTwo("e5m0", 5, torch.uint8, bias=15))),
}
ALL = [(name, q) for name, q in (presets.PRESETS | OTHERS).items()]


class Plain(Quantizer):
    """Says nothing about its fields."""


@dataclass(frozen=True, eq=False, repr=False)
class Declared(Quantizer):
    extra: int = 3


class TestSpelling(unittest.TestCase):
    @parameterized.expand(ALL)
    def test_round_trip(self, _name, q):
        text = str(q)
        assert text.startswith("hop1:Quantizer(") and "\n" not in text
        read = Quantizer.parse(text)
        assert read == q and hash(read) == hash(q) and str(read) == text
        assert all(getattr(read, f.name) == getattr(q, f.name) for f in dataclasses.fields(q))

    def test_all_different(self):
        assert len({str(q) for _, q in ALL}) == len({q for _, q in ALL}) == len(ALL)

    def test_fields_make_the_value(self):
        """Whatever way a quantizer is made."""
        same = [
            Quantizer(formats.INT8),
            Quantizer(format=formats.INT8, block=[-1, -1], scale=Amax(0)),  # type: ignore[arg-type]
            dataclasses.replace(presets.INT8_ROW, block=(-1, -1)),
            Quantizer(dataclasses.replace(formats.INT8)),
            Quantizer.parse("hop1:Quantizer( format = int8 )"),
            Quantizer.parse("hop1:Quantizer(scale=Amax(floor=-0.0), format=int8, block=(-1, -1,), stochastic=False)"),
        ]
        assert len(set(same)) == 1 and len({str(q) for q in same}) == 1

    @parameterized.expand(
        [
            ("version", "hop2:Quantizer(format=int8)", 0, "hop1:"),
            ("no version", "Quantizer(format=int8)", 0, "hop1:"),
            ("empty", "hop1:", 5, "expected a value"),
            ("unknown class", "hop1:Quantiser(format=int8)", 5, "Quantiser"),
            ("another class", "hop1:Amax()", 5, "expected a Quantizer, got a Amax"),
            ("unknown constant", "hop1:Quantizer(format=int9)", 22, "int9"),
            ("unknown field", "hop1:Quantizer(form=int8)", 15, "'form' is not a field"),
            ("field twice", "hop1:Quantizer(format=int8, format=int8)", 27, "given twice"),
            ("no comma", "hop1:Quantizer(format=int8 block=(1, -1))", 26, "expected ')'"),
            ("open", "hop1:Quantizer(format=int8", 26, "expected ')'"),
            ("rest", "hop1:Quantizer(format=int8) or 1", 27, "expected the end"),
            ("call", "hop1:__import__('os').system('true')", 5, "__import__"),
            ("bad value", "hop1:Quantizer(format=int8, block=(0, 1))", 5, "block must be"),
            ("bad part", "hop1:Quantizer(format=int8, scale=Amax(floor=-1.0))", 34, "floor"),
            ("missing", "hop1:Quantizer()", 5, "format"),
            ("dtype", "hop1:Quantizer(format=torch.nosuch)", 22, "torch.nosuch"),
            ("module", "hop1:Quantizer(format=torch.nn)", 22, "torch.nn"),
            ("number", "hop1:Quantizer(format=int8, flat=1e)", 34, "expected ')'"),
        ]
    )
    def test_errors_have_the_position(self, _name, text, position, words):
        with self.assertRaises(ValueError) as caught:
            Quantizer.parse(text)
        message = str(caught.exception)
        assert f"position {position} of" in message and words in message, message

    def test_only_text(self):
        with self.assertRaisesRegex(TypeError, "str"):
            spelling.read(b"hop1:Quantizer(format=int8)")  # type: ignore[arg-type]

    @hypothesis.settings(max_examples=300, deadline=None)
    @hypothesis.given(st.text(max_size=60) | st.text("hop1:Quantizer(format=int8,block-1)\"'[]e.", max_size=60))
    @pytest.mark.full
    def test_any_text_is_refused_or_read(self, text):
        for candidate in (text, "hop1:" + text):
            try:
                q = Quantizer.parse(candidate)
            except ValueError as error:
                assert "position" in str(error)
            else:
                assert Quantizer.parse(str(q)) == q

    def test_deep_text_is_refused(self):
        with self.assertRaises(ValueError):
            Quantizer.parse("hop1:" + "(" * 100_000)

    def test_no_text_imports(self):
        """`torch` imports parts of itself where it is asked for an attribute, so names are looked up in a table."""
        with mock.patch.object(torch, "__getattr__", side_effect=AssertionError("torch was asked")):
            for name in ("torch.onnx", "torch._inductor", "torch._export", "torch.hub", "torch.float99", "torch.nn"):
                with self.assertRaisesRegex(ValueError, f"{name}' is not a dtype"):
                    spelling.dtype(name)
                with self.assertRaisesRegex(ValueError, f"{name}' is not a dtype"):
                    spelling.read(f'hop1:Integer(name="a", bits=8, dtype={name}, low=0, high=1)')
        assert spelling.dtype("torch.float16") is spelling.dtype("half") is torch.float16

    @parameterized.expand(
        [
            ("name", "hop1:" + "x" * 10**4),
            ("string", 'hop1:"' + "x" * 10**4 + '"'),
            ("dtype", "hop1:torch." + "x" * 10**4),
            ("field", f"hop1:Amax({'x' * 10**4}=1)"),
            ("format", f'hop1:Integer(name="{"x" * 10**4}", bits=99, dtype=torch.int8, low=0, high=1)'),
            ("tuple", f"hop1:Quantizer(int8, block=({'0, ' * 5000}), scale=Amax())"),
            ("number", f"hop1:Amax(floor=1{'0' * 4000})"),
            ("digits", f"hop1:Amax(floor=1{'0' * 5000})"),
            ("text", "hop1:" + "(" * 10**6),
            ("head", "x" * 10**6),
            ("base", 'hop1:Quantizer(Format("a", 8, torch.int8), (1,), Amax())'),
        ]
    )
    def test_messages_are_short(self, _name, text):
        with self.assertRaises(ValueError) as caught:
            spelling.read(text)
        message = str(caught.exception)
        quoted = sum(message.count(part) for part in ("x", "0")) if len(text) > 1000 else 0
        assert quoted <= 250 and len(message.partition("; known are")[0]) < 700, message

    def test_long_text_is_refused(self):
        """Before it is read, which takes time in proportion."""
        with self.assertRaisesRegex(ValueError, "text has 200005 characters, more than 65536"):
            spelling.read("hop1:" + "1," * 10**5)
        book = formats.Codebook("b", 8, torch.uint8, tuple(n / 7 for n in range(256)))
        scheme = hop.Scheme(None, Quantizer(book, (1, 32), Amax()))
        assert spelling.read(str(scheme)) == scheme and len(str(scheme)) > 4000

    def test_json_that_nests(self):
        for depth, fails in ((10, False), (60, False), (70, True), (900, True), (10**6, True)):
            for start, end in (("[", "]"), ('{"a":', "}")):
                text = f'{{"a": {start * depth}{"1" if start != "[" else ""}{end * depth}}}'
                if fails:
                    with self.assertRaisesRegex(ValueError, "^it (is not |has lists and objects)"):
                        spelling.from_json(text, "it")
                else:
                    assert "a" in spelling.from_json(text, "it")

    def test_shown_is_short(self):
        deep: list[Any] = []
        for _ in range(10**5):
            deep = [deep]
        for value in (deep, 10**5000, "x" * 10**6, list(range(10**5)), {"a" * 300: 1}):
            assert len(spelling.shown(value)) <= 121


class TestValues(unittest.TestCase):
    @parameterized.expand(ALL)
    def test_copies_and_pickles(self, _name, q):
        for other in (copy.copy(q), copy.deepcopy(q), *(pickle.loads(pickle.dumps(q, p)) for p in range(2, 6))):
            assert other == q and hash(other) == hash(q)

    def test_pickles_as_text(self):
        """Another process reads it by the parser, not by setting fields."""
        assert str(presets.MXFP8).encode() in pickle.dumps(presets.MXFP8)

    @pytest.mark.full
    def test_a_fresh_process_agrees(self):
        code = (
            "import sys, pickle, hop; q = pickle.loads(bytes.fromhex(sys.argv[1]));"
            "assert q == hop.presets.NVFP4_GRADIENT; print(str(q))"
        )
        sent = pickle.dumps(presets.NVFP4_GRADIENT).hex()
        out = subprocess.run([sys.executable, "-c", code, sent], capture_output=True, text=True, check=True).stdout
        assert out.strip() == str(presets.NVFP4_GRADIENT)

    def test_frozen(self):
        with self.assertRaises(dataclasses.FrozenInstanceError):
            presets.INT8_ROW.block = (1, 1)  # type: ignore[misc]

    @parameterized.expand(
        [
            ("tensor in a rule", lambda: Amax(floor=torch.ones(())), "floor must be a finite number"),
            ("nan", lambda: Amax(floor=float("nan")), "got nan"),
            ("negative eps", lambda: CurrentScaling(eps=-1.0), "eps must be"),
            ("block", lambda: Quantizer(formats.INT8, (1, 0)), "got (1, 0)"),
            ("block of bool", lambda: Quantizer(formats.INT8, (True, -1)), "got (True, -1)"),
            ("empty block", lambda: Quantizer(formats.INT8, ()), "got ()"),
            ("scale format", lambda: Quantizer(formats.E8M0), "format must be"),
            ("pair", lambda: hop.Scheme(presets.INT8_ROW, presets.FP8_ROW), "integers are multiplied by integers"),
            (
                "pair of the backward",
                lambda: hop.Scheme(*[presets.INT8_ROW] * 2, grad=presets.FP8_ROW, backward="quantized"),
                "integers are multiplied by integers",
            ),
            ("codebooks", lambda: hop.Scheme(presets.STATE8, presets.INT8_ROW), "flat=True"),
            ("flat rows", lambda: Quantizer(formats.INT8, (1, 32), flat=True), "got (1, 32)"),
            ("flat columns", lambda: Quantizer(formats.INT8, (32,), hadamard=Hadamard(), flat=True), "exclude"),
            ("affine floats", lambda: Quantizer(formats.E4M3, scale=MinMax()), "e4m3 cannot"),
            ("stochastic book", lambda: Quantizer(formats.DYNAMIC8, stochastic=True), "dynamic8 is a codebook"),
            ("outer", lambda: Quantizer(formats.E2M1, (1, 16), TwoLevel(outer=(1, 32))), "that of the block"),
            ("signs", lambda: Hadamard((1, 2, 1, 1)), "signs must be"),
            ("power_of_two", lambda: BlockScaling(power_of_two=1), "power_of_two must be"),  # type: ignore[arg-type]
        ]
    )
    def test_fields_are_checked(self, _name, make, words):
        with self.assertRaises(ValueError) as caught:
            make()
        assert words in str(caught.exception)

    @parameterized.expand(
        [
            ("format", lambda: Quantizer("int4"), "format must be one of hop.formats"),  # type: ignore[arg-type]
            ("rule", lambda: Quantizer(formats.INT8, scale="amax"), "scale must be a rule"),  # type: ignore[arg-type]
            ("layout", lambda: Quantizer(formats.INT8, layout="tiles"), "layout must be one"),  # type: ignore[arg-type]
            ("requantize", lambda: Static(requantize="tflite"), "hop.requantization.TFLITE"),  # type: ignore[arg-type]
        ]
    )
    def test_types_are_checked(self, _name, make, words):
        with self.assertRaises(TypeError) as caught:
            make()
        assert words in str(caught.exception)

    def test_words_of_the_parser_are_those_that_users_know(self):
        with self.assertRaises(ValueError) as caught:
            Quantizer.parse("hop1:Quantizer(format=int9)")
        known = str(caught.exception).partition("known are ")[2].split(", ")
        assert {"int8", "e4m3", "Amax", "Quantizer"} <= set(known)
        assert not [name for name in known if name.startswith(("_", "Fast"))]


class TestSubclasses(unittest.TestCase):
    def test_without_declared_fields_it_is_equal_to_itself_alone(self):
        a, b = Plain(formats.INT8), Plain(formats.INT8)
        assert a == a and a != b and a != Quantizer(formats.INT8) and hash(a) != hash(b)
        with self.assertRaisesRegex(TypeError, "does not declare its fields"):
            str(a)
        with self.assertRaisesRegex(TypeError, "does not declare its fields"):
            hop.quantize(a, torch.ones(2, 2))

    def test_with_declared_fields_it_is_a_value(self):
        a, b = Declared(formats.INT8, extra=4), Declared(formats.INT8, extra=4)
        assert a == b and hash(a) == hash(b) and a != Declared(formats.INT8) and a != Quantizer(formats.INT8)
        assert Quantizer.parse(str(a)) == a and pickle.loads(pickle.dumps(a)) == a
        assert torch.equal(hop.fake_quantize(a, torch.ones(2, 2)), torch.ones(2, 2))

    @parameterized.expand(
        [("tensor", torch.ones(2)), ("list", [1, 2]), ("module", torch.nn.Linear(1, 1)), ("function", len)]
    )
    def test_a_field_that_no_text_can_stand_for(self, _name, value):
        @dataclass(frozen=True, eq=False, repr=False)
        class Holds(Quantizer):
            held: Any = None

        with self.assertRaisesRegex(TypeError, "Holds.held is"):
            Holds(formats.INT8, held=value)

    def test_process_group(self):
        import torch.distributed as dist

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:

            @dataclass(frozen=True, eq=False, repr=False)
            class OfGroup(Quantizer):
                group: Any = None

            with self.assertRaisesRegex(TypeError, "ProcessGroup"):
                OfGroup(formats.INT8, group=dist.group.WORLD)
        finally:
            dist.destroy_process_group()


class TestCompiledConstants(unittest.TestCase):
    """As arguments, captured, built inside, returned: equal ones share a program."""

    def count(self):
        from torch._dynamo.testing import CompileCounter

        return CompileCounter()

    def test_argument(self):
        counter = self.count()
        f = torch.compile(lambda q, x: hop.dequantize(hop.quantize(q, x)), backend=counter, fullgraph=True)
        x = torch.randn(4, 32)
        for q in (presets.INT8_ROW, Quantizer(formats.INT8, (1, -1)), Quantizer.parse(str(presets.INT8_ROW))):
            assert torch.equal(f(q, x), hop.fake_quantize(q, x))
        assert counter.frame_count == 1
        assert torch.equal(f(presets.MXFP8, x), hop.fake_quantize(presets.MXFP8, x))
        assert counter.frame_count == 2
        f(presets.INT8_ROW, x)
        f(presets.MXFP8, x)
        assert counter.frame_count == 2

    @parameterized.expand(
        [
            ("quantizer", lambda: dataclasses.replace(presets.INT8_ROW, block=(1, 32), stochastic=True)),
            ("rule", lambda: dataclasses.replace(presets.INT8_ROW.scale, floor=0.25)),
            ("integer", lambda: dataclasses.replace(formats.INT8, low=-100)),
            ("float", lambda: dataclasses.replace(formats.E4M3, name="mine")),
            ("scheme", lambda: dataclasses.replace(hop.schemes.INT8_DYNAMIC, rhs=presets.INT4_32)),
            (
                "within",
                lambda: dataclasses.replace(
                    presets.INT8_ROW, scale=dataclasses.replace(presets.INT8_ROW.scale, floor=0.5)
                ),
            ),
            ("requantization", lambda: dataclasses.replace(GEMMLOWP, low=0.0)),
            ("hadamard", lambda: dataclasses.replace(presets.NVFP4_HADAMARD, hadamard=None)),
        ]
    )
    @pytest.mark.works("replace_in_programs")
    @pytest.mark.quick(3)
    def test_replace(self, _name, make):
        """The way to vary a value, inside of a program."""
        torch._dynamo.reset()
        f = torch.compile(lambda x: (x + 1, make()), backend="eager", fullgraph=True)
        assert f(torch.zeros(2))[1] == make()

    @pytest.mark.works("replace_in_programs")
    def test_replace_computes(self):
        def f(x):
            q = dataclasses.replace(presets.INT8_ROW, block=(1, 16))
            scheme = dataclasses.replace(hop.schemes.INT8_DYNAMIC, rhs=q)
            return hop.quantized(torch.ops.aten.linear.default, scheme, hop.fake_quantize(q, x), x)

        x = torch.randn(4, 32)
        counter = self.count()
        assert torch.equal(torch.compile(f, backend=counter, fullgraph=True)(x), f(x))
        assert counter.frame_count == 1

    @pytest.mark.works("replace_in_programs")
    def test_replace_raises_what_eager_raises(self):
        def f(x):
            return hop.fake_quantize(dataclasses.replace(presets.INT8_ROW, block=(0, 16)), x)

        with pytest.raises(Exception, match="block"):
            f(torch.randn(4, 32))
        with pytest.raises(Exception, match="block"):
            torch.compile(f, backend="eager", fullgraph=True)(torch.randn(4, 32))

    def test_captured(self):
        counter = self.count()

        class Model(torch.nn.Module):
            def __init__(self, q):
                super().__init__()
                self.q = q

            def forward(self, x):
                return hop.fake_quantize(self.q, x)

        x, model = torch.randn(4, 32), Model(presets.INT8_ROW)
        f = torch.compile(model, backend=counter, fullgraph=True)
        f(x)
        model.q = Quantizer(formats.INT8, (1, -1))
        f(x)
        assert counter.frame_count == 1
        model.q = presets.NVFP4
        assert torch.equal(f(x), hop.fake_quantize(presets.NVFP4, x)) and counter.frame_count == 2

    def test_built_inside(self):
        def f(x, block):
            q = Quantizer(formats.INT8, (1, block), Amax(floor=0.5))
            return hop.fake_quantize(q, x), q.block[1]

        x = torch.randn(4, 32)
        got, block = torch.compile(f, backend="eager", fullgraph=True)(x, 16)
        assert block == 16 and torch.equal(got, f(x, 16)[0])

    def test_returned(self):
        f = torch.compile(lambda q: q, backend="eager", fullgraph=True)
        assert f(presets.MXFP8) is presets.MXFP8
        g = torch.compile(lambda q, x: (q, x + 1), backend="aot_eager", fullgraph=True)
        assert g(presets.MXFP8, torch.ones(1))[0] == presets.MXFP8

    def test_read_inside(self):
        f = torch.compile(lambda q, x: x * q.format.max + len(q.block), backend="eager", fullgraph=True)
        assert f(presets.MXFP8, torch.ones(1)).item() == 450

    def test_compared_inside(self):
        f = torch.compile(lambda q, x: x + (q == presets.MXFP8), backend="eager", fullgraph=True)
        assert f(presets.MXFP8, torch.zeros(1)).item() == 1 and f(presets.NVFP4, torch.zeros(1)).item() == 0

    def test_a_subclass_by_identity(self):
        counter = self.count()
        f = torch.compile(lambda q, x: x * q.format.bits, backend=counter, fullgraph=True)
        a, b = Plain(formats.INT8), Plain(formats.INT8)
        f(a, torch.ones(1))
        f(a, torch.ones(1))
        assert counter.frame_count == 1
        f(b, torch.ones(1))
        assert counter.frame_count == 2

    def test_every_class_is_known(self):
        from torch._library.opaque_object import is_opaque_value_type

        assert all(map(is_opaque_value_type, spelling._classes.values())) and Plain in spelling._classes.values()

    def test_what_torch_refuses_is_refused_when_the_class_is_made(self):
        with self.assertRaises(TypeError):

            class Bad(spelling.Value):
                __hash__ = None  # type: ignore[assignment]


class TestExports(unittest.TestCase):
    @parameterized.expand([("strict", True), ("non-strict", False)])
    def test_refused_as_argument(self, _name, strict):
        class Model(torch.nn.Module):
            def forward(self, x, q):
                return hop.fake_quantize(q, x)

        with self.assertRaisesRegex(Exception, "attribute of the module"):
            torch.export.export(Model(), (torch.ones(2, 32), presets.MXFP8), strict=strict)

    @parameterized.expand([("strict", True), ("non-strict", False)])
    def test_attribute(self, _name, strict):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.q = presets.MXFP8

            def forward(self, x):
                return hop.fake_quantize(self.q, x)

        x = torch.randn(2, 32)
        program = torch.export.export(Model(), (x,), strict=strict)
        assert torch.equal(program.module()(x), hop.fake_quantize(presets.MXFP8, x))

    def test_graphs_hold_the_text(self):
        class Model(torch.nn.Module):
            def forward(self, x):
                return hop.fake_quantize(presets.MXFP8, x)

        graph = torch.export.export(Model(), (torch.ones(2, 32),)).graph_module
        assert str(presets.MXFP8) in graph.code


class TestRules(unittest.TestCase):
    def test_rules_spell(self):
        for rule in (Amax(), Amax(0.5), MinMax(), Static(True), BlockScaling(False), Microscaling(), TwoLevel((1, -1))):
            assert spelling.read(str(rule), scale_rules.Rule) == rule
