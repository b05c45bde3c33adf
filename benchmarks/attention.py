"""int8 attention against PyTorch's in floats: full, causal, one query with a long cache; and a cache."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved
from hop import presets

aten = torch.ops.aten
_DTYPES = tuple(dict.fromkeys((FLOAT, torch.float32)))  # of the peers

# heads, heads of keys, queries, keys, width, causal, and the targets for our time relative to bfloat16's and float32's
CASES = (
    (12, 12, 128, 128, 64, False, ("<= 0.8", "<= 0.8")),
    (12, 12, 512, 512, 64, False, ("<= 0.7", "<= 0.8")),
    (12, 12, 512, 512, 64, True, ("", "")),
    (12, 12, 2048, 2048, 64, False, ("<= 0.65", "<= 0.8")),
    (32, 8, 1, 4096, 128, False, ("<= 0.6", "<= 0.5")),
)


def attention() -> Iterator[Row]:
    """Codes and scales are precomputed. Values have one scale per token, as in "int8"."""
    torch.manual_seed(0)
    for heads, groups, queries, keys, width, causal, targets in CASES:
        q, k, v = (torch.randn(1, h, n, width) for h, n in ((heads, queries), (groups, keys), (groups, keys)))
        codes = [hop.quantize(presets.INT8_ROW, x) for x in (q, k, v)]
        options: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads != groups}

        functions = [_ours(codes, options), *(_theirs(q.to(t), k.to(t), v.to(t), options) for t in _DTYPES)]
        own, *theirs = interleaved(functions)
        case = f"int8, {heads} heads of {width}, {queries} by {keys}{', causal' if causal else ''}"
        target = targets[torch.float32 == FLOAT]
        for dtype, ms in zip(_DTYPES, theirs, strict=True):
            yield Row("attention", case, own, str(dtype).removeprefix("torch."), ms, target if dtype == FLOAT else "")
    yield from _cached()


def _ours(codes: Sequence[Tensor], options: dict[str, Any]) -> Callable[[], Tensor]:
    op = aten.scaled_dot_product_attention.default
    return lambda: hop.scaled(op, FLOAT, *codes, **options)


def _theirs(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: functional.scaled_dot_product_attention(q, k, v, **options)


def _cached() -> Iterator[Row]:
    """Append the last token to a hop.nn.KVCache, and attend with its query.

    The peer is a cache of floats without copies of keys for grouped queries: query heads that share a key head become
    rows.
    """
    torch.manual_seed(0)
    heads, groups, keys, width = 32, 8, 4096, 128
    q, k, v = (torch.randn(1, n, m, width).to(FLOAT) for n, m in ((heads, 1), (groups, keys), (groups, keys)))
    own = hop.nn.KVCache((1, groups, keys, width), dtype=FLOAT)
    own.append(k, v)
    at, mask = torch.tensor([keys - 1]), torch.ones(1, 1, 1, keys, dtype=torch.bool)
    key, value = (x[:, :, -1:].clone() for x in (k, v))

    def theirs() -> None:
        k.index_copy_(2, at, key)
        v.index_copy_(2, at, value)

    def attended() -> Tensor:
        theirs()
        return functional.scaled_dot_product_attention(q.view(1, groups, heads // groups, width), k, v, mask)

    with torch.inference_mode():
        case = f"int8 cache, {groups} heads of {width}, {keys} keys"
        ours, half = interleaved([lambda: own.append(key, value, at), theirs])
        yield Row("attention", f"{case}: one more", ours, NAME, half)
        ours, half = interleaved([lambda: own(q, key, value, at), attended])
        yield Row("attention", f"{case}: one more, and {heads} queries", ours, NAME, half, "<= 0.6")


GROUPS = [attention]
