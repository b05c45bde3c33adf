"""The tables of docs/gpu.md, from the tables of the kernels."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from benchmarks import gpu, gpu_cases, gpu_instructions, gpu_quantize_counts, gpu_report, gpu_stages, gpu_steps
from benchmarks import registry as benchmarks_registry
from benchmarks.gpu_times import FORMS as TIMED
from cutlass_kernels import operators, registry, tiles, updates
from cutlass_kernels.forms import BF16, E4M3, E5M2, FORMS, S8, S32, U8, variants
from cutlass_kernels.nibbles import tile_for
from cutlass_kernels.product import FLOAT4, Product
from cutlass_kernels.variants import Variant, short
from tests.support import pages

GPUS = {
    "Ampere": (8, 0),
    "Ada": (8, 9),
    "Hopper": (9, 0),
    "Blackwell, sm_100": (10, 0),
    "sm_103": (10, 3),
    "sm_110": (11, 0),
    "sm_120": (12, 0),
}
WEIGHTS = {"Llama-3 8B": ((6144, 4096), (28672, 4096), (4096, 14336)), "70B": ((10240, 8192), (8192, 28672))}
ROWS = (1, 16, 32, 64, 128, 256, 1024, 4096, 8192)
CLOCK = 1.55e9  # cycles a second, assumed of a GPU that multiplies at the limit of its power


def _products() -> Iterator[tuple[str, Product]]:
    """A product of each kind, without data."""
    m, n, k = 64, 512, 512
    of_rows: dict[str, Any] = {"lhs_scale": torch.empty(m, 1), "rhs_scale": torch.empty(1, n)}

    def made(lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, depth: int = k, **fused: Any) -> Product:
        return Product(torch.empty(m, depth, dtype=lhs), torch.empty(n, depth, dtype=rhs).mT, out, **fused)

    def groups(size: int, dtype: torch.dtype) -> dict[str, Any]:
        shapes = {"lhs_scale": (m, k // size), "rhs_scale": (k // size, n)}
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    blocks: dict[str, Any] = {"lhs_scale": torch.empty(m, k // 128), "rhs_scale": torch.empty(k // 128, n // 128)}
    zero, e8m0 = torch.empty(1, dtype=S8), torch.float8_e8m0fnu
    yield "int8, uint8 to int32", made(S8, U8, S32)
    yield "a batch of them", Product(torch.empty(4, m, k, dtype=S8), torch.empty(4, k, n, dtype=S8), S32)
    stacked: dict[str, Any] = {"lhs_scale": torch.empty(4, m), "rhs_scale": torch.empty(4, n)}
    batch = torch.empty(4, m, k, dtype=S8), torch.empty(4, k, n, dtype=S8)
    yield "a batch with scales", Product(*batch, BF16, **stacked)
    yield "with scales, bias", made(S8, S8, BF16, **of_rows, bias=torch.empty(n))
    yield "with zero points", made(S8, S8, BF16, **of_rows, lhs_zero=zero, rhs_zero=zero)
    yield "requantized", made(S8, S8, S8, **of_rows, out_scale=torch.empty(1), requantize="division")
    yield "fp8, scales of rows, columns", made(E4M3, E4M3, BF16, **of_rows)
    yield "e5m2 by e4m3", made(E5M2, E4M3, BF16, **of_rows)
    yield "fp8, blocks of 128", made(E4M3, E4M3, BF16, **blocks)
    lines: dict[str, Any] = {"lhs_scale": blocks["lhs_scale"], "rhs_scale": torch.empty(k // 128, n)}
    yield "fp8, blocks of 1 x 128 on both sides", made(E4M3, E4M3, BF16, **lines)
    offs = torch.empty(4, dtype=torch.int32)
    weights: dict[str, Any] = {"lhs_scale": torch.empty(m), "rhs_scale": torch.empty(4, n), "offs": offs}
    yield "groups, int8", Product(torch.empty(m, k, dtype=S8), batch[1], BF16, **weights)
    yield "groups, fp8", Product(torch.empty(m, k, dtype=E4M3), batch[1].view(E4M3), BF16, **weights)
    yield "MXFP8", made(E4M3, E4M3, BF16, **groups(32, e8m0))
    yield "MXFP4", made(FLOAT4, FLOAT4, BF16, k // 2, **groups(32, e8m0))
    yield "NVFP4", made(FLOAT4, FLOAT4, BF16, k // 2, **groups(16, E4M3), global_scale=torch.empty(1))


def routes() -> str:
    """Which route takes what, by GPU."""
    rows = [["", *GPUS]]
    installed = (
        mock.patch.object(operators, "missing", lambda: None),
        mock.patch.object(registry, "missing", lambda: None),
    )
    with installed[0], installed[1], FakeTensorMode(), torch.device("cuda", 0):
        for name, product in _products():
            rows.append([name, *(operators.routes(product, c)[-1][0] for c in GPUS.values())])
    return pages.table(rows)


def forms() -> str:
    """What is compiled ahead of time."""
    found = list(variants())
    rows = [["factors", "result", "fused", "tiles"]]
    for form in FORMS:
        count = sum(_alike(form, v) for v in found)
        rows.append([f"{short(form.lhs)} x {short(form.rhs)}", short(form.out), ", ".join(_fused(form)), str(count)])
    return pages.table(rows)


def _alike(form: Variant, v: Variant) -> bool:
    return all(getattr(form, name) == getattr(v, name) for name in vars(form) if name not in ("tile", "tma"))


def _fused(v: Variant) -> Iterator[str]:
    scales = {"vector": "scales of rows and columns", "block": "scales of blocks", "1x128": "scales of 1 x 128 of both"}
    if v.batched:
        yield "batches"
    if v.group:
        yield f"codes of 4 bits in groups of {v.group}{' with zero points' * v.affine}"
        if v.scales:
            yield "scales of rows" + ", zero point on the left" * (v.lhs_zero is not None)
        return
    if v.groups:
        yield f"groups of {v.groups if v.groups != 'k' else 'K'}"
    if v.scales:
        yield scales[v.scales]
    for name in ("lhs_zero", "rhs_zero"):
        if getattr(v, name) is not None:
            yield f"zero point on the {'left' if name == 'lhs_zero' else 'right'}"
    if v.bias is not None:
        yield f"bias in {short(v.bias)}"
    if v.requantize:
        yield f"requantized by {v.requantize}{', bounded' * v.bounded}"
    if not v.is_integer and v.scales not in ("block", "1x128"):
        yield "sums in float32" if v.promoted else "sums of 14 bits"


def chosen() -> str:
    """The tiles that the model takes."""
    rows = [["N, K", *(f"M = {m}" for m in ROWS)]]
    for model, shapes in WEIGHTS.items():
        for n, k in shapes:
            best = [str(tiles.best(_fitting("int8 to bf16"), m, n, k, 132).tile).replace("_", " ") for m in ROWS]
            rows.append([f"{n}, {k} ({model})", *best])
    return pages.table(rows)


def _fitting(form: str) -> list[Variant]:
    """The variants of a form of benchmarks.gpu_times, one for each tile."""
    one = gpu_cases.Case(TIMED[form], tiles.SMALLEST, (64, 64, 512)).variant()
    assert isinstance(one, Variant), one
    made = [replace(one, tile=t, tma=not t.swap) for t in tiles.TILES]
    return [v for v in made if v.declines() is None]


def steps() -> str:
    """What the model says of a step of the largest tiles."""
    rows = [["", "tile", *(f.replace("_", " ") for f in tiles.Step._fields), "limit", "of the matrix unit, %"]]
    for form in TIMED:
        for v in _fitting(form):
            if v.tile.m * v.tile.n >= 128 * 128 and v.tile.split == 1:
                step = tiles.step_of(v)
                share = f"{100 * step.multiply / max(step):.0f}"
                rows.append([form, str(v.tile).replace("_", " "), *(f"{x:.0f}" for x in step), step.limit, share])
    return pages.table(rows)


def predicted() -> str:
    """Of each form, over the layers of WEIGHTS: for few rows the part of the memory's bandwidth, else operations."""
    rows = [["", *(f"M = {m}" for m in ROWS)]]
    for form in TIMED:
        fitting = _fitting(form)
        cells = []
        for m in ROWS:
            found = [_predicted(fitting, m, n, k) for shapes in WEIGHTS.values() for n, k in shapes]
            low, high = (f"{f([x[m > 64] for x in found]):,.0f}" for f in (min, max))
            cells.append(f"{low} to {high}{'' if m > 64 else ' %'}")
        rows.append([form, *cells])
    return pages.table(rows)


