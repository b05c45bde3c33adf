"""Everything that depends on private or version-specific parts of PyTorch.

Covers torch 2.11 to 2.15. No other module of the package names a private attribute of torch; when a release moves one,
this file is what changes.

Importing it costs nothing beyond `import torch`: what needs Dynamo, Inductor, DTensor or the FLOP counter registers
itself when that module is imported by somebody else (`when_imported`).
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib.abc
import importlib.util
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import (
    DispatchKey,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    unwrap_if_dead,
)
from torch._C._functorch import _unwrap_for_grad as unwrap_for_grad
from torch._C._functorch import _wrap_for_grad as wrap_for_grad
from torch._C._functorch import is_batchedtensor as is_batched
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import unwrap_batched
from torch._higher_order_ops.out_dtype import ALLOWABLE_OPS
from torch._higher_order_ops.out_dtype import out_dtype as stock_out_dtype
from torch._higher_order_ops.utils import register_fake
from torch._library import opaque_object
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    infer_size,
    make_contiguous_strides_for,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    maybe_handle_decomp,
    set_meta,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DispatchKey",
    "HigherOrderOperator",
    "OpOverload",
    "ProxyTorchDispatchMode",
    "Sharding",
    "TransformType",
    "add_batch_dim",
    "all_gather",
    "allow_in_graph",
    "apply_at_level",
    "around_placements",
    "as_decomposition",
    "as_dtensor",
    "below_autograd",
    "combined_over",
    "compiled",
    "core_decompositions",
    "correct_aliasing",
    "current_mode",
    "describe_dtensor",
    "finished_work",
    "flop_counter_mode",
    "gather_numbers",
    "group_rank",
    "group_size",
    "has_tangent",
    "hints",
    "inferred_size",
    "innermost",
    "is_autocasting",
    "is_batched",
    "is_compiling_for_here",
    "is_dtensor",
    "is_foreign_subclass",
    "is_forward_ad_active",
    "is_functional",
    "is_lowering",
    "is_ordinary",
    "is_plain_eager",
    "is_tracing_script",
    "is_tracked",
    "known_equal",
    "largest",
    "local_part",
    "make_dtensor",
    "make_wrapper",
    "multiplies_bfloat16",
    "no_autocast",
    "no_torch_function",
    "parts",
    "preserve_version",
    "process_group",
    "propagate_sharding",
    "reduction_name",
    "refuse_in_exports",
    "register_fake",
    "register_inductor_decomposition",
    "register_value",
    "replicate",
    "rerouted",
    "rounded",
    "sharded",
    "show_script",
    "sizes",
    "stock_common_dtype",
    "stock_operators",
    "stock_out_dtype",
    "stores_results",
    "sum_over_processes",
    "trace_as",
    "trace_node",
    "trace_parts",
    "unwrap_batched",
    "unwrap_for_grad",
    "unwrap_if_dead",
    "when_imported",
    "wrap_for_grad",
    "written",
]

below_autograd = torch._C._AutoDispatchBelowAutograd
add_batch_dim = _add_batch_dim
current_mode = _get_current_dispatch_mode


# --------------------------------------------------------------------------------------------------------------------
# Imports of others


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back once, right after the modules it waits for have been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)  # the name is no longer awaited, so this does not come back here
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for callback in callbacks:
                callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _ImportWatcher()
sys.meta_path.insert(0, _watcher)


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Run `callback` now if `module` is imported already, otherwise right after it has been."""
    if module in sys.modules:
        callback()
    else:
        _watcher.waiting.setdefault(module, []).append(callback)


# --------------------------------------------------------------------------------------------------------------------
# Eager


def is_plain_eager() -> bool:
    """True when nothing watches or transforms operator calls in this thread: no dispatch or function mode (fake
    tensors, make_fx, default devices), no functorch transform, no jit.trace. 0.15 µs."""
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
    )


def is_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """True if a torch.autograd.Function of ours can run on `tensors`, eagerly or in a program that torch.compile makes:
    no transform of torch.func, no forward-mode differentiation, no export, and no subclass but those of tracing."""
    if peek_interpreter_stack() is not None or is_tracing_script() or torch.compiler.is_exporting():
        return False
    ordinary = (FakeTensor, FunctionalTensor)
    return not is_forward_ad_active() and all(
        type(x) in (torch.Tensor, torch.nn.Parameter) or isinstance(x, ordinary) for x in tensors
    )


is_autocasting = torch._C._is_any_autocast_enabled
no_autocast = torch._C._DisableAutocast


