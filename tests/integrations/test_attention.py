"""Attention of transformers' models in low precision: what it computes, which keys it sees, what stays in floats."""

import copy
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import attention_schemes, presets
from tests.integrations.models import IDS, NEEDED, QUIET, llama, saved, tokens

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

from hop.integrations import HopConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)
SDPA = torch.ops.aten.scaled_dot_product_attention.default
FINE = attention_schemes.AttentionScheme(None, presets.INT8_ROW, presets.INT8_ROW)
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=128, initializer_range=0.2, **SIZES), add_pooling_layer=False).eval()


def gemma(**options: Any) -> Any:
    """A layer that sees a window of 4 tokens, and one that sees all."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
        **SIZES,
        **options,
    )
    return Gemma3ForCausalLM(config).eval()


MODELS = {"bert": bert, "llama": llama, "gemma": gemma}


def results(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        y = model(ids, **options)
    return y.last_hidden_state if "last_hidden_state" in y else y.logits


def attending(model: Any, attention: Any, scheme: Any = None) -> Any:
    return hop.quantize_(copy.deepcopy(model), {"*": scheme}, attention=attention)


def by_hand(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention of codes, with masks that are made from positions alone: of a whole prompt without padding."""
    own = module.hop_attention
    length = query.shape[2]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if module.is_causal:
        seen = columns <= rows
        if getattr(module, "sliding_window", None):
            seen = seen & (columns > rows - module.sliding_window)
    if own.rotated:
        query, key = (hop.scaled(torch.ops.hop.hadamard.default, torch.float32, t, 16) for t in (query, key))
    parts = zip((own.query, own.key, own.value), (query, key, value), strict=True)
    codes = [t if q is None else hop.quantize(q, t) for q, t in parts]
    grouped = key.shape[1] != query.shape[1]
    y = hop.scaled(SDPA, query.dtype, *codes, seen, scale=module.scaling, enable_gqa=grouped)
    return y.transpose(1, 2), None


AttentionInterface.register("by_hand", by_hand)
AttentionMaskInterface.register("by_hand", sdpa_mask)


