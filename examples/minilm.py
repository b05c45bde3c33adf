"""Quantize a real sentence-embedding model to int8, measure it, then export it, lower it and compile it.

Needs no network. Without a C++ compiler it leaves out what AOTInductor would do, and says so.
"""

import copy
import os
import shutil
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from int8_bert import Batch, Embedder, Int8Product, capture_codes, load, megabytes, quantize
from torch import Tensor, nn

import hop

aten = torch.ops.aten
Model = Callable[..., Any]

ROUNDS = 5
LEAST_COSINE = 0.99
STEPS = 6
START = time.perf_counter()


def step(number: int, text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s] {number}/{STEPS} {text}", flush=True)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]     {text}", flush=True)


def require(condition: bool, text: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {text}")


# ---- measuring


def embed(model: Model, batches: Sequence[Batch]) -> Tensor:
    return torch.cat([model(*batch) for batch in batches])


def measure(models: dict[str, Model], batches: Sequence[Batch]) -> dict[str, float]:
    """Milliseconds per sentence of each model: medians of interleaved rounds, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(1 + ROUNDS):
            for name, model in models.items():
                start = time.perf_counter()
                embed(model, batches)
                seconds[name].append(time.perf_counter() - start)
    count = sum(len(ids) for ids, _ in batches)
    return {name: statistics.median(s[1:]) / count * 1e3 for name, s in seconds.items()}


def cosines(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Mean and worst cosine similarity of the rows of `a` and `b`, which have length 1."""
    cosine = (a * b).sum(1)
    return cosine.mean().item(), cosine.min().item()


def same_neighbour(a: Tensor, b: Tensor) -> float:
    """Percent of the sentences whose nearest other sentence is the same in `a` and in `b`."""
    nearest_a, nearest_b = ((x @ x.t()).fill_diagonal_(-1).argmax(1) for x in (a, b))
    return 100 * (nearest_a == nearest_b).float().mean().item()


# ---- export, lowering, compilation


class Products(nn.Module):
    """The int32 accumulators of all quantized layers for given codes."""

    def __init__(self, products: Sequence[nn.Module]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def forward(self, codes: list[Tensor]) -> list[Tensor]:
        return [product(c) for product, c in zip(self.products, codes, strict=True)]


def find_compiler() -> str | None:
    return next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)


def lower(exported: Any) -> Model:
    """Lower to core ATen; exits if any other operator is left."""
    lowered = exported.run_decompositions(hop.decompositions())
    targets = [node.target for node in lowered.graph.nodes if node.op == "call_function"]
    core = [t for t in targets if isinstance(t, torch._ops.OpOverload) and torch.Tag.core in t.tags]
    sizes = [t for t in targets if isinstance(t, types.BuiltinFunctionType)]  # getitem, products of symbolic sizes
    checks = [t for t in targets if t is aten._assert_tensor_metadata.default]  # torch.export writes one per cast
    foreign = {str(t) for t in targets if t not in {*core, *sizes, *checks}}
    require(not foreign, f"not core ATen: {sorted(foreign)}")
    rest = f" (besides {len(sizes)} for sizes and {len(checks)} dtype assertions)" if sizes or checks else ""
    say(f"lowered: {len(core)} nodes of core ATen{rest}, none of hop")
    return lowered.module()


def routes(module: nn.Module, args: tuple[Any, ...], shapes: Any, folder: Path) -> dict[str, Model]:
    """`module` after export and a round trip through a file, after lowering, and compiled if there is a compiler."""
    folder.mkdir()
    torch.export.save(torch.export.export(module, args, dynamic_shapes=shapes), folder / "exported.pt2")
    exported = torch.export.load(folder / "exported.pt2")
    kept = sum(isinstance(node.target, torch._ops.HigherOrderOperator) for node in exported.graph.nodes)
    say(f"exported, saved and loaded: {kept} nodes of hop")
    found = {"exported": exported.module(), "lowered": lower(exported)}
    compiler = find_compiler()
    if compiler is None:
        say("SKIPPED AOTInductor: it needs a C++ compiler, and there is no $CXX, c++, g++ or clang++")
        return found
    say(f"compiling with AOTInductor and {compiler}")
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(folder / "compiled.pt2"), inductor_configs={"cpp.cxx": (None, compiler)}
    )
    return {**found, "compiled": torch._inductor.aoti_load_package(str(package))}


# ---- the demo


def quantized(bert: nn.Module, batch: Batch) -> tuple[nn.Module, list[Int8Product], list[Tensor]]:
    """The quantized model, its integer products, and the codes that they get for `batch`."""
    model = Embedder(quantize(bert)).eval()
    products, codes = capture_codes(model, batch)
    say(f"{len(products)} linear layers: int8 weights per output channel, int8 activations per token")
    calls = [(aten.mm.default, torch.int32, c, p.weight.t()) for p, c in zip(products, codes, strict=True)]
    fast = sum(hop.explain(*call).startswith("integer product: chosen") for call in calls)
    require(fast == len(products), f"{len(products) - fast} layers are not on integer kernels")
    say(f"{fast} of {len(products)} layers on integer kernels; embeddings, attention and norms stay float32")
    return model, products, codes