def is_tracing_script() -> bool:
    """True under `torch.jit.trace`, which records ATen operators only."""
    return _get_tracing_state() is not None


def sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape of a tensor, in numbers or symbols under torch.jit.trace too."""
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
        zeros = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_() for x in parts]
        graph = make_fx(as_decomposition(flat))(*zeros)  # zeros are indices too
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


def has_tangent(tensor: torch.Tensor) -> bool:
    """True if `tensor` is a dual number at the current level of forward-mode differentiation."""
    if not is_forward_ad_active() or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return unpack_dual(tensor).tangent is not None


def is_forward_ad_active() -> bool:
    """True inside a level of forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0


def is_foreign_subclass(cls: type) -> bool:
    """True for a tensor subclass with a `__torch_dispatch__` of its own that is not part of PyTorch's tracing."""
    if cls.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:  # type: ignore[attr-defined]
        return False
    return not issubclass(cls, FakeTensor | FunctionalTensor)


def flop_counter_mode() -> type:
    """The dispatch mode behind torch.utils.flop_counter.FlopCounterMode."""
    return sys.modules["torch.utils.flop_counter"]._FlopCounterMode


# --------------------------------------------------------------------------------------------------------------------
# Tracing


def trace_node(mode: ProxyTorchDispatchMode, hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of `hop` in the graph that `mode` builds, or what the decomposition table replaces it with."""
    decomposed = maybe_handle_decomp(mode, hop, args, kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    with disable_proxy_modes_tracing():
        out = hop(*args, **kwargs)
    if isinstance(out, list):
        out = tuple(out)  # torch.export saves no others
    proxy_args, proxy_kwargs = tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", hop, proxy_args, proxy_kwargs, name=hop.name())
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether it is wrapped by torch.func.functionalize."""
    return torch._is_functional_tensor(tensor)


def is_tracked(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> bool:
    """Whether the graph that `mode` builds has a value for `tensor`."""
    return mode.tracer.unwrap_proxy(tensor) is not tensor


def trace_parts(mode: ProxyTorchDispatchMode, hop: Any, source: torch.Tensor) -> None:
    """Let the parts of `source` be what `hop` gives for it in the graph that `mode` builds, if they are used there."""
    tracer, own = mode.tracer, mode.tracer.unwrap_proxy(source)

    @functools.cache
    def node() -> Any:
        proxy = tracer.create_proxy("call_function", hop, (own,), {}, name=hop.name())
        return set_meta(proxy, parts(source))  # type: ignore[arg-type]

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
            if next(reversed(self._source.node.graph.nodes)).op == "output":
                return self._source
            self._made = self._make()
        return self._made


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """`function` compiled, with sizes left open, a program for each kind of arguments, however many there are."""
    made = torch.compile(function, dynamic=True, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
            made(*args)

    return call


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Make Dynamo record calls of `function` as one node instead of tracing into it."""
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function) and None)


def trace_as(function: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """Make Dynamo trace `traceable` where a program calls `function`."""
    when_imported("torch._dynamo", lambda: torch.compiler.substitute_in_graph(function)(traceable) and None)


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


def written(x: torch.Tensor) -> torch.Tensor:
    """x, which Inductor computes before it is read, as what is read as strided memory; anything else it computes again
    for each element."""
    if is_plain_eager():
        return x
    x = x.contiguous()
    # Inductor's as_strided begins at the first element of what x is a part of, and does not take a number that
    # AOTInductor knows (torch 2.13).
    if not known_equal(x.storage_offset(), 0) or (not is_compiling_for_here() and known_equal(x.numel(), 1)):
        return x
    return x.as_strided(x.shape, x.stride())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x, which Inductor rounds to its dtype if that is bfloat16 or float16, because its bits are read. What lies in
    memory is rounded: an input of the graph, or the result of a product or of hop::run."""
    if x.dtype not in (torch.bfloat16, torch.float16) or is_plain_eager() or _lies_in_memory(x):
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


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether ATen's products of bfloat16 on this CPU multiply exactly and sum in float32, by oneDNN."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _keep_loops_that_do_not_divide() -> None:
    """Keep Inductor from splitting a loop over n elements by a divisor in an index, such as that of a block's scale,
    where it does not divide n: the C++ that it writes then drops the rest of the loop, silently (torch 2.13)."""
    module = sys.modules["torch._inductor.codegen.cpp"]
    split = getattr(module.CppScheduling, "try_loop_split", None)
    if split is None:
        return

    def divides(node: Any) -> bool:
        _, body, _ = node.node.get_default_sizes_body()
        divisions = {d for e in body.indexing_exprs.values() if hasattr(e, "find") for d in e.find(module.FloorDiv)}
        loops = [(body.var_ranges[var], by) for var, by in (d.args for d in divisions) if var in body.var_ranges]
        return all(known_equal(size % by, 0) for size, by in loops)

    def split_if_it_divides(self: Any, nodes: Any) -> Any:
        shapes = {tuple(n.node.get_default_sizes_body()[0][0]) for n in nodes}  # torch asserts that there is one
        return split(self, nodes) if len(shapes) == 1 and all(map(divides, nodes)) else nodes

    module.CppScheduling.try_loop_split = split_if_it_divides


when_imported("torch._inductor.codegen.cpp", _keep_loops_that_do_not_divide)


def register_value(cls: type) -> None:
    """Let instances of `cls` be constants of compiled programs: equal ones share a program.

    torch 2.11 to 2.14 call such classes opaque types; 2.15 calls them custom classes."""
    # A class that is defined again, as in a notebook, takes the name of the first.
    core: Any = torch._C
    name = f"{cls.__module__}.{cls.__qualname__}"
    if hasattr(core, "_unregister_opaque_type") and core._is_opaque_type_registered(name):
        core._unregister_opaque_type(name)
    module: Any = opaque_object
    if hasattr(module, "register_custom_class"):
        module.register_custom_class(cls, typ="constant")
    else:
        module.register_opaque_type(cls, typ="value")


def refuse_in_exports(cls: type) -> None:
    """Make torch.export refuse instances of `cls` among the inputs and outputs of a program.

    It would trace the one that it sees and take any other later, silently. All inputs and outputs pass through one
    function of torch.export, which knows no way to ask their class."""

    def register() -> None:
        module: Any = sys.modules["torch.export.graph_signature"]
        describe = module._make_argument_spec

        def describe_or_refuse(node: Any, token_names: Any) -> Any:
            value = getattr(node, "meta", {}).get("val") if hasattr(node, "meta") else node
            if isinstance(value, cls):
                raise TypeError(
                    f"torch.export: a {type(value).__name__} is an input or output of the exported program, where it "
                    "would be fixed to the one traced, and any other one ignored; make it an attribute of the module"
                )
            return describe(node, token_names)

        module._make_argument_spec = describe_or_refuse

    when_imported("torch.export.graph_signature", register)


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
    found = [n if isinstance(n, int) else n.node.hint for n in shape]
    return None if None in found else tuple(found)


# --------------------------------------------------------------------------------------------------------------------
# PyTorch's own out_dtype

stock_operators = frozenset(ALLOWABLE_OPS)
"""The operators that torch.ops.higher_order.out_dtype takes."""


def stock_common_dtype(output_dtype: torch.dtype, args: Sequence[Any]) -> torch.dtype | None:
    """The dtype that torch.ops.higher_order.out_dtype brings its operands to; None where it refuses them."""
    leaves = [x for x in tree_leaves(args) if x is not None]
    try:
        return elementwise_dtypes(
            *leaves, _one_of(output_dtype), type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        )[0]
    except (RuntimeError, ValueError):
        return None


@functools.cache
def _one_of(dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a dimension, of which no mode that is active hears."""
    with no_dispatch():
        return torch.empty(1, dtype=dtype, device="meta")


_rerouting = threading.Lock()
_reroutes: list[type] = []
_Stock = type(stock_out_dtype)


@contextlib.contextmanager
def rerouted(cls: type) -> Iterator[None]:
    """Inside, torch.ops.higher_order.out_dtype is an instance of `cls`, a subclass of its own class, in all threads.
    The last to leave restores its class.

    Rules that py_impl registers cannot be taken back, nor can one be given for a key that has one; and no cache of
    compiled programs would know of them. The class is one attribute, and Dynamo guards what it traced on it."""
    with _rerouting:
        _reroutes.append(cls)
        stock_out_dtype.__class__ = cls
    try:
        yield
    finally:
        with _rerouting:
            _reroutes.remove(cls)
            stock_out_dtype.__class__ = _reroutes[-1] if _reroutes else _Stock


# --------------------------------------------------------------------------------------------------------------------
# Tensor subclasses


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass holds; none of any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


no_torch_function = torch._C._disabled_torch_function_impl
_make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


def make_wrapper(
    cls: type, shape: Any, strides: Any, offset: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of class `cls` without storage."""
    return _make_wrapper_subclass(cls, shape, strides, offset, dtype=dtype, device=device, requires_grad=requires_grad)


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor of `shape`, symbolic sizes included."""
    return make_contiguous_strides_for(tuple(shape))


def correct_aliasing(op: OpOverload, args: Any, kwargs: Any, out: Any) -> Any:
    """`out`, which a rule of a subclass gave for `op`; where a graph is traced, marked as an alias of what the schema
    says. A view costs 10 µs less without it."""
    if is_plain_eager() and not op._schema.is_mutable:
        return out
    return return_and_correct_aliasing(op, args, kwargs, out)


def inferred_size(shape: Sequence[Any], numel: Any) -> list[Any]:
    """`shape` with a -1 in it filled in, if it has `numel` elements; otherwise PyTorch's error."""
    if all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) == numel:
        return list(shape)  # PyTorch's own takes 4 µs
    return list(infer_size(tuple(shape), numel))


# --------------------------------------------------------------------------------------------------------------------
# torch.func


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that levels of torch.func have wrapped."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def apply_at_level(rule: type, interpreter: Any, call: Callable[..., Any], context: Any, tensors: Sequence[Any]) -> Any:
    """Run `call(*tensors)` one level below `interpreter`, a level of torch.func.grad, and differentiate it by `rule`.

    `rule` has the static methods `setup_context(ctx, inputs, output)` and `backward(ctx, grad)` of
    torch.autograd.Function, with inputs `(context, *tensors)`.
    """
    level = interpreter.level()

    def forward(context: Any, *tensors: Any) -> Any:
        inner = [unwrap_for_grad(x, level) for x in tensors]
        with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
            out = call(*inner)
        return wrap_for_grad(out, level)

    function: Any = type(rule.__name__, (rule, _SingleLevelFunction), {"forward": staticmethod(forward)})
    with enable_single_level_autograd_function():
        return function.apply(context, *tensors)


# --------------------------------------------------------------------------------------------------------------------
# Collectives, as they stand in graphs


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The rows of all processes of a group, in the order of their ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), size, group))


