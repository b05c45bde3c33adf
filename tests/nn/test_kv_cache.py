"""KVCache against attention of all tokens at once, in two passes, written here in float64."""

import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop import Quantizer, presets
from hop.nn import KVCache
from hop.nn.attention.attending import attend
from hop.numerics.formats import INT4, INT8

BATCH, HEADS, GROUPS, WIDTH, VALUES, LENGTH, TOKENS = 2, 4, 2, 32, 16, 24, 14
INTEGERS = {"int8": presets.INT8_ROW, "affine": presets.UINT8_ROW_AFFINE, "int4": Quantizer(INT4, (1, 8))}
FLOATS = {"fp8": presets.FP8_ROW, "e5m2": presets.FP8_E5M2_ROW, "mxfp8": presets.MXFP8, "nvfp4": presets.NVFP4_ROW}
ALL = INTEGERS | FLOATS
CHUNKS = (0, 5, 6, 7, 10, 11, 12, 13, TOKENS)


def tokens(count: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the values of some tokens are much larger than those of others."""
    g = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))
    q, k, v = (torch.randn(BATCH, heads, count, width, generator=g) for heads, width in sizes)
    return q, k, v * torch.rand(BATCH, GROUPS, count, 1, generator=g).mul(4).exp()


def cache(quantizer: Quantizer = presets.INT8_ROW, length: int = LENGTH, **options: Any) -> KVCache:
    return KVCache((BATCH, GROUPS, length, WIDTH), quantizer, value_dim=VALUES, **options)


def part(start: int, stop: int, *tensors: Tensor) -> list[Tensor]:
    return [t[:, :, start:stop] for t in tensors]


def two_passes(rule: Quantizer, floats: list[Tensor], seen: Tensor) -> Tensor:
    """Attention of dequantized numbers, in float64, whose probabilities are rounded as those of integers are; of keys
    and values that have come. `seen` is (queries, keys)."""
    integers = rule.format.is_integer
    query, (q, *others) = presets.INT8_ROW if integers else presets.FP8_ROW, floats
    quantized = [hop.quantize(query, q), *(hop.quantize(rule, t) for t in others)]
    y, k, v = (t.dequantize().double() for t in quantized)
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
    scores = torch.where(seen, y @ k.mT / math.sqrt(WIDTH), -math.inf)
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    if not integers:
        return e @ v / e.sum(-1, keepdim=True)
    size = VALUES if rule.block[-1] == -1 else rule.block[-1]
    scale = quantized[2].scale.double().repeat_interleave(size, -1).repeat_interleave(HEADS // GROUPS, 1)
    share = e.unsqueeze(-1) * scale.unsqueeze(-3)  # (batch, heads, queries, keys, channels)
    most = share.amax(-2, keepdim=True)
    d = (255 * share / most).round() / 255
    return (d * most * (v / scale).unsqueeze(-3)).sum(-2) * 1024 / (1024 * e).round().sum(-1, keepdim=True)


def agrees(got: Tensor, want: Tensor, v: Tensor) -> None:
    """float32 and float64 may round to two codes where a probability lies in their middle: in few rows, by one code."""
    most = float(v.abs().max())
    off = (got.double() - want).abs() / most
    assert float(off.max()) <= 2 / 255 and float((off.amax(-1) <= 1e-5).double().mean()) > 0.95


def stored(t: Any) -> list[Tensor]:
    """The bytes of each buffer."""
    return [b.contiguous().view(torch.uint8) for b in t.buffers().values()]


def same(a: KVCache, b: KVCache) -> bool:
    return all(torch.equal(x, y) for x, y in zip(stored_in(a), stored_in(b), strict=True))


def stored_in(c: KVCache) -> list[Tensor]:
    return [*stored(c.key), *stored(c.value), c.length]


@pytest.mark.parametrize("name", ALL)
def test_tokens_one_after_the_other(name: str) -> None:
    """Codes are those of all tokens at once, and attention is that to all that have come."""
    rule, (q, k, v) = ALL[name], tokens()
    own = cache(rule)
    for start, stop in itertools.pairwise(CHUNKS):
        got = own(*part(start, stop, q, k, v))
        seen = torch.ones(stop, stop, dtype=torch.bool).tril()[start:]
        agrees(got, two_passes(rule, [q[:, :, start:stop], *part(0, stop, k, v)], seen), v)
    assert int(own.length) == TOKENS
    for floats, held in ((k, own.key), (v, own.value)):
        for want, got in zip(stored(hop.quantize(rule, floats)), stored(held), strict=True):
            assert torch.equal(got[:, :, :TOKENS], want) and not bool(got[:, :, TOKENS:].any())


@pytest.mark.parametrize("name", INTEGERS)
def test_bits_without_a_cache(name: str) -> None:
    rule, (q, k, v) = INTEGERS[name], tokens()
    codes = [hop.quantize(r, t) for r, t in ((presets.INT8_ROW, q), (rule, k), (rule, v))]
    want = hop.scaled(
        torch.ops.aten.scaled_dot_product_attention.default, q.dtype, *codes, is_causal=True, enable_gqa=True
    )
    assert torch.equal(cache(rule)(q, k, v), want)


def test_keys_and_values_by_their_own_quantizers() -> None:
    q, k, v = tokens()
    own = cache(presets.INT8_ROW, value_quantizer=INTEGERS["int4"], dtype=torch.bfloat16)
    y = own(q.bfloat16(), k, v)
    assert (y.dtype, own.key.dtype, own.value.quantizer) == (torch.bfloat16, torch.bfloat16, INTEGERS["int4"])
    want = cache(presets.INT8_ROW, value_quantizer=INTEGERS["int4"])(q, k, v)
    assert float((y - want).norm() / want.norm()) < 0.02  # bfloat16's rounding, of the query and of the result


def test_positions() -> None:
    """In any order, and over what is there."""
    q, k, v = tokens()
    own, plain = cache(), cache()
    plain.append(*part(0, 10, k, v))
    order = torch.tensor([3, 0, 9, 1, 2, 8, 4, 7, 5, 6])
    own.append(*(t + 1 for t in part(0, 10, k, v)))
    own.append(k[:, :, order], v[:, :, order], order)
    assert same(own, plain)
    at = torch.tensor([4, 5])  # queries at earlier positions see what is up to theirs
    got = own(*part(4, 6, q, k, v), at)
    seen = own.mask(at)
    assert seen.tolist() == [[j <= i for j in range(LENGTH)] for i in (4, 5)] and int(own.length) == 10
    agrees(got, two_passes(presets.INT8_ROW, [q[:, :, 4:6], *part(0, 10, k, v)], seen[:, :10]), v)
    assert own.mask(at, window=3).tolist() == [[i - 3 < j <= i for j in range(LENGTH)] for i in (4, 5)]


def test_what_a_mask_hides() -> None:
    """A batch padded on the left: the second sequence has four tokens less."""
    q, k, v = tokens()
    own, shown = cache(), torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    shown[1, ..., :4] = False
    y = own(q, k, v, mask=shown)
    alone = KVCache((1, GROUPS, LENGTH, WIDTH), value_dim=VALUES)(*(t[1:, :, 4:] for t in (q, k, v)))
    assert float((y[1, :, 4:] - alone[0]).norm() / alone.norm()) < 0.01 and not bool(y[1, :, :4].any())


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_window(name: str) -> None:
    """Tokens slide out; those that come at once see what was held, and each other."""
    rule, window, (q, k, v) = ALL[name], 6, tokens()
    own = cache(rule, window - 1)
    for start, stop in itertools.pairwise((0, 2, 3, 7, 8, 9, TOKENS)):
        first = max(start - (window - 1), 0)
        keys, values = own.slide(*part(start, stop, k, v))
        assert keys.shape[2] == window - 1 + stop - start
        for floats, found in ((k, keys), (v, values)):
            for want, got in zip(stored(hop.quantize(rule, floats[:, :, first:stop])), stored(found), strict=True):
                assert torch.equal(got[:, :, : stop - first], want)
        at, slots = torch.arange(start, stop)[:, None], torch.arange(keys.shape[2]) + first
        seen = (slots <= at) & (slots > at - window)
        want = two_passes(rule, [q[:, :, start:stop], *part(first, stop, k, v)], seen[:, : stop - first])
        agrees(attend(None, q[:, :, start:stop], keys, values, seen), want, v)
    assert int(own.length) == TOKENS


def test_slots_are_taken_in_turn() -> None:
    """The token at position p lies in slot p modulo the size; those above the size stay empty."""
    rule, size, (_, k, v) = presets.INT8_ROW, 5, tokens()
    own, plain = cache(rule, 7), cache(rule, size)
    for start, stop in itertools.pairwise((0, 3, 4, 10, TOKENS)):
        got, want = own.slide(*part(start, stop, k, v), size), plain.slide(*part(start, stop, k, v))
        there = min(start, size) + stop - start
        both = zip(stored(got[0]) + stored(got[1]), stored(want[0]) + stored(want[1]), strict=True)
        assert all(a.shape == b.shape and torch.equal(a[:, :, :there], b[:, :, :there]) for a, b in both)
        last = torch.arange(max(stop - size, 0), stop)
        for found, floats in ((own.key, k), (own.value, v)):
            for held, t in zip(stored(found), stored(hop.quantize(rule, floats[:, :, last])), strict=True):
                assert torch.equal(held[:, :, last % size], t) and not bool(held[:, :, size:].any())
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match=f"size must be from 0 to the cache.s length, 7, got {wrong}"):
            own.slide(*part(0, 1, k, v), wrong)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_put(name: str) -> None:
    """What append writes, where the caller says; the length is the caller's, too."""
    rule, (_, k, v) = ALL[name], tokens()
    own, want = cache(rule), cache(rule)
    want.append(*part(0, 4, k, v))
    keys, values = own.put(*part(0, 4, k, v), torch.tensor([2, 1, 0, 3]), 4)
    assert int(own.length) == 0 and keys.codes.data_ptr() == own.key_codes.data_ptr()
    for got, all_of in ((keys, want.key), (values, want.value)):
        for mine, theirs in zip(stored(got), stored(all_of), strict=True):
            assert mine.shape[2] == 4 and torch.equal(mine[:, :, [2, 1, 0, 3]], theirs[:, :, :4])


def test_cropped_tokens_leave_nothing() -> None:
    """Also not the scale of a large one, by which probabilities would be rounded."""
    q, k, v = tokens()
    own, want = cache(), cache()
    own.append(*part(0, 6, k, v))
    own.append(*(1000 * t for t in part(6, 11, k, v)))
    own.crop(8)
    own.crop(20)
    assert int(own.length) == 8
    own.crop(torch.tensor(6))
    want.append(*part(0, 6, k, v))
    assert same(own, want) and torch.equal(own(*part(6, 7, q, k, v)), want(*part(6, 7, q, k, v)))
    own.reset()
    assert same(own, cache())


def test_sequences_are_selected() -> None:
    q, k, v = tokens()
    own = cache(presets.INT4_32)
    own.append(*part(0, 9, k, v))
    buffer, turned = own.key_codes, torch.tensor([1, 0])
    own.select(turned)
    assert own.key_codes is buffer and torch.equal(
        own.key.dequantize()[:, :, :9], hop.fake_quantize(presets.INT4_32, k[turned])[:, :, :9]
    )
    three = torch.tensor([0, 0, 1])
    own.select(three)
    assert own.shape == (3, GROUPS, LENGTH, WIDTH)
    y = own(*(t[turned][three] for t in part(9, 10, q, k, v)))
    other = cache(presets.INT4_32)
    other.append(*part(0, 9, k, v))
    assert torch.equal(y, other(*part(9, 10, q, k, v))[turned][three])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "mxfp8"])
