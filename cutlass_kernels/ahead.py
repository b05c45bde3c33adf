"""Kernels compiled ahead of time, with or without a GPU: those of cutlass_kernels.forms, and what else is chosen."""

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from cutlass_kernels import cache, dequantize, hopper, missing, quantize, steps, transposing
from cutlass_kernels.forms import variants
from cutlass_kernels.quantizing import Numbers
from cutlass_kernels.transposing import Transposition
from cutlass_kernels.updates import Update
from cutlass_kernels.variants import Variant

ARCHITECTURES = (hopper.TARGET,)


def matching(pattern: str = "*") -> list[Variant]:
    """The variants whose names match a pattern of the shell, as s8_s8_bf16_*."""
    return [v for v in variants() if fnmatch.fnmatch(v.name, pattern)]


def is_built(kernel: Any) -> bool:
    return cache.is_kept(kernel.name, kernel.target)


def build(chosen: Sequence[Any], processes: int | None = None) -> Iterator[tuple[Any, str | None]]:
    """Compile kernels that are not on disk, several at a time; each with what went wrong, or None, as it is done.

    Raises:
        RuntimeError: the CuTe DSL is not installed, or no folder is there to keep kernels in.
        PermissionError: the folder of kernels is not the user's alone.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    if cache.folder() is None:
        raise RuntimeError(f"{cache.FOLDER} is empty, so that no kernel is kept; unset it, or name a folder in it")
    rest = [v for v in chosen if not is_built(v)]
    processes = min(processes or os.cpu_count() or 1, len(rest))
    if processes <= 1:
        yield from ((v, _built(v)) for v in rest)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_built, v): v for v in rest}
        for done in as_completed(running):
            yield running[done], done.result()


def _built(kernel: Any) -> str | None:
    from cutlass.base_dsl.common import DSLBaseError

    try:
        cache.keep(kernel.name, kernel.target, _module(kernel).build(kernel))
    except (DSLBaseError, RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def compiled(kernel: Any) -> Callable[..., None]:
    """The kernel of a variant of any kind."""
    return _module(kernel).compiled(kernel)


def _module(kernel: Any) -> Any:
    """The module that compiles it."""
    own = {Variant: hopper, Update: steps, Numbers: dequantize, Transposition: transposing}
    return own.get(type(kernel), quantize)
