"""Products and lookups of weights with negative scales, as hop.quantize_weight(..., signed=True) finds them."""

import numpy as np
import pytest
import torch
from torch import Tensor

import hop
from hop import presets
from hop.kernels.cpu import native
from hop.numerics.quantizer import Quantizer
from tests import levels

aten = torch.ops.aten
LINEAR = aten.linear.default


def weights(q: Quantizer, rows: int, cols: int) -> tuple[hop.QuantizedTensor, np.ndarray]:
    """A weight of negative and positive scales, and its values in float64."""
    t = hop.quantize_weight(q, torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)), signed=True)
    scale = t.buffers()["scale"].double().numpy()
    assert 0.2 < (scale < 0).mean() < 0.8
    bytes_ = t.buffers()["codes"].numpy()
    codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(rows, cols).astype(np.int64)
    codes -= 16 * (codes > 7)
    return t, codes * np.repeat(scale, cols // scale.shape[1], 1)


@pytest.mark.parametrize("level", levels.HERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("q", [presets.INT4_32, presets.INT4_128], ids=["32", "128"])
def test_products(q: Quantizer, packed: bool, level: str) -> None:
    """For few and many rows, floats and integers, against float64."""
    weight, values = weights(q, 48, 256)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 256)
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for lhs in (None, presets.INT8_ROW_AFFINE):
                with native.use(level):
                    w = hop.pack(weight) if packed else weight
                    a = x.to(dtype) if lhs is None else hop.quantize(lhs, x.to(dtype))
                    got = hop.scaled(LINEAR, dtype, a, w)
                read: Tensor = a if lhs is None else hop.dequantize(a)  # type: ignore[assignment]
                want = read.double().numpy() @ values.T
                assert np.abs(got.double().numpy() - want).max() < bound * np.abs(want).max(), (rows, dtype, lhs)


def test_other_routes() -> None:
    """Lookups, compiled and exported products."""
    weight, values = weights(presets.INT4_32, 48, 64)
    index = torch.tensor([[1, 47], [0, 20]])
    found = hop.scaled(aten.embedding.default, torch.float32, weight, index)
    assert np.allclose(found.double().numpy(), values[index.numpy()], atol=1e-6)

    model = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 48)).eval(), "int4")
    x = torch.randn(7, 64)
    want = model(x)
    exact = x.double() @ hop.dequantize(model[0].weight).double().t() + model[0].bias.double()
    assert (want - exact).abs().max() < 1e-5 * exact.abs().max()
    assert torch.allclose(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want, atol=1e-5)
    program = torch.export.export(model, (x,))
    assert torch.allclose(program.module()(x), want, atol=1e-5)
    assert torch.allclose(program.run_decompositions().module()(x), want, atol=1e-5)
