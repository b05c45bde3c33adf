"""Quantize a real sentence-embedding model to int8, 8da4w, fp8 and NVFP4, measure it, then export, lower and compile.

Needs no network. Without a C++ compiler it leaves out what AOTInductor would do, and says so.
"""

import copy
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import find_compiler, ignore_warnings_of_export, require
from quantized_bert import FORMS, Batch, Embedder, capture_inputs, load, megabytes, quantize
from torch import Tensor, nn

import hop
from hop.export import Comparison, verify

aten = torch.ops.aten
Model = Callable[..., Any]

ROUNDS = 3
FEW = 4  # sentences, of which every value is compared
LEAST_COSINES = {"int8": 0.99, "8da4w": 0.93, "fp8": 0.99, "nvfp4": 0.94}
STEPS = 6
START = time.perf_counter()


def step(number: int, text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s] {number}/{STEPS} {text}", flush=True)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]     {text}", flush=True)


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


class Layers(nn.Module):
    """The results of quantized layers for given inputs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


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
    say(f"compiling with AOTInductor and {compiler}: what our kernels do in ATen, and with native operators")
    forms = {"compiled": exported}
    try:
        forms["packaged"] = hop.export.lower(exported, native=True)
    except RuntimeError as reason:
        say(f"SKIPPED the package with native operators: {reason}")
    for name, program in forms.items():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / f"{name}.pt2"), inductor_configs={"cpp.cxx": (None, compiler)}
        )
        found[name] = torch._inductor.aoti_load_package(str(package))
    return found


# ---- the demo


def quantized(bert: nn.Module, batch: Batch) -> dict[str, nn.Module]:
    """The model in every scheme."""
    models = {}
    for name, form in FORMS.items():
        encoder = quantize(bert, form)
        model = models[name] = Embedder(encoder).eval()
        layers, inputs = capture_inputs(model, batch)
        last = [_kernel(layer, x) for layer, x in zip(layers, inputs, strict=True)]
        chosen = ", ".join(f"{last.count(k)} by {k!r}" for k in dict.fromkeys(last))
        say(f"{name}: {encoder.hop_report.summary}; {len(layers)} linear layers, {chosen}")
    say("attention and norms stay float32, or bfloat16 around fp8 and nvfp4")
    return models


def _kernel(layer: hop.nn.Linear, x: Tensor) -> str:
    """The kernel that a layer's product takes."""
    assert layer.scheme.lhs is not None
    codes = hop.quantize(layer.scheme.lhs, x)
    lines = hop.explain(aten.linear.default, x.dtype, codes, layer.weight, layer.bias).splitlines()
    return lines[-1].removesuffix(": chosen")


def compare_layers(name: str, model: nn.Module, batch: Batch, folder: Path) -> list[str]:
    """Check that every route of every layer gives the same results, bit for bit; return the routes."""
    layers, inputs = capture_inputs(model, batch)
    module = Layers(layers).eval()
    wanted = module(inputs)
    found = routes(module, (inputs,), None, folder)
    for route, run in found.items():
        same = sum(torch.equal(a, b) for a, b in zip(wanted, run(inputs), strict=True))
        require(same == len(wanted), f"{name}, {route}: results of {len(wanted) - same} layers differ from eager")
    count = sum(a.numel() for a in wanted)
    say(f"{name}, equal bit for bit: {count:,} results of {len(wanted)} layers, eager = {' = '.join(found)}")
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
    ids, mask = batch
    exported, lowered = found["exported"], found["lowered"]
    say_differences(verify(exported, lowered, (ids[:FEW], mask[:FEW])))  # type: ignore[arg-type]  # modules
    say("(lowering and compiling change how floats round, which can move the code of an activation by one)")
    return found


def say_differences(found: Comparison) -> None:
    """A short account of two programs, node by node."""
    equal = sum(row.differing == 0 for row in found.rows)
    say(f"exported against lowered, {FEW} sentences: {len(found.rows)} pairs of nodes, {equal} equal bit for bit")
    for what, row in (("first difference", found.first), ("embeddings", found.outputs[0])):
        if row is not None:
            near = f"largest {row.largest:.1e}" if row.sqnr is None else f"SQNR {row.sqnr:.0f} dB"
            say(f"{what}: {row.a}, {row.operator}, {row.differing:,} of {row.elements:,} numbers, {near}")


def print_table(columns: Sequence[str], rows: Sequence[tuple[str, str, dict[str, float]]]) -> None:
    print(f"\n{'':<36}" + "".join(f"{name:>14}" for name in columns))
    for title, form, values in rows:
        cells = (format(values[name], form) if name in values else "" for name in columns)
        print(f"{title:<36}" + "".join(f"{cell:>14}" for cell in cells).rstrip())


def print_summary(models: dict[str, nn.Module], embeddings: dict[str, Tensor], times: dict[str, float]) -> None:
    sizes = {name: megabytes(model) for name, model in models.items()}
    close = {name: cosines(x, embeddings["float32"]) for name, x in embeddings.items()}
    same = {name: same_neighbour(x, embeddings["float32"]) for name, x in embeddings.items()}
    rows = [
        ("parameters, scales among them, MB", ".1f", sizes),
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
    ignore_warnings_of_export()
    # With several threads, work of others on one core makes every small operator wait for milliseconds.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    step(1, "load all-MiniLM-L6-v2 and sentences of public-domain prose")
    bert, batches = load()
    count, sample = sum(len(ids) for ids, _ in batches), batches[len(batches) // 2]
    say(f"{count} sentences, {sum(int(mask.sum()) for _, mask in batches)} tokens, {len(batches)} batches")

    step(2, f"quantize the encoder: {', '.join(FORMS)}")
    bfloat16 = Embedder(copy.deepcopy(bert).to(torch.bfloat16)).eval()
    models = {"float32": Embedder(bert).eval(), "bfloat16": bfloat16, **quantized(bert, sample)}

    step(3, f"embed with {', '.join(models)}, eager")
    embeddings = {name: embed(model, batches) for name, model in models.items()}
    for name, least in LEAST_COSINES.items():
        mean, worst = cosines(embeddings[name], embeddings["float32"])
        require(mean >= least, f"mean cosine of {name} to float32 is {mean:.4f}, below {least}")
        say(f"{name} against float32: cosine mean {mean:.4f}, worst {worst:.4f}")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        step(4, f"compare the int8 layers, from float activations to float results, on {len(sample[0])} sentences")
        same = compare_layers("int8", models["int8"], sample, Path(folder, "layers"))
        step(5, "compare the whole int8 model, exported for any number of sentences and tokens")
        found = compare_model(models["int8"], sample, Path(folder, "model"))
        timed: dict[str, Model] = dict(models)
        for route in ("compiled", "packaged"):
            if route in found:
                timed[f"int8 {route}"] = found[route]
                embeddings[f"int8 {route}"] = embed(found[route], batches)
        step(6, f"time {', '.join(timed)}: 1 thread, {ROUNDS} interleaved rounds")
        times = measure(timed, batches)

    print_summary(models, embeddings, times)
    print(f"results of all int8 layers, bit for bit: {' = '.join(same)}")
    print(f"done in {time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
