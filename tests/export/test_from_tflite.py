"""`.tflite` files as programs of integers: the codes of LiteRT, and errors that say where."""

import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.export.targets import PT2E, TFLITE

pytest.importorskip("ai_edge_litert", reason="needs LiteRT")

from hop.export.targets.tflite.file import File
from hop.export.targets.tflite.reading import read_graph
from tests.export.test_tflite import Chain, exported
from tests.support.tflite_models import Head, Layer, MaximumPool, Network, Residual, networks, transformer


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    layers = Layer(4, 8, stride=2), MaximumPool(2, 2), Residual(Layer(8, 8, groups=8, high=0.0))
    return Network(*layers, Head(8, per_channel=False)), torch.randn(3, 4, 12, 12)


def check(model: nn.Module, x: Tensor, at_least: int = 3) -> None:
    """What is read gives what was written, on the way too, and can be written again."""
    program = exported(model, x)
    file = hop.export.to_tflite(program)
    back = hop.export.from_tflite(file)
    for given in (x, x * 5 - 1):
        assert torch.equal(back.module()(given), program.module()(given))
    found = hop.export.verify(back, file, (x,))
    assert found.first is None and len(found.rows) >= at_least, found
    again = hop.export.verify(program, hop.export.to_tflite(back), (x,))
    assert again.outputs[0].differing == 0 and again.first is None


class TestRoundTrip(unittest.TestCase):
    @pytest.mark.full
    def test_small(self) -> None:
        check(*small())
        check(transformer(16, 1), torch.randn(2, 6, 16))

    @parameterized.expand(["digits", "residual", "separable", "mobilenet", "transformer"])
    @pytest.mark.full
    def test_networks(self, name: str) -> None:
        torch.manual_seed(3)
        model, shape = networks()[name]
        check(model, torch.randn(shape), 6)

    def random(self, seeds: range) -> None:
        for seed in seeds:
            chain = Chain(seed)
            x = torch.randn(chain.shape) * 2
            program = exported(chain, x)
            back = hop.export.from_tflite(hop.export.to_tflite(program).buffer)
            assert torch.equal(back.module()(x), program.module()(x)), seed

    @pytest.mark.full
    def test_random(self) -> None:
        self.random(range(2))

    @pytest.mark.full
    def test_random_up_to_twenty(self) -> None:
        self.random(range(2, 20))

    @pytest.mark.full
    def test_form(self) -> None:
        """The program is one of integers: named, bounded, lowered, saved, and lowered to another target."""
        model, x = small()
        program = exported(model, x)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            hop.export.to_tflite(program).save(path)
            back = hop.export.from_tflite(path)
            torch.export.save(back, Path(folder) / "model.pt2")
            loaded = torch.export.load(Path(folder) / "model.pt2")
            other = hop.export.from_tflite(str(path), target=PT2E)
        y = program.module()(x)
        assert torch.equal(loaded.module()(x), y)
        assert torch.equal(hop.export.lower(back).module()(x), y)
        names = [n.name for n in back.graph.nodes if n.op == "placeholder"]
        assert names[-1] == "input" or names[-1] == "input_1"
        bits = [[(row.bits, row.status) for row in hop.export.ranges(p).products] for p in (back, program)]
        assert bits[0] == bits[1] and {row[1] for row in bits[0]} == {"proven"}
        conventions = [str(n.args[1]) for n in other.graph.nodes if "hop_scaled" in str(n.target)]
        own = "requantize=Reciprocal(", "requantize=Pt2eMean("
        assert conventions and all(any(name in c for name in own) for c in conventions), conventions
        assert (other.module()(x) - y).abs().max() < 0.1


