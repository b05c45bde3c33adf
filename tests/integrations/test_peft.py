"""LoRA of PEFT on frozen quantized layers: trained by Trainer, saved, merged, and taken out again."""

import copy
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
from tests.integrations.models import IDS, NEEDED, QUIET, llama, loaded, saved, values

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")

from hop.integrations import HopConfig  # noqa: E402  after the packages that it needs

pytestmark = pytest.mark.filterwarnings(*QUIET)
STEPS = 10


def base(scheme: str = "int8") -> Any:
    return loaded(llama(), HopConfig(scheme))


def lora(**options: Any) -> Any:
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**fields, **options})


def adapted(scheme: str = "int8", **options: Any) -> Any:
    """With adapters that are not zero."""
    torch.manual_seed(1)
    return peft.get_peft_model(base(scheme), lora(init_lora_weights=False, **options)).eval()


def codes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of the quantized weights."""
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, hop.QuantizedTensor)}
    return {f"{name}:{n}": t.clone() for name, p in weights.items() for n, t in p.buffers().items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


@pytest.mark.full
class TestTrainer(unittest.TestCase):
    def test_trains_adapters_alone(self):
        model = peft.get_peft_model(base(), lora())
        before = codes(model), {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}
        frozen = {n: p.detach().clone() for n, p in model.named_parameters() if "lora" not in n and ":" not in n}
        words = torch.arange(24).reshape(3, 8) % 7 + 1
        data = [{"input_ids": row, "labels": row} for row in words.repeat(8, 1)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=6,
                learning_rate=1e-2,
                logging_steps=1,
                save_steps=STEPS,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=data)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            checkpoint = Path(folder, f"checkpoint-{STEPS}")
            held = hop.storage.load_file(checkpoint / "adapter_model.safetensors")
            assert held and all("lora" in name for name in held)  # the base is not saved again
            again = peft.PeftModel.from_pretrained(base(), checkpoint)
            assert torch.equal(logits(again.eval()), logits(model.eval()))
        assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
        assert sum(name.endswith(":codes") for name in before[0]) == 15 and is_same(codes(model), before[0])
        own = dict(model.named_parameters())
        assert all(torch.equal(values(own[n]), values(p)) for n, p in frozen.items())
        assert before[1] and not any(torch.equal(own[n], p) for n, p in before[1].items())
        assert {n for n, p in own.items() if p.requires_grad} == set(before[1])

    def test_without_adapters_it_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
            with pytest.raises(ValueError, match="purely quantized"):
                transformers.Trainer(base(), arguments)


class TestGradients(unittest.TestCase):
    @parameterized.expand([("int8",), ("int4_weight_32",), ("fp8",)])
    @pytest.mark.quick(2)
    def test_reach_adapters_below_quantized_layers(self, scheme):
        """As of the float model of the same numbers, where activations are floats; and of nothing else."""
        model = adapted(scheme)
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert set(grads) == {name for name, p in model.named_parameters() if "lora" in name}
        assert all(g.abs().max() > 0 for g in grads.values())
        floats = copy.deepcopy(model)
        for name, module in list(floats.named_modules()):
            if isinstance(module, hop.nn.Layer):
                floats.set_submodule(name, module.to_float())
        floats.zero_grad()
        floats(input_ids=IDS, labels=IDS).loss.backward()
        for name, p in floats.named_parameters():
            if name in grads:
                similar = nn.functional.cosine_similarity(grads[name].flatten(), p.grad.flatten(), 0)
                assert similar > (0.9999 if "weight" in scheme else 0.95), (name, similar)


class TestMerge(unittest.TestCase):
    @parameterized.expand([("int8_weight",), ("int4_weight_32",), ("int8",)])
    @pytest.mark.quick(3)
    def test_into_floats(self, scheme):
        """With float activations to float32's rounding; else to what quantized activations change: 1/127 of the
        largest of a row, at each of the merged layers."""
        model = adapted(scheme)
        want = logits(model)
        merged = model.merge_and_unload()
        found, layers = logits(merged), merged.model.layers
        bound = 1e-4 if "weight" in scheme else 0.05
        assert (found - want).abs().max() <= bound * want.abs().max()
        for layer in layers:
            assert type(layer.self_attn.q_proj) is type(layer.mlp.up_proj) is nn.Linear
            assert isinstance(layer.self_attn.k_proj, hop.nn.Linear)
        with saved(merged) as folder:  # floats beside codes
            assert torch.equal(logits(type(merged).from_pretrained(folder)), found)
        hop.quantize_(merged, scheme, filter=lambda name, _: name != "lm_head")
        assert isinstance(layers[0].self_attn.q_proj, hop.nn.Linear) and layers[0].self_attn.q_proj.frozen
        assert (logits(merged) - want).abs().max() <= (0.5 if "int4" in scheme else 0.1) * want.abs().max()

    def test_keeps_what_codes_would_lose(self):
        """Changes smaller than half a step, of which codes would keep nothing."""
        model = peft.get_peft_model(base("int4_weight_32"), lora()).eval()
        before = logits(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.fill_(1e-3)
        want = logits(model) - before
        merged = model.merge_and_unload()
        assert (logits(merged) - before - want).norm() < 0.01 * want.norm()

    def test_leaves_no_trace(self):
        model = adapted("int8", bias="none", lora_bias=False)
        before, want = codes(model), logits(model)
        with model.disable_adapter():
            plain = logits(model)
        for safe in (False, True):
            model.merge_adapter(safe_merge=safe)
            assert type(model.model.model.layers[0].self_attn.q_proj.base_layer) is nn.Linear
            assert len(codes(model)) < len(before)
            model.unmerge_adapter()
            assert is_same(codes(model), before) and torch.equal(logits(model), want)
        model.merge_adapter()
        with model.disable_adapter():
            assert torch.equal(logits(model), plain)
        with pytest.warns(UserWarning, match="Already unmerged"):
            model.unmerge_adapter()

    def test_a_broken_adapter_changes_nothing(self):
        model = adapted()
        before = codes(model)
        with torch.no_grad():
            model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="NaNs detected"):
            model.merge_adapter(safe_merge=True)
        assert is_same(codes(model), before)

    def test_two_adapters_and_a_bias(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.first = nn.Embedding(16, 32), nn.Linear(32, 32)
                self.conv = nn.Conv1d(4, 8, 3, padding=1)

            def forward(self, index: torch.Tensor) -> torch.Tensor:
                return self.conv(self.first(self.embed(index)))

        index = torch.arange(4)[None]
        net = hop.quantize_(Net(), "int8_weight")
        bias = net.first.bias.detach().clone()
        names = ["embed", "first", "conv"]
        config = peft.LoraConfig(target_modules=names, r=2, init_lora_weights=False)
        model = peft.get_peft_model(net, config)
        options = {"r": 2, "init_lora_weights": False, "lora_bias": True}
        model.add_adapter("other", peft.LoraConfig(target_modules=["first"], **options))
        model.base_model.set_adapter(["default", "other"])
        want, before = model(index), codes(model)
        model.merge_adapter()
        torch.testing.assert_close(model(index), want, rtol=1e-4, atol=1e-4)
        model.unmerge_adapter()
        assert is_same(codes(model), before) and torch.equal(model(index), want)
        assert torch.equal(net.first.base_layer.bias, bias)
        merged = model.merge_and_unload()
        assert [type(m) for m in merged.children()] == [nn.Embedding, nn.Linear, nn.Conv1d]
        torch.testing.assert_close(merged(index), want, rtol=1e-4, atol=1e-4)

    @pytest.mark.full
    def test_exported(self):
        model = adapted()
        want = logits(model)
        program = torch.export.export(model.model, (), {"input_ids": IDS, "use_cache": False})
        assert torch.equal(program.module()(input_ids=IDS, use_cache=False).logits, want)