def test_saved_loaded_and_cast(name: str) -> None:
    q, k, v = tokens()
    own = cache(ALL[name])
    own.append(*part(0, 9, k, v))
    file = io.BytesIO()
    torch.save(own.state_dict(), file)
    file.seek(0)
    other = cache(ALL[name])
    other.load_state_dict(torch.load(file, weights_only=True))
    other.to(torch.bfloat16).half()
    assert same(own, other) and torch.equal(own(*part(9, 10, q, k, v)), other(*part(9, 10, q, k, v)))


HADAMARD = torch.ops.hop.hadamard.default


@pytest.mark.parametrize("name", ALL)
@pytest.mark.quick(3)
def test_rotated_keys(name: str) -> None:
    """Token by token the codes of all at once; queries are rotated each time, so that attention is that of rotated
    tokens in a plain cache, and near that of the tokens as they are."""
    rule, (q, k, v) = ALL[name], tokens()
    own, plain, other = cache(rule, rotated=True), cache(rule), cache(rule)
    turned = [hop.scaled(HADAMARD, torch.float32, t, WIDTH) for t in (q, k)]
    for start, stop in itertools.pairwise(CHUNKS):
        got = own(*part(start, stop, q, k, v))
        assert torch.equal(got, plain(*part(start, stop, *turned, v)))
        near = other(*part(start, stop, q, k, v))
        assert not torch.equal(got, near) and float((got - near).norm() / near.norm()) < (0.3 if "4" in name else 0.1)
    for mine, want in zip(stored(own.key), stored(plain.key), strict=True):
        assert torch.equal(mine, want)
    assert torch.equal(own.value.dequantize(), other.value.dequantize())
    for mine, want in zip(own.slide(*part(0, 1, k, v), 4), plain.slide(*part(0, 1, turned[1], v), 4), strict=True):
        assert all(map(torch.equal, stored(mine), stored(want)))
    slots = torch.tensor([3])
    assert all(
        map(
            torch.equal,
            stored(own.put(*part(2, 3, k, v), slots, 4)[0]),
            stored(plain.put(*part(2, 3, turned[1], v), slots, 4)[0]),
        )
    )


