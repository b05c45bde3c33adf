"""hop export: convert a saved program to another program, or to a file for another runtime."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import typer
from torch.export import ExportedProgram

from hop import requantization
from hop.cli.inputs import load_program
from hop.cli.output import quietly, show, show_json, working
from hop.compat.files import naming, whole_file, whole_folder
from hop.export import lower, to_executorch, to_integer, to_onnx, to_qdq
from hop.export.rewrite.report import RewriteReport

To = Literal["integer", "qdq", "aten", "onnx", "executorch"]
Requantize = Literal["reciprocal", "division", "multiplier", "gemmlowp", "tflite", "away", "even"]
Target = Literal["xnnpack", "vulkan"]
Weights = Literal["uint8", "int8"]

CONVENTIONS: dict[Requantize, requantization.Requantization] = {
    "reciprocal": requantization.Reciprocal(),
    "division": requantization.Division(),
    "multiplier": requantization.FloatMultiplier(),
    "gemmlowp": requantization.GEMMLOWP,
    "tflite": requantization.TFLITE,
    "away": requantization.FixedPoint(rounding="away"),
    "even": requantization.FixedPoint(rounding="even"),
}


def _or(choices: object) -> str:
    *most, last = get_args(choices)
    return f"{', '.join(most)} or {last}"


class ExportOptions(NamedTuple):
    """The format-specific options of the command; None if not given."""

    requantize: Requantize | None
    target: Target | None
    weights: Weights | None


class Route(NamedTuple):
    """An export format.

    suffix: of the file that it writes. options: the names of the options that apply to it. write: write the program to
    a file; returns a report if there is one.
    """

    suffix: str
    options: tuple[str, ...]
    write: Callable[[ExportedProgram, ExportOptions, Path], RewriteReport | None]


def _integer(program: ExportedProgram, options: ExportOptions, out: Path) -> RewriteReport:
    result = to_integer(program, requantize=None if options.requantize is None else CONVENTIONS[options.requantize])
    _save(result.program, out)
    return result.report


def _qdq(program: ExportedProgram, options: ExportOptions, out: Path) -> RewriteReport:
    if options.target == "vulkan":
        raise typer.BadParameter("--to qdq supports xnnpack only", param_hint="'--target'")
    result = to_qdq(program, target=options.target)
    _save(result.program, out)
    return result.report


def _aten(program: ExportedProgram, options: ExportOptions, out: Path) -> None:
    _save(lower(program), out)


def _onnx(program: ExportedProgram, options: ExportOptions, out: Path) -> None:
    weights = None if options.weights is None else {"uint8": torch.uint8, "int8": torch.int8}[options.weights]
    model = to_onnx(program, weights=weights)
    with whole_folder(out.parent) as folder, naming(out):  # a large model's weights go into a second file
        model.save(folder / out.name)


def _executorch(program: ExportedProgram, options: ExportOptions, out: Path) -> None:
    partitioners = [] if options.target is None else [_partitioner(options.target)]
    model: Any = to_executorch(program, partitioners=partitioners)
    with whole_file(out) as file:
        model.write_to_file(file)


def _save(program: ExportedProgram, out: Path) -> None:
    with whole_file(out) as file:
        torch.export.save(program, file)


def _partitioner(target: Target) -> Any:
    try:
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    except ImportError as error:
        raise ImportError("--to executorch needs ExecuTorch: pip install 'torch-hop[executorch]'") from error
    return {"xnnpack": XnnpackPartitioner, "vulkan": VulkanPartitioner}[target]()


ROUTES: dict[str, Route] = {
    "integer": Route(".pt2", ("requantize",), _integer),
    "qdq": Route(".pt2", ("target",), _qdq),
    "aten": Route(".pt2", (), _aten),
    "onnx": Route(".onnx", ("weights",), _onnx),
    "executorch": Route(".pte", ("target",), _executorch),
}


def export(
    model: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file that torch.export.save wrote.")],
    out: Annotated[
        Path, typer.Option("--output", "--out", "-o", dir_okay=False, help="The file to write: .pt2, .onnx or .pte.")
    ],
    to: Annotated[
        To | None, typer.Option(metavar="ROUTE", help=f"{_or(To)}.", show_default="from OUT's suffix")
    ] = None,
    requantize: Annotated[
        Requantize | None,
        typer.Option(
            metavar="RULE",
            help=f"How integer sums are requantized, for integer: {_or(Requantize)}.",
            show_default="reciprocal",
        ),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(metavar="BACKEND", help=f"The backend to delegate to, for executorch and qdq: {_or(Target)}."),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(
            metavar="DTYPE",
            help=f"The dtype of weights, for onnx: {_or(Weights)}.",
            show_default="the runtime's choice",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Convert a saved program to exact integers, to core ATen, or for another runtime, and report what was rewritten.

    integer: quantized parts in exact integers (.pt2, the default there). qdq: quantize and dequantize nodes around
    torch's float operators; a process that loads the file must import torch.ao.quantization.fx._decomposed, which
    defines them. aten: the same integers in core ATen. onnx: an ONNX model (.onnx). executorch: a file for ExecuTorch's
    runtime (.pte).

    Use this only on files that you trust: PyTorch unpickles parts of them, which can execute any code.

    Examples:
        hop export quantized.pt2 -o integers.pt2
        hop export quantized.pt2 -o integers.pt2 --requantize tflite
        hop export integers.pt2 -o lowered.pt2 --to aten
        hop export integers.pt2 -o model.onnx
        hop export integers.pt2 -o model.pte --target xnnpack
    """
    options = ExportOptions(requantize, target, weights)
    route = _route(model, out, to, options)
    with working(f"loading {model}"):
        program = load_program(model)
    with working(f"writing {out}"), quietly():
        report = route.write(program, options, out)
    size = out.stat().st_size
    if as_json:
        rows = [] if report is None else [asdict(r) for r in report.rows]
        show_json({"file": str(out), "bytes": size, "rows": rows})
        return 0
    if report is not None:
        show(str(report))
    show(f"wrote {out}, {size:,} bytes", style="green")
    return 0


def _route(model: Path, out: Path, to: str | None, options: ExportOptions) -> Route:
    """The route named `to`, or the default one for the suffix of `out`. Raises BadParameter for options that do not
    apply.
    """
    name = to or next((n for n, r in ROUTES.items() if r.suffix == out.suffix), None)
    if name is None:
        suffixes = ", ".join(sorted({r.suffix for r in ROUTES.values()}))
        raise typer.BadParameter(f"{out} must end in one of {suffixes}", param_hint="'--output'")
    route = ROUTES[name]
    if out.suffix != route.suffix:
        raise typer.BadParameter(
            f"--to {name} writes files that end in {route.suffix}, got {out}", param_hint="'--output'"
        )
    if out.exists() and out.samefile(model):
        raise typer.BadParameter(f"{out} is the input file; name another file", param_hint="'--output'")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="'--output'")
    for option, given in options._asdict().items():
        if given is not None and option not in route.options:
            takers = " and ".join(f"--to {n}" for n, r in ROUTES.items() if option in r.options)
            raise typer.BadParameter(f"applies to {takers}, not to --to {name}", param_hint=f"'--{option}'")
    return route
