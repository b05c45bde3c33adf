"""Quantize a real sentence-embedding model in four schemes, embed real text, export and package it, and time it.

python examples/minilm.py [--full]

Takes about a minute, mostly to compile the package. --full takes minutes more: it lowers the int8 layers and the whole
model to core ATen, packages both with and without native operators, compares every route with eager mode, and compares
the exported and the lowered program node by node.

No network access is needed. Without a C++ compiler, the packages are skipped with a message.
"""

import argparse
import contextlib
import copy
import hashlib
import os
import statistics
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import find_compiler, ignore_warnings_of_export, require
from quantized_bert import FORMS, Batch, Embedder, Form, capture_inputs, load, megabytes, quantize
from torch import Tensor, nn

import hop
from hop.compat import eager
from hop.export import verify
from hop.export.analysis.comparison import Comparison
from hop.kernels.cpu import native

aten = torch.ops.aten
Model = Callable[..., Any]

START = time.perf_counter()
ROUNDS = 3
FEW = 4  # sentences to compare node by node
LEAST_COSINES = {"int8": 0.99, "8da4w": 0.93, "fp8": 0.99, "nvfp4": 0.94}
LEAST_OF_ROUTES = {torch.float32: 0.998, torch.bfloat16: 0.99}  # lowest mean cosine of other int8 routes, by dtype
PACKAGED, ATEN = "int8 package", "int8 package, ATen alone"

# How native kernels multiply integer codes and float codes at each level (docs/kernels.md).
ARITHMETIC = {
    "portable": ("plain C++ loops", "plain C++ loops"),
    "avx2": ("16-bit multiplies of AVX2", "float32 multiply-adds"),
    "avx_vnni": ("8-bit dot products of AVX-VNNI", "float32 multiply-adds"),
    "avx512": ("16-bit multiplies of AVX-512", "float32 multiply-adds"),
    "avx512_vnni": ("8-bit dot products of VNNI", "float32 multiply-adds"),
    "avx512_bf16": ("8-bit dot products of VNNI", "bfloat16 dot products"),
    "amx": ("int8 matrix tiles of AMX", "bfloat16 matrix tiles of AMX"),
    "neon": ("16-bit multiplies of NEON", "float32 multiply-adds"),
    "neon_dotprod": ("8-bit dot products of NEON", "float32 multiply-adds"),
    "neon_i8mm": ("int8 matrix multiplies of NEON", "float32 multiply-adds"),
    "neon_bf16": ("int8 matrix multiplies of NEON", "bfloat16 matrix multiplies of NEON"),
}
NARROW: dict[str, str] = dict.fromkeys(("avx2", "avx512"), "8-bit multiplies of AVX2")  # int8 by 4-bit codes
WORK = {  # per scheme, what else its products do
    "int8": "int32 sums of whole rows, each scaled once",
    "8da4w": "int32 sums of 32 terms, each scaled and added in float32",
    "fp8": "after decoding codes of 8 bits",
    "nvfp4": "after decoding codes of 4 bits and their block scales",
}


def step(text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s] {text}", flush=True)


def say(text: str) -> None:
    step(f"    {text}")


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Print `text`, and a reminder every 15 seconds while the block runs."""
    say(text)
    done = threading.Event()

    def remind() -> None:
        while not done.wait(15):
            say("    still at it")

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- this machine


def has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 multiplication; otherwise PyTorch emulates it."""
    best = native.library().best
    return eager.multiplies_bfloat16() if best is None else best in ("avx512_bf16", "amx", "neon_bf16")


def forms() -> dict[str, Form]:
    """The schemes, with the faster dtype between layers (`python -m benchmarks minilm` times both)."""
    if not has_bfloat16():
        return {name: replace(form, dtype=torch.float32) for name, form in FORMS.items()}
    if native.library().best == "amx":
        return {name: replace(form, dtype=torch.bfloat16) for name, form in FORMS.items()}
    return FORMS


