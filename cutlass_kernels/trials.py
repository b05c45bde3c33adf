"""The process that tries GPU kernels, so that a fault or an endless kernel ends it and not the user's process.

cutlass_kernels.trust starts it, and writes pickled `Trial`s to its standard input. It answers through a pipe, a line of
JSON each: {"kernel": NAME, "stage": "compile"}, then {"kernel": NAME, "stage": "run"}, then {"kernel": NAME, "state":
"right", "wrong", "died" or "unchecked", "reason": TEXT}; and {"end": true} once all are done.

A judge is a function "module:name" of a subject and a device. It returns a `Judged`: what compiles the kernel, and the
checks, each of which raises AssertionError for a wrong result.
"""

import importlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from cutlass_kernels.verdicts import LONGEST, RIGHT, UNCHECKED

_OTHER = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class Trial(NamedTuple):
    """A kernel to try, by name, with the judge and its subject, which can be pickled."""

    kernel: str
    judge: str
    subject: Any


class Judged(NamedTuple):
    """How a kernel is compiled, and what it must compute."""

    compile: Callable[[], Any]
    checks: Iterable[Callable[[], Any]]


def main() -> None:
    """Try the kernels on standard input; arguments are a file descriptor to answer on, and the number of a GPU."""
    descriptor, index = map(int, sys.argv[1:3])
    if not __debug__:
        raise RuntimeError("checks are assertions, which this interpreter leaves out")
    trials: list[Trial] = pickle.load(sys.stdin.buffer)
    with os.fdopen(descriptor, "w", 1) as pipe:

        def say(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")

        device = gpu(index)
        for trial in trials:
            state, reason = tried(trial, device, say)
            say(kernel=trial.kernel, state=state, reason=reason[:LONGEST])
            if state == "died":  # the GPU returns errors to this process from now on
                return
        say(end=True)


def gpu(index: int) -> torch.device:
    """The GPU to try kernels on, made the current one."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def tried(trial: Trial, device: torch.device, say: Callable[..., None]) -> tuple[str, str]:
    """The state of a kernel, and the reason unless it is right."""
    say(kernel=trial.kernel, stage="compile")
    try:
        module, function = trial.judge.split(":")
        judged: Judged = getattr(importlib.import_module(module), function)(trial.subject, device)
        judged.compile()
    except (*_OTHER, AssertionError) as error:
        return UNCHECKED, f"it does not compile: {_shown(error)}"
    say(kernel=trial.kernel, stage="run")
    try:
        count = 0
        for check in judged.checks:
            check()
            synchronize(device)
            count += 1
    except AssertionError as error:
        return "wrong", f"its results are wrong: {_shown(error)}"
    except torch.OutOfMemoryError as error:
        return UNCHECKED, f"its check found no memory: {_shown(error)}"
    except _OTHER as error:
        return "died", f"it ended with {_shown(error)}"
    return (RIGHT, "") if count else (UNCHECKED, "no check is known for it")


def synchronize(device: torch.device) -> None:
    """Wait for the device, which reports errors of kernels then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shown(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words[:400] if isinstance(error, AssertionError) and words else f"{type(error).__name__}: {words[:400]}"


if __name__ == "__main__":
    main()
