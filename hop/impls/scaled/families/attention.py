"""Integer attention, in two passes over each row of scores.

With q, k, v the codes minus their zero points,

    x_j = (float32(Σ q k_j) · (s_q · scale)) · s_k[j] + bias_j      exact int32 sum; -∞ where key j is masked
    m   = max x_j over all keys
    e_j = exp(x_j - m)                                              correctly rounded
    c_j = rint(255 · e_j)                                           uint8, ties to even
    y   = (float32(Σ c_j v_j) · (1 / Σ c_j)) · s_v                  both sums exact, in int32

Each operation is rounded to float32 separately. s_v is one scale per channel, or one for all. If it varies by token, it
moves into the exponent, and each row of weights has its own maximum:

    t_j = x_j + log(s_v[j])                                         log correctly rounded; -∞ where s_v[j] <= 0
    n   = max t_j
    d_j = rint(255 · exp(t_j - n))                                  uint8
    y   = float32(Σ d_j v_j) · (exp(n - m) · ((1 / Σ c_j) · K)),    c_j = rint(1024 · e_j), K = 1024 / 255

So a token with most of the probability and small values, such as the first token of many texts, does not leave only a
few of the 255 steps to the others; and masked tokens have no effect.

If elements of a token have scales in groups, as with 4 bits, each group of k has its own sum Σ q k_j, times its s_k[j];
these products are added in order, rounding each sum. Each group of v has its own t, n and d.

With scales per channel, weighted sums are divided by the sum of the rounded c, not of e, so the weights add up to one
and a value shared by all tokens is reproduced. Both sums are integers, independent of their order. A row without keys
is 0.

Other operands are dequantized: x = (q̂ k̂ᵀ) · scale + bias, and y = (e · float32(1 / Σ e)) v̂, with Σ e as in softmax.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.dispatch.operators import ATTENTION, aten
from hop.impls.out_dtype import out_dtype_operator as out_dtype
from hop.impls.scaled.calls import Call, compute_dtype, described, kind, shape, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.native_attention import ATTENTION as NATIVE
from hop.impls.scaled.native_attention import Options, options
from hop.impls.scaled.operands import block_of, centered, plain, spread
from hop.numerics import copies, functions, row_sums

_INTEGERS, _FLOATS, _PLAIN = "integers", "floats of 8 or 4 bits", "plain floats"
PAIRS = {
    (_INTEGERS, _INTEGERS, _INTEGERS): "int32 sums, probabilities in uint8",
    (_FLOATS, _FLOATS, _FLOATS): "float32 sums",
    (_PLAIN, _INTEGERS, _INTEGERS): "float32 sums",
    (_PLAIN, _FLOATS, _FLOATS): "float32 sums",
}
"""The supported kinds of (query, key, value), with the arithmetic of each."""

MOST_KEYS = 65793
"""Up to this many keys Σ c · v is below 2^31, and Σ c in steps of 255 below 2^24, which float32 represents."""

_STEPS = 1024
"""Steps of the probabilities that are only summed, not multiplied by values."""

_SHARE = float(torch.tensor(_STEPS / 255))  # float32

NAMES = ("query", "key", "value")
_SCALES = {
    "query": "tokens, not of their elements",
    "key": "tokens or of groups of their elements, not of single ones",
    "value": "tokens, of groups of their elements, or of channels of all tokens",
}


# ---- argument checks


def _check(call: Call) -> None:
    q, k, v = call.args[:3]
    kinds = tuple(map(kind, (q, k, v)))
    if kinds not in PAIRS:
        got = ", ".join(f"{name!r} by {described(x)}" for name, x in zip(NAMES, (q, k, v), strict=True))
        supported = "; ".join(f"{a} with {b} and {c}" for a, b, c in PAIRS)
        raise ValueError(f"scaled: {call.op} takes {supported}; got {got}; quantize them by formats of one kind")
    _check_shapes(call)
    _check_options(call)
    if kinds == (_INTEGERS,) * 3:
        _check_blocks(call)


def _check_shapes(call: Call) -> None:
    q, k, v = (tuple(x.shape) for x in call.args[:3])
    fits = min(map(len, (q, k, v))) >= 2 and q[-1] == k[-1] and k[-2] == v[-2] and q[-1] >= 1
    if fits and call.kwargs.get("enable_gqa", False):
        fits = min(map(len, (q, k, v))) >= 3 and k[-3] >= 1 and k[-3] == v[-3] and q[-3] % k[-3] == 0
    if not fits:
        raise RuntimeError(
            f"scaled: {call.op} takes (..., L, E), (..., S, E) and (..., S, V), E at least 1, and with enable_gqa=True "
            f"heads of query that those of key and value divide; got {q}, {k} and {v}"
        )


def _check_options(call: Call) -> None:
    asked = options(call)
    dropout = call.args[4] if len(call.args) > 4 else 0.0
    if dropout != 0:
        raise ValueError(
            f"scaled: argument 'dropout_p' of {call.op} must be 0, got {dropout}; apply dropout to the result instead"
        )
    if asked.mask is not None and asked.is_causal:
        raise RuntimeError(
            f"scaled: {call.op} takes attn_mask or is_causal=True, got both; put the causal mask into attn_mask"
        )


def _check_blocks(call: Call) -> None:
    for name, x in zip(NAMES, call.args[:3], strict=True):
        if x.quantizer.format.bits > 8:
            raise ValueError(
                f"scaled: {call.op} of integers takes codes of at most 8 bits, whose sums fit int32, but {name!r} has "
                f"{x.quantizer}; use one such as hop.presets.INT8_ROW"
            )
        if x.quantizer.flat or copies.ROWWISE not in x.usages:
            raise ValueError(
                f"scaled: {call.op} of integers reads row-wise copies, in blocks of dimensions, but {name!r} has "
                f"{x.quantizer} with usages {x.usages}; use one such as hop.presets.INT8_ROW"
            )
        along = block_of(x, copies.ROWWISE)
        allowed = along[-1] == -1 or (name != "query" and along[-1] > 1) or (name == "value" and along[-2] == -1)
        if not allowed:
            rule = _SCALES[name]
            raise ValueError(
                f"scaled: the scales of {name!r} of {call.op} must be those of {rule}, got {x.quantizer}; use one "
                "such as hop.presets.INT8_ROW"
            )
    keys = call.args[1].shape[-2]
    if isinstance(keys, int) and keys > MOST_KEYS:
        raise ValueError(
            f"scaled: {call.op} of integers takes at most {MOST_KEYS} keys, whose sums fit int32, got {keys}; give "
            "a plain query"
        )


# ---- computation


def _attention(call: Call) -> Tensor:
    if tracing.known_equal(call.args[1].shape[-2], 0):
        sizes = shape(call.op, call.args, call.kwargs)
        return torch.zeros(sizes, dtype=compute_dtype(call), device=call.device)
    if all(kind(x) == _INTEGERS for x in call.args[:3]):
        return _of_integers(call)
    return _of_floats(call)


def _of_integers(call: Call) -> Tensor:
    q, k, v = (plain(x, copies.ROWWISE) for x in call.args[:3])
    asked, codes_v, of_v = options(call), _heads(call, centered(v), v), _of_groups(v)
    x = _masked(_scores(call, q, k), asked)
    row = _exponentials(x)

    def total(steps: int) -> Tensor:
        whole = _rounded(row.e, steps).sum(-1, keepdim=True, dtype=torch.int32).to(torch.float32)
        return torch.where(row.invalid, math.nan, torch.where(row.none, math.inf, whole))

    def weighted(weights: Tensor, codes: Tensor) -> Tensor:
        weights = weights.to(torch.uint8)
        return out_dtype(aten.matmul.default, torch.int32, weights, codes).to(torch.float32)

    if block_of(call.args[2], copies.ROWWISE)[-2] == -1:
        y = weighted(_rounded(row.e, 255), codes_v) * total(255).reciprocal()
        return y * _heads(call, spread(v.scale, v.block, v.shape), v)
    share = total(_STEPS).reciprocal() * _SHARE
    parts: list[Tensor] = []
    for codes, scale in zip(_groups(codes_v, v.block[-1], of_v), of_v.split(1, -1), strict=True):
        logs = torch.where(scale <= 0, -math.inf, functions.apply("log", scale))
        exponentials = _exponentials(x + _heads(call, logs, v).mT)
        gap = functions.apply("exp", torch.where(row.none, 0.0, exponentials.most - row.most))
        parts.append(weighted(_rounded(exponentials.e, 255), codes) * (gap * share))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scores(call: Call, q: Operand, k: Operand) -> Tensor:
    """The scores before mask and bias, float32: the sum over groups of k's elements, in order."""
    of_q, of_k = _of_groups(q) * options(call).scale, _of_groups(k)
    keys, scales = (_heads(call, t, k) for t in (centered(k), of_k))
    x: Tensor | None = None
    operands = (_groups(t, k.block[-1], of_k) for t in (centered(q), keys))
    for query, key, scale in zip(*operands, scales.split(1, -1), strict=True):
        n = out_dtype(aten.matmul.default, torch.int32, query, key.mT).to(torch.float32) * of_q * scale.mT
        x = n if x is None else x + n
    assert x is not None
    return x


