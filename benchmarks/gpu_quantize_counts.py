"""How many instructions the kernels that quantize take, without a GPU: python -m benchmarks.gpu_quantize_counts.

Counted are those of PTX that the emulator of tests.ptx executes, for 16 elements, without moves between registers,
which the assembler leaves out. The prediction is a model's, not a measurement: a multiprocessor issues four warps'
instructions a cycle, of which SHARE is reached, those of float64 take several slots, and memory moves at a copy's
bandwidth.
"""

import torch

from benchmarks.gpu_quantize import Case, Computed, Gated
from cutlass_kernels import dequantize, quantize
from cutlass_kernels.quantizing import Largest

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
BANDWIDTH, CLOCK, PROCESSORS, SHARE = 4.3e12, 1.755e9, 132, 0.7  # of an H200: a copy's bytes and the cycles a second
DOUBLE, CONVERSION, SEVERAL = (
    2,
    8,
    20,
)  # issue slots: half and an eighth of the rate, and some ten operations of float64


def executed(reports: list) -> dict[str, int]:
    return {
        f"{i} {name}": n
        for i, r in enumerate(reports)
        for name, n in r.instructions.items()
        if not name.startswith("mov")
    }


def slots(name: str) -> int:
    """Of an instruction: more than one where it is of float64."""
    if "f64" not in name or any(word in name for word in ("setp", "selp", "neg")):
        return 1
    return CONVERSION if "cvt" in name else SEVERAL if any(w in name for w in ("div", "sqrt", "rcp")) else DOUBLE


def line(case: Case) -> str:
    """A row of the table: instructions for 16 elements, bytes of an element, and what follows from both."""
    from tests.support import emulated_quantize as emulated

    torch.manual_seed(0)
    x, reports, variants = (
        torch.randn(case.shape).to(case.dtype),
        [],
        quantize.kernels_of(case.request(case.numbers("meta"))),
    )
    with emulated.here(reports):
        made = quantize.run(case.request(x))
    passes = 1 + isinstance(variants[0], Largest) + isinstance(case, Gated)
    moved = (passes * x.nbytes + sum(t.nbytes for t in made)) / x.numel()
    before = f"{case.operation} to " if isinstance(case, Computed) else ""
    named = f"{before}`{case.name}`, {str(x.dtype).removeprefix('torch.')}, {case.copies}"
    return row(named, reports, x.numel(), moved)


def row(name: str, reports: list, count: int, moved: float) -> str:
    own = executed(reports)
    instructions = sum(own.values()) * 32 / count * 16
    issued = sum(n * slots(name) for name, n in own.items()) * 32 / count
    memory, issue = moved / BANDWIDTH, issued / (PROCESSORS * 128 * CLOCK * SHARE)
    return f"| {name} | {instructions:.0f} | {moved:.2f} | {memory / max(memory, issue):.0%} |"


def numbers(name: str) -> str:
    from tests.support import emulated_quantize as emulated

    case, reports = Case(name, torch.bfloat16, (8, 4096)), []
    codes = case.codes("cpu")
    with emulated.here(reports):
        out = dequantize.run(codes)
    held = sum(t.nbytes for t in (codes.codes, codes.scale))
    return row(f"numbers of `{name}`", reports, out.numel(), (held + out.nbytes) / out.numel())


if __name__ == "__main__":
    titles = (
        "quantizer, memory, copies",
        "instructions for 16 elements",
        "bytes of an element",
        "share of a copy's bandwidth",
    )
    print(f"| {' | '.join(titles)} |")
    print("| --- | --- | --- | --- |")
    for case in CASES:
        print(line(case), flush=True)
    for name in ("INT8_ROW", "FP8_ROW", "MXFP4"):
        print(numbers(name), flush=True)
