"""Compile the kernels of NVIDIA's registry for each Blackwell GPU, and write benchmarks/results/registry.json.

python -m benchmarks.registry [--target 100a ...]

Needs the CuTe DSL and the registry, but no GPU; nothing is executed. Earlier results of other targets are kept if the
package versions are the same.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cutlass_kernels import cache, registry
from cutlass_kernels.product import FLOAT4, FLOATS
from cutlass_kernels.variants import short
from examples.common import json_rows

OUTPUT = Path(__file__).parent / "results" / "registry.json"
TARGETS = ("100a", "103a", "110a", "120a", "121a")
E4M3, E5M2 = FLOATS
MULTIPROCESSORS, SIZE = 148, 256
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def cases() -> Iterator[tuple[str, registry.Case]]:
    """A named case for each kernel that products use, apart from its tile."""
    for dtype in (torch.int8, torch.uint8):
        yield f"{short(dtype)} to s32", registry.Case(dtype, dtype, torch.int32)
    yield "s8 to s32, a batch", registry.Case(torch.int8, torch.int8, torch.int32, batched=True)
    for dtype in FLOATS:
        yield f"{short(dtype)} to bf16", registry.Case(dtype, dtype, BF16)
        for scaled, biased in ((True, False), (False, True), (True, True)):
            words = " and ".join(["scales"] * scaled + ["bias"] * biased)
            yield f"{short(dtype)} to bf16, {words}", registry.Case(dtype, dtype, BF16, scaled=scaled, biased=biased)
    for out in (F16, F32):
        yield f"e4m3 to {short(out)}, scales and bias", registry.Case(E4M3, E4M3, out, scaled=True, biased=True)
    for name, lhs, rhs, group in (
        ("MXFP8, e4m3", E4M3, E4M3, 32),
        ("MXFP8, e4m3 by e5m2", E4M3, E5M2, 32),
        ("MXFP8, e5m2", E5M2, E5M2, 32),
        ("MXFP4", FLOAT4, FLOAT4, 32),
        ("NVFP4", FLOAT4, FLOAT4, 16),
    ):
        for out in (BF16, F32):
            yield f"{name} to {short(out)}", registry.Case(lhs, rhs, out, group=group)


def compiled(target: str, case: registry.Case) -> dict[str, Any]:
    """Whether a case compiles for a target, with the seconds, or the error."""
    begin = time.perf_counter()
    try:
        registry.compile_for(target, registry.tiled(case, SIZE, SIZE, MULTIPROCESSORS), MULTIPROCESSORS)
    except Exception as error:  # noqa: BLE001 - the packages have many of their own
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"seconds": round(time.perf_counter() - begin, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    chosen = parser.parse_args(arguments)
    if (reason := registry.missing()) is not None:
        print(f"nothing to compile: {reason}")
        return 3
    found: dict[str, Any] = {"versions": cache.versions(), "targets": {}}
    if OUTPUT.exists() and (before := json.loads(OUTPUT.read_text()))["versions"] == found["versions"]:
        found = before
    for target in chosen.target:
        own = found["targets"][target] = {}
        for name, case in cases():
            own[name] = compiled(target, case)
            print(f"sm_{target}, {name}: {own[name]}", flush=True)
        temporary = OUTPUT.with_suffix(".part")
        temporary.write_text(json_rows(found) + "\n")
        os.replace(temporary, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