class Made:
    """A file by hand, of what `to_tflite` does not write."""

    def __init__(self, *shape: int, floats: bool = False) -> None:
        self.file = File()
        self.x = self.file.tensor("x:0", shape, **({"dtype": torch.float32} if floats else {"quantization": UNITS}))
        self.input = self.x
        if floats:
            self.add("QUANTIZE", shape, kind="QuantizeOptions")

    def add(self, op: str, shape: Any, *more: int, kind: str = "", units: Any = None, **options: Any) -> "Made":
        name = f"{op.lower()}_{len(self.file.graph.tensors)}"
        made = self.file.tensor(name, shape, quantization=units or UNITS)
        self.x = self.file.operator(op, [self.x, *more], made, kind, options)
        return self

    def product(self, *shape: int, along: int = 0) -> tuple[int, int]:
        """A weight and a bias."""
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        bias = torch.randint(-4000, 4000, (shape[along],), dtype=torch.int32, generator=generator)
        units = [0.05 * 0.01], [0], 0
        weight = self.file.tensor("weight", shape, torch.int8, ([0.01], [0], 0), codes)
        return weight, self.file.tensor("bias", bias.shape, torch.int32, units, bias)

    def bytes(self) -> bytes:
        return self.file.finish({"x:0": self.input}, {"y": self.x})


UNITS = ([0.05], [-3], 0)


