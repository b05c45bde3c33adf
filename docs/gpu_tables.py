"""The tables of docs/gpu.md and docs/gpu_kernels.md, from the tables of the kernels."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from benchmarks import gpu, gpu_cases, gpu_quantize_counts, gpu_report, gpu_stages, gpu_steps
from benchmarks import registry as benchmarks_registry
from benchmarks.gpu_times import FORMS as TIMED
from cutlass_kernels import operators, registry, tiles, updates
from cutlass_kernels.forms import BF16, E4M3, E5M2, FORMS, S8, S32, U8
from cutlass_kernels.nibbles import tile_for
from cutlass_kernels.product import FLOAT4, Product
from cutlass_kernels.variants import Variant, short
from hop.schemes import SCHEMES
from tests.support import gpu_programs, pages

GPUS = {
    "Ampere, 8.0": (8, 0),
    "Ada, 8.9": (8, 9),
    "Hopper, 9.0": (9, 0),
    "Blackwell, 10.0": (10, 0),
    "10.3": (10, 3),
    "11.0": (11, 0),
    "12.0": (12, 0),
}
WEIGHTS = {"Llama-3 8B": ((6144, 4096), (28672, 4096), (4096, 14336)), "70B": ((10240, 8192), (8192, 28672))}
_OPERATORS = {"_int_mm": "int8", "_scaled_mm": "scaled", "mm": "bfloat16"}
ROWS = (1, 16, 32, 64, 128, 256, 1024, 4096, 8192)
CLOCK = 1.55e9  # Hz, assumed for a GPU at its power limit


def _products() -> Iterator[tuple[str, Product]]:
    """One product of each kind, without data."""
    m, n, k = 64, 512, 512
    of_rows: dict[str, Any] = {"lhs_scale": torch.empty(m, 1), "rhs_scale": torch.empty(1, n)}

    def made(lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, depth: int = k, **fused: Any) -> Product:
        return Product(torch.empty(m, depth, dtype=lhs), torch.empty(n, depth, dtype=rhs).mT, out, **fused)

    def groups(size: int, dtype: torch.dtype) -> dict[str, Any]:
        shapes = {"lhs_scale": (m, k // size), "rhs_scale": (k // size, n)}
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    blocks: dict[str, Any] = {"lhs_scale": torch.empty(m, k // 128), "rhs_scale": torch.empty(k // 128, n // 128)}
    zero, e8m0 = torch.empty(1, dtype=S8), torch.float8_e8m0fnu
    yield "int8 × uint8 to int32", made(S8, U8, S32)
    yield "batches of int8 to int32", Product(torch.empty(4, m, k, dtype=S8), torch.empty(4, k, n, dtype=S8), S32)
    stacked: dict[str, Any] = {"lhs_scale": torch.empty(4, m), "rhs_scale": torch.empty(4, n)}
    batch = torch.empty(4, m, k, dtype=S8), torch.empty(4, k, n, dtype=S8)
    yield "batches of int8 with scales", Product(*batch, BF16, **stacked)
    yield "int8 with scales and bias", made(S8, S8, BF16, **of_rows, bias=torch.empty(n))
    yield "int8 with zero points", made(S8, S8, BF16, **of_rows, lhs_zero=zero, rhs_zero=zero)
    yield "int8 requantized to int8", made(S8, S8, S8, **of_rows, out_scale=torch.empty(1), requantize="division")
    yield "fp8, row and column scales", made(E4M3, E4M3, BF16, **of_rows)
    yield "e5m2 × e4m3", made(E5M2, E4M3, BF16, **of_rows)
    yield "fp8, blocks 1 × 128 and 128 × 128", made(E4M3, E4M3, BF16, **blocks)
    lines: dict[str, Any] = {"lhs_scale": blocks["lhs_scale"], "rhs_scale": torch.empty(k // 128, n)}
    yield "fp8, blocks 1 × 128 on both sides", made(E4M3, E4M3, BF16, **lines)
    offs = torch.empty(4, dtype=torch.int32)
    weights: dict[str, Any] = {"lhs_scale": torch.empty(m), "rhs_scale": torch.empty(4, n), "offs": offs}
    yield "experts, int8", Product(torch.empty(m, k, dtype=S8), batch[1], BF16, **weights)
    yield "experts, fp8", Product(torch.empty(m, k, dtype=E4M3), batch[1].view(E4M3), BF16, **weights)
    yield "MXFP8", made(E4M3, E4M3, BF16, **groups(32, e8m0))
    yield "MXFP4", made(FLOAT4, FLOAT4, BF16, k // 2, **groups(32, e8m0))
    yield "NVFP4", made(FLOAT4, FLOAT4, BF16, k // 2, **groups(16, E4M3), global_scale=torch.empty(1))


def routes() -> str:
    """The route of each product on each GPU; equal rows are merged."""
    by_route: dict[tuple[str, ...], list[str]] = {}
    installed = (
        mock.patch.object(operators, "missing", lambda: None),
        mock.patch.object(registry, "missing", lambda: None),
    )
    with installed[0], installed[1], FakeTensorMode(), torch.device("cuda", 0):
        for name, product in _products():
            by_route.setdefault(tuple(operators.routes(product, c)[-1][0] for c in GPUS.values()), []).append(name)
    return pages.table([["", *GPUS], *(["; ".join(names), *cells] for cells, names in by_route.items())])


def public_route() -> str:
    """The operators that multiply on each GPU without our kernels, for each scheme; equal rows are merged."""
    by_operators: dict[tuple[str, ...], list[str]] = {}
    for name, scheme in SCHEMES.items():
        graph, _ = gpu_programs.program(scheme, (9, 0))
        found = [p for p, _ in gpu_programs.products(graph)]
        cells = []
        for capability in GPUS.values():
            called = {_OPERATORS[op] for p in found for op in gpu_programs.called_by(p, capability)}
            cells.append(", ".join(sorted(called)) or gpu_programs.decoded_to(graph))
        by_operators.setdefault(tuple(cells), []).append(f"`{name.lower()}`")
    return pages.table([["", *GPUS], *([", ".join(names), *cells] for cells, names in by_operators.items())])


def _fitting(form: str) -> list[Variant]:
    """The variants of a form of benchmarks.gpu_times, one for each tile."""
    one = gpu_cases.Case(TIMED[form], tiles.SMALLEST, (64, 64, 512)).variant()
    assert isinstance(one, Variant), one
    made = [replace(one, tile=t, tma=not t.swap) for t in tiles.TILES]
    return [v for v in made if v.declines() is None]


def predicted() -> str:
    """For each form, the range over WEIGHTS: share of memory bandwidth for few rows, else tera-operations a second."""
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
    """The table of products with 4-bit weights in groups of 128."""
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
    """As _predicted, with the tile chosen for 4-bit weights."""
    v = replace(form, tile=tile_for(m, n, 132, form.lhs), tma=False)
    cycles, (of_weight, of_x) = tiles.cycles(v, m, n, k, 132), tiles.bytes_of(v)
    size = m * k * of_x + n * k * of_weight + m * n * v.out.itemsize
    return 100 * size / tiles.HOPPER.memory / cycles, 2 * m * n * k / cycles * CLOCK / 1e12


def quantizing(path: Path = gpu_quantize_counts.OUTPUT) -> str:
    """The counts of benchmarks.gpu_quantize_counts."""
    return gpu_quantize_counts.table(json.loads(path.read_text())["rows"])


def updating(path: Path = gpu_steps.OUTPUT) -> str:
    """The counts of benchmarks.gpu_steps."""
    return gpu_steps.table(json.loads(path.read_text())["rows"])


def stages() -> str:
    """The stages of benchmarks.gpu_stages and their time limits."""
    rows = [["stage", "runs", "time limit, s"]]
    rows += [[name, s.what, f"{s.seconds:.0f}"] for name, s in gpu_stages.STAGES.items()]
    return pages.table(rows)


def measured(path: Path = gpu.OUTPUT) -> str:
    """The results of benchmarks.gpu."""
    if not path.is_file():
        return "No GPU has been measured.\n"
    results = json.loads(path.read_text())
    return gpu_report.stages(results) + ("\n" + gpu_report.markdown(results) if results["rows"] else "")


def of_registry(path: Path = benchmarks_registry.OUTPUT) -> str:
    """Which products benchmarks.registry could compile for each Blackwell GPU; equal rows are merged."""
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
    """The GPUs that the optimizer kernels are compiled for."""
    codebooks = gpu_steps.kernels_of("adamw8", torch.bfloat16, "sm_90a")[1]
    rows = [["", *(f"{a}.{b}" for a, b in updates.TARGETS)]]
    rows.append(["compiled for", *updates.TARGETS.values()])
    copies = [str(replace(codebooks, target=t).copies) for t in updates.TARGETS.values()]
    rows.append(["copies of each table of AdamW8bit", *copies])
    floats = ["–" if t in updates.WITHOUT_FLOAT8 else "yes" for t in updates.TARGETS.values()]
    return pages.table([*rows, ["states in e4m3", *floats]])


USERS = {": routes": routes, ": public": public_route, ": measured": measured}
AUTHORS = {
    ": predicted": predicted,
    ": nibbles": nibbles,
    ": quantizing": quantizing,
    ": updating": updating,
    ": optimizers": optimizers,
    ": registry": of_registry,
    ": stages": stages,
}
