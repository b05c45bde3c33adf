"""torch.export: decompositions, and functions that run on the values of a program."""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.export.decomp_utils import CustomDecompTable

P = ParamSpec("P")
R = TypeVar("R")
_lowering = contextvars.ContextVar("lowering", default=False)


def is_lowering() -> bool:
    """Whether the call is inside a function returned by `as_decomposition`."""
    return _lowering.get()


def as_decomposition(function: Callable[P, R]) -> Callable[P, R]:
    """Prepare `function` for a decomposition table of torch.export.

    torch.export loses tensors that a decomposition creates from Python numbers. Inside the function `is_lowering` is
    true, so that they are created by operators.
    """

    @functools.wraps(function)
    def lowered(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _lowering.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _lowering.reset(token)

    return lowered


@contextlib.contextmanager
def of_values() -> Iterator[None]:
    """A context, inside a decomposition, for computing the value of a node rather than a part of a graph."""
    token = _lowering.set(False)
    try:
        yield
    finally:
        _lowering.reset(token)


def traced(function: Callable[..., object], values: Sequence[object]) -> torch.fx.GraphModule:
    """Trace the graph of `function(*values)` for the values of an exported program: fake tensors and symbolic numbers.

    As in a decomposition, tensors are created from Python numbers by operators.
    """
    mode = next((x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor)), None)
    with torch.no_grad(), mode or contextlib.nullcontext():
        return make_fx(as_decomposition(function))(*values)


def faked(function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]) -> R:
    """Run `function(*args, **kwargs)` on the fake tensors of an exported program.

    Uses the rules that tracing has for composite operators such as pad: without them these replace symbolic sizes by
    the numbers of the example inputs.
    """
    from torch._dispatch.python import enable_python_dispatcher

    mode = next((x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)), None)
    with torch.no_grad(), mode or contextlib.nullcontext(), enable_python_dispatcher():
        return function(*args, **kwargs)


def core_decompositions() -> "CustomDecompTable":
    """PyTorch's default decomposition table for export, as a new mapping."""
    return torch.export.default_decompositions()


def quantized_decomposed(name: str) -> OpOverload:
    """An operator of torch's `quantized_decomposed` namespace, which torch defines on first use."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.quantized_decomposed, packet), overload or "default")


class WithoutGradModes(TorchFunctionMode):
    """A context in which changes of grad mode have no effect, for programs without gradients. torch.export would split
    their graph at each change, which takes half of its time for a language model.
    """

    def __torch_function__(
        self,
        func: Callable[..., R],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> R | None:
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """A context in which traced nodes keep no stack traces, which take a quarter of the time of torch.export.

    It has no effect in versions of torch without the setting.
    """
    config, name = importlib.import_module("torch.fx.config"), "do_not_emit_stack_traces"
    before = getattr(config, name, None)
    if before is not None:
        setattr(config, name, True)
    try:
        yield
    finally:
        if before is not None:
            setattr(config, name, before)
