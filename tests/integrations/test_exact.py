"""Models of transformers with exact=True: the same bits in every batch, exported and lowered, saved and loaded."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hop
from hop.integrations import HopConfig
from hop.nn.exact import is_exact
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
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return t.ResNetForImageClassification(config).eval(), IMAGES, {}


@pytest.mark.parametrize("kind", ["llama", "gemma", "vit", "resnet"])
def test_routes(kind: str) -> None:
    model, x, options = made(kind)
    model = hop.quantize_(model, "int8", exact=True)
    with torch.no_grad():
        want = model(x, **options).logits
        assert torch.equal(torch.cat([model(one[None], **options).logits for one in x]), want)
        program = torch.export.export(model, (x,), options)
        report = hop.export.check_exact(program)
        assert report.exact, report
        assert torch.equal(program.module()(x, **options).logits, want)
        assert torch.equal(program.run_decompositions({}).module()(x, **options).logits, want)


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
