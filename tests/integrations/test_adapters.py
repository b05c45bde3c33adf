"""Adapters of PEFT on layers with codes: trained, merged, unmerged, saved and loaded; and larger tables of tokens."""

import tempfile
import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized

import hop
from hop.nn.models.conversion import has_static_scale
from hop.nn.scales.transforms import InputTransform
from hop.numerics.schemes import SCHEMES as NAMED
from tests.integrations.models import IDS, NEEDED, QUIET, llama, loaded, saved

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")

from hop.integrations import HopConfig, requantized_merge  # noqa: E402  after the packages that it needs

pytestmark = pytest.mark.filterwarnings(*QUIET, "ignore:.*has no rule for a QuantizedTensor", "ignore:Unmerge result")

LAYERS = ["q_proj", "v_proj", "down_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM", **options)


METHODS: dict[str, Any] = {
    "LoRA": lora,
    "DoRA": lambda: lora(use_dora=True),
    "PiSSA": lambda: lora(init_lora_weights="pissa"),
    "IA3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "OFT": lambda: peft.OFTConfig(target_modules=LAYERS, oft_block_size=8, task_type="CAUSAL_LM"),
    "trainable tokens": lambda: lora(trainable_token_indices=[1, 5]),
    "modules to save": lambda: lora(modules_to_save=["embed_tokens"]),
}
SCHEMES = ("int8", "int4_weight_32")
# All schemes that find scales in each call, and do not quantize outputs.
MORE = [
    name.lower()
    for name, scheme in NAMED.items()
    if scheme.output is None and not has_static_scale(scheme) and name.lower() not in (*SCHEMES, "int8_dynamic")
]


def base(scheme: str) -> Any:
    """A quantized model, with static scales calibrated if the scheme has them."""
    if has_static_scale(hop.schemes.named(scheme)):
        return hop.quantize_(llama(), scheme, calibrate=[IDS])
    return loaded(llama(), HopConfig(scheme))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def codes(model: Any) -> list[torch.Tensor]:
    """The buffers of the quantized weights, in the order of modules."""
    weights = [m.weight for m in model.modules() if isinstance(m, hop.nn.Layer)]
    return [t.clone() for w in weights if isinstance(w, hop.QuantizedTensor) for t in w.buffers().values()]


