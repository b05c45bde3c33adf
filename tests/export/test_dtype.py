"""The dtype of dequantized weights follows every cast of a model: before export, and of a program that was loaded."""

import copy
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets
from hop.export import follow_dtype, lower
from tests.support.files import reloaded

# Said once in a process: what nn.Linear's own operators do with a quantized weight while they are traced.
pytestmark = pytest.mark.filterwarnings("ignore:aten.* QuantizedTensor:UserWarning")
SPELLINGS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "float": (lambda m: m.float(), torch.float32),
    "half": (lambda m: m.half(), torch.float16),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float32), torch.float32),
    "to_keyword": (lambda m: m.to(dtype=torch.float16), torch.float16),
    "to_tensor": (lambda m: m.to(torch.zeros(1)), torch.float32),
    "type": (lambda m: m.type(torch.float32), torch.float32),
    "type_half": (lambda m: m.type(torch.float16), torch.float16),
}


def plain(q: hop.Quantizer) -> nn.Module:
    """nn.Linear, whose weight is quantized."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(hop.quantize(q, layer.weight.detach()), requires_grad=False)
    return model.eval().requires_grad_(False)


def frozen(scheme: hop.Scheme) -> nn.Module:
    """hop.nn.Linear, frozen."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    hop.nn.convert(model, scheme)
    model(torch.randn(2, 64).bfloat16())
    hop.nn.freeze(model)
    return model.eval().requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "int8": lambda: plain(presets.INT8_ROW),
    "int4": lambda: plain(presets.INT4_32),
    "frozen_4w": lambda: frozen(hop.schemes.INT4_WEIGHT_32),
    "frozen_8da4w": lambda: frozen(hop.schemes.INT8_DA_INT4_W),
}


def dequantized(program: Any) -> set[torch.dtype]:
    """The dtypes that its nodes dequantize to."""
    return {n.meta["val"].dtype for n in program.graph.nodes if n.name.startswith("hop_dequantize")}


def checked(program: Any, x: Tensor, want: Tensor) -> None:
    dtype = want.dtype
    assert dequantized(program) <= {dtype}
    for p in (program, reloaded(program), lower(program)):
        got = p.module()(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-8)
    floats = {torch.bfloat16, torch.float16, torch.float64} - {dtype}
    made = [n.meta.get("val") for n in lower(program).graph.nodes if n.op == "call_function"]
    assert not {v.dtype for v in made if isinstance(v, Tensor)} & (floats - {torch.float64})


class TestOurs(unittest.TestCase):
    @parameterized.expand([(f"{m}_{s}", m, s) for m in MODELS for s in SPELLINGS])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_cast_before_export(self, _name, model, spelling):
        cast, dtype = SPELLINGS[spelling]
        module, x = cast(MODELS[model]()), torch.randn(3, 64).to(dtype)
        want = module(x)
        assert want.dtype == dtype
        checked(torch.export.export(module, (x,)), x, want)

    @parameterized.expand([(f"{m}_{s}", m, s) for m in MODELS for s in SPELLINGS])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_cast_after_loading(self, _name, model, spelling):
        """Export in bfloat16, save, load, cast the module of the program, and export it again."""
        cast, dtype = SPELLINGS[spelling]
        module = MODELS[model]()
        program = reloaded(torch.export.export(module, (torch.randn(3, 64).bfloat16(),)))
        again, x = cast(program.module()), torch.randn(3, 64).to(dtype)
        checked(torch.export.export(again, (x,)), x, cast(copy.deepcopy(module))(x))

    @pytest.mark.full
    def test_a_named_dtype_stays(self):
        """What a program names is part of its meaning, as the dtype of hop.scaled and that of autocast."""

        class Named(nn.Module):
            def forward(self, x: Tensor, w: Tensor) -> Tensor:
                return hop.quantized(
                    torch.ops.aten.linear.default, hop.schemes.INT4_WEIGHT_32, x, w, dtype=torch.bfloat16
                )

        x, w = torch.randn(3, 64), torch.randn(8, 64)
        again = reloaded(torch.export.export(Named(), (x.bfloat16(), w.bfloat16()))).module().float()
        assert again(x.bfloat16(), w.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            program = torch.export.export(frozen(hop.schemes.INT4_WEIGHT_32).float(), (x,))
        assert reloaded(program).module()(x).dtype == torch.bfloat16


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
class TestTorchao(unittest.TestCase):
    """Weights of torchao, quantized in bfloat16, which `.float()` leaves there."""

    @parameterized.expand([(f"{c}_{s}", c, s) for c in ("4w", "8da4w") for s in ("float", "type", "to")])
    @pytest.mark.full
    def test_follow_dtype(self, _name, config, spelling):
        from tests.support.vulkan_models import quantized

        cast, dtype = SPELLINGS[spelling]
        model = cast(quantized(nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 8)).bfloat16().eval(), config))
        x = torch.randn(3, 64)
        program = torch.export.export(model, (x,))
        if spelling != "to":
            with pytest.raises(RuntimeError, match="dtype"):
                program.module()(x)
        mended = follow_dtype(program)
        nodes = [n for n in mended.graph.nodes if "dequantize_affine" in str(n.target)]
        assert len(nodes) == (2 if config == "4w" else 4) and {n.meta["val"].dtype for n in nodes} == {dtype}
        want = copy.deepcopy(model)
        for layer in list(want)[::2]:
            layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)  # which its class knows
        assert torch.equal(mended.module()(x), want(x))
        torch.testing.assert_close(
            mended.run_decompositions().module()(x), want(x), rtol=1e-5, atol=1e-2
        )  # its silu is another
