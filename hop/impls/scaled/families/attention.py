"""Attention of integers, in two passes over each row of scores. With codes q, k, v less their zero points,

    x_j = (float32(Σ q k_j) · (s_q · scale)) · s_k[j] + bias_j      the sum exact, in int32; -∞ where key j is hidden
    m   = max x_j, over all keys
    e_j = exp(x_j - m)                                              correctly rounded
    c_j = rint(255 · e_j)                                           uint8, ties to even
    y   = (float32(Σ c_j v_j) · (1 / Σ c_j)) · s_v                  both sums exact, in int32

each operation in float32, rounded by itself. s_v is one number for each channel, or for all. Where it changes from
token to token, it is a part of the probability before that is rounded: with V = max s_v over all tokens of a head,
hidden or not,

    y   = (float32(Σ d_j v_j) · (1 / Σ c_j)) · V,                   d_j = rint(255 · (e_j · (s_v[j] / V)))

Where elements of a token have scales in groups, as in 4 bits, a group of k has a sum Σ q k_j of its own, times its
s_k[j]; these products are added in their order, each sum rounded. A group of v has a V of its own, and so a d_j.

Probabilities are divided by the sum of what was rounded, c, and not of e: so the weights add up to one, and a value
that all tokens share comes out as it is; and both sums are integers, whose order is free. A row without a key is 0.

Other operands are dequantized: x = (q̂ k̂ᵀ) · scale + bias, and y = (e · float32(1 / Σ e)) v̂, Σ e as softmax has it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.operand import Operand
from hop.dispatch.operators import ATTENTION, aten
from hop.impls.out_dtype import out_dtype_operator as out_dtype
from hop.impls.scaled.attention_options import Options, options
from hop.impls.scaled.calls import Call, compute_dtype, described, kind, shape, values
from hop.impls.scaled.family import Meaning, Places
from hop.impls.scaled.native_attention import ATTENTION as NATIVE
from hop.impls.scaled.operands import block_of, centered, plain, spread
from hop.numerics import copies, functions, row_sums

_INTEGERS, _FLOATS, _PLAIN = "integers", "floats of 8 or 4 bits", "plain floats"
PAIRS = {
    (_INTEGERS, _INTEGERS, _INTEGERS): "int32 sums, probabilities in uint8",
    (_FLOATS, _FLOATS, _FLOATS): "float32 sums",
    (_PLAIN, _INTEGERS, _INTEGERS): "float32 sums",
    (_PLAIN, _FLOATS, _FLOATS): "float32 sums",
}
"""The kinds of query, key and value that are taken together, and how attention of them is summed."""

MOST_KEYS = 65793
"""Σ c · v stays below 2^31 up to as many, and Σ c below 2^24, so that float32 has it."""

NAMES = ("query", "key", "value")
_SCALES = {
    "query": "tokens, not of their elements",
    "key": "tokens or of groups of their elements, not of single ones",
    "value": "tokens, of groups of their elements, or of channels of all tokens",
}


# ---- what may be asked


def _check(call: Call) -> None:
    q, k, v = call.args[:3]
    kinds: Any = tuple(map(kind, (q, k, v)))
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
            f"scaled: argument 'dropout_p' of {call.op} must be 0, got {dropout}; drop elements of the result instead"
        )
    if asked.mask is not None and asked.is_causal:
        raise RuntimeError(
            f"scaled: {call.op} takes attn_mask or is_causal=True, got both; put the causal mask into attn_mask"
        )


def _check_blocks(call: Call) -> None:
    for name, x in zip(NAMES, call.args[:3], strict=True):
        if x.quantizer.flat or copies.ROWWISE not in x.usages:
            raise ValueError(
                f"scaled: {call.op} of integers reads row-wise copies, in blocks of dimensions, and {name!r} is by "
                f"{x.quantizer} with usages {x.usages}; take one such as hop.presets.INT8_ROW"
            )
        along = block_of(x, copies.ROWWISE)
        allowed = along[-1] == -1 or (name != "query" and along[-1] > 1) or (name == "value" and along[-2] == -1)
        if not allowed:
            rule = _SCALES[name]
            raise ValueError(
                f"scaled: the scales of {name!r} of {call.op} must be those of {rule}, got {x.quantizer}; take one "
                "such as hop.presets.INT8_ROW"
            )
    keys = call.args[1].shape[-2]
    if isinstance(keys, int) and keys > MOST_KEYS:
        raise ValueError(
            f"scaled: {call.op} of integers takes at most {MOST_KEYS} keys, whose sums int32 holds, got {keys}; give "
            "a plain query"
        )


# ---- what it means


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
    e, none, invalid = _exponentials(_masked(_scores(call, q, k), asked))
    c = _rounded(e)
    total = c.to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32).to(torch.float32)
    total = torch.where(invalid, math.nan, torch.where(none, math.inf, total)).reciprocal()

    def weighted(weights: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        y = out_dtype(aten.matmul.default, torch.int32, weights, codes)
        return y.to(torch.float32) * total * _heads(call, scale, v)

    if block_of(call.args[2], copies.ROWWISE)[-2] == -1:
        return weighted(c, codes_v, spread(v.scale, v.block, v.shape))
    parts: list[Tensor] = []
    for codes, scale in zip(_groups(codes_v, v.block[-1], of_v), of_v.split(1, -1), strict=True):
        most = scale.amax(-2, keepdim=True)
        share = _heads(call, torch.where(most > 0, scale / most, 0.0), v).mT
        parts.append(weighted(_rounded(e * share), codes, most))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scores(call: Call, q: Operand, k: Operand) -> Tensor:
    """The scores without mask and bias, float32: the sum over groups of elements of k, in their order."""
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
    """The elements of t that share a scale, one tensor for each."""
    return (t,) if scale.shape[-1] == 1 else t.split(size, -1)


def _of_floats(call: Call) -> Tensor:
    dtype, asked = compute_dtype(call), options(call)
    q, k, v = (values(x, dtype) for x in call.args[:3])
    x = torch.matmul(q, _heads(call, k, k).mT) * asked.scale
    e, none, invalid = _exponentials(_masked(x, asked))
    total = row_sums.sum_of_fractions(e, [-1]) if dtype == torch.float32 else e.sum(-1, keepdim=True)
    total = torch.where(invalid, math.nan, torch.where(none, math.inf, total))
    return torch.matmul(e * total.reciprocal().to(dtype), _heads(call, v, v))


def _heads(call: Call, t: Tensor, whole: Any) -> Tensor:
    """t, of key or value or of their scales, with a head for each of the query's."""
    if not options(call).grouped or tracing.known_equal(t.shape[-3], 1):
        return t
    groups = call.args[0].shape[-3] // whole.shape[-3]
    sizes = [*t.shape[:-2], groups, *t.shape[-2:]]
    return t.unsqueeze(-3).expand(sizes).flatten(-4, -3)


