"""Inductor and AOTInductor: lowering of our operators, and workarounds for bugs of the code that they generate."""

import contextlib
import contextvars
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

from hop.compat.eager import is_plain_eager, node_in_trace
from hop.compat.export import is_lowering
from hop.compat.imports import when_imported
from hop.compat.patches import bits_before_rounding, strided_beginnings, strided_offsets
from hop.compat.tracing import known_equal

P = ParamSpec("P")
R = TypeVar("R")


def register_inductor_decomposition(hop: object, function: Callable[P, R]) -> None:
    """Make Inductor and AOTInductor decompose nodes of `hop` with `function`."""

    @functools.wraps(function)
    def lowered(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _compiling.set(not virtualized().V.aot_compilation)
        try:
            return function(*args, **kwargs)
        finally:
            _compiling.reset(token)

    def virtualized() -> ModuleType:
        return sys.modules["torch._inductor.virtualized"]

    def register() -> None:
        module = sys.modules["torch._inductor.decomposition"]
        module.decompositions[hop] = lowered
        module.fast_random_decomps.cache_clear()  # it caches a copy of the table

    when_imported("torch._inductor.decomposition", register)


_compiling = contextvars.ContextVar("compiling", default=False)


def is_compiling_for_here() -> bool:
    """Whether Inductor is lowering our operators for a program that runs in this process, not for AOTInductor."""
    return _compiling.get()


_keeping = contextvars.ContextVar("keeping", default=False)


@contextlib.contextmanager
def keeping_native() -> Iterator[None]:
    """A context in which traced programs may contain operators of the native library."""
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def may_be_native() -> bool:
    """Whether a call may be computed by operators of the native library.

    True in eager mode, in Inductor's programs for this process, and in programs that keep such operators.
    """
    return is_plain_eager() or _compiling.get() or _keeping.get()


def written(x: torch.Tensor) -> torch.Tensor:
    """x as strided memory: Inductor then computes it once before it is read, instead of again for each element."""
    if is_plain_eager():
        return x
    x = x.contiguous()
    if strided_offsets.active and (
        not known_equal(x.storage_offset(), 0) or (not is_compiling_for_here() and known_equal(x.numel(), 1))
    ):
        return x
    return x.as_strided(x.shape, x.stride())


def as_strided(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """x.as_strided(shape, strides), beginning at x's first element. x must be contiguous and of an integer dtype."""
    if strided_beginnings.active and not is_plain_eager() and not known_equal(x.storage_offset(), 0):
        x = x | 0  # Inductor would remove a clone
    return x.as_strided(shape, strides)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Make Inductor round a bfloat16 or float16 x to its dtype, because its bits are read next.

    Tensors in memory are already rounded: graph inputs, and the results of products and of hop::run. Decompositions
    into core ATen, which has no view of another dtype, return x.
    """
    halves = (torch.bfloat16, torch.float16)
    if not bits_before_rounding.active or x.dtype not in halves or is_plain_eager() or _lies_in_memory(x):
        return x
    if is_lowering() and not _keeping.get():
        return x
    return (x.view(torch.int16) & -1).view(x.dtype)


def _lies_in_memory(x: torch.Tensor) -> bool:
    node = node_in_trace(x)
    while isinstance(node, torch.fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return isinstance(node, torch.fx.Node) and (node.op == "placeholder" or node.target in _STORED)


_aten = torch.ops.aten


_VIEWS = frozenset(
    {
        *(
            _aten.view.default,
            _aten._unsafe_view.default,
            _aten.reshape.default,
            _aten.t.default,
            _aten.permute.default,
        ),
        *(_aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.slice.Tensor),
        operator.getitem,
    }
)


_STORED: set[object] = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default}


def stores_results(op: object) -> None:
    """Declare that Inductor writes the results of an operator to memory."""
    _STORED.add(op)
