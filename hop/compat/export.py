"""torch.export: decompositions, and running what a program's values are."""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

_lowering = contextvars.ContextVar("lowering", default=False)


def is_lowering() -> bool:
    """True in what `as_decomposition` gives."""
    return _lowering.get()


def as_decomposition(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a table of decompositions of torch.export, which forgets tensors that a decomposition makes of
    Python numbers: inside, `is_lowering` is true, so that they are made of operators."""

    @functools.wraps(function)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        token = _lowering.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _lowering.reset(token)

    return lowered


@contextlib.contextmanager
def of_values() -> Iterator[None]:
    """Inside a decomposition: what is computed is the value of a node, and no part of a graph."""
    token = _lowering.set(False)
    try:
        yield
    finally:
        _lowering.reset(token)


def traced(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph of `function(*values)`, where values are an exported program's: fake tensors and symbolic numbers. Like
    a decomposition, it makes tensors of Python numbers by operators."""
    mode = next((x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor)), None)
    with torch.no_grad(), mode or contextlib.nullcontext():
        return make_fx(as_decomposition(function))(*values)


def faked(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`function(*args, **kwargs)`, where the fake tensors are an exported program's. With the rules that tracing has
    for operators that PyTorch makes of others, such as pad: without them these take symbolic sizes for the numbers that
    they were exported with."""
    from torch._dispatch.python import enable_python_dispatcher

    mode = next((x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)), None)
    with torch.no_grad(), mode or contextlib.nullcontext(), enable_python_dispatcher():
        return function(*args, **kwargs)


def core_decompositions() -> Any:
    """PyTorch's default decomposition table for export, as a fresh mapping."""
    return torch.export.default_decompositions()


def quantized_decomposed(name: str) -> OpOverload:
    """An operator of torch's `quantized_decomposed`, which torch defines when it is first asked for."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.quantized_decomposed, packet), overload or "default")
