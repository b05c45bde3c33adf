"""Changes inside PyTorch and workarounds for it, each with a record here, in `cpp_code`, `control_flow` or `profiling`.

A record names the fault, the versions of torch that have it, the reports about it, and the test that demonstrates it.
The test runs with the patch reverted, and fails once PyTorch no longer needs the patch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hop.compat.imports import when_imported
from hop.compat.subclass_lowering import lowering, unwrap_parameters
from hop.compat.values import STATE, cache_key, is_ours, program_key
from hop.compat.versions import Version, version

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.script_object import OpaqueObjectClassVariable
    from torch._inductor.utils import InputType

P = ParamSpec("P")
R = TypeVar("R")
Changes = Iterator[tuple[object, str, Callable[..., object]]]
"""Triples of owner, attribute name and replacement; or of library, operator name and kernel."""


@dataclass
class Patch:
    """A change inside PyTorch, or a workaround that our own code uses while the patch is `active`."""

    name: str
    fault: str
    """The behavior of PyTorch without the patch."""
    reported: tuple[str, ...]
    """PyTorch issues and pull requests about it."""
    since: Version | None = None
    """The first tested version of torch with the fault; None for all before `until`."""
    until: Version | None = None
    """The first tested version of torch without the fault; None if there is none."""
    module: str | None = None
    """The module to change, once it is imported; None for a workaround."""
    changes: Callable[[], Changes] | None = None
    active: bool = False
    _originals: list[tuple[object, str, object]] = field(default_factory=list)

    def has_fault(self, torch_version: Version) -> bool:
        """Whether a version of torch has the fault."""
        return (self.since is None or torch_version >= self.since) and (
            self.until is None or torch_version < self.until
        )

    @property
    def is_needed(self) -> bool:
        """Whether the running version of torch has the fault."""
        return self.has_fault(version())

    def apply(self) -> None:
        self.active = True
        if self.module is not None:
            when_imported(self.module, self._change)

    def take_back(self) -> None:
        """Revert the change, for tests of the fault."""
        self.active = False
        for owner, name, original in reversed(self._originals):
            if isinstance(owner, torch.library.Library):
                owner._destroy()
            elif original is None:  # inherited from a base class
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    def _change(self) -> None:
        if not self.active or self.changes is None:
            return
        for owner, name, replacement in self.changes():
            if isinstance(owner, torch.library.Library):
                owner.impl(name, replacement)
                self._originals.append((owner, name, None))
                continue
            self._originals.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, replacement)


PATCHES: dict[str, Patch] = {}
"""All patches by name."""


def _going_around(name: str, fault: str, *reported: str, until: Version | None = None) -> Patch:
    """Record a workaround in our own code."""
    result = PATCHES[name] = Patch(name, fault, reported, until=until)
    return result


def changing(
    module: str,
    fault: str,
    *reported: str,
    since: Version | None = None,
    until: Version | None = None,
) -> Callable[[Callable[[], Changes]], Patch]:
    """Decorate a function that yields the changes to `module`, and record them as a patch with the function's name."""

    def enter(changes: Callable[[], Changes]) -> Patch:
        name = changes.__name__
        result = PATCHES[name] = Patch(name, fault, reported, since, until, module, changes)
        return result

    return enter


strided_offsets = _going_around(
    "strided_offsets",
    "Inductor's as_strided counts its offset from the tensor instead of its storage, and refuses an offset that "
    "AOTInductor knows; `inductor.written` avoids such calls",
    "pytorch#175325",
    "pytorch#180581",
    "pytorch#197431",
    "pytorch#197712",
)
strided_beginnings = _going_around(
    "strided_beginnings",
    "AOTAutograd takes an as_strided of a view without an offset to start at the view's base; `inductor.as_strided` "
    "copies the view",
    until=(2, 13),
)
unsigned_products = _going_around(
    "unsigned_products",
    "torch._int_mm refuses uint8 on CPUs; `hop.kernels.aten.integer` shifts such operands to int8",
    until=(2, 13),
)
bits_before_rounding = _going_around(
    "bits_before_rounding",
    "Inductor reads the bits of a bfloat16 or float16 value computed in float32 before it is rounded; "
    "`inductor.rounded` rounds it",
    "pytorch#185337",
    "pytorch#182225",
)


