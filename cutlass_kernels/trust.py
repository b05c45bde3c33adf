"""Which GPU kernels may be used: those that gave right results on this kind of GPU.

A kernel without a verdict (cutlass_kernels.verdicts) is tried before its first use, in a separate process with a time
limit (cutlass_kernels.trials). The environment variable HOP_GPU_KERNELS chooses:

    verified   kernels that were right; the default
    all        every kernel, without a trial
    off        none, so that PyTorch's operators run

While a CUDA graph is captured nothing is tried, and only kernels with a verdict are used.
"""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import torch

from cutlass_kernels import cache, verdicts
from cutlass_kernels.trials import Trial
from cutlass_kernels.verdicts import STATES, UNCHECKED, Kind, Verdict

VARIABLE = "HOP_GPU_KERNELS"
MODES = ("verified", "all", "off")
SECONDS = 20.0  # for trials at first use, with the start of their process
PATIENCE = 6.0  # of these, for the checks of one kernel, once it is compiled
JUDGES = {  # by the type of a kernel: cutlass_kernels knows products; hop adds what it alone can compute another way
    "Variant": "cutlass_kernels.trial_products:product",
    "Transposition": "cutlass_kernels.trial_products:transposition",
    "Registered": "cutlass_kernels.trial_products:registry_product",
}
_CODE = "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); from cutlass_kernels import trials; trials.main()"
_MOST_BYTES = 2**20  # of an answer
_LATE = "; run `hop kernels check`, which takes its time"

families: list[Callable[[], Iterable[Any]]] = []
"""Each gives kernels that are compiled already, to try beside the first one on a kind of GPU."""

_known: dict[tuple[Kind, str, str], Verdict] = {}  # by kind, kernel and digest
_decided: dict[tuple[Any, ...], str | None] = {}  # by the mode, the kernel and the number of the GPU
_lock = threading.RLock()
_kinds: dict[int, Kind] = {}


def mode() -> str:
    """The value of HOP_GPU_KERNELS.

    Raises:
        ValueError: it is none of MODES.
    """
    chosen = os.environ.get(VARIABLE) or MODES[0]
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {chosen!r}; unset it, or set one of these")
    return chosen


def declines(kernel: Any, device: torch.device, subject: Any = None) -> str | None:
    """Why a kernel must not be used on a GPU, or None. A kernel without a verdict is tried first.

    Args:
        kernel: a value with `name` and `target`.
        subject: what its judge needs to know, the kernel by default.
    """
    key = os.environ.get(VARIABLE), kernel, device.index
    if key in _decided:
        return _decided[key]
    if (chosen := mode()) != "verified":
        reason, is_final = (None if chosen == "all" else f"{VARIABLE}=off"), True
    else:
        verdict, is_final = verdict_of(kernel, device, subject)
        reason = None if verdict.is_right else f"{kernel.name} is not used on this GPU: {verdict.reason}"
    if is_final and device.index is not None:
        _decided[key] = reason
    return reason


def verdict_of(kernel: Any, device: torch.device, subject: Any = None) -> tuple[Verdict, bool]:
    """The verdict on a kernel, from memory, from disk, or by trying it now; and whether this process keeps it."""
    kind, digest = kind_of(device), cache.identity(kernel.name, kernel.target)
    key = kind, kernel.name, digest
    found = _known.get(key)
    if found is not None:
        return found, True
    with _lock:
        found = _known.get(key) or _remembered(kind, kernel.name, digest)
        if found is None and is_capturing():
            how = "run the call once before the capture, or `hop kernels check`"
            reason = f"it was not checked yet, and cannot be while a CUDA graph is captured: {how}"
            return Verdict(UNCHECKED, reason), False
        if found is None:
            found = _first_use(kernel, device, subject)
            if not found.is_right:
                _warn(kernel.name, found)
    return found, True


def _first_use(kernel: Any, device: torch.device, subject: Any) -> Verdict:
    """Try a kernel; if it is the first one on this kind of GPU, with those of `families` as time allows."""
    kernels = {kernel.name: kernel}
    if not known(device):
        kernels |= {own.name: own for family in families for own in family() if own.name != kernel.name}
    trials = [trial_of(own, subject if own is kernel else None) for own in kernels.values()]
    return verify(trials, {n: cache.identity(n, own.target) for n, own in kernels.items()}, device, SECONDS)[
        kernel.name
    ]


def trial_of(kernel: Any, subject: Any = None) -> Trial:
    """The trial of a kernel, with what its judge needs to know."""
    return Trial(kernel.name, judge_of(kernel), kernel if subject is None else subject)


