"""Everything that depends on private or version-specific parts of PyTorch.

Covers torch 2.11 to 2.15. No other module of the package names a private attribute of torch; when a release moves one,
this file is what changes.

Importing it costs nothing beyond `import torch`: what needs Dynamo, Inductor, DTensor or the FLOP counter registers
itself when that module is imported by somebody else (`when_imported`).
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import (
    DispatchKey,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import TransformType, _add_batch_dim, peek_interpreter_stack
from torch._C._functorch import _unwrap_for_grad as unwrap_for_grad
from torch._C._functorch import _wrap_for_grad as wrap_for_grad
from torch._C._functorch import unwrap_if_dead as unwrap_if_dead
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import unwrap_batched
from torch._higher_order_ops.utils import register_fake
from torch._library import opaque_object
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import infer_size
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    maybe_handle_decomp,
    track_tensor_tree,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DispatchKey",
    "HigherOrderOperator",
    "OpOverload",
    "ProxyTorchDispatchMode",
    "Sharding",
    "TransformType",
    "add_batch_dim",
    "apply_at_level",
    "below_autograd",
    "core_decompositions",
    "current_mode",
    "has_tangent",
    "is_plain_eager",
    "is_tracing_script",
    "propagate_sharding",
    "register_fake",
    "register_inductor_decomposition",
    "trace_as",
    "trace_node",
    "unwrap_batched",
    "when_imported",
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


def is_tracing_script() -> bool:
    """True under `torch.jit.trace`, which records ATen operators only."""
    return _get_tracing_state() is not None


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
    proxy_args, proxy_kwargs = tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", hop, proxy_args, proxy_kwargs, name=hop.name())
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Make Dynamo record calls of `function` as one node instead of tracing into it."""
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function) and None)


def trace_as(function: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """Make Dynamo trace `traceable` where a program calls `function`."""
    when_imported("torch._dynamo", lambda: torch.compiler.substitute_in_graph(function)(traceable) and None)


def register_inductor_decomposition(hop: Any, function: Callable[..., Any]) -> None:
    """Make Inductor and AOTInductor replace nodes of `hop` by what `function` does."""

    def register() -> None:
        module = sys.modules["torch._inductor.decomposition"]
        module.decompositions[hop] = function
        module.fast_random_decomps.cache_clear()  # a cached copy of the table

    when_imported("torch._inductor.decomposition", register)


def register_value(cls: type) -> None:
    """Let instances of `cls` be constants of compiled programs: equal ones share a program.

    torch 2.11 to 2.14 call such classes opaque types; 2.15 calls them custom classes."""
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


def core_decompositions() -> Any:
    """PyTorch's default decomposition table for export, as a fresh mapping."""
    return torch.export.default_decompositions()


def known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever value a symbol in them has: a comparison that leaves no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


# --------------------------------------------------------------------------------------------------------------------
# Tensor subclasses

no_torch_function = torch._C._disabled_torch_function_impl


def make_wrapper(
    cls: type, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of class `cls` without storage."""
    make = torch.Tensor._make_wrapper_subclass
    return make(cls, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad)


def correct_aliasing(op: OpOverload, args: Any, kwargs: Any, out: Any) -> Any:
    """`out`, which a rule of a subclass gave for `op`; where a graph is traced, marked as an alias of what the schema
    says. A view costs 10 µs less without it."""
    if is_plain_eager() and not (op._schema.is_mutable):
        return out
    return return_and_correct_aliasing(op, args, kwargs, out)


def inferred_size(shape: Sequence[Any], numel: Any) -> list[Any]:
    """`shape` with a -1 in it filled in, if it has `numel` elements; otherwise PyTorch's error."""
    return list(infer_size(tuple(shape), numel))


# --------------------------------------------------------------------------------------------------------------------
# torch.func


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
# DTensor


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
        spec = DTensorSpec(mesh, target, tensor_meta=x._spec.tensor_meta)
        local = redistribute_local_tensor(local, x._spec, spec)
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


def replicate() -> Any:
    """The placement that has everything everywhere."""
    from torch.distributed.tensor import Replicate

    return Replicate()
