"""Inductor and AOTInductor: what becomes of our operators, and work-arounds for the code that it writes."""

import contextlib
import contextvars
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hop.compat.eager import is_plain_eager
from hop.compat.imports import when_imported
from hop.compat.patches import bits_before_rounding, strided_beginnings, strided_offsets
from hop.compat.tracing import known_equal


def register_inductor_decomposition(hop: Any, function: Callable[..., Any]) -> None:
    """Make Inductor and AOTInductor replace nodes of `hop` by what `function` does."""

    @functools.wraps(function)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        token = _compiling.set(not virtualized().V.aot_compilation)
        try:
            return function(*args, **kwargs)
        finally:
            _compiling.reset(token)

    def virtualized() -> Any:
        return sys.modules["torch._inductor.virtualized"]

    def register() -> None:
        module = sys.modules["torch._inductor.decomposition"]
        module.decompositions[hop] = lowered
        module.fast_random_decomps.cache_clear()  # a cached copy of the table

    when_imported("torch._inductor.decomposition", register)


_compiling = contextvars.ContextVar("compiling", default=False)


def is_compiling_for_here() -> bool:
    """True while Inductor lowers our operators in a program that runs in this process, not one of AOTInductor."""
    return _compiling.get()


_keeping = contextvars.ContextVar("keeping", default=False)


@contextlib.contextmanager
def keeping_native() -> Iterator[None]:
    """Within it, operators of the native library may stand in a program that is traced."""
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def may_be_native() -> bool:
    """Whether operators of the native library may stand for what is called or traced now: in eager mode, in programs of
    Inductor for this process, and where a program is to keep them."""
    return is_plain_eager() or _compiling.get() or _keeping.get()


def written(x: torch.Tensor) -> torch.Tensor:
    """x, which Inductor computes before it is read, as what is read as strided memory; anything else it computes again
    for each element."""
    if is_plain_eager():
        return x
    x = x.contiguous()
    if strided_offsets.active and (
        not known_equal(x.storage_offset(), 0) or (not is_compiling_for_here() and known_equal(x.numel(), 1))
    ):
        return x
    return x.as_strided(x.shape, x.stride())


def as_strided(x: torch.Tensor, shape: Sequence[Any], strides: Sequence[Any]) -> torch.Tensor:
    """x.as_strided(shape, strides), which begins where x begins. x is contiguous, of integers."""
    if strided_beginnings.active and not is_plain_eager() and not known_equal(x.storage_offset(), 0):
        x = x | 0  # Inductor leaves out a clone
    return x.as_strided(shape, strides)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x, which Inductor rounds to its dtype if that is bfloat16 or float16, because its bits are read. What lies in
    memory is rounded: an input of the graph, or the result of a product or of hop::run."""
    halves = (torch.bfloat16, torch.float16)
    if not bits_before_rounding.active or x.dtype not in halves or is_plain_eager() or _lies_in_memory(x):
        return x
    return (x.view(torch.int16) & -1).view(x.dtype)


def _lies_in_memory(x: torch.Tensor) -> bool:
    mode = get_proxy_mode()
    proxy = None if mode is None else mode.tracer.unwrap_proxy(x)
    node = getattr(proxy, "node", None)
    while node is not None and node.target in _VIEWS:
        node = node.args[0]
    return node is not None and (node.op == "placeholder" or node.target in _STORED)


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


_STORED: set[Any] = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default}


def stores_results(op: Any) -> None:
    """Say that the results of an operator lie in memory."""
    _STORED.add(op)
