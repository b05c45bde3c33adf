"""The Hadamard transform: its matrix, as a Kronecker product; its sums in their order, in numpy; its gradients."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import hop
from hop import presets
from hop.numerics.hadamard import SIZES, Hadamard

OP = torch.ops.hop.hadamard.default


def matrix(size: int) -> np.ndarray:
    """H / √size in float64."""
    two = np.array([[1.0, 1.0], [1.0, -1.0]])
    return functools.reduce(np.kron, [two] * int(math.log2(size))) / math.sqrt(size)


def by_stages(x: Tensor, size: int) -> Tensor:
    """Each block in place, in float32: elements half a block apart first, neighbors last."""
    y = x.float().numpy().copy().reshape(-1, size)
    half = size // 2
    while half:
        for i in range(0, size, 2 * half):
            a, b = y[:, i : i + half].copy(), y[:, i + half : i + 2 * half].copy()
            y[:, i : i + half], y[:, i + half : i + 2 * half] = a + b, a - b
        half //= 2
    return torch.from_numpy(y * np.float32(1 / math.sqrt(size))).reshape(x.shape)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_matrix(size: int) -> None:
    x = numbers(3, 5, 3 * size)
    want = (x.double().numpy().reshape(-1, size) @ matrix(size)).reshape(x.shape)
    got = hop.scaled(OP, torch.float32, x, size)
    assert torch.equal(got, by_stages(x, size))
    assert float((got.double() - torch.from_numpy(want)).abs().max()) < 1e-5
    np.testing.assert_allclose(Hadamard((1,) * size).matrix.double().numpy(), matrix(size), atol=1e-8)
    back = hop.scaled(OP, torch.float32, got, size)  # it is its own inverse
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 64, 128])
def test_a_row_alone_and_among_others(size: int, dtype: torch.dtype) -> None:
    """The same bits, of numbers of very different sizes; in floats, and in codes without a rounding between."""
    x = (numbers(37, 2 * size) * 2.0 ** (20 * numbers(37, 1, seed=1))).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    whole = hop.scaled(OP, dtype, x, size)
    assert torch.equal(whole, by_stages(x, size).to(dtype))
    assert torch.equal(torch.cat([hop.scaled(OP, dtype, row, size) for row in x.split(1)]), whole)
    codes, want = hop.scaled(OP, presets.INT8_ROW, x, size), hop.quantize(presets.INT8_ROW, by_stages(x, size))
    assert torch.equal(codes.codes, want.codes) and torch.equal(codes.scale, want.scale)


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.quick(2)
def test_its_derivative_is_itself(size: int) -> None:
    x, grad = numbers(3, 64).requires_grad_(), numbers(3, 64, seed=1)
    for output in (torch.float32, presets.FP8_ROW):
        y = hop.scaled(OP, output, x, size)
        y = y if isinstance(output, torch.dtype) else hop.dequantize(y)
        (got,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(got, hop.scaled(OP, torch.float32, grad, size), rtol=1e-5, atol=1e-5)
    double = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: hop.scaled(OP, torch.float64, t, size), double, check_forward_ad=True)


def test_by_itself() -> None:
    x = numbers(2, 3, 16)
    assert torch.equal(torch.ops.hop.hadamard(x, 8), by_stages(x, 8))
    assert torch.equal(torch.func.vmap(lambda t: torch.ops.hop.hadamard(t, 8))(x), by_stages(x, 8))


@pytest.mark.parametrize(("shape", "size"), [((2, 12), 8), ((2, 12), 3), ((2, 12), 12), ((), 4), ((2, 512), 512)])
def test_sizes_that_do_not_fit(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match=rf"must be one of \(4, .*, 256\) that divides the last dimension.*got {size}"):
        hop.scaled(OP, torch.float32, torch.ones(shape), size)
    with pytest.raises(ValueError, match=rf"size must be one of .* got {size}"):
        torch.ops.hop.hadamard(torch.ones(shape), size)


def test_bad_descriptions_are_refused() -> None:
    from hop.kernels.cpu import rows

    x = torch.ones(2, 12)
    if not hasattr(torch.ops.hop_native, "rows"):
        pytest.skip("needs the native kernels")
    for size in (8.0, 0.0, 3.0, -4.0, 512.0, math.nan, math.inf, 4.5):
        words = rows.description(rows.Operation("hadamard", number=size, sums=1), torch.float32)
        with pytest.raises(RuntimeError, match="a power of two from 4 to 256 that divides the row's length"):
            torch.ops.hop_native.rows.default(x, None, None, None, None, None, words)
