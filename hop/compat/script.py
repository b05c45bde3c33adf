"""torch.jit.trace: what it records of our operators."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _get_tracing_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from hop.compat.export import as_decomposition


def is_tracing_script() -> bool:
    """True under `torch.jit.trace`, which records ATen operators only."""
    return _get_tracing_state() is not None


def sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor, in numbers or symbols under torch.jit.trace too."""
    if not is_tracing_script():
        return tuple(tensor.shape)
    with _no_script():
        return tuple(tensor.shape)


@contextlib.contextmanager
def _no_script() -> Any:
    """Out of sight of torch.jit.trace."""
    module: Any = torch._C
    state, set_state = _get_tracing_state(), module._set_tracing_state
    set_state(None)
    try:
        yield
    finally:
        set_state(state)


def show_script(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), of which torch.jit.trace sees the ATen operators that it comes to for these sizes:
    sizes are numbers inside, where torch.jit.trace has tensors, and wrapper subclasses their parts."""
    rebuild: list[Callable[..., Any]] = []

    def flat(*parts: torch.Tensor) -> list[torch.Tensor]:
        inner_args, inner_kwargs = build(parts)
        out, build_out = _taken_apart(function(*inner_args, **inner_kwargs))
        rebuild.append(build_out)
        return out

    with _no_script():
        parts, build = _taken_apart((args, kwargs))
        examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in parts]
        for x in examples:
            x.fill_(1) if x.is_floating_point() and x.itemsize > 1 else x.zero_()  # 1 is a scale, 0 an index
        graph = make_fx(as_decomposition(flat))(*examples)
    return rebuild[0](graph(*parts))


def _taken_apart(tree: Any) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """The plain tensors of a tree, and a function that builds the tree again of others."""
    leaves, spec = tree_flatten(tree)
    found: list[torch.Tensor] = []
    builders: list[Callable[..., Any]] = []
    for x in leaves:
        if not isinstance(x, torch.Tensor):
            builders.append(lambda rest, x=x: x)
        elif not is_traceable_wrapper_subclass(x):
            found.append(x)
            builders.append(next)
        else:
            names, context = x.__tensor_flatten__()
            found += [getattr(x, name) for name in names]
            made = (type(x), names, context, x.shape, x.stride())
            builders.append(lambda rest, made=made: _wrapped(rest, *made))

    def build(parts: Sequence[torch.Tensor]) -> Any:
        rest = iter(parts)
        return tree_unflatten([make(rest) for make in builders], spec)

    return found, build


def _wrapped(rest: Any, cls: Any, names: list[str], context: Any, shape: Any, stride: Any) -> torch.Tensor:
    return cls.__tensor_unflatten__({name: next(rest) for name in names}, context, shape, stride)
