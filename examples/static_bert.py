"""Run all-MiniLM-L6-v2 in integers only, with 16-bit activations, 8-bit weights and static scales.

No value between the token ids and the hidden states is a float: the program is exported, rewritten for LiteRT's integer
kernels, written to a .tflite file, and compared with LiteRT tensor by tensor.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchao  # noqa: F401  (it registers quantized_decomposed)
from common import ignore_warnings_of_export, require
from quantized_bert import Batch, load
from torch import Tensor, nn

import hop
from hop.export.targets import TFLITE_16X8

_LEAST_COSINE = 0.99
_MASKED = 60.0  # subtracted from scores of padding; LiteRT's softmax is 0 from 10 below the largest score on
_INT16, _INT8 = (-(2**15), 2**15 - 1, torch.int16), (-127, 127, torch.int8)
qd = torch.ops.quantized_decomposed


# ---- numbers as codes


class Points:
    """The quantization points of activations, in execution order.

    While observing, it returns floats unchanged and records their ranges; afterwards it quantizes with them.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.observes, self.place = bits, True, 0
        self.ranges: list[tuple[float, float]] = []

    def begin(self) -> None:
        self.place = 0

    def __call__(self, x: Tensor, units: bool = False) -> Tensor:
        """x quantized with its scale; with `units`, softmax outputs quantized with softmax's fixed units."""
        i, self.place = self.place, self.place + 1
        if self.observes:
            if i == len(self.ranges):
                self.ranges.append((0.0, 0.0))
            low, high = self.ranges[i]
            self.ranges[i] = min(low, float(x.min())), max(high, float(x.max()))
            return x
        low, high = (0.0, 1.0 - 2.0**-self.bits) if units else self.ranges[i]
        if self.bits == 16:
            return both(x, 2.0**-15 if units else rounded(max(-low, high) / _INT16[1]), 0, _INT16)
        scale = rounded((high - low) / 255)
        return both(x, scale, round(-128 - low / scale), (-128, 127, torch.int8))


def both(x: Tensor, scale: float, zero: int, codes: Any) -> Tensor:
    """x quantized and dequantized."""
    return qd.dequantize_per_tensor(qd.quantize_per_tensor(x, scale, zero, *codes), scale, zero, *codes)


def rounded(x: float) -> float:
    """x rounded to float32, as in files."""
    return float(torch.tensor(x))


class Constant(nn.Module):
    """A constant tensor of codes with one scale."""

    def __init__(self, x: Tensor, codes: Any = _INT16) -> None:
        super().__init__()
        x = x.detach()
        self.range, self.scale = codes, rounded(float(x.abs().max()) / codes[1])
        self.codes = nn.Buffer(qd.quantize_per_tensor(x, self.scale, 0, *codes))

    def forward(self) -> Tensor:
        return qd.dequantize_per_tensor(self.codes, self.scale, 0, *self.range)


class Linear(nn.Module):
    """A linear layer, times `factor`, with 8-bit weight codes and a scale per output channel."""

    def __init__(self, layer: nn.Linear, points: Points, factor: float = 1.0) -> None:
        super().__init__()
        weight = layer.weight.detach() * factor
        self.points, self.bias = points, nn.Buffer(layer.bias.detach() * factor)
        self.scales = nn.Buffer(weight.abs().amax(1) / 127)
        self.zeros = nn.Buffer(torch.zeros(len(weight), dtype=torch.int64))
        self.codes = nn.Buffer(qd.quantize_per_channel(weight, self.scales, self.zeros, 0, *_INT8))

    def forward(self, x: Tensor) -> Tensor:
        weight = qd.dequantize_per_channel(self.codes, self.scales, self.zeros, 0, *_INT8)
        return self.points(nn.functional.linear(x, weight, self.bias))


# ---- the model


