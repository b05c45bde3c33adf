"""What writes floats to a quantized weight, in PEFT and transformers: an error, whose remedy works."""

import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parameterized import parameterized

from tests.integrations.models import IDS, NEEDED, QUIET, llama, loaded

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")

from hop.integrations import HopConfig, register_lora  # noqa: E402  after the packages that it needs

pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:.*has no rule for a QuantizedTensor")


def ia3(model: Any) -> Any:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).merge_and_unload()


def pissa(model: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, register_lora(config))


def tokens(model: Any) -> Any:
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return model


class TestRemedy(unittest.TestCase):
    @parameterized.expand([("ia3", "q_proj", ia3), ("pissa", "q_proj", pissa), ("tokens", "embed_tokens", tokens)])
    def test_layer_in_floats(self, _name: str, end: str, write: Callable[[Any], Any]) -> None:
        with pytest.raises(TypeError, match=r"model\.set_submodule\(name, layer\.to_float\(\)\)"):
            write(loaded(llama(), HopConfig("int8")))
        model = loaded(llama(), HopConfig("int8"))
        with torch.no_grad():
            want = model(input_ids=IDS, use_cache=False).logits
            for name in [n for n, _ in model.named_modules() if n.endswith(end)]:
                model.set_submodule(name, model.get_submodule(name).to_float())
            got = write(model).eval()(input_ids=IDS, use_cache=False).logits[..., : want.shape[-1]]
        # Some layers have floats in the place of codes.
        assert (got - want).norm() < 0.05 * want.norm()
