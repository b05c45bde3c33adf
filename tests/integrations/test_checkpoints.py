"""load_model: small models written as GGUF and as checkpoints of others, against transformers' float models of the same
numbers; saved and loaded again; files that are no such models."""

import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
from tests.integrations.gguf_files import MODELS, rounded, write
from tests.integrations.models import IDS, NEEDED, QUIET, saved, values
from tests.support.files import InFolder

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
transformers: Any = pytest.importorskip("transformers")

from hop.integrations import load_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)


def result(model: Any) -> torch.Tensor:
    with torch.no_grad():
        y = model(IDS)
    return y.logits if hasattr(y, "logits") else y.last_hidden_state


def assert_same(model: Any, want: Any) -> None:
    """Equal parameters, bit for bit, and results but for the order of sums."""
    own = hop.nn.float_state_dict(model)
    for name, tensor in want.state_dict().items():
        assert torch.equal(own[name], tensor), name
    assert own.keys() == want.state_dict().keys()
    a, b = result(model), result(want)
    assert (a - b).abs().max() < 2e-5 * b.abs().max(), (a - b).abs().max()


class TestGGUF(InFolder):
    def loaded(self, named: str, kind: str = "Q8_0", **changes: Any) -> Any:
        write(MODELS[named](), self.folder / "model.gguf", kind, **changes)
        return load_model(self.folder / "model.gguf")

    @parameterized.expand([(name, name) for name in MODELS])
    def test_equals_the_float_model_and_comes_back(self, _name, named):
        model = self.loaded(named)
        assert_same(model, rounded(MODELS[named](), "Q8_0"))
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert layers and all(isinstance(m, hop.nn.Linear) and m.frozen for m in layers)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder, **({} if named != "bert" else {"add_pooling_layer": False}))
        assert_same(again, rounded(MODELS[named](), "Q8_0"))
        assert torch.equal(result(again), result(model))

    @parameterized.expand([(name, name) for name in ("llama", "llama tied", "qwen3 128", "gemma3 256")])
    def test_equals_what_transformers_reads(self, _name, named):
        model = self.loaded(named)
        want = type(model).from_pretrained(self.folder, gguf_file="model.gguf", dtype=torch.float32)
        assert_same(model, want)

    @parameterized.expand([(kind, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")])
    def test_types(self, _name, kind):
        model = self.loaded("llama tied", kind)
        want = rounded(MODELS["llama tied"](), kind)
        assert_same(model, want)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert_same(again, want)
        for layer in (model.lm_head, again.lm_head):
            assert layer.weight.quantizer.is_dense() == (kind[:2] == "Q5")

    def test_tied_is_one_table(self):
        model = self.loaded("gemma3")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.model.embed_tokens, hop.nn.layers.ScaledEmbedding)
        assert values(model.lm_head.weight).shape == (96, 64)
        assert type(model.dequantize().model.embed_tokens).__name__ == "Gemma3TextScaledWordEmbedding"


if __name__ == "__main__":
    unittest.main()
