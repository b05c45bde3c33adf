"""Output of commands: coloured text on a terminal, JSON for machines, and progress bars on a terminal."""

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def show(text: str, *, style: str | None = None) -> None:
    """Print text to stdout with its line breaks, coloured on a terminal that supports it (NO_COLOR is respected)."""
    _print(Console(highlight=False), text, style)


def say(text: str, *, style: str | None = None) -> None:
    """Print text to stderr, as `show` does to stdout."""
    _print(Console(stderr=True, highlight=False), text, style)


def _print(console: Console, text: str, style: str | None) -> None:
    if console.is_terminal:
        console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
    else:
        print(text, file=console.file, flush=True)


def show_json(value: object) -> None:
    """Print a value as JSON to stdout. Infinities and NaN become the strings "inf", "-inf" and "nan"."""
    print(as_json(value), flush=True)


def as_json(value: object) -> str:
    return json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show an activity on stderr while it runs, on a terminal only."""
    console = Console(stderr=True)
    with console.status(escape(what)) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress log messages below errors, such as those of other libraries."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


class Bar:
    """A progress bar on stderr, on a terminal only. Text printed meanwhile must go through its `show` and `say`.

    Args:
        total: number of steps.
        what: the description.
        ticks: whether the clock runs between steps, in a thread that wakes ten times a second.
    """

    def __init__(self, total: int, what: str, *, ticks: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            auto_refresh=ticks,
            redirect_stdout=sys.stdout.isatty(),  # leave pipes and files alone
        )
        self._task = self._progress.add_task(escape(what), total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self) -> None:
        """Advance by one step."""
        self._progress.update(self._task, advance=1, refresh=True)

    def doing(self, what: str) -> None:
        """Change the description."""
        self._progress.update(self._task, description=escape(what), refresh=True)

    def show(self, text: str, *, style: str | None = None) -> None:
        """Print as `show` does, above the bar if both are on a terminal."""
        if self._console.is_terminal and sys.stdout.isatty():
            _print(self._console, text, style)
        else:
            show(text, style=style)

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print as `say` does, above the bar."""
        _print(self._console, text, style)


def examples(doc: str) -> tuple[str, str]:
    """Split a docstring into a command's help and the formatted lines under "Examples:".

    Each of these lines is a command, optionally followed by two or more spaces and a remark.
    """
    words, _, rest = doc.partition("\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in words.split("\n\n")]
    shown = ["[bold]Examples[/bold]"]
    for line in filter(None, map(str.strip, rest.splitlines())):
        command, *said = re.split(r" {2,}", line, maxsplit=1)
        shown.append(f"  [cyan]{escape(command)}[/cyan]" + "".join(f"  [dim]{escape(s)}[/dim]" for s in said))
    return escape("\n\n".join(paragraphs).strip()), "\n".join(shown) if rest else ""
