"""Time PyTorch's own out_dtype, and hop's as a replacement: calls, and a program in PT2E's reference representation.

python -m benchmarks.stock [--write]      # --write: into docs/export_stock.md
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hop
from benchmarks.timing import interleaved, keep_freed_memory
from hop.kernels.cpu import native
from tests.support import pages

aten = torch.ops.aten
stock = torch.ops.higher_order.out_dtype
PAGE = Path(__file__).parents[1] / "docs" / "export_stock.md"
COMMAND = "python -m benchmarks.stock --write"
ROUNDS = 21


def product(m: int, k: int, n: int) -> list[str]:
    """int8 by int8 to int32: theirs, theirs inside patch_torch, ours."""
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
    theirs = lambda: stock(aten.mm.default, torch.int32, a, b)  # noqa: E731

    def patched() -> Any:
        with hop.patch_torch():
            return theirs()

    ours = lambda: hop.out_dtype(aten.mm.default, torch.int32, a, b)  # noqa: E731
    assert torch.equal(theirs(), ours()) and torch.equal(patched(), ours())
    return [f"mm of int8, {m}×{k}×{n}", *times([theirs, patched, ours])]


def network(batch: int, width: int) -> list[str]:
    """A network of linear layers that PT2E converted to integers: as is, inside patch_torch, and after from_torch."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    layers = [torch.nn.Linear(width, width) for _ in range(3)]
    model, x = torch.nn.Sequential(*layers).eval().requires_grad_(False), torch.randn(batch, width)
    quantizer = xnnpack_quantizer.XNNPACKQuantizer()
    quantizer.set_global(xnnpack_quantizer.get_symmetric_quantization_config(is_per_channel=False))
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    program = torch.export.export(convert_pt2e(prepared, use_reference_representation=True), (x,))
    theirs, ours = program.module(), hop.export.from_torch(program).module()

    def patched() -> Any:
        with hop.patch_torch():
            return theirs(x)

    with torch.no_grad():
        assert torch.equal(theirs(x), ours(x)) and torch.equal(theirs(x), patched())
        name = f"PT2E, 3 linear layers {width}×{width}, {batch} rows"
        return [name, *times([lambda: theirs(x), patched, lambda: ours(x)])]


def times(functions: Sequence[Any]) -> list[str]:
    found = interleaved(functions, rounds=ROUNDS, budget_s=60.0)
    return [f"{ms:.3g} ms" for ms in found] + [f"{found[0] / found[2]:.2g}"]


def table() -> str:
    rows = [product(512, 1024, 1024), product(8, 64, 64), network(64, 512)]
    header = ["", "PyTorch's", "PyTorch's, inside `patch_torch`", "`hop.out_dtype`", "times as fast as PyTorch's"]
    return f"CPU level `{native.library().path}`:\n\n{pages.table([header, *rows])}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with several threads on shared cores, short calls would measure the scheduler
    text = table()
    print(text)
    if "--write" in sys.argv:
        PAGE.write_text(pages.filled(PAGE.read_text(), COMMAND, text))
