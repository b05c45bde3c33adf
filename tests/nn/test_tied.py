"""An embedding and the head that shares its weight: one Parameter, packed too."""

import unittest
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets, schemes
from tests.support.schemes import CROSSED

aten = torch.ops.aten
QUANTIZERS = {
    name: getattr(presets, name)
    for name in ("INT8_ROW", "INT8_TENSOR", "INT4_32", "UINT4_32_AFFINE", "FP8_ROW", "MXFP8", "MXFP4", "NVFP4")
}


class Tied(nn.Module):
    def __init__(self, rows: int = 70) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(rows, 96)
        self.head = nn.Linear(96, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embed(index))


def applicable() -> list[tuple[str, Any]]:
    """The schemes in which both layers quantize the weight alike."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        found = [(n, s) for n, s in CROSSED.items() if hop.nn.convert(Tied(), s).hop_report.converted == 2]
    return [(n, s) for n, s in found if s.rhs.scale.missing() is None]  # else each layer has a scale of its own


class Rows(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, index):
        return hop.scaled(aten.embedding.default, torch.float32, self.weight, index)


class TestRowsOfTiles(unittest.TestCase):
    @parameterized.expand([(f"{name}_{size}", q, size) for name, q in QUANTIZERS.items() for size in (32, 96, 160)])
    @pytest.mark.quick(2)
    def test_they_are_those_of_the_plain_form(self, _name, q, size):
        plain = hop.quantize(q, torch.randn(70, size, generator=torch.Generator().manual_seed(1)))
        packed = hop.pack(plain, hop.layouts.Tiled())
        for index in (
            torch.randint(0, 70, (3, 5)),
            torch.arange(70),
            torch.tensor(69),
            torch.zeros(0, dtype=torch.int32),
        ):
            want = hop.scaled(aten.embedding.default, torch.float32, plain, index)
            assert torch.equal(hop.scaled(aten.embedding.default, torch.float32, packed, index), want)
            assert torch.equal(want, hop.dequantize(plain)[index.long()])

    @parameterized.expand(QUANTIZERS.items())
    @pytest.mark.quick(2)
    def test_only_selected_rows_are_dequantized(self, _name, q):
        """In programs of core ATen too, which would otherwise dequantize the vocabulary for each token."""
        table = hop.quantize(q, torch.randn(70, 64))
        for weight in (table, hop.pack(table, hop.layouts.Tiled())):
            program = torch.export.export(Rows(weight), (torch.tensor([3, 69]),)).run_decompositions(
                hop.decompositions()
            )
            nodes = [node for node in program.graph.nodes if node.op == "call_function"]
            assert all(torch.Tag.core in node.target.tags for node in nodes), nodes
            values = [node.meta["val"] for node in nodes]
            assert max(v.numel() for v in values if v.dtype == torch.float32) == 2 * 64
            assert torch.equal(program.module()(torch.tensor([5, 0])), hop.dequantize(table)[[5, 0]])

    def test_rows_that_there_are_not(self):
        packed = hop.pack(hop.quantize(presets.INT8_TENSOR, torch.randn(70, 64)), hop.layouts.Tiled())
        for row in (-1, 70, 75, 200):
            with pytest.raises(IndexError):
                hop.scaled(aten.embedding.default, torch.float32, packed, torch.tensor([row]))

    @pytest.mark.full
    def test_programs(self):
        function = lambda w, i: hop.scaled(aten.embedding.default, torch.float32, w, i)  # noqa: E731
        index = torch.tensor([[0, 69], [33, 15]])
        for q in (presets.INT8_ROW, presets.INT4_32):
            packed = hop.pack(hop.quantize(q, torch.randn(70, 64)), hop.layouts.Tiled())
            want = function(packed, index)
            assert torch.equal(torch.compile(function, fullgraph=True)(packed, index), want)
            members = torch.func.vmap(function, (None, 0))(packed, index)
            assert torch.equal(members, want)


class TestTied(unittest.TestCase):
    @parameterized.expand(applicable())
    def test_one_packed_weight(self, _name, scheme):
        model, index = Tied().eval(), torch.arange(12).reshape(3, 4)
        hop.nn.convert(model, scheme)
        hop.nn.calibrate(model, [index], progress=False)
        with torch.no_grad():
            y = model(index)
            hop.nn.freeze(model)
            assert torch.equal(model(index), y)
            hop.nn.freeze(model, pack=True)
            assert torch.equal(model(index), y)
        assert model.embed.weight is model.head.weight and len(list(model.parameters())) == 1
        again = Tied()
        again.load_state_dict(hop.nn.float_state_dict(model))
        assert torch.equal(again.embed.weight, hop.dequantize(model.head.weight))

    def test_the_memory_of_one(self):
        model = hop.quantize_(Tied(), "int8")
        assert model.embed.weight.quantizer.layout == model.head.weight.quantizer.layout
        state = model.state_dict()
        assert all(t.quantizer.layout is None for t in state.values())
        alone = hop.quantize_(nn.Sequential(nn.Embedding(70, 96)), "int8")
        assert alone[0].weight.quantizer.layout is None

    def test_other_schemes(self):
        """Codes of two kinds are two weights, and the embedding stays plain."""
        model = hop.quantize_(Tied(), {"embed": schemes.INT8_WEIGHT, "head": schemes.INT4_WEIGHT_32})
        assert model.embed.weight is not model.head.weight and model.embed.weight.quantizer.layout is None
