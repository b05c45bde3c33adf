"""The command line: `hop`, and `python -m hop`.

A command is a function in a file of its own, of the same name, and COMMANDS lists them. Its docstring is its help; what
stands under "Examples:" there, a line each, is shown below the options. It returns its exit status, or None for 0:

    0  done, or the answer is yes
    1  it failed, a part of it did, or the answer is no
    2  it was not understood
    130  interrupted
"""

import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import hop
from hop.cli import kernels
from hop.cli.bench import bench
from hop.cli.explain import explain
from hop.cli.export import export
from hop.cli.formats import formats
from hop.cli.info import info
from hop.cli.output import examples, say
from hop.cli.quantize import quantize
from hop.cli.report import report
from hop.cli.vectors import vectors
from hop.cli.verify import verify

COMMANDS: tuple[Callable[..., int | None], ...] = (
    info,
    formats,
    explain,
    verify,
    report,
    export,
    vectors,
    quantize,
    bench,
)

_ERRORS = (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_LONGEST = 600  # characters of a message


def main(arguments: Sequence[str] | None = None, *, program: str = "hop") -> int:
    """Run a command.

    Args:
        arguments: of the command line, sys.argv[1:] by default.
        program: what it is called in messages.

    Returns its exit status. Errors are a line on stderr.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    try:
        with warnings.catch_warnings():
            if not debug and not sys.warnoptions:
                warnings.simplefilter("ignore", FutureWarning)  # of PyTorch to those who call it
            status = _run(given, program, debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status


def _run(arguments: list[str], program: str, debug: bool) -> int:
    try:
        status = application()(args=arguments, prog_name=program, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except BrokenPipeError:
        raise
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except (typer.TyperException, *_ERRORS) as error:
        if debug:
            traceback.print_exc()
        is_usage = isinstance(error, typer.TyperException) and error.exit_code == 2
        if text := _words(error):
            where = getattr(getattr(error, "ctx", None), "command_path", program)
            say(f"{where}: {text}{f' ({where} --help says more)' if is_usage else ''}", style="red")
        return 2 if is_usage else 1


def _words(error: BaseException) -> str:
    """A message on one line."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been shown
        return ""
    text = _of_usage(error) if isinstance(error, typer.TyperException) else str(error)
    if isinstance(error, KeyError) or not text.strip():
        text = f"{type(error).__name__}: {text}"
    text = " ".join(text.strip().split("\n\n")[0].split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … (--debug shows all of it)"


def _of_usage(error: Any) -> str:
    """The words of typer, with the value where it leaves that out. It passes on those of pydantic, which begin with the
    class of the error."""
    text = error.format_message()
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return text
    text, value = text.replace("Value error, ", "", 1), repr(details()[0]["input"])
    return text if value in text else f"{text}; got {value}"


def application() -> typer.Typer:
    """The commands, put together."""
    app = typer.Typer(
        help="Mixed- and low-precision operators for PyTorch: what runs here, and what became of a program.",
        epilog=_exit_statuses,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )
    app.callback()(_everywhere)
    for command in COMMANDS:
        register(app, command)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", context_settings=_SETTINGS)
    for command in kernels.COMMANDS:
        register(group, command)
    app.add_typer(group, name="kernels", help="The kernels for GPUs: list them, or compile them ahead of time.")
    return app


def register(app: typer.Typer, command: Callable[..., Any]) -> None:
    """Add a command, whose docstring is its help."""
    words, shown = examples(inspect.getdoc(command) or "")
    name = command.__name__.removesuffix("_")
    settings = {**_SETTINGS, "ignore_unknown_options": command is explain}  # numbers below 0 are arguments of operators
    app.command(name, help=words, epilog=shown, context_settings=settings, no_args_is_help=False)(command)


_SETTINGS = {"help_option_names": ["--help", "-h"]}
_exit_statuses = (
    "[bold]Exit status[/bold]\n  0  done, or the answer is yes\n  1  it failed, a part of it did, or the answer is no\n"
    "  2  it was not understood"
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hop {hop.__version__}")
        raise typer.Exit


def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version, and end.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from; may stand anywhere on the line.")
    ] = False,
) -> None:
    """What every command takes; `main` reads --debug."""
