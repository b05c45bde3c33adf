"""TOSA's sums, means, pools and concatenations against Python's own integers: every code equal."""

import pytest
import torch
from torch import Tensor

import hop
from hop.numerics.formats import INT8, INT16
from hop.numerics.integer.functions import TosaAdd, TosaAveragePool, TosaConcatenation, TosaMean
from hop.numerics.integer.tosa import rescaled
from tests.support import integer_functions as exact

aten = torch.ops.aten
FORMATS = {torch.int8: INT8, torch.int16: INT16}
ROOM = {torch.int8: 20, torch.int16: 15}


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    info = torch.iinfo(dtype)
    torch.manual_seed(3)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


def within(values: list[int], dtype: torch.dtype) -> list[int]:
    info = torch.iinfo(dtype)
    return [exact.within(v, info.min, info.max) for v in values]


def scales(*numbers: float) -> list[Tensor]:
    return [torch.tensor(n) for n in numbers]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("numbers", [(0.021, 0.037, 0.046), (0.5, 1e-3, 0.25), (0.01, 0.01, 3e-4)])
def test_add(dtype: torch.dtype, numbers: tuple[float, ...]) -> None:
    x, y = drawn(dtype, 2, 500).unbind(0)
    own, its, out = scales(*numbers)
    zeros = (3, -9, 5) if dtype == torch.int8 else (0, 0, 0)
    for sign in (1, -1):
        more = {"other": y, "other_scale": its, "other_zero_point": zeros[1], "subtracts": sign < 0}
        found = TosaAdd().codes(x, own, zeros[0], out, zeros[2], FORMATS[dtype], **more)
        real = [float(s) for s in (own, its, out)]
        wanted = []
        for a, b in zip(x.tolist(), y.tolist(), strict=True):
            if sign > 0:
                n = exact.tosa_add(a - zeros[0], b - zeros[1], real, ROOM[dtype])
            else:  # the difference of both terms
                twice, room = 2 * max(real[:2]), 2 ** ROOM[dtype]
                p, q = (
                    exact.tosa_scale(v - z, *exact.tosa_multiplier(s / twice * room))
                    for v, z, s in ((a, zeros[0], real[0]), (b, zeros[1], real[1]))
                )
                n = exact.tosa_scale(p - q, *exact.tosa_multiplier(twice / (real[2] * room)))
            wanted.append(n + zeros[2])
        assert found.tolist() == within(wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_mean(dtype: torch.dtype) -> None:
    x, (own, out) = drawn(dtype, 300, 7), scales(0.021, 0.0093)
    zero = 11 if dtype == torch.int8 else 0
    found = TosaMean().codes(x, own, zero, out, 0, FORMATS[dtype], rest=([1],), dims=[1])
    m = exact.tosa_multiplier(float(own) / (float(out) * 7))
    assert found.tolist() == within([exact.tosa_scale(sum(r) - 7 * zero, *m) for r in x.tolist()], dtype)


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (2, 5)])
def test_average_pool(kernel: tuple[int, int]) -> None:
    x, (own, out) = drawn(torch.int8, 3, 10, 15), scales(0.021, 0.0093)
    given = {"op": aten.avg_pool2d.default, "rest": (list(kernel),), "dims": [1, 2]}
    found = TosaAveragePool().codes(x, own, 11, own, 11, INT8, **given)
    windows = x.unfold(1, kernel[0], kernel[0]).unfold(2, kernel[1], kernel[1]).flatten(-2).flatten(0, -2)
    wanted = [exact.tosa_average([v - 11 for v in w]) + 11 for w in windows.tolist()]
    assert found.flatten().tolist() == wanted
    other = TosaAveragePool().codes(x, own, 11, out, -4, INT8, **given)
    m = exact.tosa_multiplier(float(own) / float(out))
    assert other.flatten().tolist() == within([exact.tosa_scale(v - 11, *m) - 4 for v in wanted], torch.int8)


def test_average_pool_of_edges() -> None:
    """What pads the picture does not count."""
    x, (own,) = drawn(torch.int8, 1, 5, 5), scales(0.021)
    given = {"op": aten.avg_pool2d.default, "rest": ([3, 3], [2, 2], [1, 1], False, False), "dims": [1, 2]}
    found = TosaAveragePool().codes(x, own, 11, own, 11, INT8, **given)
    for i in range(3):
        for j in range(3):
            inside = x[0, max(0, 2 * i - 1) : 2 * i + 2, max(0, 2 * j - 1) : 2 * j + 2].flatten().tolist()
            assert found[0, i, j] == exact.tosa_average([v - 11 for v in inside]) + 11
    with pytest.raises(ValueError, match=r"TosaAveragePool: .* count_include_pad False"):
        TosaAveragePool().codes(x, own, 11, own, 11, INT8, **{**given, "rest": ([3, 3], [2, 2], [1, 1])})


def test_concatenation() -> None:
    x, y = drawn(torch.int8, 2, 40).unbind(0)
    own, its = scales(0.021, 0.0371)
    found = TosaConcatenation().codes(x, own, -5, own, -5, INT8, others=[(y, its, -9)])
    m = exact.tosa_multiplier(float(its) / float(own))
    assert torch.equal(found[:40], x)
    assert found[40:].tolist() == within([exact.tosa_scale(v + 9, *m) - 5 for v in y.tolist()], torch.int8)


def test_ties_go_up() -> None:
    """Where gemmlowp rounds a tie below 0 away from it."""
    n = torch.tensor([-3, -1, 1, 3])
    assert rescaled(n, torch.tensor(0.5, dtype=torch.float64)).tolist() == [-1, 0, 1, 2]


def test_of_scaled() -> None:
    """A call of hop.scaled gives the convention's codes, and uint8 is refused."""
    q = hop.Quantizer(INT8, (-1, -1), scale=hop.scale_rules.Static(affine=True, requantize=TosaMean()))
    x = hop.quantize(hop.presets.INT8_TENSOR, torch.randn(4, 6))
    units = {"output_scale": torch.full((1, 1), 0.01), "output_zero_point": torch.full((1, 1), 3, dtype=torch.int8)}
    y = hop.scaled(aten.mean.dim, q, x, [1], True, **units)
    own = x.scale.reshape(())
    wanted = TosaMean().codes(x.codes, own, 0, torch.tensor(0.01), 3, INT8, rest=([1], True), dims=[1])
    assert torch.equal(y.codes, wanted)
    with pytest.raises(TypeError, match=r"TosaAdd: codes must be torch.int8 or torch.int16"):
        z = torch.zeros(2, dtype=torch.uint8)
        TosaAdd().codes(z, own, 0, own, 0, INT8, other=z, other_scale=own, other_zero_point=0)