def sum_over_processes(x: torch.Tensor, size: int, group: str, *, scatter: bool) -> torch.Tensor:
    """The sum over the processes of a group; with `scatter` this one's part of its rows."""
    ops, x = torch.ops._c10d_functional, x.contiguous()
    return ops.wait_tensor(
        ops.reduce_scatter_tensor(x, "sum", size, group) if scatter else ops.all_reduce(x, "sum", group)
    )


def combined_over(x: torch.Tensor, op: str, over: Any, axis: int = 0) -> torch.Tensor:
    """The "max", "min" or "sum" over the processes of a group, or along an axis of a mesh, element by element."""
    group = over.get_group(axis) if hasattr(over, "get_group") else over
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), op, group.group_name))


def gather_numbers(n: int, mesh: Any) -> list[int]:
    """The numbers that the processes of a mesh of one dimension give, in the order of their ranks."""
    own = torch.tensor([n], device=mesh.device_type)
    return all_gather(own, mesh.size(), mesh.get_group().group_name).tolist()


preserve_version = torch.autograd._unsafe_preserve_version_counter
"""A context in which writing to a tensor does not count as a change for autograd."""


def process_group(boxed: Any) -> Any:
    """The group that a c10d operator is given."""
    group: Any = torch.distributed.ProcessGroup
    return boxed if isinstance(boxed, group) else group.unbox(boxed)