def judge_of(kernel: Any) -> str:
    """The judge of a kernel, by its type; empty if there is none."""
    return JUDGES.get(type(kernel).__name__, "")


def kind_of(device: torch.device) -> Kind:
    """The kind of a GPU, asked once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _kinds.get(index)
    if found is None:
        found = _kinds[index] = verdicts.kind_of(torch.device("cuda", index))
    return found


def is_capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _warn(name: str, verdict: Verdict) -> None:
    warnings.warn(
        f"the GPU kernel {name} is not used: {verdict.reason}. PyTorch's operators run instead; see `hop info`, "
        f"and set {VARIABLE}=off to use none of these kernels",
        stacklevel=3,
    )


def _remembered(kind: Kind, name: str, digest: str) -> Verdict | None:
    """The verdict on disk on a kernel with this digest."""
    for own, verdict in verdicts.read(kind).items():
        _known.setdefault((kind, own, verdict.digest), verdict)
    return _known.get((kind, name, digest))


def check(kernels: Iterable[Any], device: torch.device, seconds: float = 600.0) -> dict[str, Verdict]:
    """Try kernels without a verdict, as `verify`, and give the verdicts on all by name. With HOP_GPU_KERNELS=off none
    is tried."""
    named = {kernel.name: kernel for kernel in kernels}
    if mode() == "off":
        return {name: Verdict(UNCHECKED, f"{VARIABLE}=off") for name in named}
    digests = {name: cache.identity(name, kernel.target) for name, kernel in named.items()}
    return verify([trial_of(kernel) for kernel in named.values()], digests, device, seconds)


def verify(
    trials: Sequence[Trial], digests: Mapping[str, str], device: torch.device, seconds: float
) -> dict[str, Verdict]:
    """Try kernels that have no verdict, one process at a time on a machine, and keep the verdicts; all of `trials`.

    Args:
        digests: of the kernels, by name.
        seconds: for all of them, with the start of the process.
    """
    kind = kind_of(device)
    with _lock, verdicts.locked(kind, seconds + PATIENCE) as alone:
        kept = {t.kernel: _remembered(kind, t.kernel, digests[t.kernel]) for t in trials}
        found = {name: verdict for name, verdict in kept.items() if verdict is not None}
        rest = [t for t in trials if t.kernel not in found]
        if rest and not alone:
            reason = f"another process has been checking kernels for more than {seconds:.0f} s"
            new = {t.kernel: Verdict(UNCHECKED, reason) for t in rest}
        else:
            new = _tried(rest, device, seconds)
        new = {name: verdict._replace(digest=digests[name]) for name, verdict in new.items()}
        verdicts.add(kind, new)
        first = trials[0].kernel if trials else ""
        for name, verdict in new.items():
            if verdict.state in STATES or name == first:  # which without a verdict is not tried again by this process
                _known[kind, name, digests[name]] = verdict
        _decided.clear()
        return found | new


# ---- the process that tries them


def _tried(trials: Sequence[Trial], device: torch.device, seconds: float) -> dict[str, Verdict]:
    """The verdict of each trial, from as many processes as it takes, one after another."""
    deadline, found = time.monotonic() + seconds - PATIENCE, dict[str, Verdict]()
    for trial in trials:
        if not trial.judge:
            found[trial.kernel] = Verdict(UNCHECKED, f"nothing here can check it; {VARIABLE}=all uses it all the same")
    rest = [t for t in trials if t.kernel not in found]
    while rest and time.monotonic() < deadline:
        try:
            new, why = _attempt(rest, device, deadline)
        except OSError as error:
            new, why = {}, f"the process that checks it did not start: {error}"
        found |= new
        left = [t for t in rest if t.kernel not in found]
        if len(left) == len(rest):  # no progress, so another process would not make any
            return found | {t.kernel: Verdict(UNCHECKED, why) for t in left}
        rest = left
    return found | {
        t.kernel: Verdict(UNCHECKED, f"its check did not begin within {seconds:.0f} s{_LATE}") for t in rest
    }


def _attempt(trials: Sequence[Trial], device: torch.device, deadline: float) -> tuple[dict[str, Verdict], str]:
    """The verdicts that one process gives, and the reason why it gives no more."""
    begun, stage, found = "", "", dict[str, Verdict]()
    with _process(trials, device) as (child, pipe, log):
        for message in _messages(pipe, deadline, [t.kernel for t in trials]):
            if message is None:
                if stage == "run":
                    reason = "its check did not end in time: the kernel may run for ever"
                    return found | {begun: Verdict("hung", reason)}, reason
                where = f"while {begun} was compiled" if begun else "while its process started"
                return _blamed(found, begun, f"its check took too long {where}{_LATE}")
            if isinstance(message, str):
                return _blamed(found, begun, f"its check gave a senseless answer: {message}")
            if "stage" in message:
                begun, stage = message["kernel"], message["stage"]
            elif "state" in message:
                found[begun], stage = Verdict(message["state"], message["reason"]), ""
            else:
                return found, "its check ended without a verdict"
        status = _status(child)
        reason = f"its check ended with status {status}. {_end_of(log)}".strip()
        if stage == "run" and status not in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
            return found | {begun: Verdict("died", reason[: verdicts.LONGEST])}, reason
        return _blamed(found, begun if stage else "", reason)


def _blamed(found: dict[str, Verdict], kernel: str, reason: str) -> tuple[dict[str, Verdict], str]:
    """The verdicts, and that there is none on a kernel whose trial was disturbed."""
    return (found | {kernel: Verdict(UNCHECKED, reason)} if kernel else found), reason


@contextmanager
def _process(trials: Sequence[Trial], device: torch.device) -> Iterator[tuple[Any, IO[bytes], IO[bytes]]]:
    """The process, the pipe of its answers, and what it prints; it is killed at the end."""
    index = torch.cuda.current_device() if device.index is None else device.index
    reader, writer = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    environment[VARIABLE] = "all"
    with os.fdopen(reader, "rb", 0) as pipe, tempfile.TemporaryFile("w+b") as log, tempfile.TemporaryFile() as given:
        pickle.dump(list(trials), given)
        given.seek(0)
        try:
            child = subprocess.Popen(
                [*_command(), str(writer), str(index), json.dumps(sys.path)],
                stdin=given,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            yield child, pipe, log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a GPU may not end
                child.wait(timeout=2)


def _command() -> list[str]:
    return [sys.executable, "-c", _CODE]


def _messages(pipe: IO[bytes], deadline: float, kernels: Iterable[str]) -> Iterator[dict[str, Any] | str | None]:
    """The messages of a process: None once the time is over, and a text for an answer that is none."""
    rest, total, kernels, begun, stage = b"", 0, set(kernels), "", ""
    patience = deadline
    while True:
        left = patience - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            yield None
            return
        read = os.read(pipe.fileno(), 1 << 16)
        total += len(read)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        if total > _MOST_BYTES:
            yield f"more than {_MOST_BYTES} bytes"
            return
        for line in lines:
            message = _parsed(line)
            if not _is_due(message, kernels, begun, stage):
                yield ascii(line[:80])
                return
            assert message is not None
            begun, stage = message.get("kernel", ""), message.get("stage", "")
            patience = time.monotonic() + PATIENCE if stage == "run" else deadline
            yield message


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_due(message: dict[str, Any] | None, kernels: set[str], begun: str, stage: str) -> bool:
    """Whether a message may follow those before it."""
    if message is None:
        return False
    if message == {"end": True}:
        return not stage
    kernel = message.get("kernel")
    if message.keys() == {"kernel", "stage"}:
        wanted = {"compile": not stage, "run": stage == "compile" and kernel == begun}
        return kernel in kernels and wanted.get(str(message["stage"]), False)
    if message.keys() != {"kernel", "state", "reason"} or kernel != begun or not isinstance(message["reason"], str):
        return False
    states = STATES if stage == "run" else ()
    return bool(stage) and message["state"] in (*states, UNCHECKED) and len(message["reason"]) <= verdicts.LONGEST


def _status(child: Any) -> int | None:
    """The exit status of a process that has closed its pipe; None if it runs on."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    return child.poll()


def _end_of(log: IO[bytes], size: int = 300) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - size))
    return " ".join(log.read().decode(errors="replace").split())


# ---- what is known


def forget(device: torch.device) -> None:
    """Remove the verdicts on a GPU, and on others of its kind."""
    kind = kind_of(device)
    verdicts.forget(kind)
    for key in [key for key in _known if key[0] == kind]:
        del _known[key]
    _decided.clear()


def known(device: torch.device) -> dict[str, Verdict]:
    """The verdicts on kernels of the present sources on a GPU, by name; nothing is tried."""
    kind = kind_of(device)
    kept = {(own, v.digest): v for own, v in verdicts.read(kind).items()}
    kept |= {(name, digest): v for (own, name, digest), v in _known.items() if own == kind}
    return {name: v for (name, digest), v in kept.items() if digest in cache.identities(name)}