def _of_groups(x: Operand) -> Tensor:
    """The scales of tokens, for each group of their elements: (..., S or 1, groups)."""
    return spread(x.scale, (*x.block[:-1], -1), x.shape)


def _groups(t: Tensor, size: int, scale: Tensor) -> tuple[Tensor, ...]:
    """Split t into the elements that share a scale."""
    return (t,) if scale.shape[-1] == 1 else t.split(size, -1)


def _of_floats(call: Call) -> Tensor:
    dtype, asked = compute_dtype(call), options(call)
    q, k, v = (values(x, dtype) for x in call.args[:3])
    x = torch.matmul(q, _heads(call, k, k).mT) * asked.scale
    e, _, none, invalid = _exponentials(_masked(x, asked))
    total = row_sums.sum_of_fractions(e, [-1]) if dtype == torch.float32 else e.sum(-1, keepdim=True)
    total = torch.where(invalid, math.nan, torch.where(none, math.inf, total))
    return torch.matmul(e * total.reciprocal().to(dtype), _heads(call, v, v))


def _heads(call: Call, t: Tensor, whole: Tensor | Operand) -> Tensor:
    """Expand t, made from keys or values or their scales, to one head for each query head."""
    if not options(call).grouped or tracing.known_equal(t.shape[-3], 1):
        return t
    groups = call.args[0].shape[-3] // whole.shape[-3]
    sizes = [*t.shape[:-2], groups, *t.shape[-2:]]
    return t.unsqueeze(-3).expand(sizes).flatten(-4, -3)


