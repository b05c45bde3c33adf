"""HopCache: what models say with it and without a cache, in batches, beams and windows; and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hop
from hop import Quantizer, presets
from hop.nn.attention.attending import attend
from hop.nn.attention.kv_cache import KVCache
from hop.numerics.formats import INT4
from tests.integrations.models import NEEDED, QUIET

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
transformers: Any = pytest.importorskip("transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402

from hop.integrations import HopCache  # noqa: E402
from hop.integrations.cache import MARK  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)
CODES, WINDOW = "codes", 6
INT4_16 = Quantizer(INT4, (1, 16))
# Of the largest logit. What 8-bit floats lose beside a cache is what float32 sums do, up to a code of a query or a key
# that lies in the middle of two. Probabilities of integers are rounded by the largest scale of the values that have
# come, which a run without a cache takes from all tokens: their last bit may differ.
ALLOWED = {"fp8": (presets.FP8_ROW, 0.003), "int8": (presets.INT8_ROW, 0.03), "int4": (INT4_16, 0.1)}


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers calls it. What comes without a cache is quantized as a cache would."""
    if not isinstance(key, hop.QuantizedTensor):
        key, value = (hop.quantize(module.config.rule, t) for t in (key, value))
    causal = query.shape[2] > 1 and attention_mask is None
    y = attend(None, query, key, value, attention_mask, scale=kwargs["scaling"], is_causal=causal)
    return y.transpose(1, 2).contiguous(), None


setattr(attention, MARK, True)
transformers.AttentionInterface.register(CODES, attention)
transformers.AttentionMaskInterface.register(CODES, sdpa_mask)


def model(name: str, rule: Quantizer = presets.INT8_ROW, implementation: str = CODES) -> Any:
    """A small random one. Gemma's layers attend to a window, to all tokens, and to a window."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(  # noqa: C408
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        attn_implementation=implementation,
    )
    if name == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        more: Any = {"sliding_window": WINDOW, "layer_types": types, "query_pre_attn_scalar": 16}
        made = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **more))
    made.config.rule = rule
    return made.eval().requires_grad_(False)


MODELS = ("llama", "gemma")
IDS = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(1))


def said(m: Any, cache: Any, ids: Tensor = IDS, steps: tuple[int, ...] = (9, *[1] * 11), mask: Any = None) -> Tensor:
    """The logits of further tokens, which come in such steps."""
    logits, start = [], cache.get_seq_length()
    for count in steps:
        stop = start + count
        own = {} if mask is None else {"attention_mask": mask[:, :stop]}
        logits.append(m(ids[:, start:stop], past_key_values=cache, **own).logits)
        start = stop
    return torch.cat(logits, 1)


def agree(got: Tensor, want: Tensor, allowed: float) -> None:
    """In the logits, and in the tokens that are said, where those are not a tie."""
    limit = allowed * float(want.abs().max())
    assert float((got - want).abs().max()) <= limit
    first, second = want.topk(2).values.unbind(-1)
    clear = first - second > 2 * limit
    assert bool(clear.any()) and torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", ALLOWED)
@pytest.mark.quick(2)
def test_as_without_a_cache(rule: str, name: str) -> None:
    """A prompt, longer than the window, and tokens after it, one by one; and all in parts."""
    quantizer, allowed = ALLOWED[rule]
    m = model(name, quantizer)
    want = m(IDS, use_cache=False).logits
    for steps in ((9, *[1] * 11), (2, 1, 1, 5, 7, 1, 3)):
        cache = HopCache(m, 24, quantizer)
        agree(said(m, cache, steps=steps), want, allowed)
        assert cache.get_seq_length() == 20 and cache.batch_size == 2 and cache.get_max_length() == 24


def rotated(name: str) -> Any:
    """A model whose attention rotates queries and keys."""
    return hop.quantize_(model(name, implementation="sdpa"), {"*": None}, attention="int8_rotated")


@pytest.mark.parametrize("name", MODELS)
def test_rotated_keys(name: str) -> None:
    """The cache goes by the model's attention; what is said is what is said without one."""
    m, plain = rotated(name), model(name)
    want = m(IDS, use_cache=False).logits
    assert not torch.equal(want, plain(IDS, use_cache=False).logits)
    for steps in ((9, *[1] * 11), (2, 1, 1, 5, 7, 1, 3)):
        cache = HopCache(m, 24)
        agree(said(m, cache, steps=steps), want, ALLOWED["int8"][1])
        assert all(layer.cache.rotated for layer in cache.layers)
    with hop.nn.scheme(lambda role: None):  # what a cache holds is read as it is
        without = said(m, HopCache(m, 24))
    assert torch.equal(without, said(m, HopCache(m, 24)))
    by_name = model(name, implementation="hop_rotated")  # without schemes: int8 beside integers
    assert torch.equal(said(by_name, HopCache(by_name, 24)), said(m, HopCache(m, 24)))