def group_size(group: Any) -> int:
    """The processes of a group that a functional collective is given, by name or itself."""
    return _resolved(group).size()


def group_rank(group: Any) -> int:
    """This process's place in such a group."""
    return _resolved(group).rank()


def _resolved(group: Any) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group) if isinstance(group, str) else process_group(group)  # type: ignore[arg-type]


def reduction_name(boxed: Any) -> str:
    """The name of the reduction that a c10d operator is given, as functional collectives have it."""
    reduce: Any = torch.distributed.ReduceOp
    found = boxed if isinstance(boxed, reduce) else boxed.op()
    names = [n for n in dir(reduce) if n.isupper()]
    return next((name.lower() for name in names if found == getattr(reduce, name)), str(found))


def finished_work(works: Sequence[Any], finish: Callable[[], None], asynchronous: bool) -> Any:
    """What a c10d operator returns: a Work that is done once `works` are and `finish`, called once after them."""
    from torch._C._distributed_c10d import PythonCallbackWork, Work

    pending = [work if isinstance(work, Work) else Work.unbox(work) for work in works]
    left = [finish]

    def wait(timeout: Any) -> bool:
        while left:
            for work in pending:
                work.wait(timeout)
            left.pop()()
        return True

    if not asynchronous:
        for work in pending:
            work.wait()
        left.pop()()
    return PythonCallbackWork(wait).boxed()


