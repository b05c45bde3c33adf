"""make_fx: nodes of the graphs that it traces, and symbolic sizes."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, _len_torch_dispatch_stack_pre_dispatch
from torch.fx import Proxy
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
from hop.compat.pytree import Args, Kwargs
from hop.compat.subclasses import parts


def trace_node(mode: ProxyTorchDispatchMode, hop: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a call of `hop` in the graph that `mode` builds, or its decomposition if the table has one."""
    decomposed = maybe_handle_decomp(mode, hop, args, kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    with disable_proxy_modes_tracing(), of_values():
        out = hop(*args, **kwargs)
    if isinstance(out, list):
        out = tuple(out)  # torch.export cannot save other sequences
    proxy_args, proxy_kwargs = tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", hop, proxy_args, proxy_kwargs, name=hop.name())
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


_describing = contextvars.ContextVar("describing", default=False)


@contextlib.contextmanager
def describing() -> Iterator[None]:
    """A context in which only shapes, dtypes and strides of results matter.

    Tensors have no values and sizes are numbers, so any tensor with the right properties may be returned, which takes
    fewer operators.
    """
    token = _describing.set(True)
    try:
        yield
    finally:
        _describing.reset(token)


def is_describing() -> bool:
    """Whether the call is inside `describing`."""
    return _describing.get()


def is_exporting() -> bool:
    """Whether operators are recorded before autograd, as torch.export does."""
    return _len_torch_dispatch_stack_pre_dispatch() > 0


def is_tracked(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> bool:
    """Whether the graph that `mode` builds tracks `tensor`."""
    return mode.tracer.unwrap_proxy(tensor) is not tensor


def trace_parts(mode: ProxyTorchDispatchMode, hop: HigherOrderOperator, source: torch.Tensor) -> None:
    """In the graph that `mode` builds, make the inner tensors of `source` results of `hop`, if they are used."""
    tracer = mode.tracer
    own: Any = tracer.unwrap_proxy(source)

    @functools.cache
    def node() -> Any:
        proxy = tracer.create_proxy("call_function", hop, (own,), {}, name=hop.name())
        return set_meta(proxy, tuple(parts(source)))  # torch.export cannot save lists

    for i, part in enumerate(parts(source)):
        set_proxy_slot(part, tracer, _LazyProxy(own, lambda i=i, part=part: set_meta(node()[i], part)))


class _LazyProxy(_ProxyTensor):
    """A value whose node is created at its first use. After the graph is finished, the value is its source instead."""

    def __init__(self, source: Proxy, make: Callable[[], Proxy]) -> None:
        self._source, self._make, self._made, self.constant = source, make, None, None

    @property
    def proxy(self) -> Proxy:  # type: ignore[override]
        if self._made is None:
            if next(iter(reversed(self._source.node.graph.nodes))).op == "output":
                return self._source
            self._made = self._make()
        return self._made


def known_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for all values of their symbols. The comparison adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def largest(size: int | torch.SymInt) -> int | None:
    """The largest value that a size can have for any values of its symbols; None if it has no bound."""
    if isinstance(size, int):
        return size
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else None


def hints(shape: Iterable[int | torch.SymInt]) -> tuple[int, ...] | None:
    """A shape in which symbolic sizes are replaced by their values at tracing; None if one had none."""
    sizes = [n if isinstance(n, int) else n.node.hint for n in shape]
    return None if None in sizes else tuple(sizes)


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a node has been removed from its graph."""
    return node._erased


def nesting(graph: torch.fx.Graph) -> Any:
    """The nesting of a graph's arguments (`in_spec`) and their names (`orig_args`); None if it has neither."""
    return getattr(graph._codegen, "pytree_info", None)