class TestAttention(unittest.TestCase):
    @parameterized.expand([(f"{m}_{s}", m, s) for m in MODELS for s in attention_schemes.ATTENTION_SCHEMES])
    def test_it_is_the_operator(self, _name, name, scheme):
        """With the model's own masks, of a prompt longer than the window."""
        model = MODELS[name]()
        ids = torch.arange(1, 13)[None].repeat(2, 1) * torch.tensor([[1], [3]])
        quantized = attending(model, scheme.lower())
        rotated = attention_schemes.ATTENTION_SCHEMES[scheme].rotated
        assert quantized.config._attn_implementation == ("hop_rotated" if rotated else "hop")
        assert model.config._attn_implementation == "sdpa"
        got = results(quantized, ids)
        quantized.config._attn_implementation = "by_hand"
        assert torch.equal(got, results(quantized, ids))
        want = results(model, ids)
        assert 0 < (got - want).norm() < 0.15 * want.norm()

    @parameterized.expand([(m, side) for m in MODELS for side in ("left", "right")])
    def test_padding(self, name, side):
        """Tokens of a padded batch get what they get alone, but for the order of float sums: keys and values have
        scales of their own, and the query none."""
        model, ids = attending(MODELS[name](), FINE), torch.arange(1, 10)[None]
        row = ids[:, :6]
        pad = torch.zeros(1, 3, dtype=torch.int64)
        padded = torch.cat([pad, row] if side == "left" else [row, pad], 1)
        own = slice(3, None) if side == "left" else slice(0, 6)
        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[1] = (padded != 0)[0]
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        batch = results(model, torch.cat([ids, padded]), attention_mask=mask, **positions)
        torch.testing.assert_close(batch[1:, own], results(model, row), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch[:1], results(model, ids), rtol=1e-4, atol=1e-4)

    def test_what_a_token_sees(self):
        """A later token changes nothing before it, and an earlier one nothing beyond its window."""
        model = attending(gemma(), FINE)
        ids = torch.arange(1, 13)[None]
        y = results(model, ids)
        changed = ids.clone()
        changed[0, 8] = 99
        assert torch.equal(results(model, changed)[:, :8], y[:, :8])
        assert not torch.equal(results(model, changed)[:, 8:], y[:, 8:])

    @parameterized.expand([("llama",), ("gemma",)])
    def test_generates(self, name):
        """With transformers' caches of floats: as the whole sequence says, token by token; with a static one too."""
        model = attending(MODELS[name](), FINE)
        found = tokens(model)
        ids = torch.tensor([found])
        said = results(model, ids[:, :-1]).argmax(-1)[0, IDS.shape[1] - 1 :]
        assert said.tolist() == found[IDS.shape[1] :]
        static = model.generate(
            IDS, max_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation="static", disable_compile=True
        )
        assert static[0].tolist() == found

    def test_with_layers_saved_and_loaded(self):
        model = llama()
        want = hop.quantize_(copy.deepcopy(model), {"lm_head": None, "*": "int8"}, attention="int8")
        with saved(model) as folder:
            config = HopConfig("int8", attention="int8")
            got = type(model).from_pretrained(folder, quantization_config=config)
        assert torch.equal(results(got, IDS), results(want, IDS))
        assert sum(row.scheme == attention_schemes.INT8_ATTENTION for row in got.hop_report.rows) == 2
        with saved(got) as folder:
            again = type(model).from_pretrained(folder)
        assert again.config.quantization_config.attention == str(attention_schemes.INT8_ATTENTION)
        assert torch.equal(results(again, IDS), results(want, IDS))
        plain = HopConfig("int8")
        assert "attention" not in plain.to_dict() and plain.attention is None
        with self.assertRaisesRegex(ValueError, "no scheme is called 'int7'"):
            HopConfig("int8", attention="int7")

    def test_rotated_saved_and_loaded(self):
        model = llama()
        with saved(model) as folder:
            got = type(model).from_pretrained(folder, quantization_config=HopConfig("int8", attention="int8_rotated"))
        with saved(got) as folder:
            again = type(model).from_pretrained(folder)
        assert again.config.quantization_config.attention == str(attention_schemes.INT8_ROTATED_ATTENTION)
        assert again.config._attn_implementation == "hop_rotated"
        assert torch.equal(results(again, IDS), results(got, IDS))
        want = hop.quantize_(model, {"lm_head": None, "*": "int8"}, attention="int8_rotated")
        assert torch.equal(results(got, IDS), results(want, IDS))

    def test_rotated_and_no_longer(self):
        model = attending(llama(), "int8_rotated")
        plain = attending(model, "int8")
        assert plain.config._attn_implementation == "hop"
        assert torch.equal(results(plain, IDS), results(attending(llama(), "int8"), IDS))
        assert not torch.equal(results(plain, IDS), results(model, IDS))

    def test_some_modules(self):
        model = bert()
        some = attending(model, {"*.0.*": "int8", "*.1.*": None})
        rows = {row.name: row for row in some.hop_report.rows if row.type == "BertSelfAttention"}
        assert [row.scheme is None for row in rows.values()] == [False, True]
        none = attending(some, {"*": None})
        assert torch.equal(results(none, IDS), results(model, IDS))
        assert not torch.equal(results(some, IDS), results(model, IDS))

    @parameterized.expand([("int8",), ("int8_rotated",)])
    @pytest.mark.full
    def test_compiled_and_exported(self, attention):
        model = attending(bert(), attention, "int8")
        want = results(model, IDS)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(results(compiled, IDS), want)
        with torch.no_grad():
            program = torch.export.export(model, (IDS,))
        assert torch.equal(program.module()(IDS).last_hidden_state, want)

    @parameterized.expand([("int8",), ("int8_rotated",)])
    def test_trains(self, attention):
        model = hop.nn.convert(bert(), {"*": "int8"}, attention=attention)
        model(IDS).last_hidden_state.square().sum().backward()
        assert all(p.grad is not None and p.grad.norm() > 0 for n, p in model.named_parameters() if "query.weight" in n)
        with self.assertRaisesRegex(ValueError, r"dropout=0\.1 of BertSelfAttention drops scores"):
            model.train()(IDS)

    def test_what_is_left(self):
        """Attention that caps its scores; and a module that is called one, and nobody knows."""
        from transformers import Gemma2Config, Gemma2ForCausalLM

        sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
        capped = attending(Gemma2ForCausalLM(Gemma2Config(vocab_size=64, attn_logit_softcapping=30.0, **sizes)), "int8")
        rows = [row for row in capped.hop_report.rows if row.type == "Gemma2Attention"]
        assert len(rows) == 2 and all(row.scheme is None and "softcapping" in row.reason for row in rows)
        assert capped.config._attn_implementation != "hop"

        class OwnAttention(torch.nn.Linear):
            pass

        model: Any = torch.nn.ModuleDict({"a": bert(), "b": OwnAttention(4, 4)})
        hop.nn.convert(model, {"*": None}, attention="int8")
        found = {row.name: row for row in model.hop_report.rows if row.type == "OwnAttention"}
        assert "it computes attention itself" in found["b"].reason
        assert all("itself" not in row.reason for row in model.hop_report.rows if row.name.startswith("a."))

    def test_arguments_that_say_more(self):
        function = AttentionInterface()["hop"]
        model = attending(bert(), "int8")
        module = model.encoder.layer[0].attention.self
        q = torch.zeros(1, 4, 3, 16)
        for name, value in {"softcap": 30.0, "s_aux": 1.0, "output_attentions": True}.items():
            with self.assertRaisesRegex(ValueError, f"{name} of BertSelfAttention"):
                function(module, q, q, q, None, **{name: value})

    def test_biases_of_positions(self):
        model = attending(bert(), FINE)
        module = model.encoder.layer[0].attention.self
        q, k, v = (torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
        bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(3))
        mask = torch.tensor([True, True, True, False, True]).expand(2, 1, 5, 5)
        function, sdpa = AttentionInterface()["hop"], AttentionInterface()["sdpa"]
        for seen in (None, mask, torch.zeros(2, 1, 5, 5).masked_fill(~mask, -1e9)):
            for causal in (False, True):
                given: Any = {"position_bias": bias, "is_causal": causal, "scaling": 0.25}
                got, _ = function(module, q, k, v, seen, **given)
                want, _ = sdpa(module, q, k, v, seen, **given)
                torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