def explain_kernel(name: str, kernel: str) -> str:
    """Describe the kernel that computes a scheme's products on this machine, which determines their speed."""
    if not kernel.startswith("native"):
        return f"{kernel} of PyTorch's operators ({native.library().declines()})"
    path = native.library().path
    integers, floats = ARITHMETIC[path]
    integers = NARROW.get(path, integers) if name == "8da4w" else integers
    return f"{kernel}, {integers if FORMS[name].is_exact() else floats}, {WORK[name]}"


# ---- measuring


def embed(model: Model, batches: Sequence[Batch]) -> Tensor:
    return torch.cat([model(*batch) for batch in batches])


def measure(models: Mapping[str, Model], batches: Sequence[Batch]) -> dict[str, float]:
    """Milliseconds per sentence of each model: medians of rounds after a warm-up, with models in turns on each batch.

    The times are processor times, which for one thread equal the elapsed time without other processes.
    """
    rounds: list[dict[str, float]] = []
    with torch.inference_mode():
        for _ in range(1 + ROUNDS):
            seconds = dict.fromkeys(models, 0.0)
            for batch in batches:
                for name, model in models.items():
                    start = time.process_time()
                    model(*batch)
                    seconds[name] += time.process_time() - start
            rounds.append(seconds)
    count = sum(len(ids) for ids, _ in batches)
    return {name: statistics.median(r[name] for r in rounds[1:]) / count * 1e3 for name in models}