class TestOperators(unittest.TestCase):
    def check(self, made: Made, *shape: int) -> Any:
        data = made.bytes()
        program = hop.export.from_tflite(data)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4
        found = hop.export.verify(program, data, (x,))
        assert found.first is None and found.rows, found
        assert len(torch.unique(program.module()(x))) > 1
        again = hop.export.to_tflite(program)
        assert hop.export.verify(program, again, (x,)).first is None
        return program

    @parameterized.expand([(1, 2, 3), (2, 2, 4), (2, 3, 5), (1, 1, 2)])
    @pytest.mark.quick(4)
    def test_same_padding(self, stride: int, kernel: int, size: int) -> None:
        """SAME, which pads one side more than the other."""
        made = Made(2, size + 4, size + 3, 3)
        out = [2, -(-(size + 4) // stride), -(-(size + 3) // stride), 4]
        options = {"strideH": stride, "strideW": stride, "padding": made.file.padding("SAME")}
        made.add("CONV_2D", out, *made.product(4, kernel, kernel, 3), kind="Conv2DOptions", **options)
        made.add("MAX_POOL_2D", out, kind="Pool2DOptions", **_windows(made))
        self.check(made, 2, size + 4, size + 3, 3)

    def test_depthwise_multiplier(self) -> None:
        made = Made(1, 6, 6, 3)
        options = {"strideH": 1, "strideW": 1, "depthMultiplier": 2, "padding": made.file.padding("VALID")}
        given = made.product(1, 3, 3, 6, along=3)
        made.add("DEPTHWISE_CONV_2D", (1, 4, 4, 6), *given, kind="DepthwiseConv2DOptions", **options)
        self.check(made, 1, 6, 6, 3)

    def test_grouped_convolution(self) -> None:
        made = Made(1, 5, 5, 4)
        options = {"strideH": 1, "strideW": 1, "padding": made.file.padding("VALID")}
        self.check(
            made.add("CONV_2D", (1, 3, 3, 6), *made.product(6, 3, 3, 2), kind="Conv2DOptions", **options), 1, 5, 5, 4
        )

    def test_views(self) -> None:
        made = Made(2, 1, 6, 5)
        numbers = made.file.integers
        made.add("SQUEEZE", (2, 6, 5), kind="SqueezeOptions", squeezeDims=[1])
        made.add("EXPAND_DIMS", (2, 6, 1, 5), numbers("axis", [2]), kind="ExpandDimsOptions")
        made.add(
            "SLICE", (2, 3, 1, 5), numbers("begin", [0, 2, 0, 0]), numbers("size", [2, 3, -1, -1]), kind="SliceOptions"
        )
        ends = [numbers(n, v) for n, v in (("b", [1, 0, 0, 0]), ("e", [2, 3, 1, 4]), ("s", [1, 2, 1, 1]))]
        made.add(
            "STRIDED_SLICE", (2, 1, 5), *ends, kind="StridedSliceOptions", beginMask=1, endMask=8, shrinkAxisMask=1
        )
        assert made.file.graph.tensors[-1].shape == [2, 1, 5]
        made.add("RESHAPE", (2, 5), numbers("shape", [2, 5]), kind="ReshapeOptions", newShape=[2, 5])
        made.add("TRANSPOSE", (5, 2), numbers("by", [1, 0]), kind="TransposeOptions")
        self.check(made, 2, 1, 6, 5)

    def test_padding(self) -> None:
        made = Made(2, 3, 4)
        sides = made.file.tensor("sides", (3, 2), torch.int32, data=torch.tensor([[0, 1], [2, 0], [1, 1]]))
        made.add("PAD", (3, 5, 6), sides, kind="PadOptions")
        fill = made.file.tensor("fill", (1,), torch.int8, UNITS, torch.tensor([17]))
        self.check(made.add("PADV2", (4, 7, 8), sides, fill, kind="PadV2Options"), 2, 3, 4)

    @parameterized.expand(["RELU", "RELU6"])
    def test_bounds(self, name: str) -> None:
        made = Made(3, 40)
        data = made.add(name, (3, 40), units=([0.04], [-20], 0)).bytes()
        program = hop.export.from_tflite(data)
        assert hop.export.verify(program, data, (torch.randn(3, 40) * 4,)).first is None

    @parameterized.expand(["NONE", "RELU", "RELU6", "RELU_N1_TO_1"])
    @pytest.mark.quick(4)
    def test_fused(self, name: str) -> None:
        made = Made(4, 60)
        options = {"kind": "AddOptions", "fusedActivationFunction": made.file.activation(name)}
        self.check(made.add("ADD", (4, 60), made.x, units=([0.07], [-10], 0), **options), 4, 60)

    def test_floats_at_the_ends(self) -> None:
        made = Made(3, 8, floats=True)
        made.add("ADD", (3, 8), made.x, kind="AddOptions", units=([0.1], [2], 0))
        y = made.file.tensor("floats", (3, 8), torch.float32)
        made.x = made.file.operator("DEQUANTIZE", [made.x], y, "DequantizeOptions")
        data = made.bytes()
        program = hop.export.from_tflite(data)
        found = hop.export.verify(program, data, (torch.randn(3, 8),))
        assert found.first is None and found.outputs[0].dtype == torch.float32

    def test_constant_operand(self) -> None:
        made = Made(2, 4)
        other = made.file.tensor("other", (4,), torch.int8, ([0.02], [5], 0), torch.tensor([3, -100, 77, 5]))
        self.check(made.add("MUL", (2, 4), other, kind="MulOptions", units=([0.1], [4], 0)), 2, 4)

    @parameterized.expand([((2, 3, 4, 5),), ((2, 3, 5),), ((4, 5),)])
    @pytest.mark.quick(3)
    def test_piecewise_and_extremes(self, shape: tuple[int, ...]) -> None:
        """Slopes by the last dimension, and one for all; HARD_SWISH, LEAKY_RELU, REDUCE_MAX."""
        made = Made(*shape)
        codes = torch.tensor([-90, 4, 30, 127, 60])
        slopes = made.file.tensor("slopes", [1] * (len(shape) - 2) + [5], torch.int8, ([0.02], [4], 0), codes)
        made.add("PRELU", shape, slopes, units=([0.06], [9], 0))
        one = made.file.tensor("one", (1,), torch.int8, ([0.004], [0], 0), torch.tensor([77]))
        made.add("PRELU", shape, one).add("HARD_SWISH", shape, units=([0.04], [-90], 0))
        made.add("LEAKY_RELU", shape, kind="LeakyReluOptions", alpha=-0.3)
        axes = made.file.integers("axes", [0])
        self.check(made.add("REDUCE_MAX", (1, *shape[1:]), axes, kind="ReducerOptions", keepDims=True), *shape)

    def test_slopes_along_two_dimensions(self) -> None:
        made = Made(2, 3, 4)
        slopes = made.file.tensor("slopes", (3, 4), torch.int8, ([0.02], [4], 0), torch.arange(12).reshape(3, 4))
        with pytest.raises(NotImplementedError, match=r"PRELU .* may differ along one dimension only"):
            hop.export.from_tflite(made.add("PRELU", (2, 3, 4), slopes).bytes())

    def table(self, *tables: Tensor, lowest: int = 128, shared: str = "") -> bytes:
        """A file with the sum of codes that are looked up in each table, by operators that are shared or not."""
        made, types = Made(3, 40), File().schema.TensorType
        options = {"inDataType": types.INT8, "outDataType": types.INT32}
        results: list[int] = []
        cast = places = -1
        for i, codes in enumerate(tables):
            table = made.file.tensor(f"table{i or ''}", codes.shape, torch.int8, UNITS, codes)
            if not i or not shared:
                cast = made.file.tensor(f"codes{i or ''}", (3, 40), torch.int32)
                cast = made.file.operator("CAST", [made.input], cast, "CastOptions", options)
            if not i or shared != "ADD":
                places = made.file.tensor(f"places{i or ''}", (3, 40), torch.int32)
                constant = made.file.integers(f"lowest{i or ''}", [lowest])
                places = made.file.operator("ADD", [cast, constant], places, "AddOptions")
            y = made.file.tensor(f"y{i or ''}", (3, 40), quantization=UNITS)
            results.append(made.file.operator("GATHER", [table, places], y, "GatherOptions", {"axis": 0}))
        made.x = results[0]
        for other in results[1:]:
            made.add("ADD", (3, 40), other, kind="AddOptions", units=([0.1], [4], 0))
        return made.bytes()

    def test_tables(self) -> None:
        """A table of a leaky relu, whose slope is found from it; not of any function, and not by all codes."""
        n = torch.arange(-128, 128) + 3
        data = self.table(torch.where(n > 0, n, (n * 0.307).round()).to(torch.int64) - 3)
        program, x = hop.export.from_tflite(data), torch.randn(3, 40) * 3
        assert hop.export.verify(program, data, (x,)).first is None
        assert "aten.leaky_relu.default" in str(program.graph)
        with pytest.raises(NotImplementedError, match=r"its table 'table' is not that of a function"):
            hop.export.from_tflite(self.table(torch.arange(256) % 7))
        for wrong in (self.table(n[:100]), self.table(n.clamp(-128, 127), lowest=127)):
            with pytest.raises(NotImplementedError, match=r"operator 0 CAST 'codes' is not supported"):
                hop.export.from_tflite(wrong)

    @parameterized.expand([("CAST", 6), ("ADD", 5), ("", 7)])
    @pytest.mark.quick(3)
    def test_tables_that_share(self, shared: str, count: int) -> None:
        """Two lookups read one CAST, or one ADD, or neither; the program has both functions."""
        n = torch.arange(-128, 128) + 3
        slopes = [torch.where(n > 0, n, (n * slope).round()).to(torch.int64) - 3 for slope in (0.307, 0.12)]
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 3
        data = self.table(*slopes, shared=shared)
        assert len(read_graph("from_tflite", data).operators) == count
        program = hop.export.from_tflite(data)
        assert hop.export.verify(program, data, (x,)).first is None
        assert str(program.graph).count("aten.leaky_relu.default") == 2

    def test_inner_product_of_wide_inputs(self) -> None:
        """Dimensions in front are joined where they are not kept."""
        made = Made(2, 3, 4)
        self.check(made.add("FULLY_CONNECTED", (3, 5), *made.product(5, 8), kind="FullyConnectedOptions"), 2, 3, 4)


def _windows(made: Made) -> dict[str, Any]:
    return {"filterHeight": 2, "filterWidth": 2, "strideH": 1, "strideW": 1, "padding": made.file.padding("SAME")}


class TestErrors(unittest.TestCase):
    def test_arguments(self) -> None:
        with pytest.raises(TypeError, match="from_tflite: model must be a TfliteModel"):
            hop.export.from_tflite(3)
        with pytest.raises(TypeError, match=r"from_tflite: target must be a .*Target or None, got 'TFLITE'"):
            hop.export.from_tflite(b"", target="TFLITE")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="bytes 4 to 7 are"):
            hop.export.from_tflite(b"PK\x03\x04....")

    @parameterized.expand(
        [
            ("ELU", r"operator 0 ELU 'elu_1' is not supported; supported are CONV_2D"),
            ("CUSTOM", r"operator 0 CUSTOM 'custom_1' is not supported"),
        ]
    )
    def test_unknown_operator(self, name: str, message: str) -> None:
        with pytest.raises(NotImplementedError, match=message):
            hop.export.from_tflite(Made(2, 3).add(name, (2, 3)).bytes())

    def test_floats(self) -> None:
        made = Made(2, 3)
        y = made.file.tensor("y", (2, 3), torch.float32)
        made.x = made.file.operator("DEQUANTIZE", [made.x], y, "DequantizeOptions")
        z = made.file.tensor("z", (2, 3), torch.float32)
        made.x = made.file.operator("LOGISTIC", [made.x], z)
        with pytest.raises(NotImplementedError, match=r"operator 0 DEQUANTIZE 'y' computes floats"):
            hop.export.from_tflite(made.bytes())

    def test_missing_row(self) -> None:
        from dataclasses import replace

        target = replace(TFLITE, rows=TFLITE.rows[:2])
        made = Made(2, 3).add("EXP", (2, 3), kind="ExpOptions")
        with pytest.raises(NotImplementedError, match=r"operator 0 EXP .* no row for aten.exp.default; the"):
            hop.export.from_tflite(made.bytes(), target=target)

    def test_what_does_not_fit(self) -> None:
        made = Made(2, 3)
        with pytest.raises(ValueError, match=r"TRANSPOSE 'transpose_2' returns the shape \(3, 2\), but the file"):
            hop.export.from_tflite(made.add("TRANSPOSE", (2, 3), made.file.integers("by", [1, 0])).bytes())
        made = Made(2, 3)
        with pytest.raises(ValueError, match=r"operator 0 TRANSPOSE 'transpose_2' is invalid: .*"):
            hop.export.from_tflite(made.add("TRANSPOSE", (2, 3), made.file.integers("by", [1, 1])).bytes())
        made = Made(2, 3)
        with pytest.raises(NotImplementedError, match=r"RESHAPE .* has the scale and zero point \(0.1.*, 0\)"):
            hop.export.from_tflite(made.add("RESHAPE", (6,), units=([0.125], [0], 0)).bytes())
        made = Made(2, 3)
        with pytest.raises(NotImplementedError, match=r"the bound 6.0 of its activation is halfway between"):
            hop.export.from_tflite(made.add("RELU6", (2, 3), units=([12 / 101], [0], 0)).bytes())

    @parameterized.expand([("INT8", 128), ("INT8", -129), ("INT16", 2**15), ("INT16", -(2**15) - 1)])
    def test_zero_points_outside_their_dtype(self, kind: str, zero: int) -> None:
        made = Made(2, 3)
        dtype = getattr(torch, kind.lower())
        other = made.file.tensor("other", (3,), dtype, ([0.02], [zero], 0), torch.tensor([3, 100, 5]))
        made.add("MUL", (2, 3), other, kind="MulOptions")
        info = torch.iinfo(dtype)
        message = rf"'other' has the zero points \({zero},\), but those of {kind} are {info.min} to {info.max}"
        with pytest.raises(ValueError, match=message):
            hop.export.from_tflite(made.bytes())

    def test_damaged(self) -> None:
        """Any bytes changed, or left out: an error that says where, or another program; nothing else, and quickly."""
        model, x = small()
        data = hop.export.to_tflite(exported(model, x)).buffer
        generator, read = torch.Generator().manual_seed(0), 0
        for trial in range(400):
            broken = bytearray(data)
            for _ in range(1 + trial % 3):
                place = int(torch.randint(8, len(data), (), generator=generator))
                broken[place] = int(torch.randint(0, 256, (), generator=generator))
            cut = int(torch.randint(8, len(data), (), generator=generator)) if trial % 2 else len(data)
            try:
                read_graph("from_tflite", bytes(broken[:cut]))
                read += 1
            except (ValueError, NotImplementedError) as error:
                assert str(error).startswith("from_tflite: model"), error
        assert 0 < read < 400

    def test_lists_that_lie(self) -> None:
        """A length that the file has not is no length: nothing is made of it."""
        data = bytearray(Made(2, 3).add("EXP", (2, 3), kind="ExpOptions").bytes())
        for place in range(8, len(data) - 4, 4):
            lying = data.copy()
            lying[place : place + 4] = (0x7FFFFFF0).to_bytes(4, "little")
            try:
                hop.export.targets.tflite.reading.read_graph("from_tflite", bytes(lying))  # type: ignore[attr-defined]
            except (ValueError, NotImplementedError) as error:
                assert "model" in str(error)
