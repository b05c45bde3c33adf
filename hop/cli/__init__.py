"""The command line: `hop`, and `python -m hop`.

Each command is a function in a file of the same name, listed in COMMANDS. Its docstring is its help text; the lines
under "Examples:" are shown below the options. It returns its exit status, or None for 0:

    0  done, or the answer is yes
    1  it failed at least in part, or the answer is no
    2  wrong usage
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
_MAX_MESSAGE = 600  # characters of an error message


def main(arguments: Sequence[str] | None = None, *, program: str = "hop") -> int:
    """Run a command and return its exit status. Errors are one line on stderr.

    Args:
        arguments: of the command line. Default: sys.argv[1:].
        program: the program's name in messages.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    try:
        with warnings.catch_warnings():
            if not debug and not sys.warnoptions:
                warnings.simplefilter("ignore", FutureWarning)  # PyTorch addresses these to its callers
            status = _run(given, program, debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader stopped early, as `head` does
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
        if text := _one_line(error):
            where = getattr(getattr(error, "ctx", None), "command_path", program)
            say(f"{where}: {text}{f' (see {where} --help)' if is_usage else ''}", style="red")
        return 2 if is_usage else 1


def _one_line(error: BaseException) -> str:
    """The message of an error, on one line."""
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has already printed the help
        return ""
    text = _usage_message(error) if isinstance(error, typer.TyperException) else str(error)
    if isinstance(error, KeyError) or not text.strip():
        text = f"{type(error).__name__}: {text}"
    text = " ".join(text.strip().split("\n\n")[0].split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} … (use --debug for the full message)"


def _usage_message(error: Any) -> str:
    """The message of a usage error, with the rejected value. Pydantic's messages, which typer passes on, omit it."""
    text = error.format_message()
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return text
    text, value = text.replace("Value error, ", "", 1), repr(details()[0]["input"])
    return text if value in text else f"{text}; got {value}"


def application() -> typer.Typer:
    """Build the typer application with all commands."""
    app = typer.Typer(
        help="Mixed- and low-precision operators for PyTorch: inspect, convert and compare programs and kernels.",
        epilog=_exit_statuses,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )
    app.callback()(_common_options)
    for command in COMMANDS:
        register(app, command)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", context_settings=_SETTINGS)
    for command in kernels.COMMANDS:
        register(group, command)
    app.add_typer(group, name="kernels", help="The kernels for GPUs: list them, or compile them ahead of time.")
    return app


def register(app: typer.Typer, command: Callable[..., object]) -> None:
    """Add a command with its docstring as its help."""
    words, shown = examples(inspect.getdoc(command) or "")
    name = command.__name__.removesuffix("_")
    settings = {**_SETTINGS, "ignore_unknown_options": command is explain}  # so that -1 is an argument, not an option
    app.command(name, help=words, epilog=shown, context_settings=settings, no_args_is_help=False)(command)


_SETTINGS = {"help_option_names": ["--help", "-h"]}
_exit_statuses = (
    "[bold]Exit status[/bold]\n  0  done, or the answer is yes\n  1  it failed at least in part, or the answer is no\n"
    "  2  wrong usage"
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hop {hop.__version__}")
        raise typer.Exit


def _common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error; allowed anywhere on the line.")
    ] = False,
) -> None:
    """Options of every command; `main` reads --debug."""