@changing(
    "torch._dynamo.variables.script_object",
    "Dynamo traces constants of registered classes without their attributes and methods",
    "pytorch#172092",
    until=(2, 13),
)
def opaque_values() -> Changes:
    from torch._dynamo.variables import script_object
    from torch._library import fake_class_registry
    from torch._library.opaque_object import is_opaque_value_type

    module = script_object
    variable, plain = module.TorchScriptObjectVariable, module.UserDefinedObjectVariable

    def of_values(name: str, own: Callable[..., object]) -> tuple[type, str, Callable[..., object]]:
        other = vars(variable)[name]

        @functools.wraps(other)
        def method(self: "script_object.TorchScriptObjectVariable", *args: object, **kwargs: object) -> object:
            chosen = own if is_opaque_value_type(type(self.value)) else other
            return chosen(self, *args, **kwargs)

        return variable, name, method

    def attribute(
        self: "script_object.TorchScriptObjectVariable", tx: "InstructionTranslator", name: str
    ) -> "VariableTracker":
        if name != "__eq__":
            return plain.var_getattr(self, tx, name)
        return module.LambdaVariable(
            lambda other: module.ConstantVariable.create(self.value == other.as_python_constant())
        )

    yield of_values("as_python_constant", lambda self: self.value)
    yield of_values("is_python_hashable", lambda self: True)
    yield of_values("var_getattr", attribute)
    yield of_values("call_method", plain.call_method)

    # so that classes can be compared and joined by |
    yield module.OpaqueObjectClassVariable, "is_python_constant", lambda self: is_opaque_value_type(self.value)

    registry = fake_class_registry
    stand_in = registry.maybe_to_fake_obj
    yield registry, "maybe_to_fake_obj", lambda mode, x: x if is_opaque_value_type(type(x)) else stand_in(mode, x)


@changing(
    "torch._subclasses.fake_tensor",
    "the fake tensor cache assumes that every higher-order operator returns a tuple",
    "pytorch#151957",
    until=(2, 13),
)
def fake_results() -> Changes:
    from torch._subclasses import fake_tensor

    module: Any = fake_tensor
    keep = module.FakeTensorMode._make_cache_entry

    def keep_tuples(
        self: fake_tensor.FakeTensorMode,
        state: object,
        key: object,
        func: object,
        args: object,
        kwargs: object,
        output: object,
    ) -> object:
        if isinstance(func, HigherOrderOperator) and not isinstance(output, tuple | None):
            raise module._BypassDispatchCache("a higher-order operator's result that is no tuple")
        return keep(self, state, key, func, args, kwargs, output)

    yield module.FakeTensorMode, "_make_cache_entry", keep_tuples


@changing(
    "torch._dynamo.variables.script_object",
    "Dynamo breaks the graph at hasattr of a registered class, as in dataclasses.replace",
    "pytorch#187226",
)
def attributes_of_value_classes() -> Changes:
    from torch._dynamo.variables import script_object
    from torch._dynamo.variables.constant import ConstantVariable

    def has(self: "OpaqueObjectClassVariable", tx: object, name: str) -> "VariableTracker":
        return ConstantVariable.create(hasattr(self.value, name))

    module = script_object
    name = "OpaqueObjectClassVariable" if hasattr(module, "OpaqueObjectClassVariable") else "CustomClassVariable"
    yield getattr(module, name), "call_obj_hasattr", has


@changing(
    "torch",
    "vmap has no rule for view.dtype",
    until=(2, 13),
)
def batched_views() -> Changes:
    from torch._C._functorch import _add_batch_dim, _unwrap_batched, maybe_current_level

    def view(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        level: Any = maybe_current_level()
        value, dim = _unwrap_batched(x, level)
        if dim is not None and x.itemsize != dtype.itemsize:  # the size of the last dimension changes
            value, dim = value.movedim(dim, 0), 0
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)):
            out = torch.ops.aten.view.dtype(value, dtype)
        return out if dim is None else _add_batch_dim(out, dim, level)

    yield torch.library.Library("aten", "IMPL", "FuncTorchBatched"), "view.dtype", view


REFUSED: list[type] = []
"""Classes whose instances are errors among the inputs and outputs of programs of torch.export."""


@changing(
    "torch.export.graph_signature",
    "torch.export accepts inputs and outputs of registered classes, specializes on the value it traced and silently "
    "accepts any other later; we raise",
    "pytorch#179870",
    "pytorch#181676",
    "pytorch#167768",
)
def values_in_signatures() -> Changes:
    from torch.export import graph_signature

    module = graph_signature
    describe = module._make_argument_spec

    def describe_or_refuse(node: object, token_names: object) -> object:
        value = getattr(node, "meta", {}).get("val") if hasattr(node, "meta") else node
        if isinstance(value, tuple(REFUSED)):
            raise TypeError(
                f"torch.export: a {type(value).__name__} is an input or output of the exported program, which "
                "would always use the traced value and ignore any other; make it an attribute of the module"
            )
        return describe(node, token_names)

    yield module, "_make_argument_spec", describe_or_refuse


@changing(
    "torch.distributed.tensor",
    "AOTAutograd's disk cache ignores the class and format of DTensors' local tensors, and may return a program for "
    "another one",
    "pytorch#173526",
    "pytorch#188390",
    "pytorch#188401",
    since=(2, 13),  # 2.11 does not cache programs with DTensors
)
def hashes_of_local_tensors() -> Changes:
    from torch.distributed.tensor import DTensor

    cls = DTensor
    own = cls._stable_hash_for_caching
    yield cls, "_stable_hash_for_caching", lambda self: f"{own(self)} {cache_key(self._local_tensor)}"


