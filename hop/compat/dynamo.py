"""Dynamo, the front end of torch.compile."""

import functools
from collections.abc import Callable

import torch

from hop.compat.imports import when_imported
from hop.compat.patches import CACHED


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile `function` with dynamic sizes, and without a limit on the number of programs."""
    program = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: object) -> None:
        with torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
            program(*args)

    return call


def allow_in_graph(function: Callable[..., object]) -> None:
    """Make Dynamo record calls of `function` as one node instead of tracing into it.

    AOTAutograd's cache on disk stores programs with such nodes, so results may depend on nothing but the arguments and
    what `values.program_key` covers.
    """
    CACHED.add(function)
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function) and None)


def trace_as(function: Callable[..., object], traceable: Callable[..., object]) -> None:
    """Make Dynamo trace `traceable` where a program calls `function`."""
    when_imported("torch._dynamo", lambda: torch.compiler.substitute_in_graph(function)(traceable) and None)
