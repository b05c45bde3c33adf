"""Size and accuracy of all-MiniLM-L6-v2's encoder in each scheme.

python -m benchmarks.which_scheme     # prints, and writes benchmarks/results/which_scheme.json
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch

import hop
from examples.common import json_rows
from hop.kernels.cpu import native

RESULTS = Path(__file__).parent / "results" / "which_scheme.json"
SCHEMES = ("int8_weight", "int8", "fp8", "mxfp8", "8da4w", "int4", "nvfp4", "mxfp4")


def measure() -> dict[str, Any]:
    """One entry for each scheme, and for the float model."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # examples import each other
    from examples import minilm
    from examples.quantized_bert import Embedder, load, megabytes

    bert, batches = load()
    wanted = minilm.embed(Embedder(bert).eval(), batches)
    found: dict[str, dict[str, float]] = {}
    for name in ("float32", *SCHEMES):
        encoder = copy.deepcopy(bert)
        model = Embedder(encoder if name == "float32" else hop.quantize_(encoder, name)).eval()
        embeddings = minilm.embed(model, batches)
        mean, worst = minilm.cosines(embeddings, wanted)
        found[name] = {
            "megabytes": megabytes(model),
            "cosine": mean,
            "worst": worst,
            "same_nearest": minilm.same_neighbour(embeddings, wanted),
        }
    sentences = sum(len(ids) for ids, _ in batches)
    return {"level": native.library().path, "torch": torch.__version__, "sentences": sentences, "rows": found}


def main() -> None:
    torch.set_grad_enabled(False)
    found = measure()
    for name, row in found["rows"].items():
        print(f"{name:<12}" + "".join(f"{key} {value:.4g}  " for key, value in row.items()))
    RESULTS.write_text(json_rows(found))


if __name__ == "__main__":
    main()