KEYED: list[type] = []
"""Tensor subclasses whose programs are distinguished by `cache_key`."""


@changing(
    "torch._functorch._aot_autograd.autograd_cache",
    "AOTAutograd's disk cache does not ask subclasses what a program depends on, and may return one compiled for "
    "other rules",
    "pytorch#173526",
    until=(2, 13),
)
def hashes_of_subclasses() -> Changes:
    from torch._functorch._aot_autograd import autograd_cache

    cls = autograd_cache.AOTAutogradCachePickler
    begin = cls.__init__

    def begin_with_keys(self: Any, gm: torch.fx.GraphModule) -> None:
        begin(self, gm)
        self.dispatch_table.update(dict.fromkeys(KEYED, lambda x: (str, (cache_key(x),))))

    yield cls, "__init__", begin_with_keys


@changing(
    "torch._inductor.codecache",
    "the keys of AOTAutograd's and Inductor's disk caches omit what our operators and patches depend on while a "
    "program is compiled, such as the CPU level, so that the caches may return a program of another version or level",
)
def keys_of_programs() -> Changes:
    from torch._inductor import codecache

    cls = codecache.FxGraphHashDetails
    collect = cls.__init__

    @functools.wraps(collect)
    def collect_ours(
        self: Any, gm: torch.fx.GraphModule | None, example_inputs: "Sequence[InputType]", *args: Any, **kwargs: Any
    ) -> None:
        collect(self, gm, example_inputs, *args, **kwargs)
        self.hop_program_key = program_key(lowers_values=_calls_ours(gm) or any(map(_may_hold_values, example_inputs)))

    yield cls, "__init__", collect_ours


CACHED: set[object] = set()
"""Functions that are nodes of Dynamo's graphs and depend on nothing but their arguments and `values.program_key`."""


def _calls_ours(gm: torch.fx.GraphModule | None) -> bool:
    """Whether a graph, or one inside it, has a node of ours that is not lowered yet."""
    graphs = () if gm is None else (m.graph for m in gm.modules() if isinstance(m, torch.fx.GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    return any(t in CACHED or (isinstance(t, HigherOrderOperator) and is_ours(type(t))) for t in targets)


def _may_hold_values(x: object) -> bool:
    return isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x)


@changing(
    "torch._functorch._aot_autograd.autograd_cache",
    "AOTAutograd's disk cache is not used for programs with functions marked by allow_in_graph",
)
def cached_functions() -> Changes:
    from torch._functorch._aot_autograd import autograd_cache

    module = autograd_cache
    check = module.check_node_safe

    def check_others(node: torch.fx.Node) -> None:
        if node.op != "call_function" or node.target not in CACHED:
            check(node)

    yield module, "check_node_safe", check_others


@changing(
    "torch.export.exported_program",
    "run_decompositions fails on subclasses of tensors that are constants of strict export, and on such inputs",
    "pytorch#173526",
)
def lowered_subclasses() -> Changes:
    from torch.export import exported_program as module

    yield module, "_decompose_exported_program", lowering(module._decompose_exported_program, KEYED)


@changing(
    "torch._functorch._aot_autograd.subclass_parametrization",
    "run_decompositions fails on subclasses of tensors whose parts are integers, on parameters that train or have "
    "several names",
)
def unwrapped_parameters() -> Changes:
    from torch._functorch._aot_autograd import subclass_parametrization as parts

    unwrap = parts.unwrap_tensor_subclass_parameters
    yield (
        *(parts, "unwrap_tensor_subclass_parameters"),
        lambda module: unwrap_parameters(module, unwrap, tuple(KEYED)),
    )


MOVING: list[Callable[[], AbstractContextManager[object]]] = []
"""Contexts that are active while DTensor moves local tensors from one placement to another."""


@changing(
    "torch.distributed.tensor.placement_types",
    "DTensor redistributes with plain operators; a cut through a block would give a plain tensor on one process and "
    "codes on another",
    "pytorch#173526",
)
def moves_between_placements() -> Changes:
    from torch.distributed.tensor import placement_types

    module = placement_types
    for cls in dict.fromkeys((module.Shard, getattr(module, "_StridedShard", module.Shard))):
        for name in _MOVES & set(vars(cls)):
            yield cls, name, _inside_moving(vars(cls)[name])


_MOVES = frozenset(
    {
        *("_shard_tensor", "_to_replicate_tensor", "_to_new_shard_dim", "_replicate_to_shard"),
        *("_replicate_to_strided_shard", "_reduce_shard_tensor"),
    }
)


def _inside_moving(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for context in MOVING:
                stack.enter_context(context())
            return function(*args, **kwargs)

    return run


STATE.append(lambda: f"patches {sorted(name for name, patch in PATCHES.items() if patch.active)}")


def apply_needed() -> None:
    """Apply each patch that the running version of torch needs and that is not yet active."""
    for patch in [p for p in PATCHES.values() if p.is_needed and not p.active]:
        patch.apply()


apply_needed()