class LayerNorm(nn.Module):
    """A layer norm from TFLite's operators: mean, difference, square, mean, rsqrt, products and a sum.

    eps, 1e-12, is far below a code and omitted.
    """

    def __init__(self, norm: nn.LayerNorm, points: Points) -> None:
        super().__init__()
        self.points, self.weight, self.bias = points, Constant(norm.weight), Constant(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        point = self.points
        away = point(x - point(x.mean(-1, keepdim=True)))
        variance = point(point(away * away).mean(-1, keepdim=True))
        plain = point(away * point(variance.rsqrt()))
        return point(point(plain * self.weight()) + self.bias())


class Block(nn.Module):
    """Attention and an MLP, each added to its input and normalized."""

    def __init__(self, layer: Any, points: Points) -> None:
        super().__init__()
        own, self.points = layer.attention.self, points
        self.heads, self.size = own.num_attention_heads, own.attention_head_size
        self.query = Linear(own.query, points, self.size**-0.5)  # so that scores need no division
        self.key, self.value = Linear(own.key, points), Linear(own.value, points)
        self.joined = Linear(layer.attention.output.dense, points)
        self.wide, self.narrow = Linear(layer.intermediate.dense, points), Linear(layer.output.dense, points)
        self.norms = nn.ModuleList(LayerNorm(part.LayerNorm, points) for part in (layer.attention.output, layer.output))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        point, (batch, length, width) = self.points, x.shape
        q, k, v = (
            layer(x).reshape(batch, length, self.heads, self.size).permute(0, 2, 1, 3).reshape(-1, length, self.size)
            for layer in (self.query, self.key, self.value)
        )
        scores = point(torch.bmm(q, k.transpose(1, 2))).reshape(batch, self.heads, length, length)
        shares = point(point(scores + mask).softmax(-1), units=True)
        y = point(torch.bmm(shares.reshape(-1, length, length), v))
        y = y.reshape(batch, self.heads, length, self.size).permute(0, 2, 1, 3).reshape(batch, length, width)
        x = self.norms[0](point(x + self.joined(y)))
        y = self.narrow(point(nn.functional.gelu(self.wide(x))))
        return self.norms[1](point(x + y))


class Encoder(nn.Module):
    """The encoder of (batch, length) token ids, int32, and of a mask, (batch, 1, 1, length), 0 for tokens and 1 for
    padding.

    Returns dequantized hidden states, (batch, length, width).
    """

    def __init__(self, bert: Any, length: int, bits: int = 16) -> None:
        super().__init__()
        self.points, own = Points(bits), bert.embeddings
        self.words = Constant(own.word_embeddings.weight)
        places = own.position_embeddings.weight[:length] + own.token_type_embeddings.weight[0]
        self.places, self.away = Constant(places), Constant(torch.tensor([-_MASKED]))
        self.norm = LayerNorm(own.LayerNorm, self.points)
        self.blocks = nn.ModuleList(Block(layer, self.points) for layer in bert.encoder.layer)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        self.points.begin()
        point = self.points
        mask = point(point(padding) * self.away())
        x = self.norm(point(point(nn.functional.embedding(ids, self.words())) + self.places()))
        for block in self.blocks:
            x = block(x, mask)
        return x


def calibrated(bert: nn.Module, batches: Sequence[Batch], bits: int = 16) -> Encoder:
    """An encoder calibrated on batches, for sequences of their length."""
    encoder = Encoder(bert, batches[0][0].shape[1], bits).eval()
    with torch.inference_mode():
        for batch in batches:
            encoder(*inputs_of(batch))
    encoder.points.observes = False
    return encoder


def inputs_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The encoder's inputs from ids and an attention mask."""
    ids, attention = batch
    return ids.to(torch.int32), (1.0 - attention.to(torch.float32))[:, None, None, :]


def cut(batches: Sequence[Batch], rows: int, length: int) -> Iterator[Batch]:
    """The sentences in batches of `rows`, cut or padded to `length` tokens."""
    sentences = [
        torch.stack([nn.functional.pad(x, (0, max(0, length - len(x))))[:length] for x in pair])
        for ids, mask in batches
        for pair in zip(ids, mask, strict=True)
    ]
    for i in range(0, len(sentences) - rows + 1, rows):
        both = torch.stack(sentences[i : i + rows])
        yield both[:, 0], both[:, 1]


def embedding(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean of the hidden states of all tokens."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def least_cosine(model: nn.Module, bert: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """The lowest cosine similarity with the float model, of sentence embeddings and of single tokens' hidden states."""
    sentences, tokens = [1.0], [1.0]
    with torch.inference_mode():
        for batch in batches:
            found, wanted = model(*inputs_of(batch)), bert(*batch).last_hidden_state
            pair = embedding(found, batch[1]), embedding(wanted, batch[1])
            sentences.append(float(torch.cosine_similarity(*pair, dim=-1).min()))
            every = torch.cosine_similarity(found, wanted, dim=-1)[batch[1].bool()]
            tokens.append(float(every.min()))
    return min(sentences), min(tokens)


# ---- the demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=24, help="tokens of a sentence")
    parser.add_argument("--batches", type=int, default=4, help="of two sentences, for the comparison")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    given = parser.parse_args()
    ignore_warnings_of_export()
    bert, all_batches = load()
    bert.encoder.layer = bert.encoder.layer[: given.layers]  # type: ignore[union-attr,index]
    batches = list(cut(all_batches, 2, given.length))
    held_out, seen = batches[: 2 * given.batches : 2], batches[1::2]
    found: dict[str, Any] = {}
    for bits in (8, 16):
        encoder = calibrated(bert, seen, bits)
        found[f"cosine_{bits}"], found[f"token_cosine_{bits}"] = least_cosine(encoder, bert, held_out)
        print(f"activations of {bits} bits: least cosine {found[f'cosine_{bits}']:.5f} of sentences, ", end="")
        print(f"{found[f'token_cosine_{bits}']:.5f} of tokens")
    program = torch.export.export(encoder, inputs_of(held_out[0]))
    integers, report = hop.export.to_integer(program, target=TFLITE_16X8)
    require(not report.left, f"not all is integers: {report}")
    model = hop.export.to_tflite(integers)
    print(f"{len(report.rewritten)} operators in integers, {len(model.buffer) / 1e6:.1f} MB of .tflite")
    sums = hop.export.ranges(integers)
    worst = max((row for row in sums.products if row.bits), key=lambda row: row.bits or 0)
    found |= {"bits": worst.bits, "proven": all(row.status == "proven" for row in sums.products)}
    print(f"the widest sum needs {worst.bits} bits, in {worst.node}; every one is proven: {found['proven']}")
    checks = hop.export.verify(integers, model, [inputs_of(batch) for batch in held_out])
    found |= {"codes": sum(row.elements for row in checks.rows), "differ": sum(row.differing for row in checks.rows)}
    found["tensors"] = len(checks.rows)
    print(
        f"LiteRT's reference kernels: {found['differ']} of {found['codes']:,} codes differ, {len(checks.rows)} tensors"
    )
    if given.output:
        given.output.write_text(json.dumps(found, indent=2))
    require(found["differ"] == 0 and found["proven"], "the program is not LiteRT's")
    require(found["cosine_16"] >= _LEAST_COSINE, f"the least cosine is {found['cosine_16']}")


if __name__ == "__main__":
    main()
