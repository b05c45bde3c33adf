"""Functions, norms and softmax in other runtimes: by the runtime's own operators, or by ours, with the bits of eager
mode; tables of codes in either case."""

import tempfile
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import presets

aten = torch.ops.aten
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    **{name: (getattr(aten, name).default, (), {}) for name in ("exp", "exp2", "tanh", "erf", "sigmoid", "silu")},
    **{name: (getattr(aten, name).default, (), {}) for name in ("log", "rsqrt", "gelu", "hardswish")},
    "gelu by tanh": (aten.gelu.default, (), {"approximate": "tanh"}),
    "silu_mul": (torch.ops.hop.silu_mul.default, (torch.linspace(-2, 2, 32),), {}),
    "hadamard": (torch.ops.hop.hadamard.default, (16,), {}),
    "softmax": (aten.softmax.int, (-1,), {}),
    "log_softmax": (aten.log_softmax.int, (-1,), {}),
    "layer_norm": (aten.layer_norm.default, ([32], torch.linspace(-1, 2, 32), torch.linspace(1, 3, 32)), {}),
    "rms_norm": (aten.rms_norm.default, ([32], torch.linspace(-1, 2, 32)), {}),
}


class Between(nn.Module):
    """All of them, as floats and as codes of rows."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for name in self.names:
            op, args, kwargs = CALLS[name]
            y = x.abs() + 0.01 if name in ("log", "rsqrt") else x
            args = tuple(a.expand(x.shape) if isinstance(a, Tensor) and name == "silu_mul" else a for a in args)
            found.append(hop.scaled(op, torch.float32, y, *args, **kwargs))
            q = hop.scaled(op, presets.INT8_ROW, y, *args, **kwargs)
            found += [q.codes, q.scale]  # type: ignore[attr-defined]
        return tuple(found)


def some() -> Tensor:
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(7)) * 3
    x[1] *= 1e-3
    return x


def by_onnxruntime(program: Any, x: Tensor, exact: bool) -> list[Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with tempfile.TemporaryDirectory() as folder:
        hop.export.to_onnx(program, exact=exact).save(f"{folder}/model.onnx")
        session = runtime.InferenceSession(f"{folder}/model.onnx")
        return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def by_executorch(program: Any, x: Tensor, exact: bool) -> list[Tensor]:
    pytest.importorskip("executorch")
    from executorch.runtime import Runtime

    buffer = hop.export.to_executorch(program, exact=exact).buffer
    return [y.clone() for y in Runtime.get().load_program(buffer).load_method("forward").execute([x])]


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,))


RUNTIMES = {"onnxruntime": by_onnxruntime, "executorch": by_executorch}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
class TestElsewhere(unittest.TestCase):
    @parameterized.expand(RUNTIMES)
    def test_ours(self, runtime):
        """0 of all differ."""
        x, model = some(), Between(tuple(CALLS))
        for got, want in zip(RUNTIMES[runtime](exported(model, x), x, True), model(x), strict=True):
            assert torch.equal(got, want)

    @parameterized.expand(RUNTIMES)
    def test_of_the_runtime(self, runtime):
        """Floats to some units in the last place of the largest of a row, and codes to one."""
        x, model = some(), Between(tuple(CALLS))
        for got, want in zip(RUNTIMES[runtime](exported(model, x), x, False), model(x), strict=True):
            if want.dtype == torch.int8:
                assert (got.int() - want.int()).abs().max() <= 1 and (got != want).float().mean() < 0.01
            else:
                assert ((got - want).abs() <= 2.0**-19 * want.abs().amax(-1, keepdim=True)).all()

    @parameterized.expand(RUNTIMES)
    def test_tables_of_codes(self, runtime):
        q = presets.INT8_TENSOR_STATIC_AFFINE
        model: Any = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8), nn.Sigmoid()).eval()
        last = hop.Scheme(q, presets.INT8_ROW, q)
        hop.nn.convert(model, {"*": last})
        hop.nn.calibrate(model, [some()], progress=False)
        hop.nn.freeze(model)

        class Codes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return model(x).codes

        want = Codes()(some())
        for exact in (False, True):
            (got,) = RUNTIMES[runtime](exported(Codes(), some()), some(), exact)
            assert torch.equal(got, want) and len(want.unique()) > 8
