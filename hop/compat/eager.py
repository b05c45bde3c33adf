"""The state of PyTorch's dispatcher in eager mode: queries and context managers."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch._C import Argument as Argument
from torch._C import DispatchKey as DispatchKey
from torch._C import _dispatch_tls_is_dispatch_key_excluded as _is_excluded
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._higher_order_ops.utils import register_fake as register_fake
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

R = TypeVar("R")
T = TypeVar("T", bound=torch.Tensor)

int_mm = torch._int_mm
below_autograd = torch._C._AutoDispatchBelowAutograd


def recording() -> AbstractContextManager[object]:
    """A context in which autograd records even inside an operator that runs below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


current_mode = _get_current_dispatch_mode
no_modes = _disable_current_modes
"""A context in which no dispatch mode is active."""


class _Ignored(threading.local):
    modes = 0  # how many function modes of this thread leave our operators alone


ignored = _Ignored()


@contextmanager
def ignored_function_mode() -> Iterator[None]:
    """A context for a function mode, already entered, that leaves our operators alone: they stay plain eager calls."""
    ignored.modes += 1
    try:
        yield
    finally:
        ignored.modes -= 1


def past_ignored_modes(function: Callable[..., R], *args: object) -> R:
    """Call a function of ours in eager mode. If all function modes leave our operators alone, they do not see the calls
    that it makes, each of which would take 3 µs more."""
    if not ignored.modes or _len_torch_function_stack() > ignored.modes:
        return function(*args)
    with torch._C.DisableTorchFunction():
        return function(*args)


def node_in_trace(x: torch.Tensor) -> torch.fx.Node | None:
    """The node of x in the graph that make_fx traces; None if it traces nothing, or knows no x.

    Does not import the tracer, which imports sympy: before somebody has imported it, nothing is traced.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = None if tracer is None else tracer.get_proxy_mode()
    return None if mode is None else getattr(mode.tracer.unwrap_proxy(x), "node", None)


def is_plain_eager() -> bool:
    """Whether nothing observes or transforms operator calls in this thread; takes 0.15 µs.

    False inside dispatch and function modes (fake tensors, make_fx, default devices), functorch transforms and
    jit.trace.
    """
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack() > ignored.modes
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
    )


class _Ranges(threading.local):
    inside = False  # whether the call is inside a profiler range of ours (hop.compat.profiling)


ranges = _Ranges()


def is_unwatched() -> bool:
    """`is_plain_eager`, and neither autocast nor a profiler is active. Written out because each call evaluates it."""
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack() > ignored.modes
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or is_autocasting()
        or (profiler._is_profiler_enabled and not ranges.inside)
    )


def refuse_script() -> None:
    """Raise NotImplementedError under torch.jit.trace, which would record one input's results as constants."""
    if _get_tracing_state() is not None:
        raise NotImplementedError("operators of hop cannot be recorded by torch.jit.trace; use torch.export")


def is_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether our torch.autograd.Functions can run on `tensors`, in eager mode or under torch.compile.

    False with torch.func transforms, forward-mode differentiation, export, and subclasses other than those of tracing.
    """
    if peek_interpreter_stack() is not None or torch.compiler.is_exporting():
        return False
    ordinary = (FakeTensor, FunctionalTensor)
    return not is_forward_ad_active() and all(
        type(x) in (torch.Tensor, torch.nn.Parameter) or isinstance(x, ordinary) for x in tensors
    )


is_autocasting = torch._C._is_any_autocast_enabled
has_storage = torch._C._has_storage
no_autocast = torch._C._DisableAutocast


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a dual number whose tangent autograd propagates; below autograd nothing does."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not is_forward_ad_active():
        return False
    if peek_interpreter_stack() is None and _is_excluded(DispatchKey.AutogradFunctionality):
        return False
    return forward_ad.unpack_dual(tensor, level=0).tangent is not None


def is_forward_ad_active() -> bool:
    """Whether forward-mode differentiation is active; there is at most one level, shared with torch.func.

    A program that Dynamo made opens the level in C++, and the only way to find out is that opening another one fails.
    """
    if is_dual_level_open():
        return True
    if is_plain_eager():
        return False
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def is_dual_level_open() -> bool:
    """`is_forward_ad_active`, where nothing is traced or transformed; takes 0.04 µs."""
    return forward_ad._current_level >= 0


def primal(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its tangent."""
    return forward_ad.unpack_dual(tensor, level=0).primal if has_tangent(tensor) else tensor


def with_tangent(value: T, of: torch.Tensor) -> T:
    """`value` with the tangent of another tensor of its shape, if that has one."""
    tangent = forward_ad.unpack_dual(of, level=0).tangent
    dual: Any = None if tangent is None else forward_ad.make_dual(value, tangent.to(value.dtype), level=0)
    return value if dual is None else dual


def flop_counter_mode() -> type:
    """The dispatch mode behind torch.utils.flop_counter.FlopCounterMode."""
    return sys.modules["torch.utils.flop_counter"]._FlopCounterMode


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether ATen multiplies bfloat16 exactly and sums in float32 on this CPU (oneDNN)."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


preserve_version = torch.autograd._unsafe_preserve_version_counter
"""A context in which writes to a tensor do not count as changes for autograd."""


@functools.cache
def has_int_mm() -> bool:
    """Whether `torch._int_mm` has an exact, fast kernel on this CPU.

    Without VNNI it is a plain loop, or a oneDNN kernel that adds two byte products in 16 bits and saturates.
    """
    if not torch.cpu._is_vnni_supported():
        return False
    with _disable_current_modes():
        a, b = (torch.full(shape, 127, dtype=torch.int8) for shape in ((33, 64), (64, 17)))
        return bool((int_mm(a, b) == 127 * 127 * 64).all())
