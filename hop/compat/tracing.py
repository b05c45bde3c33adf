"""make_fx and what it traces: nodes, and sizes that are symbols."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    maybe_handle_decomp,
    set_meta,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map

from hop.compat.export import of_values
from hop.compat.subclasses import parts


def trace_node(mode: ProxyTorchDispatchMode, hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of `hop` in the graph that `mode` builds, or what the decomposition table replaces it with."""
    decomposed = maybe_handle_decomp(mode, hop, args, kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    with disable_proxy_modes_tracing(), of_values():
        out = hop(*args, **kwargs)
    if isinstance(out, list):
        out = tuple(out)  # torch.export saves no others
    proxy_args, proxy_kwargs = tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", hop, proxy_args, proxy_kwargs, name=hop.name())
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


_describing = contextvars.ContextVar("describing", default=False)


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """A context in which results are wanted for their shapes, dtypes and strides alone, of tensors without values and
    of sizes that are numbers: what has those of another, which takes fewer operators, may be given in its place."""
    token = _describing.set(True)
    try:
        yield
    finally:
        _describing.reset(token)


def is_describing() -> bool:
    """Whether it is that context."""
    return _describing.get()


def is_exporting() -> bool:
    """Whether operators are recorded before autograd sees them, as torch.export does."""
    return _len_torch_dispatch_stack_pre_dispatch() > 0


def is_tracked(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> bool:
    """Whether the graph that `mode` builds has a value for `tensor`."""
    return mode.tracer.unwrap_proxy(tensor) is not tensor


def trace_parts(mode: ProxyTorchDispatchMode, hop: Any, source: torch.Tensor) -> None:
    """Let the parts of `source` be what `hop` gives for it in the graph that `mode` builds, if they are used there."""
    tracer, own = mode.tracer, mode.tracer.unwrap_proxy(source)

    @functools.cache
    def node() -> Any:
        proxy = tracer.create_proxy("call_function", hop, (own,), {}, name=hop.name())
        return set_meta(proxy, tuple(parts(source)))  # torch.export saves no lists

    for i, part in enumerate(parts(source)):
        set_proxy_slot(part, tracer, _LazyProxy(own, lambda i=i, part=part: set_meta(node()[i], part)))


class _LazyProxy(_ProxyTensor):
    """A value whose node is made when it is first used, unless that is after the graph has been finished: then it
    stands for its source."""

    def __init__(self, source: Any, make: Callable[[], Any]) -> None:
        self._source, self._make, self._made, self.constant = source, make, None, None

    @property
    def proxy(self) -> Any:  # type: ignore[override]
        if self._made is None:
            if next(iter(reversed(self._source.node.graph.nodes))).op == "output":
                return self._source
            self._made = self._make()
        return self._made


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever value a symbol in them has: a comparison that leaves no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def largest(size: Any) -> int | None:
    """The largest value that a size can have whatever its symbols are; None if there is no bound."""
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else None


def hints(shape: Any) -> tuple[int, ...] | None:
    """A shape with the sizes that symbols had when they were traced; None if one had none."""
    sizes = [n if isinstance(n, int) else n.node.hint for n in shape]
    return None if None in sizes else tuple(sizes)


def is_erased(node: torch.fx.Node) -> bool:
    """Whether it stands in its graph no longer."""
    return node._erased


def nesting(graph: torch.fx.Graph) -> Any:
    """How the arguments of a graph are nested (`in_spec`) and their names (`orig_args`); None where it does not say."""
    return getattr(graph._codegen, "pytree_info", None)