@pytest.mark.parametrize("width", [24, 20, 512])
def test_blocks_of_rotated_keys(width: int) -> None:
    """The largest that divide a head."""
    size = {24: 8, 20: 4, 512: 256}[width]
    x = torch.randn(1, 1, 3, width, generator=torch.Generator().manual_seed(1))
    own = KVCache((1, 1, 4, width), rotated=True)
    assert int(own.rotation) == size and "rotated=True" in repr(own)
    keys, _ = own.append(x, x)
    want = hop.scaled(HADAMARD, presets.INT8_ROW, x, size)
    assert torch.equal(keys.codes[:, :, :3], want.codes) and torch.equal(keys.scale[:, :, :3], want.scale)


def test_rotated_keys_are_saved_as_such() -> None:
    _, k, v = tokens()
    own = cache(rotated=True)
    own.append(k, v)
    state = own.state_dict()
    assert int(state["rotation"]) == WIDTH and "rotation" not in cache().state_dict()
    again = cache(rotated=True)
    again.load_state_dict(state)
    assert same(own, again)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="key_codes are rotated, but this cache has rotated=False"):
            cache().load_state_dict(state, strict=strict)
        with pytest.raises(RuntimeError, match="key_codes are not rotated, but this cache has rotated=True"):
            cache(rotated=True).load_state_dict(cache().state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=r"attention\.key_codes are rotated"):
        torch.nn.ModuleDict({"attention": cache()}).load_state_dict({f"attention.{n}": t for n, t in state.items()})