def trained(method: str, scheme: str) -> Any:
    """A base with an adapter after three steps, which reduce the loss and change nothing else."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base(scheme), METHODS[method]())
    before = codes(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert all(torch.equal(a, b) for a, b in zip(codes(model), before, strict=True))
    assert not any(isinstance(p, hop.QuantizedTensor) for p in model.parameters() if p.requires_grad)
    return model.eval()


def check(method: str, scheme: str) -> None:
    model = trained(method, scheme)
    want, before = logits(model), codes(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base(scheme), folder).eval()
    assert (logits(again) - want).abs().max() <= 1e-6 * want.abs().max()
    # Merged layers have float inputs, whose rounding to 8 or 4 bits is gone.
    inputs = hop.schemes.named(scheme).lhs
    bound = 1e-4 if inputs is None else 0.5 if inputs.format.bits < 8 else 0.15
    model.merge_adapter()
    assert (logits(model) - want).norm() <= bound * want.norm()
    model.unmerge_adapter()
    if method == "PiSSA":  # whose bases are floats, that PEFT subtracts the change from
        assert (logits(model) - want).norm() <= 1e-5 * want.norm()
    else:
        assert torch.equal(logits(model), want)
    assert all(torch.equal(a, b) for a, b in zip(codes(model), before, strict=True))
    merged = model.merge_and_unload()
    assert (logits(merged) - want).norm() <= bound * want.norm()
    if has_static_scale(hop.schemes.named(scheme)):  # which HopConfig does not hold
        return
    with saved(merged) as folder:  # floats beside codes
        assert torch.equal(logits(type(merged).from_pretrained(folder)), logits(merged))


class TestAdapters(unittest.TestCase):
    @parameterized.expand([(f"{method} {scheme}", method, scheme) for method in METHODS for scheme in SCHEMES])
    @pytest.mark.quick(10)
    def test_train_merge_unmerge_save(self, _name, method, scheme):
        check(method, scheme)

    @parameterized.expand([(f"{method} {scheme}", method, scheme) for method in METHODS for scheme in MORE])
    @pytest.mark.full
    def test_other_schemes(self, _name, method, scheme):
        check(method, scheme)

    @parameterized.expand(["LoRA", "IA3"])
    @pytest.mark.quick(2)
    def test_static_scales(self, method):
        check(method, "int8_static")

    def test_requantized_behind_a_transform(self):
        """The weight of a layer that multiplies its input is not the weight that adapters change."""
        model: Any = hop.nn.convert(llama(), "int8")
        model.model.layers[0].mlp.down_proj.transform_input(InputTransform(torch.full((128,), 2.0)))
        adapted = peft.get_peft_model(hop.nn.freeze(model), METHODS["LoRA"]())
        want = logits(adapted)
        refused = pytest.raises(RuntimeError, match="has a transformed input, and its weight cannot be quantized again")
        with refused, requantized_merge():
            adapted.merge_adapter()
        with pytest.warns(UserWarning, match="Already unmerged"):  # the layers after it
            adapted.unmerge_adapter()
        assert torch.equal(logits(adapted), want)

    def test_requantized(self):
        """Merged weights by the scheme of their layers: the codes of the float weight that is merged otherwise."""
        model = trained("LoRA", "int8")
        want = logits(model)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        model.merge_adapter()
        floats = layer.base_layer.weight.detach().clone()
        model.unmerge_adapter()
        with requantized_merge():
            model.merge_adapter()
        assert isinstance(layer.base_layer, hop.nn.Linear)
        q = layer.base_layer.frozen_quantizer()
        assert torch.equal(hop.dequantize(layer.base_layer.weight), hop.dequantize(hop.quantize(q, floats)))
        assert (logits(model) - want).norm() < 0.05 * want.norm()
        model.unmerge_adapter()
        assert torch.equal(logits(model), want)
        with requantized_merge():
            merged = model.merge_and_unload()
        assert isinstance(merged.model.layers[0].self_attn.q_proj, hop.nn.Linear)
        with saved(merged) as folder:
            assert torch.equal(logits(type(merged).from_pretrained(folder)), logits(merged))

    @parameterized.expand([(method, method) for method in METHODS])
    @pytest.mark.quick(4)
    def test_requantized_by_every_method(self, _name, method):
        model = trained(method, "int8")
        want = logits(model)
        with requantized_merge():
            merged = model.merge_and_unload()
        layer = merged.model.layers[1].self_attn.q_proj
        assert isinstance(layer, hop.nn.Linear) == (method != "PiSSA")  # whose bases are floats already
        table = merged.model.embed_tokens
        assert isinstance(table, hop.nn.Embedding) == (method != "modules to save")
        assert (logits(merged) - want).norm() < 0.1 * want.norm()

    def test_pissa_requantized(self):
        with requantized_merge():
            model = peft.get_peft_model(base("int8"), METHODS["PiSSA"]())
        assert isinstance(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, hop.nn.Linear)
        assert (logits(model) - logits(base("int8"))).norm() < 0.05 * logits(base("int8")).norm()


class TestTokens(unittest.TestCase):
    @parameterized.expand([("untied", False, None), ("tied", True, []), ("head", False, [])])
    def test_resized(self, _name, tie, kept):
        for requantizes in (False, True):
            model = loaded(llama(tie), HopConfig("int8", modules_to_not_convert=kept))
            want, size = logits(model), model.config.vocab_size
            if requantizes:
                with requantized_merge():
                    model.resize_token_embeddings(size + 8)
            else:
                model.resize_token_embeddings(size + 8)
            table = model.get_input_embeddings()
            assert table.weight.shape[0] == model.lm_head.weight.shape[0] == model.config.vocab_size == size + 8
            assert isinstance(table.weight, hop.QuantizedTensor) == requantizes
            found = logits(model)
            assert found.shape[-1] == size + 8
            assert (found[..., :size] - want).norm() <= 0.05 * want.norm()
            with saved(model) as folder:
                assert torch.equal(logits(type(model).from_pretrained(folder)), found)