def _masked(x: Tensor, asked: Options) -> Tensor:
    if asked.is_causal:  # aligned top left, as in ATen
        return torch.where(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), x, -math.inf)
    if asked.mask is None:
        return x
    return torch.where(asked.mask, x, -math.inf) if asked.mask.dtype == torch.bool else x + asked.mask.to(x.dtype)


class _Row(NamedTuple):
    """For each row of scores, (..., S or 1): exp(x - max x), max x, whether all keys are masked, and whether a score is
    NaN or infinite.
    """

    e: Tensor
    most: Tensor
    none: Tensor
    invalid: Tensor


def _exponentials(x: Tensor) -> _Row:
    most = x.amax(-1, keepdim=True)
    none = most == -math.inf
    invalid = ~(none | most.isfinite())
    return _Row(functions.apply("exp", x - torch.where(none, 0.0, most)), most, none, invalid)


def _rounded(e: Tensor, steps: int) -> Tensor:
    """rint(steps · e) as int32. Values outside 0..1 occur only in rows that become NaN."""
    return (e * steps).round().nan_to_num(0.0).clamp(0, steps).to(torch.int32)


# ---- DTensor


def _places(call: Call, ndim: int) -> dict[int, Places]:
    """Batch dimensions, and heads unless grouped, keep their sharding."""
    shapes = {i: x.shape for i, x in enumerate(call.args[:4]) if isinstance(x, Tensor | Operand)}
    own = [d for d in range(ndim - 2) if not (options(call).grouped and d == ndim - 3)]
    return {i: {d: d - ndim + len(s) for d in own if d - ndim + len(s) >= 0} for i, s in shapes.items()}


MEANINGS = {ATTENTION: Meaning(_attention, places=_places, check=_check, kernels=(NATIVE,))}
