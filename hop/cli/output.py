"""What commands write: text with colours on a terminal, JSON for machines, progress where somebody watches."""

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def show(text: str, *, style: str | None = None) -> None:
    """A text on stdout, its lines as they are, coloured on a terminal that takes colours (NO_COLOR is respected)."""
    _print(Console(highlight=False), text, style)


def say(text: str, *, style: str | None = None) -> None:
    """The same on stderr."""
    _print(Console(stderr=True, highlight=False), text, style)


def _print(console: Console, text: str, style: str | None) -> None:
    if console.is_terminal:
        console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)
    else:
        print(text, file=console.file, flush=True)


def show_json(value: Any) -> None:
    """A value on stdout, as JSON. Infinities and NaN, which JSON lacks, are the strings "inf", "-inf" and "nan"."""
    print(as_json(value), flush=True)


def as_json(value: Any) -> str:
    return json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is being done while it lasts, on a terminal, on stderr."""
    console = Console(stderr=True)
    with console.status(escape(what)) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what other libraries log of themselves; errors are logged."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


class Bar:
    """How far a command has come; on a terminal, on stderr. What is shown and said within it goes through it.

    Args:
        total: how many steps there are.
        ticks: whether its clock runs between steps, by a thread that wakes ten times a second.
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
            redirect_stdout=sys.stdout.isatty(),  # elsewhere it goes where it goes
        )
        self._task = self._progress.add_task(escape(what), total=total)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self) -> None:
        """One more is done."""
        self._progress.update(self._task, advance=1, refresh=True)

    def doing(self, what: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=escape(what), refresh=True)

    def show(self, text: str, *, style: str | None = None) -> None:
        """As `show`, above the bar where both are on a terminal."""
        if self._console.is_terminal and sys.stdout.isatty():
            _print(self._console, text, style)
        else:
            show(text, style=style)

    def say(self, text: str, *, style: str | None = None) -> None:
        """As `say`, above the bar."""
        _print(self._console, text, style)


def examples(doc: str) -> tuple[str, str]:
    """A docstring as the help of a command, and the lines under its "Examples:" as what stands below the options. A
    line is a command, and after two spaces or more, words on it."""
    words, _, rest = doc.partition("\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in words.split("\n\n")]
    shown = ["[bold]Examples[/bold]"]
    for line in filter(None, map(str.strip, rest.splitlines())):
        command, *said = re.split(r" {2,}", line, maxsplit=1)
        shown.append(f"  [cyan]{escape(command)}[/cyan]" + "".join(f"  [dim]{escape(s)}[/dim]" for s in said))
    return escape("\n\n".join(paragraphs).strip()), "\n".join(shown) if rest else ""
