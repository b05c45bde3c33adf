"""hop verify: compare two programs, or a program and a .tflite, .tosa, .onnx or .pte file, on the same inputs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hop.cli.inputs import load_inputs, load_program
from hop.cli.output import show, show_json, working
from hop.export import verify as compare
from hop.export.analysis.arguments import named
from hop.export.analysis.comparison import Comparison
from hop.export.verifying import file_kind
from hop.numerics.spelling import JsonObject

Program = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file that torch.export.save wrote.")]
Data = Annotated[Path | None, typer.Option(help="Inputs: .npz or .safetensors.", show_default="random ones")]
Seed = Annotated[int, typer.Option(help="The seed of random inputs.")]


def verify(
    a: Program,
    b: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Another, or a .tflite, .tosa, .onnx or .pte file."),
    ],
    data: Data = None,
    seed: Seed = 0,
    at_least: Annotated[
        float | None, typer.Option(metavar="DB", help="Accept outputs with at least this SQNR.", show_default="equal")
    ] = None,
    kernels: Annotated[str, typer.Option(help="Of a .tflite file: reference, optimized or micro.")] = "reference",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Run two programs on the same inputs and show where they differ: in the outputs, and in corresponding nodes.

    If B is a .tflite file (run by LiteRT), an .onnx file (run by onnxruntime) or a .tosa file (run by TOSA's reference
    model), codes are compared node by node, and for the first node that differs it is tried which convention reproduces
    the runtime's codes. The environment variable HOP_TOSA names the reference model, or the Python environment that has
    it. Of a .pte file (run by ExecuTorch), outputs are compared.

    Exit status: 0 if all outputs are equal or, with --at-least, if integers are equal and each float output reaches
    that SQNR in decibels; 1 if not, or if the two cannot be compared.

    --data names inputs as program A does, or by position: "0", "1", or "arr_0". An array with one more leading
    dimension has several inputs. Without it, inputs are random, in the sizes that A was exported with: floats are
    normal; integers of 8 and 16 bits cover their range; wider ones are 0 or 1, or any row of the table that they index.

    Use this only on files that you trust: PyTorch unpickles parts of them, which can execute any code; LiteRT,
    onnxruntime and ExecuTorch run a file in this process.

    Examples:
        hop verify model.pt2 lowered.pt2
        hop verify float.pt2 int8.pt2 --data batch.npz --at-least 30
        hop verify a.pt2 b.pt2 --json
        hop verify integers.pt2 model.tflite --kernels optimized
        hop verify integers.pt2 model.tosa
        hop verify integers.pt2 model.onnx
    """
    with working(f"loading {a} and {b}"):
        program = load_program(a)
        other: Any = load_program(b) if file_kind(b) is None else b
        inputs = [named(program, x) for x in load_inputs(program, data, seed=seed)]
    with working("running both"):
        comparison = compare(program, other, inputs, kernels=kernels)
    is_met = all(_reaches(row, at_least) for row in comparison.outputs)
    if as_json:
        show_json(as_dict(comparison, is_met))
    else:
        show(str(comparison))
        show(_answer(is_met, at_least), style="green" if is_met else "red")
    return 0 if is_met else 1


def as_dict(comparison: Comparison, is_met: bool) -> JsonObject:
    """The comparison as --json prints it."""
    names = ("a", "b", "operator", "output", "shape", "elements", "differing", "largest", "sqnr")
    rows = [
        {**{n: getattr(row, n) for n in names}, "dtype": str(row.dtype).removeprefix("torch.")}
        for row in comparison.rows
    ]
    first = None if comparison.first is None else comparison.first.a
    counts: dict[str, object] = {"only_a": comparison.only_a, "only_b": comparison.only_b, "inputs": comparison.inputs}
    counts["trials"] = [
        {"convention": str(t.convention), "differing": t.differing, "targets": list(t.targets)}
        for t in comparison.trials
    ]
    counts["units"] = [{"node": n, "program": list(own), "file": list(its)} for n, own, its in comparison.units]
    return {"holds": is_met, "first": first, **counts, "rows": rows}


def _reaches(row: Any, bound: float | None) -> bool:
    if row.differing == 0:
        return True
    return bound is not None and row.sqnr is not None and row.sqnr >= bound


def _answer(is_met: bool, bound: float | None) -> str:
    if bound is None:
        return "the outputs are equal" if is_met else "the outputs differ"
    return f"the outputs are {'within' if is_met else 'not within'} {bound:g} dB"
