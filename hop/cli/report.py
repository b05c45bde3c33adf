"""hop report: write an HTML page on each node of a program, and on other schemes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from torch.export import ExportedProgram

from hop import schemes as known_schemes
from hop.cli.inputs import Inputs, load_inputs, load_program
from hop.cli.output import Bar, say, show, show_json, working
from hop.export.analysis.arguments import named
from hop.numerics.spelling import JsonObject
from hop.report import CANDIDATES, Options, compare
from hop.report import sweep as run_sweep
from hop.report.measuring import Progress
from hop.report.sweep_result import Sweep

File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file that torch.export.save wrote.")]
Other = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="The float program to compare with, saved the same way."),
]
Data = Annotated[Path | None, typer.Option(help="Inputs: .npz or .safetensors.", show_default="random ones")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "--out", "-o", dir_okay=False, help="The HTML page to write.", show_default="MODEL.html"),
]
Seed = Annotated[int, typer.Option(help="The seed of random inputs.")]
Runs = Annotated[int, typer.Option(min=1, help="Number of timed runs.")]
TriesSchemes = Annotated[bool, typer.Option("--sweep", help="Also try other schemes on a float program.")]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help=f"The schemes to try, separated by commas: {', '.join(CANDIDATES)}.", show_default="all"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; write a page only with --output.")]


def report(
    model: File,
    reference: Other = None,
    data: Data = None,
    output: Output = None,
    seed: Seed = 0,
    runs: Runs = 3,
    sweep: TriesSchemes = False,
    schemes: Only = None,
    as_json: Json = False,
) -> None:
    """Run a program and write a page on it: each node's formats, kernel, bytes, time and value histogram, and its error
    if there is a reference.

    The page is one file that needs no network. --data is read as by hop verify.

    --sweep also converts the linear layers, convolutions and embeddings of a float program to other schemes; the page
    then begins with the quality, size and time of each. Results are saved one by one in a .sweep.jsonl file next to the
    page, so that running an interrupted command again resumes the sweep.

    Use this only on files that you trust: PyTorch unpickles parts of them, which can execute any code.

    Examples:
        hop report int8.pt2 --reference float.pt2 --data batch.npz -o report.html
        hop report float.pt2 --sweep --schemes int8,fp8,nvfp4
        hop report int8.pt2 --json
    """
    chosen = _chosen(schemes, sweep)
    page = output or Path(f"{model.stem}.html")
    if not page.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {page.parent}", param_hint="'--output'")
    with working(f"loading {model}"):
        program = load_program(model)
        other = None if reference is None else load_program(reference)
        inputs = [named(program, x) for x in load_inputs(program, data, seed=seed)]
    if data is None:
        say("inputs are random; pass real ones with --data for meaningful errors and ranges")
    tried = _sweep(program, inputs, chosen, page, Options(runs, model.name)) if sweep else None
    with _bar() as progress:
        result = compare(program, other, inputs, runs=runs, name=model.name, progress=progress)
    if as_json:
        show_json({"report": result.to_dict(), "sweep": None if tried is None else tried.to_dict()})
    else:
        show("\n".join([*([] if tried is None else [str(tried), tried.summary, ""]), result.summary]))
    if output is not None or not as_json:
        result.save(page, tried)
        say(f"wrote {page}")


def _chosen(schemes: str | None, sweep: bool) -> JsonObject:
    if schemes is None:
        return dict(CANDIDATES)
    names = [name.strip() for name in schemes.split(",")]
    if not sweep:
        raise typer.BadParameter("needs --sweep", param_hint="'--schemes'")
    try:
        return {name: known_schemes.named(name) for name in names}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--schemes'") from error


def _sweep(program: ExportedProgram, inputs: Inputs, chosen: JsonObject, page: Path, options: Options) -> Sweep:
    journal = page.with_suffix(".sweep.jsonl")
    try:
        with _bar() as progress:
            told = Options(options.rounds, options.name, progress)
            return run_sweep(program, inputs, chosen, journal=journal, options=told)
    except KeyboardInterrupt:
        say(f"interrupted; finished results are in {journal}, and the same command resumes from them")
        raise


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar that appears at the first call of the progress function."""
    bars: list[Bar] = []
    seen = [0]

    def tell(what: str, done: int, of: int) -> None:
        if not bars:
            bars.append(Bar(of, what).__enter__())
        bars[0].say(what)
        for _ in range(done - seen[0]):
            bars[0].step()
        seen[0] = done

    try:
        yield tell
    finally:
        for bar in bars:
            bar.__exit__()