def test_keys_of_another_rotation_are_refused() -> None:
    m = rotated("llama")
    cache = HopCache(m, 24)
    m.set_attn_implementation("hop")
    with pytest.raises(ValueError, match="holds keys that are rotated, but the model's attention is now 'hop'"):
        m(IDS, past_key_values=cache)
    plain = HopCache(m, 24)
    m.set_attn_implementation("hop_rotated")
    with pytest.raises(ValueError, match="keys that are not rotated, but the model's attention is now 'hop_rotated'"):
        m(IDS, past_key_values=plain)
    hop.nn.convert(m, {"*": None}, attention={"*.layers.0.*": "int8", "*": "int8_rotated"})
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn' rotates queries and keys, and that of .*layers\.0.* does not"
    ):
        HopCache(m, 24)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hidden", [range(4), range(5, 9)], ids=["left", "right"])
def test_a_batch_with_padding(name: str, hidden: range) -> None:
    """Of the prompt of the first sequence."""
    quantizer, allowed = ALLOWED["fp8"]
    m, mask = model(name, quantizer), torch.ones_like(IDS)
    mask[0, list(hidden)] = 0
    want = m(IDS, attention_mask=mask, use_cache=False).logits
    got = said(m, HopCache(m, 24, quantizer), mask=mask)
    agree(got[mask.bool()], want[mask.bool()], allowed)


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_given_the_codes(name: str) -> None:
    m, seen = model(name), []
    watched = lambda module, q, k, v, mask, **kwargs: seen.append((k, v)) or attention(module, q, k, v, mask, **kwargs)  # noqa: E731
    setattr(watched, MARK, True)
    transformers.AttentionInterface.register("watched", watched)
    transformers.AttentionMaskInterface.register("watched", sdpa_mask)
    m.set_attn_implementation("watched")
    cache = HopCache(m, 24, presets.INT8_ROW, INT4_16)
    said(m, cache, steps=(3, 1))
    assert len(seen) == 6 and all(type(t) is hop.QuantizedTensor for pair in seen for t in pair)
    key, value = seen[4]  # of the second layer, at the last token
    held = cache.layers[1].cache
    assert key.codes is held.key_codes and value.codes is held.value_codes and value.quantizer == INT4_16
    assert tuple(key.shape) == (2, 2, 24, 16) and tuple(seen[3][0].shape[2:]) == (
        (7, 16) if name == "gemma" else (24, 16)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(2)
def test_generate(name: str) -> None:
    """Greedily, with padding, and by beams, which reorder the cache."""
    quantizer, _ = ALLOWED["fp8"]
    m, mask = model(name, quantizer), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    for beams in (1, 3):
        options: Any = {
            "max_new_tokens": 10,
            "do_sample": False,
            "num_beams": beams,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        want = m.generate(IDS[:, :9], attention_mask=mask, use_cache=False, **options)
        cache = HopCache(m, 24, quantizer)
        got = m.generate(IDS[:, :9], attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(got, want) and cache.batch_size == 2 * beams


def test_cropped() -> None:
    """Tokens that are taken back leave nothing."""
    m = model("llama")
    cache, want = HopCache(m, 24), HopCache(m, 24)
    said(m, cache, steps=(7, 4, 1))
    said(m, want, steps=(7,))
    cache.crop(-5)
    cache.crop(0)
    assert cache.get_seq_length() == 7
    assert torch.equal(said(m, cache, steps=(1, 2)), said(m, want, steps=(1, 2)))
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(said(m, cache), said(m, HopCache(m, 24)))
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or below, got 3"):
        cache.crop(3)


def test_a_window_is_cropped_until_it_slides() -> None:
    m = model("gemma")
    cache, want = HopCache(m, 24), HopCache(m, 24)
    said(m, cache, steps=(3, 2))
    said(m, want, steps=(3,))
    cache.crop(-2)
    assert torch.equal(said(m, cache, steps=(1, 4)), said(m, want, steps=(1, 4)))
    assert not cache.is_croppable and HopCache(model("llama"), 24).is_croppable
    with pytest.raises(RuntimeError, match="has processed 8 tokens, and those before its window of 6 are gone"):
        cache.crop(-1)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_come_and_go(name: str) -> None:
    m, ids = model(name), IDS[[1, 1, 0, 0]]
    cache, want = HopCache(m, 24), HopCache(m, 24)
    said(m, cache, steps=(9,))
    said(m, want, ids, steps=(9,))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    torch.testing.assert_close(said(m, cache, ids, (1, 1)), said(m, want, ids, (1, 1)), rtol=0, atol=1e-4)
    cache.batch_select_indices(torch.tensor([0, 2]))
    want.batch_select_indices(torch.tensor([1, 3]))
    torch.testing.assert_close(said(m, cache, ids[::2], (1,)), said(m, want, ids[::2], (1,)), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"key must be .*\(2, 2, T, 16\).*got \(4, 2, 1, 16\)"):
        said(m, cache, ids, (1,))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_compiled_once(name: str) -> None:
    """While it fills, and while the window slides: the bits of eager mode."""
    torch._dynamo.reset()
    m, counter = model(name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m.forward, backend=counter, fullgraph=True)
    caches = [HopCache(m, 24) for _ in range(2)]
    for cache in caches:
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    for i in range(16):
        got, want = (f(IDS[:, i : i + 1], past_key_values=c).logits for f, c in zip((compiled, m), caches, strict=True))
        assert torch.equal(got, want), i
    assert counter.frame_count == 1 and caches[0].get_seq_length() == 16


# ---- what is refused


class Own(nn.Module):
    """An attention that knows a cache, and not transformers' interface."""

    def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
        key, value = past_key_values.update(x, x, 0)
        return x @ key.mT @ value


def test_attention_that_reads_floats() -> None:
    m = model("llama", implementation="sdpa")
    with pytest.raises(ValueError, match="attention is 'sdpa', which would compute with floats"):
        HopCache(m, 24)
    m.set_attn_implementation(CODES)
    cache = HopCache(m, 24)
    for other in ("eager", "sdpa"):
        m.set_attn_implementation(other)
        with pytest.raises(ValueError, match=f"attention is '{other}', which would compute with floats"):
            m(IDS, past_key_values=cache)
    m.set_attn_implementation(CODES)
    m.model.layers[1].self_attn = Own()
    with pytest.raises(ValueError, match=r"\['Own'\] computes attention itself"):
        HopCache(m, 24)


def test_refused() -> None:
    m = model("llama")
    with pytest.raises(TypeError, match="model must be one of transformers, got Linear"):
        HopCache(nn.Linear(2, 2), 24)
    with pytest.raises(ValueError, match="each token by itself"):
        HopCache(m, 24, presets.INT8_TENSOR)
    with pytest.raises(ValueError, match="both have integer formats, or both float formats"):
        HopCache(m, 24, presets.INT8_ROW, presets.FP8_ROW)
    with pytest.raises(ValueError, match="20 tokens after 0 do not fit into a length of 16"):
        m(IDS, past_key_values=HopCache(m, 16))
    with pytest.raises(NotImplementedError, match="layers are not offloaded"):
        HopCache(m, 16).layers[0].offload()
    m.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"of the types \['linear_attention'\]"):
        HopCache(m, 24)


def test_an_encoder_beside_the_decoder() -> None:
    sizes: Any = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(vocab_size=16, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    with pytest.raises(ValueError, match="has an encoder as well as a decoder"):
        HopCache(transformers.BartForConditionalGeneration(config), 24)


def test_a_model_that_ignores_the_interface() -> None:
    config = transformers.CTRLConfig(vocab_size=16, n_positions=8, n_embd=8, dff=8, n_layer=1, n_head=2)
    m = transformers.CTRLLMHeadModel(config)
    m.config._attn_implementation = CODES
    with pytest.raises(ValueError, match="CTRLLMHeadModel computes attention itself"):
        HopCache(m, 24)


@pytest.mark.parametrize("steps", ((9, *[1] * 11), (2, 1, 1, 5, 7, 1, 3)))
@pytest.mark.parametrize("name", MODELS)
def test_slots_in_use(name: str, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention "hop" reads the slots in use, and says, bit for bit, what it says of all slots."""
    m, counts, extend = model(name, implementation="hop"), list[int](), KVCache.extend

    def recorded(self: KVCache, *args: Any) -> Any:
        key, value = extend(self, *args)
        counts.append(key.shape[2])
        return key, value

    def whole(self: KVCache, key: Tensor, value: Tensor, size: int | None = None) -> Any:
        return self.append(key, value) if size is None else self.slide(key, value, size)

    monkeypatch.setattr(KVCache, "extend", recorded)
    with torch.no_grad():  # else `extend` calls itself
        got = said(m, HopCache(m, 200), steps=steps)
    full = counts[1::3] if name == "gemma" else counts
    assert set(full) == {64}
    monkeypatch.setattr(KVCache, "extend", whole)
    assert torch.equal(got, said(m, HopCache(m, 200), steps=steps))


def test_a_copy_of_a_cache_reads_its_own_slots() -> None:
    m = model("llama", implementation="hop")
    cache, want = HopCache(m, 24), HopCache(m, 24)
    said(m, cache, steps=(7,))
    said(m, want, steps=(7,))
    other = copy.deepcopy(cache)
    said(m, cache, steps=(5,))
    assert torch.equal(said(m, other, steps=(3, 1)), said(m, want, steps=(3, 1)))
