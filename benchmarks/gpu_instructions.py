"""Count the instructions in the Hopper kernels' main loops, by kind and per step along K, from their machine code.

    python -m benchmarks.gpu_instructions                # benchmarks/results/gpu_instructions.json; make tables: a page
    python -m benchmarks.gpu_instructions --show --only blocks

Needs the CuTe DSL and nvdisasm, from the CUDA toolkit or, with `--nvdisasm`, from a package of Triton's
(triton/backends/nvidia/bin); no GPU. A step is 128 elements of K. Each of the four schedulers of a multiprocessor has a
warp of each consumer, and issues one instruction per cycle. `slots` is the fraction of issue slots that the consumers
use while the matrix unit multiplies a step. The remaining slots are free, as long as one consumer's waiting overlaps
with the other's products.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import gpu_cases as g
from benchmarks.gpu_times import FORMS
from cutlass_kernels import forms
from cutlass_kernels.tiles import HOPPER, TILES
from cutlass_kernels.variants import Tile, Variant, short
from examples.common import json_rows
from tests.support import pages

OUTPUT = Path(__file__).with_name("results") / "gpu_instructions.json"
# Prefixes of names, in the order in which they are tried.
KINDS = {
    "wgmma": ("HGMMA", "IGMMA", "QGMMA"),
    "its order": ("WARPGROUP",),
    "mbarriers": ("SYNCS",),
    "barriers": ("BAR", "MEMBAR", "FENCE"),
    "float32": ("FADD", "FFMA", "FMUL"),
    "loads": ("LDG", "LDS"),
    "moved": ("R2UR", "MOV", "UMOV"),
    "spilled": ("LDL", "STL"),
}
REST = "other"
NIBBLES = [f for f in forms.FORMS if f.group == 128 and not f.affine]
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\s.*`\((\.L_x_\d+)\)")
_NAME = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)")


def cases() -> Iterator[tuple[str, Tile, Variant]]:
    """Forms by name, each with its tiles for many rows; some also with tiles for few rows.

    Clusters do not change the loop, so only the last of the tiles that differ in them is used, with two blocks along
    the rows if there is one.
    """
    in_order = sorted(TILES, key=lambda t: t.cluster[0])
    alike = {(t.m, t.n, t.pingpong, t.swap): t for t in in_order if t.split == 1}
    for form in FORMS:
        for tile in alike.values():
            large, small = tile.m * tile.n >= 128 * 128, form in ("int8 to bf16", "fp8") and tile.n in (16, 64)
            if small if tile.swap else large:
                rows, columns = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
                v = g.Case(FORMS[form], tile, (rows, columns, 512)).variant()
                if isinstance(v, Variant):
                    yield form, tile, v
    for v in NIBBLES:
        for tile in (Tile(64, 8, swap=True), Tile(128, 64, swap=True)):
            name = f"int4 by {short(v.lhs)}" + ", zero points" * (v.lhs_zero is not None)
            yield name, tile, replace(v, tile=tile, tma=False)


def loops(text: str) -> list[list[str]]:
    """The instruction names of each multiplying loop, including outer loops: from a label to the branch back to it."""
    lines = text.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    ends = [(labels[b[1]], i) for i, line in enumerate(lines) if (b := _BRANCH.search(line)) and labels[b[1]] < i]
    bodies = [[m[1] for line in lines[begin : end + 1] if (m := _NAME.search(line))] for begin, end in ends]
    return [body for body in bodies if kinds(body)["wgmma"]]


def kinds(names: Sequence[str]) -> Counter[str]:
    return Counter(next((kind for kind, starts in KINDS.items() if name.startswith(starts)), REST) for name in names)


def counted(form: str, v: Variant, nvdisasm: str) -> dict[str, Any]:
    """A row: instructions of a warp per step of K, and in a tile's whole loop."""
    from tests.support import emulated

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(emulated.compiled(v).cubin)
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = sorted(loops(text), key=len)
    inner, t = kinds(found[0]), v.tile
    products = t.rows // 64 * (t.k // v.depth)  # per step
    steps = inner["wgmma"] / products
    assert steps == int(steps) > 0, f"{v.name}: {inner['wgmma']} products in a loop, {products} in a step"
    step = {name: inner[name] / steps for name in (*KINDS, REST)}
    cycles = t.m * t.n * t.k * v.lhs.itemsize / HOPPER.products
    slots = sum(step.values()) * (1 if t.pingpong else t.consumers) / cycles
    return {"form": form, "tile": str(t), "cycles": cycles, "step": step, "slots": slots, "tile_code": len(found[-1])}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["", "tile", "cycles", *KINDS, REST, "wgmma, %", "slots, %", "code of a tile"]]
    for row in rows:
        step, all_ = row["step"], sum(row["step"].values())
        numbers = [f"{step[name]:.4g}" for name in (*KINDS, REST)]
        shares = [f"{100 * step['wgmma'] / all_:.0f}", f"{100 * row['slots']:.0f}"]
        lines.append([row["form"], row["tile"], f"{row['cycles']:.0f}", *numbers, *shares, str(row["tile_code"])])
    return pages.table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the table, and write nothing")
    parser.add_argument("--only", default="", help="part of a form's and a tile's name")
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"), help="the disassembler; else that of the PATH")
    options = parser.parse_args()
    if not options.nvdisasm:
        parser.error("no nvdisasm is on the PATH; install the CUDA toolkit, or name one that Triton's package has")
    chosen = [(form, v) for form, tile, v in cases() if options.only in f"{form} {tile}"]
    rows = [counted(form, v, options.nvdisasm) for form, v in chosen]
    print(table(rows))
    if not options.show:
        OUTPUT.write_text(json_rows({"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
