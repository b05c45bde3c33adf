"""Models of transformers with exact=True: the same bits in every batch, exported and lowered, saved and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop.integrations import HopCache, HopConfig
from hop.kernels.cpu import native
from hop.nn.models.exact import is_exact
from tests.integrations.models import NEEDED, QUIET, llama, loaded, saved

for name in NEEDED:
    pytest.importorskip(name)
pytestmark = [pytest.mark.filterwarnings(text) for text in (*QUIET, "ignore:`isinstance")]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def made(kind: str) -> tuple[Any, Tensor, dict[str, Any]]:
    """A float model with random weights, its input, and options of its call."""
    import transformers as t

    torch.manual_seed(0)
    if kind == "llama":
        return llama(), TOKENS, {"use_cache": False}
    if kind == "gemma":
        config = t.Gemma3TextConfig(vocab_size=64, num_key_value_heads=2, head_dim=16, **SIZES)
        return t.Gemma3ForCausalLM(config).eval(), TOKENS, {"use_cache": False}
    if kind == "vit":
        return t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **SIZES)).eval(), IMAGES, {}
    if kind == "qwen":
        config = t.Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=16, **SIZES)
        return t.Qwen3ForCausalLM(config).eval(), TOKENS, {"use_cache": False}
    if kind == "bert":
        return t.BertForSequenceClassification(t.BertConfig(vocab_size=64, **SIZES)).eval(), TOKENS, {}
    if kind == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        model = t.T5ForConditionalGeneration(t.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).eval()
        return model, TOKENS, {"decoder_input_ids": TOKENS[:, :5], "use_cache": False}
    if kind == "whisper":
        sizes = {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20}
        sizes |= {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in _WHISPER.items()}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        model = t.WhisperForConditionalGeneration(t.WhisperConfig(vocab_size=64, **sizes, **special)).eval()
        inputs = IMAGES.reshape(2, -1)[:, :640].reshape(2, 16, 40)
        return model, inputs, {"decoder_input_ids": TOKENS[:2, :5], "use_cache": False}
    if kind == "convnext":
        config = t.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)
        return t.ConvNextForImageClassification(config).eval(), IMAGES, {}
    if kind == "segformer":  # resizes by linear interpolation
        sizes = {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]}
        model = t.SegformerForSemanticSegmentation(t.SegformerConfig(decoder_hidden_size=16, **sizes)).eval()
        return model, IMAGES, {}
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return t.ResNetForImageClassification(config).eval(), IMAGES, {}


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
QUICK, MORE = ("llama",), ("vit", "resnet", "gemma", "qwen", "bert", "t5", "whisper", "convnext", "segformer")


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.full) for kind in MORE)])
def test_routes(kind: str) -> None:
    model, x, options = made(kind)
    model = hop.quantize_(model, "int8", exact=True)
    with torch.no_grad():
        want = model(x, **options).logits
        parts = [{k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in options.items()} for i in range(len(x))]
        ones = [model(one[None], **part).logits for one, part in zip(x, parts, strict=True)]
        assert torch.equal(torch.cat(ones), want)
        program = torch.export.export(model, (x,), options)
        report = hop.export.check_exact(program)
        assert report.exact, report
        assert torch.equal(program.module()(x, **options).logits, want)
        assert torch.equal(program.run_decompositions({}).module()(x, **options).logits, want)


@pytest.mark.full
@pytest.mark.parametrize("kind", [*QUICK, *MORE])
def test_compiled(kind: str) -> None:
    model, x, options = made(kind)
    model = hop.quantize_(model, "int8", exact=True)
    with torch.no_grad():
        assert torch.equal(torch.compile(model)(x, **options).logits, model(x, **options).logits)


def test_refuses_layers_of_transformers() -> None:
    """GPT-2's Conv1D, a linear layer that hop does not quantize."""
    import transformers as t

    config = t.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match=r"stay in floats.*h\.0\.attn\.c_attn \(Conv1D\)"):
        hop.quantize_(t.GPT2LMHeadModel(config), "int8", exact=True)


def test_cached_decoding_is_prefill() -> None:
    """The logits of a token do not depend on how many came with it."""
    model = hop.quantize_(llama(), "int8", exact=True)
    with torch.no_grad():
        whole = model(TOKENS, use_cache=False).logits
        first = model(TOKENS[:, :7], use_cache=True)
        rest, cache = [], first.past_key_values
        for i in range(7, TOKENS.shape[1]):
            step = model(TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True)
            rest, cache = [*rest, step.logits], step.past_key_values
    assert torch.equal(torch.cat([first.logits, *rest], 1), whole)


@torch.no_grad()
def greedy(step: Callable[[Tensor], Tensor], first: Tensor) -> Tensor:
    """The logits of 33 positions, each of the likeliest token before it; `first` are those of the prompt."""
    logits = [first]
    for _ in range(32):
        logits.append(step(logits[-1].argmax(-1)))
    return torch.stack(logits, 1)


@pytest.mark.full
@pytest.mark.skipif(native.library().file is None, reason="the native library was not built")
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_generation(kind: str, tmp_path: Path) -> None:
    """Prefill and 32 tokens have the same logits without a cache, in growing and static caches of floats, in a cache of
    codes, and by the compiled step, on both sides of the end of Gemma's window."""
    import transformers as t

    torch.manual_seed(0)
    options = {"vocab_size": 64, "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 64}
    if kind == "gemma":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 32}
        model: Any = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, **options, **layers))
    else:
        model = t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **options))
    model = hop.quantize_(model.eval(), "int8", exact=True)

    def eager(cache: Any) -> Tensor:
        def step(tokens: Tensor) -> Tensor:
            return model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1]

        with torch.no_grad():
            return greedy(step, model(TOKENS, past_key_values=cache, use_cache=True).logits[:, -1])

    want = eager(t.DynamicCache(config=model.config))
    ids = torch.cat([TOKENS, want.argmax(-1)[:, :-1]], 1)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits[:, TOKENS.shape[1] - 1 :], want)
    assert torch.equal(eager(t.StaticCache(config=model.config, max_cache_len=48)), want)
    assert torch.equal(eager(HopCache(model, 48)), want)
    decoder = hop.compile_decode(model, 48, batch_size=3, folder=tmp_path)
    assert torch.equal(greedy(decoder, decoder.prefill(TOKENS)), want)


def test_saved_and_loaded() -> None:
    model = hop.quantize_(llama(), "int8", exact=True)
    with saved(model) as folder, torch.no_grad():
        again = type(model).from_pretrained(folder)
        assert is_exact(again) and again.config.quantization_config.exact
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_while_loading() -> None:
    config = HopConfig("int8", exact=True, modules_to_not_convert=[])
    model = loaded(llama(), config)
    want = hop.quantize_(llama(), "int8", exact=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, want(TOKENS).logits)
    with pytest.raises(ValueError, match=r"these layers stay in floats.*lm_head \(Linear\)"):
        loaded(llama(), HopConfig("int8", exact=True))
    with pytest.raises(ValueError, match=r"HopConfig: exact=True, and in the scheme .* products sum floats"):
        HopConfig("int4", exact=True)
    with pytest.raises(TypeError, match="HopConfig: exact must be True or False, got 'yes'"):
        HopConfig("int8", exact="yes")  # type: ignore[arg-type]