def _predicted(fitting: list[Variant], m: int, n: int, k: int) -> tuple[float, float]:
    """Percent of the memory's bandwidth, and tera-operations a second."""
    v = tiles.best(fitting, m, n, k, 132)
    cycles = tiles.cycles(v, m, n, k, 132)
    size = m * k + n * k + m * n * v.out.itemsize
    return 100 * size / tiles.HOPPER.memory / cycles, 2 * m * n * k / cycles * CLOCK / 1e12


def nibbles() -> str:
    """Likewise of weights of 4 bits in groups of 128."""
    rows = [["", *(f"M = {m}" for m in ROWS)]]
    for form in FORMS:
        if form.group == 128 and not form.affine:
            cells = []
            for m in ROWS:
                found = [_predicted_of_nibbles(form, m, n, k) for shapes in WEIGHTS.values() for n, k in shapes]
                low, high = (f"{f([x[m > 64] for x in found]):,.0f}" for f in (min, max))
                cells.append(f"{low} to {high}{'' if m > 64 else ' %'}")
            rows.append([short(form.lhs) + ", zero points" * (form.lhs_zero is not None), *cells])
    return pages.table(rows)


def _predicted_of_nibbles(form: Variant, m: int, n: int, k: int) -> tuple[float, float]:
    """As _predicted, with the tile that such a product takes."""
    v = replace(form, tile=tile_for(m, n, 132, form.lhs), tma=False)
    cycles, (of_weight, of_x) = tiles.cycles(v, m, n, k, 132), tiles.bytes_of(v)
    size = m * k * of_x + n * k * of_weight + m * n * v.out.itemsize
    return 100 * size / tiles.HOPPER.memory / cycles, 2 * m * n * k / cycles * CLOCK / 1e12


