"""Kernels compiled ahead of time, with or without a GPU: those of cutlass_kernels.forms, and quantize's variants."""

import fnmatch
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from cutlass_kernels import cache, dequantize, hopper, missing, quantize
from cutlass_kernels.forms import variants
from cutlass_kernels.quantizing import Numbers
from cutlass_kernels.variants import Variant

ARCHITECTURES = (hopper.TARGET,)


def matching(pattern: str = "*") -> list[Variant]:
    """The variants whose names match a pattern of the shell, as s8_s8_bf16_*."""
    return [v for v in variants() if fnmatch.fnmatch(v.name, pattern)]


def is_built(variant: Any) -> bool:
    return cache.is_kept(variant.name, hopper.TARGET)


def build(chosen: list[Any], processes: int | None = None) -> Iterator[tuple[Any, str | None]]:
    """Compile variants that are not on disk, several at a time; each with what went wrong, or None, as it is done.

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


def _built(variant: Any) -> str | None:
    from cutlass.base_dsl.common import DSLBaseError

    try:
        cache.keep(variant.name, hopper.TARGET, _module(variant).build(variant))
    except (DSLBaseError, RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def compiled(variant: Any) -> Callable[..., None]:
    """The kernel of a variant of any kind."""
    return _module(variant).compiled(variant)


def _module(variant: Any) -> Any:
    """The module that compiles it."""
    if isinstance(variant, Variant):
        return hopper
    return dequantize if isinstance(variant, Numbers) else quantize