def compare_products(products: Sequence[Int8Product], codes: list[Tensor], folder: Path) -> list[str]:
    """Check that every route gives the same accumulators, bit for bit; return the routes."""
    module = Products(products).eval()
    wanted = module(codes)
    found = routes(module, (codes,), None, folder)
    for name, model in found.items():
        same = sum(torch.equal(a, b) for a, b in zip(wanted, model(codes), strict=True))
        require(same == len(wanted), f"{name}: accumulators of {len(wanted) - same} layers differ from eager")
    count = sum(a.numel() for a in wanted)
    say(f"equal bit for bit: {count:,} int32 accumulators of {len(wanted)} layers, eager = {' = '.join(found)}")
    return ["eager", *found]


def compare_model(model: nn.Module, batch: Batch, folder: Path) -> dict[str, Model]:
    """Print how close every route of the whole model comes to eager; return the routes."""
    sentences, tokens = torch.export.Dim("sentences", min=2), torch.export.Dim("tokens", min=2, max=512)
    shapes = ({0: sentences, 1: tokens}, {0: sentences, 1: tokens})
    wanted = model(*batch)
    found = routes(model, batch, shapes, folder)
    for name, route in found.items():
        got = route(*batch)
        mean, worst = cosines(got, wanted)
        close = "equal bit for bit" if torch.equal(got, wanted) else f"cosine mean {mean:.4f}, worst {worst:.4f}"
        say(f"embeddings, {name:>8} against eager int8: {close}")
    say("(lowering and compiling change how floats round, which can move the code of an activation by one)")
    return found


def print_table(columns: Sequence[str], rows: Sequence[tuple[str, str, dict[str, float]]]) -> None:
    print(f"\n{'':<38}" + "".join(f"{name:>15}" for name in columns))
    for title, form, values in rows:
        cells = (format(values[name], form) if name in values else "" for name in columns)
        print(f"{title:<38}" + "".join(f"{cell:>15}" for cell in cells).rstrip())


def print_summary(models: dict[str, nn.Module], embeddings: dict[str, Tensor], times: dict[str, float]) -> None:
    sizes = {name: megabytes(model) for name, model in models.items()}
    close = {name: cosines(x, embeddings["float32"]) for name, x in embeddings.items()}
    same = {name: same_neighbour(x, embeddings["float32"]) for name, x in embeddings.items()}
    rows = [
        ("encoder linear weights, scales, MB", ".1f", {name: linear for name, (linear, _) in sizes.items()}),
        ("whole model, MB", ".1f", {name: whole for name, (_, whole) in sizes.items()}),
        ("ms per sentence", ".2f", times),
        *(
            (f"times as fast as {peer}", ".2f", {name: times[peer] / ms for name, ms in times.items()})
            for peer in ("float32", "bfloat16")
        ),
        ("cosine to float32, mean", ".4f", {name: mean for name, (mean, _) in close.items()}),
        ("cosine to float32, worst", ".4f", {name: worst for name, (_, worst) in close.items()}),
        ("same nearest sentence as float32, %", ".0f", same),
    ]
    print_table(list(times), rows)


def main() -> None:
    # torch.export raises it about itself, in every copy of an exported program.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
    # With several threads, work of others on one core makes every small operator wait for milliseconds.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    step(1, "load all-MiniLM-L6-v2 and sentences of public-domain prose")
    bert, batches = load()
    count, sample = sum(len(ids) for ids, _ in batches), batches[len(batches) // 2]
    say(f"{count} sentences, {sum(int(mask.sum()) for _, mask in batches)} tokens, {len(batches)} batches")

    step(2, "quantize the encoder")
    int8, products, codes = quantized(bert, sample)
    bfloat16 = Embedder(copy.deepcopy(bert).to(torch.bfloat16)).eval()
    models = {"float32": Embedder(bert).eval(), "bfloat16": bfloat16, "int8": int8}

    step(3, f"embed with {', '.join(models)}, eager")
    embeddings = {name: embed(model, batches) for name, model in models.items()}
    mean, worst = cosines(embeddings["int8"], embeddings["float32"])
    require(mean >= LEAST_COSINE, f"mean cosine of int8 to float32 is {mean:.4f}, below {LEAST_COSINE}")
    say(f"int8 against float32: cosine mean {mean:.4f}, worst {worst:.4f}")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        step(4, f"compare the integer products of all layers, on the int8 codes of {len(sample[0])} sentences")
        same = compare_products(products, codes, Path(folder, "products"))
        step(5, "compare the whole int8 model, exported for any number of sentences and tokens")
        found = compare_model(int8, sample, Path(folder, "model"))
        timed: dict[str, Model] = dict(models)
        if "compiled" in found:
            timed["int8 compiled"] = found["compiled"]
            embeddings["int8 compiled"] = embed(found["compiled"], batches)
        step(6, f"time {', '.join(timed)}: 1 thread, {ROUNDS} interleaved rounds")
        times = measure(timed, batches)

    print_summary(models, embeddings, times)
    print(f"int32 accumulators of all {len(products)} layers, bit for bit: {' = '.join(same)}")
    print(f"done in {time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