def cosines(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Mean and worst cosine similarity of the rows of `a` and `b`, which have length 1."""
    cosine = (a * b).sum(1)
    return cosine.mean().item(), cosine.min().item()


def same_neighbour(a: Tensor, b: Tensor) -> float:
    """Percent of the sentences whose nearest other sentence is the same in `a` and in `b`."""
    nearest_a, nearest_b = ((x @ x.t()).fill_diagonal_(-1).argmax(1) for x in (a, b))
    return 100 * (nearest_a == nearest_b).float().mean().item()


def check_embeddings(name: str, got: Tensor, wanted: Tensor, least: float) -> None:
    """Print how close embeddings come to those of `wanted`; exits if their mean cosine is below `least`."""
    mean, worst = cosines(got, wanted)
    require(mean >= least, f"{name}: mean cosine is {mean:.4f}, below {least}")
    say(f"{name}: {'equal bit for bit' if torch.equal(got, wanted) else f'cosine mean {mean:.4f}, worst {worst:.4f}'}")


def compare_bits(bert: nn.Module, sample: Batch) -> None:
    """Print a digest of the embeddings of an exact int8 model on every route; exits if they are not all equal."""
    model = hop.quantize_(Embedder(copy.deepcopy(bert)), "int8", exact=True)
    ids, mask = (x[:FEW] for x in sample)
    routes = {
        "eager": model(ids, mask),
        "one sentence at a time": torch.cat([model(ids[i : i + 1], mask[i : i + 1]) for i in range(len(ids))]),
        "exported": torch.export.export(model, (ids, mask)).module()(ids, mask),
    }
    torch.set_num_threads(2)
    routes["2 threads"] = model(ids, mask)
    torch.set_num_threads(1)
    for level in dict.fromkeys(("portable", *native.library().levels())):
        if level in native.library().levels():
            with native.use(level):
                routes[f"level {level}"] = model(ids, mask)
    for name, found in routes.items():
        say(f"{name:<24}{hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]}")
        require(torch.equal(found, routes["eager"]), f"{name}: the embeddings differ from those of eager mode")


# ---- export, lowering, packages


def export(model: nn.Module, args: tuple[Any, ...], shapes: Any, file: Path) -> Any:
    """The exported program of `model` after a round trip through a file."""
    torch.export.save(torch.export.export(model, args, dynamic_shapes=shapes), file)
    exported = torch.export.load(file)
    kept = sum(isinstance(node.target, torch._ops.HigherOrderOperator) for node in exported.graph.nodes)
    say(f"exported, saved ({file.stat().st_size / 1e6:.0f} MB) and loaded: {kept} nodes of hop")
    return exported


def package(program: Any, file: Path, compiler: str) -> Model:
    """A package of `program`, compiled by AOTInductor, for Python or C++."""
    options = {
        "cpp.cxx": (None, compiler),
        "aot_inductor.precompile_headers": False,  # only worthwhile for many packages
        "aot_inductor.compile_wrapper_opt_level": "O0",  # for the code that calls kernels; halves the compile time
    }
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
    return torch._inductor.aoti_load_package(str(path))


def package_native(exported: Any, file: Path) -> Model | None:
    """A package that calls our native operators; None, after printing the reason, if it cannot be compiled."""
    compiler = find_compiler()
    if compiler is None:
        say("SKIPPED the packages: AOTInductor needs a C++ compiler, and there is no $CXX, c++, g++ or clang++")
        return None
    say("lowering: each call of hop becomes a native operator")
    try:
        lowered = hop.export.lower(exported, native=True)
    except RuntimeError as reason:
        say(f"SKIPPED the package with native operators: {reason}")
        return None
    calls = sum(str(node.target).startswith("hop_native.") for node in lowered.graph.nodes)
    with waiting(f"compiling with AOTInductor and {compiler}: {calls} calls of native operators, and C++ for the rest"):
        return package(lowered, file, compiler)


def lower(exported: Any) -> Model:
    """Lower to core ATen; exits if any other operator is left."""
    lowered = exported.run_decompositions(hop.decompositions(products="float"))
    targets = [node.target for node in lowered.graph.nodes if node.op == "call_function"]
    core = [t for t in targets if isinstance(t, torch._ops.OpOverload) and torch.Tag.core in t.tags]
    sizes = [t for t in targets if isinstance(t, types.BuiltinFunctionType)]  # getitem, products of symbolic sizes
    checks = [t for t in targets if t is aten._assert_tensor_metadata.default]  # torch.export writes one per cast
    foreign = {str(t) for t in targets if t not in {*core, *sizes, *checks}}
    require(not foreign, f"not core ATen: {sorted(foreign)}")
    rest = f" (besides {len(sizes)} for sizes and {len(checks)} dtype assertions)" if sizes or checks else ""
    say(f"lowered: {len(core)} nodes of core ATen{rest}, none of hop")
    return lowered.module()


def add_slow_routes(exported: Any, folder: Path) -> dict[str, Model]:
    """The program lowered to core ATen, and its package without native operators if there is a compiler."""
    with waiting("lowering to core ATen"):
        found = {"lowered": lower(exported)}
    compiler = find_compiler()
    if compiler is not None:
        with waiting(f"compiling what our kernels do in ATen, with AOTInductor and {compiler}"):
            found["package, ATen alone"] = package(exported, folder / "aten.pt2", compiler)
    return found


# ---- the steps


def quantize_all(bert: nn.Module, batch: Batch) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The model in every scheme, and how each is computed."""
    models, kernels = {}, {}
    for name, form in forms().items():
        encoder = quantize(bert, form)
        model = models[name] = Embedder(encoder).eval()
        layers, inputs = capture_inputs(model, batch)
        chosen = [_kernel(layer, x) for layer, x in zip(layers, inputs, strict=True)]
        kernels[name] = "; ".join(explain_kernel(name, kernel) for kernel in dict.fromkeys(chosen))
        between = str(form.dtype).removeprefix("torch.")
        say(f"{name}: {encoder.hop_report.summary}; {len(layers)} linear layers, {between} between them")
    return models, kernels


def _kernel(layer: hop.nn.Linear, x: Tensor) -> str:
    """The kernel that runs a layer's product."""
    assert layer.scheme.lhs is not None
    codes = hop.quantize(layer.scheme.lhs, x)
    lines = hop.explain(aten.linear.default, x.dtype, codes, layer.weight, layer.bias).splitlines()
    return lines[-1].removesuffix(": chosen")


class Layers(nn.Module):
    """The outputs of quantized layers for given inputs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def compare_layers(model: nn.Module, batch: Batch, folder: Path) -> None:
    """Check that every route of every int8 layer equals eager mode, bit for bit."""
    folder.mkdir()
    layers, inputs = capture_inputs(model, batch)
    module = Layers(layers).eval()
    wanted = module(inputs)
    exported = export(module, (inputs,), None, folder / "exported.pt2")
    packaged = package_native(exported, folder / "native.pt2")
    found = {"exported": exported.module(), **add_slow_routes(exported, folder)}
    if packaged is not None:
        found["package"] = packaged
    for route, run in found.items():
        same = sum(torch.equal(a, b) for a, b in zip(wanted, run(inputs), strict=True))
        require(same == len(wanted), f"int8, {route}: results of {len(wanted) - same} layers differ from eager")
    count = sum(a.numel() for a in wanted)
    say(f"equal bit for bit: {count:,} results of {len(wanted)} layers, eager = {' = '.join(found)}")


def compare_routes(exported: Any, model: nn.Module, batch: Batch, folder: Path) -> Model | None:
    """Compare the int8 model in core ATen with eager mode, and node by node; returns its package without native
    operators.
    """
    folder.mkdir()
    found = add_slow_routes(exported, folder)
    wanted, least = model(*batch), LEAST_OF_ROUTES[forms()["int8"].dtype]
    for route, run in found.items():
        check_embeddings(f"{route}, against eager int8", run(*batch), wanted, least)
    ids, mask = batch
    with waiting(f"comparing the exported and the lowered program node by node, {FEW} sentences"):
        say_differences(verify(exported.module(), found["lowered"], (ids[:FEW], mask[:FEW])))  # type: ignore[arg-type]
    return found.get("package, ATen alone")


def say_differences(found: Comparison) -> None:
    """Print a short comparison of two programs, node by node."""
    equal = sum(row.differing == 0 for row in found.rows)
    say(f"{len(found.rows)} pairs of nodes, {equal} equal bit for bit")
    for what, row in (("first difference", found.first), ("embeddings", found.outputs[0])):
        if row is not None:
            near = f"largest {row.largest:.1e}" if row.sqnr is None else f"SQNR {row.sqnr:.0f} dB"
            say(f"{what}: {row.a}, {row.operator}, {row.differing:,} of {row.elements:,} numbers, {near}")


def package_int8(model: nn.Module, sample: Batch, folder: Path, full: bool) -> dict[str, tuple[Model, str]]:
    """Export and package the int8 model; returns the packages with their descriptions. With `full`, compare routes."""
    step("export the int8 model, for any number of sentences and tokens")
    sentences, tokens = torch.export.Dim("sentences", min=2), torch.export.Dim("tokens", min=2, max=512)
    exported = export(model, sample, ({0: sentences, 1: tokens},) * 2, folder / "model.pt2")
    same = torch.equal(exported.module()(*sample), model(*sample))
    require(same, "the exported int8 model gives other embeddings than eager mode")
    say("embeddings of the exported model equal those of eager mode, bit for bit")

    step("package it, with native operators")
    packages = {}
    packaged = package_native(exported, folder / "native.pt2")
    if packaged is not None:
        packages[PACKAGED] = packaged, "the kernels of int8, called from Inductor's C++, without `import hop`"
    if full:
        step(f"compare the int8 layers on every route, on {len(sample[0])} sentences")
        compare_layers(model, sample, folder / "layers")
        step("compare the whole int8 model on every route")
        packaged = compare_routes(exported, model, sample, folder / "routes")
        if packaged is not None:
            packages[ATEN] = packaged, "float32 products, whose sums of codes are exact; it needs PyTorch alone"
    return packages


# ---- the table


@dataclass(frozen=True)
class Result:
    """Measurements of a model."""

    megabytes: float
    milliseconds: float
    embeddings: Tensor


def print_table(results: Mapping[str, Result], kernels: Mapping[str, str]) -> None:
    """Print a row per model, then how each is computed."""
    peers = [name for name in ("float32", "bfloat16") if name in results]
    wanted = results["float32"].embeddings
    heads = ["MB", "ms/sentence", *(f"x {peer}" for peer in peers), "cosine mean", "worst", "same nearest"]
    print(f"\n{'':<28}" + "".join(f"{head:>13}" for head in heads))
    for name, result in results.items():
        mean, worst = cosines(result.embeddings, wanted)
        speeds = (f"{results[peer].milliseconds / result.milliseconds:.2f}" for peer in peers)
        near = f"{same_neighbour(result.embeddings, wanted):.0f} %"
        megabytes = f"{result.megabytes:.1f}"
        cells = [megabytes, f"{result.milliseconds:.2f}", *speeds, f"{mean:.4f}", f"{worst:.4f}", near]
        print(f"{name:<28}" + "".join(f"{cell:>13}" for cell in cells))
    print("\nMB: parameters and scales. x float32: how many times as fast. Cosines, and the nearest other sentence: of")
    print("the embeddings against float32's. Products of the linear layers:")
    fastest = min(peers, key=lambda peer: results[peer].milliseconds)
    for name, kernel in kernels.items():
        print(f"  {name:<26}{kernel}")
        if results[name].milliseconds > results[fastest].milliseconds:
            print(f"  {'':<26}(slower than {fastest} on this CPU; what it saves is memory)")
    if "bfloat16" not in peers:
        print("bfloat16 is not timed: this CPU has no instructions for it, and PyTorch emulates them.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="compare every route, which takes minutes")
    full = parser.parse_args().full
    ignore_warnings_of_export()
    # With several threads, other load on one core would delay every small operator by milliseconds.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    step("load all-MiniLM-L6-v2 and sentences of public-domain prose")
    bert, batches = load(1 if full else 2)
    count, sample = sum(len(ids) for ids, _ in batches), batches[len(batches) // 2]
    say(f"{count} sentences, {sum(int(mask.sum()) for _, mask in batches)} tokens, {len(batches)} batches")

    step(f"quantize the encoder: {', '.join(FORMS)}")
    models: dict[str, nn.Module] = {"float32": Embedder(bert).eval()}
    if has_bfloat16():
        models["bfloat16"] = Embedder(copy.deepcopy(bert).to(torch.bfloat16)).eval()
    quantized, kernels = quantize_all(bert, sample)
    models |= quantized

    step(f"embed the sentences with {', '.join(models)}")
    embeddings = {"float32": embed(models["float32"], batches)}
    for name in [*models][1:]:
        embeddings[name] = embed(models[name], batches)
        least = LEAST_COSINES.get(name, 0.99)
        check_embeddings(f"{name}, against float32", embeddings[name], embeddings["float32"], least)

    step(f"the same bits everywhere: hop.quantize_(model, 'int8', exact=True), digests of {FEW} embeddings")
    compare_bits(bert, sample)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        packages = package_int8(models["int8"], sample, Path(folder), full)
        least = LEAST_OF_ROUTES[forms()["int8"].dtype]
        for name, (model, kernel) in packages.items():
            kernels[name], embeddings[name] = kernel, embed(model, batches)
            check_embeddings(f"{name}, against eager int8", embeddings[name], embeddings["int8"], least)
        if packages:
            say("(Inductor rounds floats between layers in its own way, which can move a code by one)")

        timed = {**models, **{name: model for name, (model, _) in packages.items()}}
        chosen = [batches[len(batches) // 4], batches[3 * len(batches) // 4]]
        some = sum(len(ids) for ids, _ in chosen)
        step(f"time {len(timed)} models on {some} sentences: processor time of 1 thread, medians of {ROUNDS} rounds")
        times = measure(timed, chosen)

    sizes = {name: megabytes(models.get(name, models["int8"])) for name in timed}
    print_table({name: Result(sizes[name], times[name], embeddings[name]) for name in timed}, kernels)
    print(f"done in {time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
