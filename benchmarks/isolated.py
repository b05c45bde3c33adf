"""Run cases in a separate process, which may fail, crash or hang without affecting the others.

python -m benchmarks.isolated GROUP DESCRIPTOR SKIP SECONDS     names of cases that are done, as JSON, on standard input

A group is "module:function" or "module:function:argument:...": a function that yields names and calls. A call raises
unittest.SkipTest, with the reason, if it cannot run here. The child process reports the start and the outcome of each
case through a pipe. A GPU error makes its process unusable, and a kernel that never ends cannot be stopped from within,
so the parent kills such a child and starts another one at the next case.
"""

import contextlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Cases = Iterable[tuple[str, Callable[[], Any]]]
ROOT = Path(__file__).parents[1]
# Exceptions that a case may raise; others end the process, which the parent reports.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError)
_ERRORS = (*_ERRORS, ValueError)
_POISONED = 3  # exit status of a child whose GPU returns errors
NO_TIME, TOO_MANY = "no time was left", "too many cases ended the process"  # errors of cases that were left out
Done = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: "passed" with a value, "failed", "hung" or "died" with an error, or "skipped"."""

    group: str
    case: str
    state: str
    value: Any = None
    error: str = ""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.state in ("failed", "hung", "died")


# ---- the parent


def run(
    group: str, deadline: float, *, patience: float = 60.0, restarts: int = 4, done: Done = lambda group: ()
) -> Iterator[Outcome]:
    """Yield the outcomes of a group's cases as they finish.

    Args:
        done: gives the names of a group's cases that are left out.
        deadline: time.monotonic() after which no case is started; skipped cases have a single outcome.
        patience: seconds allowed for a case, and for the start of a process.
        restarts: of the process, after cases that ended it; then the rest of the group is abandoned.
    """
    first, is_over, names = 0, False, json.dumps(list(done(group)))
    for _ in range(restarts + 1):
        first, is_over = yield from _attempt(group, (first, names), deadline, patience)
        if is_over:
            return
    yield Outcome(group, f"from case {first} on", "skipped", error=TOO_MANY)


def together(groups: Sequence[str], deadline: float, *, workers: int = 1, **options: Any) -> Iterator[Outcome]:
    """Yield the outcomes of several groups, with `workers` processes, in order of the groups."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    seen: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)

    def work() -> None:
        try:
            while True:
                for outcome in run(waiting.get_nowait(), deadline, **options):
                    seen.put(outcome)
        except queue.Empty:
            pass
        finally:
            seen.put(None)

    workers = min(workers, len(groups))
    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    while workers:
        outcome = seen.get()
        if outcome is None:
            workers -= 1
        else:
            yield outcome


START, _BETWEEN = "(start)", "(between cases)"
_GRACE = 15.0  # seconds that a case may take after the deadline


def _attempt(
    group: str, left_out: tuple[int, str], deadline: float, patience: float
) -> Generator[Outcome, None, tuple[int, bool]]:
    """Yield the outcomes of one child; returns the first case for another one, and whether the group is done.

    `left_out` are the number of cases before the first one, and the JSON of the names of others.
    """
    (skip, names), (reader, writer) = left_out, os.pipe()
    seconds = deadline - time.monotonic()
    command = [sys.executable, "-m", "benchmarks.isolated", group, str(writer), str(skip), str(seconds)]
    with (
        tempfile.TemporaryFile("w+b") as log,
        tempfile.TemporaryFile("w+") as given,
        os.fdopen(reader, "rb", 0) as pipe,
    ):
        given.write(names)
        given.seek(0)
        child = subprocess.Popen(
            command, cwd=ROOT, pass_fds=(writer,), stdin=given, stdout=log, stderr=log, start_new_session=True
        )
        os.close(writer)
        case, begun, done = START, time.monotonic(), skip
        try:
            for message in _messages(pipe, deadline, patience):
                spent = time.monotonic() - begun
                if message is None:
                    error = f"nothing was heard for {spent:.0f} s. {_end_of(log)}"
                    yield Outcome(group, case, "hung", error=error, seconds=spent)
                    return done + 1, case == START
                if "begin" in message:
                    case, done, begun = message["begin"], message["at"], time.monotonic()
                elif "left" in message:
                    yield Outcome(group, f"{message['left']} cases", "skipped", error=NO_TIME)
                    return done, True
                elif "end" in message:
                    return done, True
                else:
                    done += 1
                    yield Outcome(group, case, message["state"], message["value"], message["error"], spent)
                    case, begun = _BETWEEN, time.monotonic()
                    if message["poisoned"]:
                        return done, False
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5)
            error = f"the process ended with status {child.poll()}. {_end_of(log)}"
            yield Outcome(group, case, "died", error=error, seconds=time.monotonic() - begun)
            return done + (case != _BETWEEN), case == START
        finally:
            _end(child)


def _messages(pipe: IO[bytes], deadline: float, patience: float) -> Iterator[dict[str, Any] | None]:
    """Yield a child's messages; None after `patience` seconds of silence, or less near the deadline."""
    rest = b""
    while True:
        left = max(1.0, deadline + _GRACE - time.monotonic())
        if not select.select([pipe], [], [], min(patience, left))[0]:
            yield None
            return
        read = os.read(pipe.fileno(), 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from (json.loads(line) for line in lines)


def _end_of(log: IO[bytes], size: int = 600) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - size))
    return log.read().decode(errors="replace").strip()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its children, without waiting for one that is blocked on a GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)


# ---- the child


def main(group: str, descriptor: str, skip: str, seconds: str) -> int:
    deadline = time.monotonic() + float(seconds)
    with os.fdopen(int(descriptor), "w", 1) as pipe:

        def say(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")

        left_out = set(json.load(sys.stdin))
        cases = [(i, *case) for i, case in enumerate(cases_of(group)) if i >= int(skip) and case[0] not in left_out]
        for i, (at, name, call) in enumerate(cases):
            if time.monotonic() > deadline:
                say(left=len(cases) - i)
                return 0
            say(begin=name, at=at)
            value, error, state = None, "", "passed"
            try:
                value = call()
            except unittest.SkipTest as raised:
                error, state = str(raised), "skipped"
            except _ERRORS as raised:
                error, state = _shown(raised), "failed"
            poisoned = state == "failed" and _is_poisoned()
            say(state=state, value=value, error=error, poisoned=poisoned)
            if poisoned:
                return _POISONED
        say(end=True)
    return 0


def cases_of(group: str) -> Cases:
    module, function, *arguments = group.split(":")
    return getattr(importlib.import_module(module), function)(*arguments)


def _shown(error: BaseException) -> str:
    """The error, and our source line that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:800]}{at}"


def _is_poisoned() -> bool:
    """Whether this process's GPU returns errors from now on."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
