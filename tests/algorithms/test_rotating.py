"""rotate: the transform against its matrix in float64, where it folds, and models that keep what they compute."""

import copy
import math
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.algorithms import Rotation, gptq, rotate
from hop.numerics.hadamard import Hadamard
from hop.numerics.schemes import MXFP4_DYNAMIC, NVFP4_DYNAMIC, Scheme
from tests.algorithms.test_smoothing import Block, in_floats, outliers

BATCHES = [outliers(seed) for seed in (1, 2, 3)]
ALWAYS = Rotation(always=True)


def sylvester(n: int) -> Tensor:
    """H by doubling, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class TestHadamard(unittest.TestCase):
    @parameterized.expand([(str(n), n) for n in (4, 8, 16, 32, 64, 128, 256)])
    def test_every_size_is_orthogonal(self, _name, n):
        signs = tuple(1 if (i * i) % 3 else -1 for i in range(n))
        hadamard, x = Hadamard(signs), torch.randn(5, 2 * n, generator=torch.Generator().manual_seed(0))
        wanted = torch.diag(torch.tensor(signs, dtype=torch.float64)) @ sylvester(n) / math.sqrt(n)
        assert torch.allclose(wanted @ wanted.t(), torch.eye(n, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(hadamard.matrix.double(), wanted, rtol=1e-7)
        assert torch.allclose(hadamard.apply(x).double(), x.double() @ torch.block_diag(wanted, wanted), atol=1e-5)
        assert torch.allclose(hadamard.invert(hadamard.apply(x)), x, atol=1e-5)


class TestSizes(unittest.TestCase):
    @parameterized.expand(
        [
            ("mx", Rotation(), MXFP4_DYNAMIC, 384, None, 32),
            ("nv", Rotation(), NVFP4_DYNAMIC, 384, None, 16),
            ("weights", Rotation(), Scheme(None, presets.INT4_64), 384, None, 64),
            ("rows", Rotation(), Scheme(presets.INT8_ROW, presets.INT8_ROW), 384, None, 128),
            ("head", Rotation(), MXFP4_DYNAMIC, 384, 16, 16),
            ("odd", Rotation(), MXFP4_DYNAMIC, 36, None, 4),
            ("given", Rotation(size=8), MXFP4_DYNAMIC, 384, None, 8),
            ("does_not_fit", Rotation(size=64), MXFP4_DYNAMIC, 96, None, None),
            ("none", Rotation(), MXFP4_DYNAMIC, 31, None, None),
        ]
    )
    def test_size(self, _name, settings, scheme, channels, head, wanted):
        found = settings.hadamard(scheme, channels, head)
        assert (None if found is None else len(found.signs)) == wanted
        assert found is None or wanted == 16 or found == settings.hadamard(scheme, channels, head)

    def test_seeds(self):
        one, other = (Rotation(seed=seed).hadamard(MXFP4_DYNAMIC, 64) for seed in (0, 1))
        assert one != other and Rotation(seed=1).hadamard(MXFP4_DYNAMIC, 64) == other


class TestRotate(unittest.TestCase):
    @parameterized.expand(
        [
            ("sdpa", "layer", "sdpa", "relu", False),
            ("matmul", "rms", "matmul", "gated", False),
            ("grouped", "rms_module", "grouped", "gelu", True),
        ]
    )
    @pytest.mark.quick(3)
    def test_the_model_computes_the_same(self, _name, norm, attention, mlp, post):
        block = Block(norm, post, attention, mlp).eval().requires_grad_(False)
        model = rotate(copy.deepcopy(block), "mxfp4", BATCHES, settings=ALWAYS)
        wanted = block(BATCHES[0])
        assert torch.allclose(in_floats(model, BATCHES[0]), wanted, atol=1e-4 * float(wanted.abs().max()))
        rows = {row.name: row for row in model.rotation_report}
        assert all(row.size for row in rows.values())
        folded = {name for name, row in rows.items() if row.folded_into}
        assert folded == (set() if attention == "grouped" else {"o"})
        for name, row in rows.items():
            assert (model.get_submodule(name).input_transform is None) == (name in folded) and bool(row.note) != (
                name in folded
            )

    def test_values_are_rotated_within_heads(self):
        """Rows of the value projection are those of float64, and the last projection takes them back."""
        block = Block().eval().requires_grad_(False)
        model = rotate(copy.deepcopy(block), "mxfp4", BATCHES, settings=ALWAYS)
        r = torch.diag(torch.tensor(Hadamard().signs).double()) @ sylvester(16) / 4
        whole = torch.block_diag(r, r, r, r)
        assert model.rotation_report[3].size == 16 and model.rotation_report[3].folded_into == "v"
        assert torch.allclose(model.o.weight.double(), block.o.weight.double() @ whole, atol=1e-6)
        assert torch.allclose(model.v.bias.double(), block.v.bias.double() @ whole, atol=1e-6)
        hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).double()
        x = model.v.input_transform(hidden.float()).double()
        assert torch.allclose(
            x @ model.v.weight.double().t(), hidden @ (whole.t() @ block.v.weight.double()).t(), atol=1e-4
        )

    def test_linear_before_linear(self):
        model = (
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
            .eval()
            .requires_grad_(False)
        )
        done = rotate(copy.deepcopy(model), "mxfp4", BATCHES, settings=ALWAYS)
        rows = {row.name: row for row in done.rotation_report}
        assert rows["1"].folded_into == "0" and "so a rotation cannot fold into it" in rows["3"].note
        wanted = model(BATCHES[0])
        assert torch.allclose(in_floats(done, BATCHES[0]), wanted, atol=1e-4 * float(wanted.abs().max()))

    @parameterized.expand(["mxfp4", "nvfp4", "int8_static"])
    @pytest.mark.quick(2)
    def test_errors_are_those_of_layers(self, scheme):
        """Before and after are what the layer does on the data, and it is rotated only where that is better."""
        layer = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
        x, wanted = torch.cat(BATCHES), layer(torch.cat(BATCHES))
        signal = (wanted - layer[0].bias).double().square().sum()
        (row,) = rotate(copy.deepcopy(layer), scheme, BATCHES).rotation_report
        for settings in (None, ALWAYS):
            model = copy.deepcopy(layer)
            if settings:
                model = rotate(model, scheme, BATCHES, settings=settings)
                row = model.rotation_report[0]
            done = hop.quantize_(model, scheme, calibrate=BATCHES, weights="rule")
            lost = float((done(x) - wanted).double().square().sum() / signal)
            assert (row.after if settings else row.before) == pytest.approx(lost, rel=0.02)
        (row,) = rotate(copy.deepcopy(layer), scheme, BATCHES).rotation_report
        assert (row.size > 0) == (row.after < row.before) and bool(row.size) != (
            "it does not reduce the error" in row.note
        )

    @pytest.mark.full
    def test_then_gptq_saved_and_exported(self):
        block = Block(post=True, mlp="gelu").eval().requires_grad_(False)
        model = gptq(rotate(copy.deepcopy(block), "mxfp4", BATCHES), "mxfp4", BATCHES)
        assert all(row.error <= row.nearest for row in model.gptq_report)
        wanted = block(BATCHES[0])
        plain = hop.quantize_(copy.deepcopy(block), "mxfp4")
        assert (model(BATCHES[0]) - wanted).norm() < (plain(BATCHES[0]) - wanted).norm()
        other = hop.quantize_(Block(post=True, mlp="gelu").eval(), "mxfp4")
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(BATCHES[0]), model(BATCHES[0]))
        program = torch.export.export(model, (BATCHES[0],))
        lowered: Any = program.run_decompositions(hop.decompositions()).module()
        assert torch.equal(program.module()(BATCHES[0]), model(BATCHES[0]))
        assert torch.allclose(lowered(BATCHES[0]), model(BATCHES[0]), atol=0.05)

    def test_errors(self):
        for call, error, said in (
            (lambda: rotate(Block(), "mxfp4", []), ValueError, "rotate: batches is empty"),
            (lambda: rotate(Block(), "mxfp4", BATCHES, settings=32), TypeError, "settings must be a Rotation"),
            (lambda: rotate(3, "mxfp4", BATCHES), TypeError, "rotate: model must be"),
            (lambda: rotate(Block(), "mxfp4", [BATCHES[0] * math.nan]), ValueError, "the input of layer 'q' has NaN"),
            (lambda: Rotation(size=12), ValueError, "size must be one of"),
            (lambda: Rotation(seed=0.5), TypeError, "seed must be"),
            (lambda: Rotation(always=1), TypeError, "always must be"),
        ):
            with pytest.raises(error, match=said):
                call()
        (row,) = rotate(nn.Sequential(nn.Linear(31, 8)).eval(), "int4", [torch.randn(4, 31)]).rotation_report
        assert "divides its 31 channels" in row.note
