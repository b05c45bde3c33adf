"""hop vectors: write the inputs, sums and outputs of each node as test vectors for kernels and hardware."""

from pathlib import Path
from typing import Annotated

import typer

from hop.cli.inputs import load_inputs, load_program
from hop.cli.output import show, show_json, working
from hop.export import vectors as write


def vectors(
    program: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file that torch.export.save wrote.")],
    out: Annotated[Path, typer.Argument(file_okay=False, help="The folder to write, new or empty.")],
    data: Annotated[Path | None, typer.Option(help="Inputs: .npz or .safetensors.", show_default="random ones")] = None,
    seed: Annotated[int, typer.Option(help="The seed of random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write golden vectors: the inputs, codes, exact sums, parameters and outputs of each node of a program.

    The folder has a .npz file per node, vectors.json with the list of nodes, readers in Python (needs numpy only) and
    C99, and a README that describes each array.

    --data names inputs as the program does, or by position: "0", "1", or "arr_0". Without it, inputs are random, in the
    sizes that the program was exported with.

    Use this only on files that you trust: PyTorch unpickles parts of them, which can execute any code.

    Examples:
        hop vectors integers.pt2 out
        hop vectors integers.pt2 out --data one.npz
    """
    with working(f"loading {program}"):
        loaded = load_program(program)
        inputs = load_inputs(loaded, data, seed=seed)
    with working(f"writing {out}"):
        names = write(loaded, out, inputs)
    if as_json:
        show_json({"folder": str(out), "nodes": names})
    else:
        show(f"wrote {len(names)} nodes to {out}", style="green")