def _masked(x: Tensor, asked: Options) -> Tensor:
    if asked.is_causal:  # aligned top left, as ATen's
        return torch.where(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(), x, -math.inf)
    if asked.mask is None:
        return x
    return torch.where(asked.mask, x, -math.inf) if asked.mask.dtype == torch.bool else x + asked.mask.to(x.dtype)


def _exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - max x) of each row, whether it has no key, and whether it has a NaN or an infinity."""
    most = x.amax(-1, keepdim=True)
    none = most == -math.inf
    invalid = ~(none | most.isfinite())
    return functions.apply("exp", x - torch.where(none, 0.0, most)), none, invalid


def _rounded(e: Tensor) -> Tensor:
    """rint(255 · e), uint8. What is no probability belongs to a row that is NaN anyway, or to a scale below 0."""
    return (e * 255).round().nan_to_num(0.0).clamp(0, 255).to(torch.uint8)


# ---- several processes


def _places(call: Call, ndim: int) -> dict[int, Places]:
    """Batches lie as they do, and heads, where each has a key of its own."""
    shapes = {i: x.shape for i, x in enumerate(call.args[:4]) if isinstance(x, Tensor | Operand)}
    own = [d for d in range(ndim - 2) if not (options(call).grouped and d == ndim - 3)]
    return {i: {d: d - ndim + len(s) for d in own if d - ndim + len(s) >= 0} for i, s in shapes.items()}


MEANINGS = {ATTENTION: Meaning(_attention, places=_places, check=_check, kernels=(NATIVE,))}