def instructions(path: Path = gpu_instructions.OUTPUT) -> str:
    """What benchmarks.gpu_instructions has counted."""
    return gpu_instructions.table(json.loads(path.read_text())["rows"])


def quantizing(path: Path = gpu_quantize_counts.OUTPUT) -> str:
    """What benchmarks.gpu_quantize_counts has counted."""
    return gpu_quantize_counts.table(json.loads(path.read_text())["rows"])


def updating(path: Path = gpu_steps.OUTPUT) -> str:
    """What benchmarks.gpu_steps has counted."""
    return gpu_steps.table(json.loads(path.read_text())["rows"])


def stages() -> str:
    """The stages of benchmarks.gpu_stages, and their times."""
    rows = [["stage", "what it runs", "seconds at most"]]
    rows += [[name, s.what, f"{s.seconds:.0f}"] for name, s in gpu_stages.STAGES.items()]
    return pages.table(rows)


def measured(path: Path = gpu.OUTPUT) -> str:
    """What was found on a GPU."""
    if not path.is_file():
        return "**Nothing has been measured yet.**\n"
    results = json.loads(path.read_text())
    return gpu_report.stages(results) + ("\n" + gpu_report.markdown(results) if results["rows"] else "")


def of_registry(path: Path = benchmarks_registry.OUTPUT) -> str:
    """What NVIDIA's registry has for each Blackwell, as benchmarks.registry found it: cases that are alike together."""
    found = json.loads(path.read_text())
    versions = [f"{name} {found['versions'][name]}" for name in ("nvidia-cutlass-operators", "nvidia-cutlass-dsl")]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for own in found["targets"].values() for name in own):
        cells = tuple(_registered(own[name]) for own in found["targets"].values())
        alike.setdefault(cells, []).append(name)
    rows = [[" and ".join(versions), *(f"sm_{t}" for t in found["targets"])]]
    return pages.table([*rows, *(["; ".join(names), *cells] for cells, names in alike.items())])


def _registered(outcome: dict[str, Any]) -> str:
    if "seconds" in outcome:
        return "compiles"
    return "none" if "has no kernel" in outcome["error"] else "fails"


def optimizers() -> str:
    """What the kernels of optimizers are compiled for."""
    codebooks = gpu_steps.kernels_of("adamw8", torch.bfloat16, "sm_90a")[1]
    rows = [["", *(f"{a}.{b}" for a, b in updates.TARGETS)]]
    rows.append(["compiled for", *updates.TARGETS.values()])
    copies = [str(replace(codebooks, target=t).copies) for t in updates.TARGETS.values()]
    rows.append(["copies of each table of AdamW8bit", *copies])
    floats = ["–" if t in updates.WITHOUT_FLOAT8 else "yes" for t in updates.TARGETS.values()]
    return pages.table([*rows, ["states in e4m3", *floats]])


TABLES = {
    ": registry": of_registry,
    ": optimizers": optimizers,
    ": routes": routes,
    ": forms": forms,
    ": tiles": chosen,
    ": steps": steps,
    ": predicted": predicted,
    ": nibbles": nibbles,
    ": instructions": instructions,
    ": quantizing": quantizing,
    ": updating": updating,
    ": stages": stages,
    ": measured": measured,
}
