"""What a program holds, what stays in it, and that nothing recognised is said."""

import unittest

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import export, presets
from hop.impls.decompositions import operators_named

aten = torch.ops.aten


class Small(nn.Module):
    """An integer product, a softmax, and a nested graph."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y = hop.out_dtype(aten.mm.default, torch.int32, a, b).to(torch.float32)
        y = torch.softmax(y, -1)  # a line to be named
        return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))


class Quantizing(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        x, w = (hop.quantize(presets.INT8_ROW, v) for v in (x, w))
        return hop.scaled(aten.linear.default, torch.float32, x, w)


def small() -> torch.export.ExportedProgram:
    a, b = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8)
    return torch.export.export(Small(), (a, b)).run_decompositions({})


ALLOWED = [hop.out_dtype, aten._to_copy, aten.sum.default, "aten.gt", torch.ops.higher_order.cond, aten.sin, "aten.cos.default"]  # fmt: skip  # noqa: E501


class TestCheck(unittest.TestCase):
    def test_holds(self):
        program = small()
        export.check(program, operators=[*ALLOWED, "aten._softmax.default", aten.softmax])
        export.check(program, dtypes={torch.int8, torch.int32, torch.float32, torch.bool})

    @pytest.mark.full
    def test_an_operator(self):
        with pytest.raises(ValueError) as raised:
            export.check(small(), operators=ALLOWED)
        head, *lines = str(raised.value).splitlines()
        assert head == "check: 1 node is not allowed in the program"
        assert "softmax" in lines[0] and "is not among the operators" in lines[0]
        assert "tests/export/test_check.py:" in lines[0] and "# a line to be named" in lines[0]

    @parameterized.expand([("nested", aten.sin, "sin"), ("outer", torch.ops.higher_order.cond, "cond")])
    @pytest.mark.full
    def test_one_less(self, _name, less, shown):
        allowed = [x for x in ALLOWED if x is not less]
        with pytest.raises(ValueError, match=f"{shown}.* is not among the operators"):
            export.check(small(), operators=[*allowed, aten._softmax, aten.softmax])

    @pytest.mark.full
    def test_dtypes(self):
        with pytest.raises(ValueError) as raised:
            export.check(small(), dtypes=[torch.float32, torch.bool])
        text = str(raised.value)
        assert "a: an input is of torch.int8" in text and "hop_out_dtype is of torch.int32" in text

    @parameterized.expand(
        [("list", "aten.mm.default", TypeError), ("operator", [3], TypeError), ("dtype", None, ValueError)]
    )
    @pytest.mark.full
    def test_arguments(self, _name, operators, error):
        with pytest.raises(error, match="check: operators"):
            export.check(small(), operators=operators)
        with pytest.raises(TypeError, match=r"check: dtypes must be of torch.dtype, got 'int8'"):
            export.check(small(), dtypes=["int8"])


class TestKeep(unittest.TestCase):
    """hop.decompositions(keep=...)."""

    def lowered(self, *keep: object) -> torch.export.ExportedProgram:
        program = torch.export.export(Quantizing(), (torch.randn(4, 64), torch.randn(8, 64)))
        return program.run_decompositions(hop.decompositions(keep=keep))

    @parameterized.expand(
        [
            ("none", (), set()),
            ("function", (hop.scaled,), {"hop_scaled_buffers"}),
            ("name", ("quantize",), {"hop_quantize_buffers"}),
            ("operator", (torch.ops.higher_order.hop_scaled_buffers,), {"hop_scaled_buffers"}),
            ("made_of", (hop.out_dtype,), {"hop_out_dtype"}),
            ("several", (hop.quantize, "hop_scaled_buffers"), {"hop_quantize_buffers", "hop_scaled_buffers"}),
        ]
    )
    @pytest.mark.full
    def test_stays(self, _name, keep, wanted):
        low = self.lowered(*keep)
        assert {str(n.target) for n in low.graph.nodes if str(n.target).startswith("hop_")} == wanted
        x, w = torch.randn(4, 64), torch.randn(8, 64)
        assert torch.equal(low.module()(x, w), Quantizing()(x, w))

    def test_refused(self):
        for bad in ("softmax", torch.relu, aten.mm.default, ""):
            with pytest.raises(ValueError, match=r"keep must name operators of ours, which are hop_buffers, .*; got"):
                hop.decompositions(keep=[bad])
        for bad in ("scaled", hop.scaled, torch.ops.higher_order.hop_scaled):
            with pytest.raises(TypeError, match="keep must be a list"):
                hop.decompositions(keep=bad)


class TestNames(unittest.TestCase):
    """Nodes are found by public names: torch.ops.higher_order.hop_<function>."""

    @parameterized.expand(
        [(f.__name__, f) for f in (hop.out_dtype, hop.scaled, hop.quantize, hop.dequantize, hop.noise)]
    )
    def test_public(self, name, function):
        named = operators_named(function)
        assert getattr(torch.ops.higher_order, f"hop_{name}") in named
        assert all(getattr(torch.ops.higher_order, h.name()) is h for h in named)

    @pytest.mark.full
    def test_a_node(self):
        found = [n for n in small().graph.nodes if n.target is torch.ops.higher_order.hop_out_dtype]
        assert len(found) == 1 and found[0].args[0] is aten.mm.default


class TestNothingQuantized(unittest.TestCase):
    """to_integer of what is not quantized says so."""

    def test_floats(self):
        program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),))
        with pytest.raises(ValueError) as raised:
            export.to_integer(program)
        text = str(raised.value)
        assert text.startswith(
            "to_integer: found no quantized operator in the program, which has aten.linear.default, aten.relu"
        )
        assert "quantized_decomposed::quantize_per_tensor" in text and "to_scheme" in text

    def test_ours(self):
        """A program of ours is one of integers already."""
        program = torch.export.export(Quantizing(), (torch.randn(4, 64), torch.randn(8, 64)))
        export.check(export.to_integer(program).program, operators=[hop.quantize, hop.scaled])

    def test_wide_codes(self):
        """Codes that no format holds are left with the reason."""
        from torch.ao.quantization.fx import _decomposed  # noqa: F401

        class Wide(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                given = (0.001, 0, -(2**31), 2**31 - 1, torch.int32)
                codes = torch.ops.quantized_decomposed.quantize_per_tensor(x, *given)
                return torch.ops.quantized_decomposed.dequantize_per_tensor(codes, *given).sin()

        x = torch.randn(3, 5)
        program = torch.export.export(Wide(), (x,))
        found, report = export.to_integer(program)
        assert [row.detail for row in report.left] == [
            "codes of int32: their readers stay in floats (known are int8, uint8, int16)"
        ]
        assert torch.equal(found.module()(x), program.module()(x))
