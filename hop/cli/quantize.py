"""hop quantize: a checkpoint of transformers in, one of codes out, in little memory."""

from pathlib import Path
from typing import Annotated

import typer

import hop
from hop.cli.output import Bar, quietly, show


def quantize(
    folder: Annotated[Path, typer.Argument(help="with config.json and safetensors of floats")],
    out: Annotated[Path, typer.Argument(help="the folder to write; one that the same command began is finished")],
    scheme: Annotated[str, typer.Option(help="a name of hop.schemes, such as int8 or int4, or a scheme's text")],
    keep: Annotated[list[str] | None, typer.Option(help="a module that stays in floats; again for more")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="the output embeddings too")] = False,
) -> None:
    """Quantize a checkpoint of transformers, tensor by tensor.

    The model is never in memory. Killed at any moment, the command leaves a folder without config.json, which the same
    command finishes. Output embeddings, and what is tied to them, stay in floats without --keep or --everything.

    Examples:
        hop quantize model model-int4 --scheme int4
        hop quantize model model-int8 --scheme int8 --keep lm_head --keep model.layers.0
    """
    if everything and keep:
        raise typer.BadParameter("goes without --keep", param_hint="'--everything'")
    names = [] if everything else keep or None
    with quietly(), Bar(100, f"quantizing {folder}") as bar:
        percent = 0

        def progress(_name: str, done: int, total: int) -> None:
            nonlocal percent
            while percent < done * 100 // max(total, 1):
                percent += 1
                bar.step()

        report = hop.integrations.quantize_folder(folder, out, scheme, modules_to_not_convert=names, progress=progress)
    show(f"wrote {out}: {report.summary}", style="green")