class Sizes(TorchDispatchMode):
    """The elements of the largest float tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.is_floating_point() and not isinstance(t, hop.QuantizedTensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("name", INTEGERS)
def test_codes_are_read(name: str) -> None:
    """No float tensor has a number for each element of the keys or values."""
    q, k, v = tokens()
    own = KVCache((BATCH, GROUPS, 512, WIDTH), INTEGERS[name], value_dim=VALUES)
    own.append(*part(0, 9, k, v))
    with Sizes() as sizes:
        own(*part(9, 10, q, k, v))
    assert BATCH * HEADS * 512 <= sizes.largest < BATCH * GROUPS * 512 * VALUES


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.quick(3)
def test_compiled_once(name: str, backend: str) -> None:
    """As it fills, and beyond the window; the bits of eager mode, where sums are exact."""
    torch._dynamo.reset()
    q, k, v = tokens()
    own, window = cache(ALL[name], rotated=name != "int4"), cache(ALL[name], 5)
    counter = CompileCounterWithBackend(backend)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        at = window.length.clamp(max=5)
        return own(q, k, v), attend(None, q, *window.slide(k, v), torch.arange(6) <= at)

    compiled, results = torch.compile(step, backend=counter, fullgraph=True), []
    for i in range(TOKENS):
        results.append(compiled(*part(i, i + 1, q, k, v)))
    assert counter.frame_count == 1
    own.reset()
    window.reset()
    for i, (y, z) in enumerate(results):
        for a, b in zip((y, z), step(*part(i, i + 1, q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if name in INTEGERS else 1e-5 * float(v.abs().max()))


@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.full), "fp8"])
@pytest.mark.full
def test_exported(name: str) -> None:
    """With its buffers, which change; saved, loaded, and lowered."""
    q, k, v = tokens()
    own, file = cache(ALL[name], rotated=name != "int4"), io.BytesIO()
    program = torch.export.export(cache(ALL[name], rotated=name != "int4"), tuple(part(0, 1, q, k, v)))
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    file.seek(0)
    lowered = torch.export.load(file).run_decompositions(hop.decompositions())
    assert not any("hop" in str(node.target) for node in lowered.graph.nodes)
    modules = [p.module() for p in (program, loaded, lowered)]
    for i in range(4):
        want, *got = (m(*part(i, i + 1, q, k, v)) for m in (own, *modules))
        for y in got:
            torch.testing.assert_close(y, want, rtol=0, atol=0 if name in INTEGERS else 1e-5 * float(v.abs().max()))


def test_no_gradient_passes_into_it() -> None:
    q, k, v = tokens()
    for own in (cache(), cache(rotated=True)):
        q.grad = None
        y = own(*part(0, 3, q.requires_grad_(), k.requires_grad_(), v.requires_grad_()))
        y.sum().backward()
        assert k.grad is None and v.grad is None and float(q.grad.norm()) > 0


SHAPE = (BATCH, GROUPS, LENGTH, WIDTH)
COLUMNS = Quantizer(INT8, (1, 1, -1, 1))
REFUSED: dict[str, Any] = {
    "three sizes": (ValueError, r"\(batch, heads, length, head_dim\), got \(2, 3, 4\)", lambda: KVCache((2, 3, 4))),
    "integers as dtype": (TypeError, "dtype must be floating point", lambda: KVCache(SHAPE, dtype=torch.int8)),
    "a name": (TypeError, "quantizer must be a Quantizer, got 'int8'", lambda: KVCache(SHAPE, "int8")),
    "channels": (ValueError, "each token by itself.*INT4_32", lambda: KVCache(SHAPE, COLUMNS)),
    "whole": (ValueError, "each token by itself", lambda: KVCache(SHAPE, presets.INT8_TENSOR)),
    "two levels": (ValueError, "each token by itself", lambda: KVCache(SHAPE, presets.NVFP4)),
    "static": (ValueError, "scales found by its rule", lambda: KVCache(SHAPE, presets.INT8_TENSOR_STATIC)),
    "codebook": (ValueError, "integers or floats", lambda: KVCache(SHAPE, Quantizer(presets.STATE8.format, (1, -1)))),
    "values": (ValueError, "value_quantizer must quantize each token", lambda: KVCache(SHAPE, value_quantizer=COLUMNS)),
    "two kinds": (ValueError, "both have integer formats, or both float formats.*int8.*e4m3",
        lambda: KVCache(SHAPE, value_quantizer=presets.FP8_ROW)),
    "rotated": (TypeError, "rotated must be True or False, got 1", lambda: KVCache(SHAPE, rotated=1)),
    "no block": (ValueError, "none of these divides its width, 33", lambda: KVCache((1, 1, 4, 33), rotated=True)),
    "batch": (ValueError, r"key must be .*\(2, 2, T, 32\).* got \(1, 2, 1, 32\)", lambda: appended(k=(1, 2, 1, 32))),
    "T": (ValueError, r"value must be .*one T.* got \(2, 2, 2, 16\)", lambda: appended(v=(2, 2, 2, 16))),
    "dimensions": (ValueError, r"key must be .* got \(2, 2, 32\)", lambda: appended(k=(2, 2, 32))),
    "codes": (TypeError, "key must be a plain tensor",
        lambda: appended(k=hop.quantize(presets.INT8_ROW, torch.ones(2, 2, 1, 32)))),
    "positions": (ValueError, r"positions must be int64 of shape \(1,\), got torch.int32",
        lambda: appended(at=torch.tensor([1]).int())),
    "beyond": (ValueError, "from 0 to 23, got .*24", lambda: appended(at=torch.tensor([24]))),
    "below": (ValueError, "from 0 to 23, got .*-1", lambda: appended(at=torch.tensor([-1]))),
    "full": (ValueError, "25 tokens after 0 do not fit into a length of 24",
        lambda: appended((2, 2, 25, 32), (2, 2, 25, 16))),
}  # fmt: skip


def appended(k: Any = (2, 2, 1, 32), v: Any = (2, 2, 1, 16), at: Tensor | None = None) -> None:
    key, value = (x if isinstance(x, Tensor) else torch.ones(x) for x in (k, v))
    cache().append(key, value, at)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, words, call = REFUSED[name]
    with pytest.raises(error, match=words):
        call()
