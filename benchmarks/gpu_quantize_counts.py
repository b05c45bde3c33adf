"""Count the instructions of the quantize kernels, without a GPU.

    python -m benchmarks.gpu_quantize_counts      # benchmarks/results/gpu_quantize_counts.json; make tables: a page

Counted are the PTX instructions that the emulator of tests.ptx executes for 16 elements, without register moves, which
the assembler removes. The prediction comes from a model, not a measurement: a multiprocessor issues instructions of
four warps per cycle, of which it reaches SHARE; float64 instructions take several slots; and memory moves at a copy's
bandwidth.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_quantize import Case, Computed, Gated
from cutlass_kernels import cache, dequantize, quantize
from cutlass_kernels.quantizing import Largest
from examples.common import json_rows
from tests.support import pages

OUTPUT = Path(__file__).with_name("results") / "gpu_quantize_counts.json"
CASES = (
    *(Case(name, torch.bfloat16, (8, 4096)) for name in ("INT8_ROW", "FP8_ROW", "INT8_ROW_AFFINE", "FP8_1X128")),
    *(Case(name, torch.bfloat16, (8, 4096)) for name in ("MXFP8", "MXFP4", "NVFP4", "INT4_32", "FP8_TENSOR")),
    Case("FP8_128X128", torch.bfloat16, (128, 1024)),
    Case("FP8_128X128", torch.bfloat16, (128, 1024), "both"),
    Case("MXFP8", torch.bfloat16, (128, 1024), "both"),
    Case("MXFP8", torch.bfloat16, (128, 1024), "columnwise"),
    Case("FP8_ROW", torch.float32, (8, 4096)),
    *(Computed(name, torch.bfloat16, (8, 4096)) for name in ("INT8_ROW", "FP8_ROW", "MXFP8")),
    Computed("INT8_ROW", torch.bfloat16, (8, 4096), operation="layer_norm"),
    *(Gated("INT8_ROW", torch.bfloat16, (8, 4096), operation=operation) for operation in ("silu", "gelu_tanh", "gelu")),
    Gated("MXFP8", torch.bfloat16, (8, 4096)),
)
DEQUANTIZED = tuple(Case(name, torch.bfloat16, (8, 4096)) for name in ("INT8_ROW", "FP8_ROW", "MXFP4"))
BANDWIDTH, CLOCK, PROCESSORS, SHARE = 4.3e12, 1.755e9, 132, 0.7  # of an H200: bytes of a copy and cycles per second
# Issue slots of float64 instructions: half and an eighth of the rate, and about ten operations.
DOUBLE, CONVERSION, SEVERAL = 2, 8, 20


def name_of(case: Case) -> str:
    operation = getattr(case, "operation", "")  # of operators that are computed and quantized in one kernel
    before = f"{operation} to " if operation else ""
    return f"{before}`{case.name}`, {str(case.dtype).removeprefix('torch.')}, {case.copies}"


def numbers_of(case: Case) -> str:
    return f"dequantize `{case.name}`"


def names() -> list[str]:
    """The rows of the table."""
    return [*map(name_of, CASES), *map(numbers_of, DEQUANTIZED)]


def executed(reports: list) -> dict[str, int]:
    return {
        f"{i} {name}": n
        for i, r in enumerate(reports)
        for name, n in r.instructions.items()
        if not name.startswith("mov")
    }


def slots(name: str) -> int:
    """The issue slots of an instruction: more than one for float64."""
    if "f64" not in name or any(word in name for word in ("setp", "selp", "neg")):
        return 1
    return CONVERSION if "cvt" in name else SEVERAL if any(w in name for w in ("div", "sqrt", "rcp")) else DOUBLE


def counted(case: Case) -> dict[str, Any]:
    """A row: instructions of a thread for 16 elements, their slots, and bytes read and written per element."""
    from tests.support import emulated_quantize as emulated

    torch.manual_seed(0)
    request, reports = case.request(torch.randn(case.shape).to(case.dtype)), []
    variants = quantize.kernels_of(case.request(case.numbers("meta")))
    with emulated.here(reports):
        made = quantize.run(request)
    passes = 1 + isinstance(variants[0], Largest) + (getattr(request, "other", None) is not None)
    moved = passes * request.x.nbytes + sum(t.nbytes for t in made)
    return _row(name_of(case), reports, request.x.numel(), moved)


def counted_back(case: Case) -> dict[str, Any]:
    """The same for dequantizing."""
    from tests.support import emulated_quantize as emulated

    codes, reports = case.codes("cpu"), []
    with emulated.here(reports):
        out = dequantize.run(codes)
    held = sum(t.nbytes for t in (codes.codes, codes.scale))
    return _row(numbers_of(case), reports, out.numel(), held + out.nbytes)


def _row(name: str, reports: list, count: int, moved: int) -> dict[str, Any]:
    own = executed(reports)
    instructions, issued = sum(own.values()), sum(n * slots(name) for name, n in own.items())
    per_chunk = 32 / count * 16
    return {
        "name": name,
        "instructions": instructions * per_chunk,
        "slots": issued * per_chunk,
        "bytes": moved / count,
    }


def share(issued: float, size: float) -> float:
    """The highest fraction of a copy's bandwidth: memory time divided by the larger of memory time and issue time."""
    memory, issue = size / BANDWIDTH, issued / 16 / (PROCESSORS * 128 * CLOCK * SHARE)
    return memory / max(memory, issue)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            "quantizer, input, copies",
            "instructions per 16 elements",
            "bytes per element",
            "share of a copy's bandwidth",
        ]
    ]
    for row in rows:
        count, size = row["instructions"], row["bytes"]
        lines.append([row["name"], f"{count:.0f}", f"{size:.2f}", f"{share(row['slots'], size):.0%}"])
    return pages.table(lines)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for count, cases in ((counted, CASES), (counted_back, DEQUANTIZED)):
        for case in cases:
            rows.append(count(case))
            print(rows[-1], flush=True)
    OUTPUT.write_text(json_rows({"versions": cache.versions(), "rows": rows}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
