"""Processes that begin with torch and hop imported: forks of one that has done nothing else.

A new Python takes 2 to 8 s of processor time to import what most programs need, a fork some milliseconds. The server is
that of multiprocessing, of which each process of pytest has one. It has started no thread, and drawn and computed
nothing. What must see how a process begins, or variables that PyTorch reads as it is loaded, takes a new Python.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.export", "torch.testing._comparison"),
    *("torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("hop", "hop.checkpoint", "hop.export", "hop.integrations", "hop.nn.distributed", "hop.optim"),
    __name__,
)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(list(IMPORTED))


def run(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 600
) -> "subprocess.CompletedProcess[str]":
    """What comes of `python -W ignore -c code arguments`, begun as a fork, in the folder of the project.

    Raises:
        subprocess.TimeoutExpired: it took more than `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = dict(os.environ if env is None else env)
        process = context.Process(target=_execute, args=(code, arguments, own, folder))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout)
        said = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess([code, *arguments], process.exitcode, *said)


def _execute(code: str, arguments: tuple[str, ...], env: dict[str, str], folder: str) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        with open(f"{folder}/{name}", "wb") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv, sys.warnoptions = ["-c", *arguments], ["ignore"]
    warnings.simplefilter("ignore")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))
