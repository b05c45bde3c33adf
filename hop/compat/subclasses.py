"""Tensor subclasses: recognizing and creating them, aliasing, and shapes."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._prims_common import infer_size, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing

from hop.compat.eager import is_plain_eager
from hop.compat.imports import when_imported
from hop.compat.pytree import Args

R = TypeVar("R")
T = TypeVar("T", bound=torch.Tensor)


def is_foreign_subclass(cls: type) -> bool:
    """Whether a tensor subclass defines its own `__torch_dispatch__` and is not part of PyTorch's tracing."""
    if cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:  # type: ignore[attr-defined]
        return False
    return not issubclass(cls, FakeTensor | FunctionalTensor)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether torch.func.functionalize has wrapped the tensor."""
    return torch._is_functional_tensor(tensor)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The inner tensors of a wrapper subclass; an empty list for other tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def context(tensor: torch.Tensor) -> object:
    """The properties of a wrapper subclass that its `__tensor_flatten__` returns; None for other tensors."""
    return tensor.__tensor_flatten__()[1] if is_traceable_wrapper_subclass(tensor) else None


no_torch_function = torch._C._disabled_torch_function_impl


_make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def make_wrapper(
    cls: type[T],
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> T:
    """Create a tensor of class `cls` without storage."""
    return _make_wrapper_subclass(cls, shape, strides, offset, dtype=dtype, device=device, requires_grad=requires_grad)


def make_contiguous_wrapper(cls: type[T], shape: Sequence[int], dtype: torch.dtype) -> T:
    """Create a contiguous tensor of class `cls` on the CPU, without storage and without a gradient."""
    return _make_wrapper_subclass(cls, shape, dtype=dtype)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`, which may contain symbolic sizes."""
    if not all(type(n) is int for n in shape):
        return make_contiguous_strides_for(tuple(shape))
    strides, step = [], 1  # PyTorch's own function imports sympy first, which takes 0.8 s
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def dispatch(op: OpOverload, args: Args, kwargs: Mapping[str, object], run: Callable[..., R]) -> R:
    """Call `run(op, args, kwargs)` from a `__torch_dispatch__` with the same operators in and out of inference mode.

    Normally autograd's keys decompose composite operators before a subclass sees them. In inference mode, and for
    inference tensors, there are no such keys, so this function decomposes them. A view of an ordinary tensor is an
    ordinary tensor also in inference mode (PyTorch raises for anything else), so `run` creates it outside that mode.
    """
    if _is_composite(op):
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    if torch.is_inference_mode_enabled() and op.is_view and not args[0].is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return run(op, args, kwargs)
    return run(op, args, kwargs)


@functools.cache
def _is_composite(op: OpOverload) -> bool:
    """Whether autograd's keys run the operator's implicit decomposition: it has one, and no kernel that takes
    precedence.
    """
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    return known(name, "CompositeImplicitAutograd") and not (known(name, "CPU") or known(name, "CUDA"))


def correct_aliasing(op: OpOverload, args: Args, kwargs: Mapping[str, object], out: object) -> Any:
    """Mark `out`, the result of a subclass's rule for `op`, as an alias according to the schema, if a graph is traced.

    In eager mode it is left out, which makes a view 10 µs faster.
    """
    if is_plain_eager() and not op._schema.is_mutable:
        return out
    return return_and_correct_aliasing(op, args, kwargs, out)


def inferred_size(shape: Sequence[int], numel: int) -> list[int]:
    """`shape` with its -1 filled in, for `numel` elements; raises PyTorch's error if they do not match."""
    if all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) == numel:
        return list(shape)  # PyTorch's own takes 4 µs
    return list(infer_size(tuple(shape), numel))


def base(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `view` is a view of; None if it is not a view."""
    return view._base


def stack_in_batches(cls: type) -> None:
    """Let the workers of a DataLoader stack tensors of a class as its own process does, not into a plain tensor."""

    def stack(batch: list[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
        return torch.stack(batch)

    def register() -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map[cls] = stack

    when_imported("torch.utils.data._utils.collate", register)