# --------------------------------------------------------------------------------------------------------------------
# DTensor


def around_placements(context: Callable[[], Any]) -> None:
    """Run what DTensor does to move its parts, from one placement to another, inside `context()`."""

    def register() -> None:
        module = sys.modules["torch.distributed.tensor.placement_types"]
        for cls in (module.Shard, getattr(module, "_StridedShard", module.Shard)):  # type: ignore[attr-defined]
            for name in _MOVES & set(vars(cls)):
                setattr(cls, name, _inside(context, vars(cls)[name]))

    when_imported("torch.distributed.tensor.placement_types", register)


_MOVES = frozenset(
    {
        *("_shard_tensor", "_to_replicate_tensor", "_to_new_shard_dim", "_replicate_to_shard"),
        *("_replicate_to_strided_shard", "_reduce_shard_tensor"),
    }
)


def _inside(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run


def _hash_local_tensors() -> None:
    """Let AOTAutograd's cache on disk tell DTensors apart by their local tensors: DTensor's own hash knows only how
    they are placed, so that a program for one subclass, or one format, is taken for another's (torch 2.13)."""
    cls = sys.modules["torch.distributed.tensor"].DTensor  # type: ignore[attr-defined]
    own = getattr(cls, "_stable_hash_for_caching", None)
    if own is not None:
        cls._stable_hash_for_caching = lambda self: f"{own(self)} {cache_key(self._local_tensor)}"


def cache_key(x: Any) -> str:
    """A subclass's `_stable_hash_for_caching`, by which AOTAutograd's cache on disk tells programs apart: what they may
    depend on of the tensor, and the sources of this package, whose rules are traced into them: a program that another
    version compiled is not this one's. (A program of our higher-order operators is not cached at all.)"""
    return f"{_described(x)} {_sources()}"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _described(x: Any) -> str:
    """All that a program may depend on of a tensor, and of those that it holds. Programs of symbolic sizes are not
    cached: the cache could not check what it is asked to guard."""
    if not isinstance(x, torch.Tensor):
        return type(x).__qualname__
    if any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())):
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache(f"{type(x).__name__} of symbolic sizes")
    plain = f"{type(x).__qualname__}{tuple(x.shape)}{tuple(x.stride())}{x.dtype}{x.device}{x.requires_grad}"
    if not is_traceable_wrapper_subclass(x):
        return plain
    names, context = x.__tensor_flatten__()
    return f"{plain}{context!r}{[(name, _described(getattr(x, name))) for name in names]}"


when_imported("torch.distributed.tensor", _hash_local_tensors)


class Sharding(NamedTuple):
    """How an operator wants its DTensor operands placed, and where its result then lies."""

    inputs: list[Any]  # placements of each DTensor among the leaves of the arguments, in order
    mesh: Any
    output: Any  # placements
    shape: torch.Size
    stride: tuple[int, ...]


