"""transformers' Trainer with an optimizer of ours: trained, stopped, and resumed."""

import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

import hop
from hop import optim

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

STEPS, HALF = 6, 3


def trainer(folder: str) -> Any:
    """Of a tiny BERT, from scratch, without dropout."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    words = torch.randint(0, 128, (4 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in words]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_steps=HALF,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3, stochastic_rounding=True, seed=3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
class TestTrainer(unittest.TestCase):
    def test_resumes(self):
        with tempfile.TemporaryDirectory() as name:
            whole, again = trainer(name), trainer(name)
            whole.train()
            assert len(losses(whole)) == STEPS and len(set(losses(whole))) > STEPS // 2
            checkpoint = Path(name) / f"checkpoint-{HALF}"
            saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
            assert isinstance(saved["state"][0]["exp_avg"], hop.QuantizedTensor)
            again.train(resume_from_checkpoint=str(checkpoint))
            assert losses(again) == losses(whole)
            pairs = list(zip(whole.model.parameters(), again.model.parameters(), strict=True))
            assert all(torch.equal(p, q) for p, q in pairs)
            quantized = 0
            for p, q in pairs:
                for key, x in whole.optimizer.state[p].items():
                    y = again.optimizer.state[q][key]
                    quantized += isinstance(x, hop.QuantizedTensor)
                    x, y = (hop.dequantize(t) if isinstance(t, hop.QuantizedTensor) else t for t in (x, y))
                    assert torch.equal(x, y)
            assert quantized > 4
