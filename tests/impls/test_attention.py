"""Attention of scaled, held against integers of Python, numpy's float32 and mpmath's exponential."""

import functools
import itertools
import math
import operator
from importlib import import_module
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import hop
from hop import Quantizer, presets
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import scaled_buffers
from hop.impls.scaled.families import attention
from hop.numerics.formats import INT4, INT8, INT16
from hop.tensor.quantized import operand as operand_of
from tests.impls.test_scaled_rows import float32

SDPA = torch.ops.aten.scaled_dot_product_attention.default
CHANNEL = Quantizer(INT8, (1, -1, 1))  # a scale for each channel of each head
VALUES = {"channel": CHANNEL, "tensor": presets.INT8_TENSOR, "token": presets.INT8_ROW}


def made(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def exponential(x: np.float32) -> np.float32:
    if np.isnan(x):
        return x
    with mpmath.workprec(300):
        return np.float32(float32(mpmath.exp(mpmath.mpf(float(x)))) if x > -math.inf else 0.0)


def logarithm(x: np.float32) -> np.float32:
    if not x > 0:
        return np.float32(math.nan if np.isnan(x) else -math.inf)
    with mpmath.workprec(300):
        return np.float32(float32(mpmath.log(mpmath.mpf(float(x)))) if x < math.inf else x)


def code(x: np.float32, steps: int = 255) -> int:
    """rint(steps · x), ties to even, of a probability."""
    y = x * np.float32(steps)
    return min(max(round(float(y)), 0), steps) if np.isfinite(y) else 0


def one_row(scores: list[np.float32], v: np.ndarray, of_v: np.ndarray, per_token: bool) -> np.ndarray:
    """One row of the result; v holds integers of Python."""
    most, width = max(scores, default=np.float32(-math.inf)), v.shape[1]
    if any(np.isnan(s) for s in scores) or most == math.inf:
        return np.full(width, np.float32(math.nan))
    if most == -math.inf:
        return np.zeros(width, np.float32)
    e = [exponential(s - most) for s in scores]
    if per_token:
        moved = [s + logarithm(u) for s, u in zip(scores, of_v[:, 0], strict=True)]
        top = np.float32(math.nan) if any(map(np.isnan, moved)) else max(moved)
        weights = [code(exponential(t - top)) for t in moved]
        share = np.float32(1) / np.float32(sum(code(x, 1024) for x in e)) * np.float32(1024 / 255)
        factors = np.full(width, exponential(top - most) * share)
    else:
        weights = [code(x) for x in e]
        factors = None
    sums = [np.float32(sum(w * row[i] for w, row in zip(weights, v.tolist(), strict=True))) for i in range(width)]
    if factors is not None:
        return np.array([n * f for n, f in zip(sums, factors, strict=True)], np.float32)
    inverse = np.float32(1) / np.float32(sum(weights))
    return np.array([n * inverse * u for n, u in zip(sums, of_v[0], strict=True)], np.float32)


def numbers(x: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Codes less zero points, and the scale of each, of an operand in blocks of whole dimensions or single elements."""
    codes = x.codes.to(torch.int64)
    if x.quantizer.format == INT4:  # two to a byte, the first in the lower bits
        codes = (torch.stack([codes & 15, codes >> 4], -1).flatten(-2) + 8) % 16 - 8
    codes = codes - (x.zero if isinstance(x.zero, int) else x.zero.to(torch.int64))
    whole = x.scale.repeat_interleave(max(x.quantizer.block[-1], 1), -1)[..., : x.shape[-1]]
    return codes.numpy(), whole.expand(x.shape).numpy()


def starts(x: Any) -> list[int]:
    """Where the groups of elements of a token begin, and the end."""
    size = x.quantizer.block[-1]
    return [*range(0, x.shape[-1], x.shape[-1] if size in (-1, 1) else size), x.shape[-1]]


def oracle(
    q: Any, k: Any, v: Any, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention of quantized (B, H, L, E), (B, G, S, E) and (B, G, S, V)."""
    (qs, of_q), (ks, of_k), (vs, of_v) = (numbers(operand_of(x)) for x in (q, k, v))
    factor = np.float32(1 / math.sqrt(qs.shape[-1]) if scale is None else scale)
    batch, heads, length, _ = qs.shape
    keys, per_token = ks.shape[-2], v.scale.shape[-2] > 1
    y = np.empty((*qs.shape[:-1], vs.shape[-1]), np.float32)
    for b, h, i in itertools.product(range(batch), range(heads), range(length)):
        g, scores = h // (heads // ks.shape[1]), []
        for j in range(keys):
            parts = []
            for at, end in itertools.pairwise(starts(k)):
                n = sum(int(x) * int(z) for x, z in zip(qs[b, h, i, at:end], ks[b, g, j, at:end], strict=True))
                parts.append(np.float32(n) * (of_q[b, h, i, 0] * factor) * of_k[b, g, j, at])
            x = functools.reduce(operator.add, parts)
            if mask is not None:
                own = mask.expand(batch, heads, length, keys)[b, h, i, j].item()
                x = (x if own else np.float32(-math.inf)) if mask.dtype == torch.bool else x + np.float32(own)
            scores.append(np.float32(-math.inf) if causal and j > i else x)
        for at, end in itertools.pairwise(starts(v)):
            y[b, h, i, at:end] = one_row(scores, vs[b, g][:, at:end], of_v[b, g][:, at:end], per_token)
    return torch.from_numpy(y)


def attended(q: Any, k: Any, v: Any, *args: Any, output: Any = torch.float32, **kwargs: Any) -> Tensor:
    """By the kernel that takes it, and by the reference: the same bits."""
    got = hop.scaled(SDPA, output, q, k, v, *args, **kwargs)
    want = scaled_buffers.reference(
        SDPA, output, None, None, *encode([operand_of(x) for x in (q, k, v)]), *args, **kwargs
    )
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    return got


MASKS: dict[str, Any] = {
    "none": None,
    "bool": made(2, 1, 5, 9, seed=7) > 0,
    "bias": made(4, 5, 9, seed=8),
    "hidden": torch.tensor([[True] * 9, [False] * 9, [True, False] * 4 + [True], [False] * 8 + [True], [True] * 9]),
    "infinite": torch.where(made(5, 9, seed=9) > 0.5, -math.inf, made(5, 9, seed=10)),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.quick(2)
def test_integers(mask: str, values: str) -> None:
    q = hop.quantize(presets.INT8_ROW, made(2, 4, 5, 12, seed=1, scale=2))
    k = hop.quantize(presets.INT8_ROW, made(2, 4, 9, 12, seed=2))
    v = hop.quantize(VALUES[values], made(2, 4, 9, 7, seed=3))
    given = () if MASKS[mask] is None else (MASKS[mask],)
    assert torch.equal(attended(q, k, v, *given), oracle(q, k, v, *given))


@pytest.mark.parametrize("values", VALUES)
def test_causal_and_grouped(values: str) -> None:
    q = hop.quantize(presets.INT8_ROW, made(1, 4, 9, 12, seed=1))
    k = hop.quantize(presets.INT8_TENSOR, made(1, 2, 6, 12, seed=2))
    v = hop.quantize(VALUES[values], made(1, 2, 6, 16, seed=3))
    got = attended(q, k, v, None, 0.0, True, scale=0.7, enable_gqa=True)
    assert torch.equal(got, oracle(q, k, v, causal=True, scale=0.7))


@pytest.mark.parametrize("mask", ["none", "bool", "hidden"])
@pytest.mark.parametrize("format", [INT4, INT8])
@pytest.mark.quick(3)
def test_groups_of_elements(format: Any, mask: str) -> None:
    """The last group of v is cut off."""
    q = hop.quantize(presets.INT8_ROW, made(2, 4, 5, 12, seed=1, scale=2))
    k = hop.quantize(Quantizer(format, (1, 4)), made(2, 2, 9, 12, seed=2) * torch.arange(1, 13))
    v = hop.quantize(Quantizer(format, (1, 8)), made(2, 2, 9, 20, seed=3) * torch.arange(1, 21))
    got = attended(q, k, v, *(() if MASKS[mask] is None else (MASKS[mask],)), enable_gqa=True)
    assert torch.equal(got, oracle(q, k, v, MASKS[mask]))


def test_zero_points_and_scales_of_tensors() -> None:
    q = hop.quantize(presets.INT8_ROW_AFFINE, made(1, 2, 3, 8, seed=1) + 1)
    k = hop.quantize(presets.UINT8_ROW_AFFINE, made(1, 2, 6, 8, seed=2) - 1)
    v = hop.quantize(presets.INT8_TENSOR_AFFINE, made(1, 2, 6, 4, seed=3) + 2)
    assert torch.equal(attended(q, k, v), oracle(q, k, v))


def test_rows_that_are_not_numbers() -> None:
    q, k = (hop.quantize(presets.INT8_ROW, made(1, 1, 4, 8, seed=i)) for i in (1, 2))
    v = hop.quantize(CHANNEL, made(1, 1, 4, 8, seed=3))
    inf, nan = math.inf, math.nan
    bias = torch.tensor([[0, nan, 0, 0], [inf, 0, 0, 0], [-inf] * 4, [-inf, nan, -inf, -inf]])
    got = attended(q, k, v, bias)
    assert torch.equal(got.isnan(), oracle(q, k, v, bias).isnan())
    assert bool(got[0, 0, [0, 1, 3]].isnan().all()) and bool((got[0, 0, 2] == 0).all())


def test_a_row_without_a_key_is_zero() -> None:
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    q, k, v = (made(1, 1, 4, 8, seed=i) for i in range(3))
    of = lambda p, x: hop.quantize(p, x)  # noqa: E731
    for operands in (
        [of(presets.INT8_ROW, x) for x in (q, k, v)],
        [of(presets.FP8_ROW, x) for x in (q, k, v)],
        [q, of(presets.INT8_ROW, k), of(presets.INT8_ROW, v)],
        [q.double(), of(presets.INT8_ROW, k), of(presets.INT8_ROW, v)],
    ):
        assert torch.equal(hop.scaled(SDPA, torch.float32, *operands, hidden), torch.zeros(1, 1, 4, 8))
    empty = hop.quantize(presets.INT8_ROW, made(1, 1, 0, 8))
    assert torch.equal(hop.scaled(SDPA, torch.float32, of(presets.INT8_ROW, q), empty, empty), torch.zeros(1, 1, 4, 8))


@pytest.mark.parametrize("pair", list(attention.PAIRS)[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats(pair: tuple[str, ...], dtype: torch.dtype) -> None:
    """Within what float32 sums of so many products may be off by, twice."""
    rules = {"integers": presets.INT8_ROW, "floats of 8 or 4 bits": presets.FP8_ROW, "plain floats": None}
    floats = [made(2, 4, 5, 16, seed=1), made(2, 2, 9, 16, seed=2), made(2, 2, 9, 8, seed=3)]
    given = [x.to(dtype) if rules[n] is None else hop.quantize(rules[n], x) for n, x in zip(pair, floats, strict=True)]
    real = [
        x.double() if isinstance(x, Tensor) and not hasattr(x, "quantizer") else x.dequantize().double() for x in given
    ]
    bias = made(5, 9, seed=4).to(torch.float32)
    for mask in (None, bias, bias > 0):
        got = hop.scaled(SDPA, torch.float64, *given, mask, enable_gqa=True)
        want = SDPA(*real, bias.double() if mask is bias else mask, enable_gqa=True).nan_to_num(0.0)
        wide = dtype == torch.float64 and pair[0] == "plain floats"
        unit = 2.0**-50 if wide else 2.0**-23
        assert float((got - want).abs().max()) <= (16 + 9 + 8) * unit * float(want.abs().max()) * 4


def test_what_all_tokens_share_comes_out() -> None:
    """Weights add up to one, whatever rounding does to each; those of tokens within what rounding does to all."""
    q, k = (hop.quantize(presets.INT8_ROW, made(1, 2, 64, 16, seed=i, scale=3)) for i in (1, 2))
    for name, rule in VALUES.items():
        v = hop.quantize(rule, torch.full((1, 2, 64, 4), 1.5))
        got = hop.scaled(SDPA, torch.float32, q, k, v)
        off = 64 / 2 * (1 / 255 + 1 / 1024) if name == "token" else 2.0**-22
        torch.testing.assert_close(got, torch.full_like(got, 1.5), rtol=off, atol=0)


@pytest.mark.parametrize("width", [-1, 4])
def test_hidden_values_change_nothing(width: int) -> None:
    """Also where their scales are larger than those of the tokens that are seen."""
    q, k = (hop.quantize(presets.INT8_ROW, made(1, 2, n, 16, seed=n)) for n in (5, 9))
    rule, seen = Quantizer(INT8, (1, width)), torch.arange(9) < 6
    v = made(1, 2, 9, 8, seed=3)
    other = torch.where(seen.unsqueeze(-1), v, v * 100)
    got, want = (hop.scaled(SDPA, torch.float32, q, k, hop.quantize(rule, x), seen) for x in (other, v))
    assert torch.equal(got, want)


def test_small_values_of_likely_tokens() -> None:
    """A token that takes most of the probability and has a small value leaves the others all of the 255 steps."""
    q, k = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 65, 16)
    k[..., 0, :] = 4 / 16**0.5
    v = made(1, 1, 65, 8, seed=4)
    v[..., 0, :] *= 1e-4
    want = SDPA(q.double(), k.double(), v.double())
    codes = [hop.quantize(presets.INT8_ROW, x) for x in (q, k, v)]
    error = (hop.scaled(SDPA, torch.float32, *codes) - want).norm() / want.norm()
    assert float(error) < 0.02


def test_error_to_floats() -> None:
    q, k, v = (made(1, 4, 128, 64, seed=i) for i in range(3))
    want = SDPA(q.double(), k.double(), v.double())
    for name, rule in VALUES.items():
        codes = (hop.quantize(p, x) for p, x in ((presets.INT8_ROW, q), (presets.INT8_ROW, k), (rule, v)))
        error = (hop.scaled(SDPA, torch.float64, *codes) - want).norm() / want.norm()
        assert float(error) < 0.02, name


# ---- what is refused

ROW = hop.quantize(presets.INT8_ROW, made(1, 2, 4, 8))
GROUPS = hop.quantize(Quantizer(INT8, (1, 4)), made(1, 2, 4, 8))
WIDE = Quantizer(INT16, (1, -1))
ELEMENTS = hop.quantize(Quantizer(INT8, (1, 1)), made(1, 2, 4, 8))
REFUSED: dict[str, tuple[Any, ...]] = {
    "value plain": (ValueError, "'value' by torch.float32", (ROW, ROW, made(1, 2, 4, 8))),
    "key in fp8": (ValueError, "'key' by .*e4m3", (ROW, hop.quantize(presets.FP8_ROW, made(1, 2, 4, 8)), ROW)),
    "key of elements": (ValueError, "scales of 'key'.*not of single ones", (ROW, ELEMENTS, ROW)),
    "query in 16 bits": (ValueError, "at most 8 bits.*'query'", (hop.quantize(WIDE, made(1, 2, 4, 8)), ROW, ROW)),
    "value in 16 bits": (ValueError, "at most 8 bits.*'value'", (ROW, ROW, hop.quantize(WIDE, made(1, 2, 4, 8)))),
    "query in groups": (ValueError, "scales of 'query'.*of tokens", (GROUPS, ROW, ROW)),
    "value of elements": (ValueError, "scales of 'value'.*of groups", (ROW, ROW, ELEMENTS)),
    "dropout": (ValueError, "'dropout_p'.* must be 0, got 0.5", (ROW, ROW, ROW, None, 0.5)),
    "two masks": (RuntimeError, "got both", (ROW, ROW, ROW, torch.ones(4, 4, dtype=torch.bool), 0.0, True)),
    "integers as mask": (TypeError, "'attn_mask'.* must be bool or floating point",
        (ROW, ROW, ROW, torch.ones(4, 4).int())),
    "mask quantized": (ValueError, "'attn_mask'", (ROW, ROW, ROW, hop.quantize(presets.INT8_ROW, made(4, 4)))),
    "widths": (RuntimeError, r"got \(1, 2, 4, 8\), \(1, 2, 4, 6\)",
        (ROW, hop.quantize(presets.INT8_ROW, made(1, 2, 4, 6)), ROW)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, words, args = REFUSED[name]
    with pytest.raises(error, match=words):
        hop.scaled(SDPA, torch.float32, *args)


def test_too_many_keys() -> None:
    k = hop.quantize(presets.INT8_ROW, torch.zeros(1, 65794, 1))
    with pytest.raises(ValueError, match="at most 65793 keys"):
        hop.scaled(SDPA, torch.float32, k[:, :1], k, k)


def test_to_integer_leaves_it() -> None:
    """What a program computes with plain probabilities is not rounded to 8 bits by a rewrite."""
    import_module("torch.ao.quantization.fx._decomposed")  # registers quantized_decomposed

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dq = torch.ops.quantized_decomposed.dequantize_per_tensor.default
            q = torch.ops.quantized_decomposed.quantize_per_tensor.default
            y = dq(x, 0.1, 0, -128, 127, torch.int8)
            return q(SDPA(y, y, y), 0.1, 0, -128, 127, torch.int8)

    x = torch.randint(-128, 128, (1, 2, 4, 8), dtype=torch.int8)
    program = torch.export.export(Model(), (x,))
    assert torch.equal(hop.export.to_integer(program).program.module()(x), program.module()(x))


def test_out_dtype_draws_nothing() -> None:
    x = made(1, 2, 4, 8)
    assert torch.equal(hop.out_dtype(SDPA, torch.float32, x, x, x), SDPA(x, x, x))
    with pytest.raises(ValueError, match=r"'dropout_p'.* must be 0, got 0\.5"):
        hop.out_dtype(SDPA, torch.float32, x, x, x, None, 0.5)