def propagate_sharding(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharding | None:
    """Ask DTensor's own strategy for `op`, or None if DTensor has none for `op` itself (as for composite operators).

    `args` are as `describe_dtensor` makes them; no data moves."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    dispatcher = DTensor._op_dispatcher
    info: Any = dispatcher.unwrap_to_op_info(op, args, kwargs)
    if op in dispatcher._custom_op_handlers:
        return None  # the strategy alone is not enough: a convolution of a sharded image talks to its neighbours
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError:
        return None
    result = info.output_sharding
    spec = result.output_spec
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None or result.use_val_from_redistribute_schema:
        return None
    schema = result.redistribute_schema if result.needs_redistribute else info.schema
    inputs = [x.placements for x in tree_leaves(schema.args_schema) if isinstance(x, DTensorSpec)]
    meta = spec.tensor_meta
    return Sharding(inputs, spec.mesh, spec.placements, meta.shape, meta.stride)


def describe_dtensor(x: Any, dtype: torch.dtype) -> Any:
    """A DTensor without data, placed as `x`, of `dtype`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(x.device_mesh, x.placements, tensor_meta=TensorMeta(x.shape, x.stride(), dtype))
    return DTensor(x._local_tensor.to("meta", dtype), spec, requires_grad=False)


def local_part(x: Any, placements: Any) -> torch.Tensor:
    """The part of DTensor `x` that this process has once it is placed as `placements`.

    Where they are Partial sums of a replicated `x`, the first process has the value and the others zeros; DTensor's own
    redistribution divides by their number, which integers do not survive."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    mesh = x.device_mesh
    spread = [type(p) is Partial and q.is_replicate() for p, q in zip(placements, x.placements, strict=True)]
    target = tuple(Replicate() if s else p for p, s in zip(placements, spread, strict=True))
    local = x.to_local()
    if target != tuple(x.placements):
        meta, dtype = x._spec.tensor_meta, local.dtype
        # Gloo moves no 8-bit floats, but their bytes
        as_bytes = dtype.is_floating_point and dtype.itemsize == 1 and not any(p.is_partial() for p in x.placements)
        if as_bytes:
            local, meta = local.view(torch.uint8), meta._replace(dtype=torch.uint8)
        source, spec = (DTensorSpec(mesh, places, tensor_meta=meta) for places in (x.placements, target))
        local = wait(redistribute_local_tensor(local, source, spec)).view(dtype)
    elsewhere = any(s and place for s, place in zip(spread, mesh.get_coordinate(), strict=True))
    return torch.zeros_like(local) if elsewhere else local


def make_dtensor(local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The DTensor whose part in this process is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, sharding.mesh, sharding.output, run_check=False, shape=sharding.shape, stride=sharding.stride
    )


def is_dtensor(x: Any) -> bool:
    """True for a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def alike(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x as a DTensor placed as `other`, if that is one, otherwise as a plain tensor."""
    if not is_dtensor(x) and not is_dtensor(other):
        return x
    from torch.distributed.tensor import distribute_tensor

    if not is_dtensor(other):
        return x.full_tensor()  # type: ignore[attr-defined]
    own: Any = other
    if is_dtensor(x):
        return x.redistribute(own.device_mesh, own.placements)  # type: ignore[attr-defined]
    return distribute_tensor(x, own.device_mesh, own.placements, src_data_rank=None)


def wait(x: Any) -> torch.Tensor:
    """The tensor that a collective gives, once it is there."""
    return x.wait() if hasattr(x, "wait") else x


def own_part(x: Any) -> Any:
    """The tensor of a DTensor that this process has, itself; any other tensor as it is."""
    return x._local_tensor if is_dtensor(x) else x  # type: ignore[attr-defined]


def as_dtensor(x: torch.Tensor, mesh: Any) -> Any:
    """x, on all of `mesh` if it is no DTensor."""
    from torch.distributed.tensor import DTensor

    return x if is_dtensor(x) else DTensor.from_local(x, mesh, [replicate()] * mesh.ndim, run_check=False)


def is_on_mesh(x: Any) -> bool:
    """Whether this process has a part of DTensor `x`."""
    return x.device_mesh.get_coordinate() is not None


def local_range(x: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The part of DTensor `x` that this process has, itself, and where it begins in each dimension. Raises ValueError
    if it is a sum's part or no range."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_partial() for p in x.placements):
        raise ValueError(f"a DTensor of placements {x.placements} holds partial sums; redistribute it first")
    local = x._local_tensor
    shape, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"the local tensor of a DTensor must have shape {tuple(shape)}, got {tuple(local.shape)}")
    for dim, n in enumerate(x.shape):
        along = [(i, p) for i, p in enumerate(x.placements) if getattr(p, "dim", None) == dim]
        if all(p.is_shard() for _, p in along):
            continue
        index, here = torch.arange(n), x.device_mesh.get_coordinate()
        for i, p in along:  # strided shards
            index = p._split_tensor(index, x.device_mesh.size(i), with_padding=False, contiguous=False)[0][here[i]]
        if len(index) and index[-1] - index[0] != len(index) - 1:
            raise ValueError(f"the part of a DTensor of placements {x.placements} is no range of dimension {dim}")
    return local, tuple(offsets)


def processes(group: Any) -> Any:
    """Collectives over objects that carry an exception of one process to all, as DCP has them; of one process where
    there is no process group."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def replicate() -> Any:
    """The placement that has everything everywhere."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def sharded(dim: int) -> Any:
    """The placement that cuts a dimension into parts."""
    from torch.distributed.tensor import Shard

    return Shard(dim)
