"""hop quantize: quantize a transformers checkpoint with little memory."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

import hop
from hop.cli.output import Bar, quietly, show


def quantize(
    folder: Annotated[
        Path, typer.Argument(help="A checkpoint: config.json and float safetensors files; or a GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; an interrupted run of the same command resumes.")],
    scheme: Annotated[str, typer.Option(help="A name in hop.schemes, such as int8 or int4, or a scheme's text.")],
    keep: Annotated[list[str] | None, typer.Option(help="A module to leave in floats; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Quantize the output embeddings too.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="The same bits on every route and CPU; includes --everything.")
    ] = False,
) -> None:
    """Quantize a transformers checkpoint or a GGUF file, tensor by tensor.

    The model is never fully in memory. If interrupted, the command leaves a folder without config.json, and the same
    command resumes it. Output embeddings, and weights tied to them, stay in floats unless --keep or --everything is
    given.

    With --exact the loaded model gives the same bits in every batch, compiled or not, on every CPU; schemes and layers
    that sum floats are refused.

    Examples:
        hop quantize model model-int4 --scheme int4
        hop quantize model model-int8 --scheme int8 --keep lm_head --keep model.layers.0
        hop quantize model model-int8 --scheme int8 --exact
        hop quantize model.gguf model-int8 --scheme int8
    """
    if everything and keep:
        raise typer.BadParameter("cannot be combined with --keep", param_hint="'--everything'")
    names = keep or ([] if everything or exact else None)
    with quietly(), Bar(100, f"quantizing {folder}") as bar:
        percent = 0

        def progress(_name: str, done: int, total: int) -> None:
            nonlocal percent
            while percent < done * 100 // max(total, 1):
                percent += 1
                bar.step()

        report = hop.integrations.quantize_folder(
            folder, out, scheme, modules_to_not_convert=names, exact=exact, progress=progress
        )
    show(str(report))
    show(f"wrote {out}: {sum(row.bytes for row in report.rows):,} bytes of tensors", style="green")
    show(f"next: {_next(out)}")


def _next(out: Path) -> str:
    """A command that loads the model in `out` and lists its layers."""
    (model_class,) = json.loads((out / "config.json").read_bytes())["architectures"][:1]
    code = f"import hop.integrations, transformers; m = transformers.{model_class}.from_pretrained({str(out)!r})"
    return f"python -c {shlex.quote(f'{code}; print(m.hop_report)')}"
