"""Hop, the base class of our operators: the rules for dispatch keys and transforms, each written once.

A subclass defines the meaning of its operator, and nothing about dispatch:

    check       validate the arguments and bring them to a canonical form
    reference   the definition, in plain ATen; also the decomposition, the fallback, the shape rule and the test oracle
    kernels     the fast implementations, in the order in which they are tried
    gradient    the gradient of each tensor argument, composed of our operators
    batch       the rule under vmap that keeps the node, or None
    shard       the rule for DTensors

A call takes the first of these routes that applies:

    plain eager tensors, no mode or transform   check, then the first kernel that supports the call, else the reference
    everything else                             PyTorch's dispatcher, with the rules registered in `Hop.__init__`
"""

import abc
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hop.compat import eager, functorch, imports, inductor, memory, profiling, subclasses, tracing, values
from hop.compat.eager import DispatchKey, HigherOrderOperator
from hop.compat.functorch import FuncTorchInterpreter, TransformType, VmapInterpreter
from hop.compat.pytree import Args, ArgsKwargs, Kwargs, tree_leaves, tree_map_only
from hop.dispatch import compiled, plan
from hop.dispatch import ranges as ranges
from hop.dispatch.autograd import AutogradRule, BareCall, Gradient
from hop.dispatch.kernel import Declined, Kernel

R = TypeVar("R", covariant=True)
_current = threading.local()
"""`call`: the operator and arguments, as checked, that this thread dispatches."""
hops: list["Hop[object]"] = []
PLAIN = memory.PLAIN
_Call = tuple["Hop[object]", tuple[object, ...], Mapping[str, object]]


class Hop(HigherOrderOperator, Generic[R]):
    """A higher-order operator that returns one tensor, or a list of tensors if it has no gradient: R.

    Results never alias inputs, and inputs are not mutated.
    """

    plain: frozenset[type] = PLAIN  # operand types that need no dispatcher rule

    def __init__(self, name: str) -> None:
        super().__init__(name, cacheable=values.is_ours(type(self)))  # no cache key covers the code of others
        self.py_impl(DispatchKey.CompositeExplicitAutograd)(self._run)
        self.py_impl(DispatchKey.Autograd)(self._autograd)
        self.py_impl(DispatchKey.FuncTorchGradWrapper)(self._unwrap_dead)
        self.py_impl(TransformType.Grad)(self._grad_level)
        self.py_impl(TransformType.Jvp)(self._jvp_level)
        self.py_impl(TransformType.Vmap)(self._vmap_level)
        self.py_impl(tracing.ProxyTorchDispatchMode)(self._trace)
        self.py_functionalize_impl(self._functionalize)
        eager.register_fake(self, self._describe)
        inductor.register_inductor_decomposition(self, self._lower)
        imports.when_imported("torch.distributed.tensor", self._register_dtensor)
        imports.when_imported("torch.utils.flop_counter", self._register_flop_counter)
        compiled.operators[name] = self
        hops.append(self)

    # ---- implemented by subclasses

    @abc.abstractmethod
    def check(self, /, *args: Any, **kwargs: Any) -> ArgsKwargs:
        """Raise for invalid arguments; return valid ones in canonical form. Does not read data."""

    @abc.abstractmethod
    def reference(self, /, *args: Any, **kwargs: Any) -> R:
        """The definition, in plain ATen."""

    def fake(self, /, *args: Any, **kwargs: Any) -> R:
        """The result for fake tensors, with the same shapes, dtypes and strides as the real one."""
        return self.reference(*args, **kwargs)

    def forward_mode(self, /, *args: Any, **kwargs: Any) -> R:
        """The result, computed by operators whose forward-mode derivative is that of this operator."""
        return self.reference(*args, **kwargs)

    def kernels(self, /, *args: Any, **kwargs: Any) -> Iterable[tuple[Kernel, Any]]:
        """The kernels to try for this call, best first, each with the call in the form that it expects."""
        return ()

    def given(self, call: Any) -> Args:
        """The arguments that a plan is called with, for a call in that form."""
        return call

    def differentiable(self, /, *args: Any, **kwargs: Any) -> bool:
        """Whether the result can have a gradient."""
        return False

    def gradient(self, grad: Tensor, needed: Sequence[bool], /, *args: Any, **kwargs: Any) -> Sequence[Tensor | None]:
        """The gradient of each leaf of `(args, kwargs)` for which `needed` is true, in that leaf's dtype."""
        raise NotImplementedError(f"{self.name()} is differentiable but implements no gradient")

    def batch(self, size: int, dims: Sequence[int | None], /, *args: Any, **kwargs: Any) -> tuple[Tensor, int] | None:
        """Compute all `size` members of a batch at once.

        `dims` contains the batch dimension of each leaf, or None. Returns the result and its batch dimension, or None
        if PyTorch should batch the reference.
        """
        return None

    def shard(self, /, *args: Any, **kwargs: Any) -> R:
        """The result for operands some of which are DTensors: DTensors."""
        return self.reference(*args, **kwargs)

    # ---- calls

    def __call__(self, /, *args: object, **kwargs: object) -> R:
        if eager.is_autocasting():  # our operators choose the dtype that they compute in themselves
            with eager.no_autocast():
                return self(*args, **kwargs)
        is_eager = eager.is_plain_eager()
        if not is_eager:
            eager.refuse_script()
        if profiling.is_watched(is_eager):
            with profiling.ranged(self.name(), args):
                return self(*args, **kwargs)
        outer = getattr(_current, "call", None)
        # Each mode calls the operator again. Values can be read only in eager mode, so that call is checked once more.
        if is_eager or outer is None or not _is_same(outer, (self, args, kwargs)):
            args, kwargs = self.check(*args, **kwargs)
        if plan.is_plain(self.plain, args, kwargs):
            return self._run(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _resolve, (args, kwargs))
        _current.call = (self, args, kwargs)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _current.call = outer

    def dispatch(self, /, dispatch_key: object, *args: object, **kwargs: object) -> R:
        if dispatch_key == DispatchKey.Python:
            mode = eager.current_mode()
            known = mode is None or type(mode) in self.python_key_table
            if not known and not getattr(mode, "supports_higher_order_operators", False):
                return self.reference(*args, **kwargs)  # a mode that only supports ATen sees only ATen
            for subclass in _unknown_subclasses(self, args, kwargs):
                self.py_impl(subclass)(self.reference)
        return super().dispatch(dispatch_key, *args, **kwargs)

    def explain(self, /, *args: Any, **kwargs: Any) -> str:
        """Explain which implementation a call uses, and why each one before it declined."""
        args, kwargs = self.check(*args, **kwargs)
        lines: list[str] = []
        for kernel, call in self.kernels(*args, **kwargs):
            match = kernel.match(call)
            if not isinstance(match, Declined):
                return "\n".join([*lines, f"{kernel.name}: chosen"])
            lines.append(f"{kernel.name}: {match.reason}")
        return "\n".join([*lines, "reference: chosen"])

    # ---- below autograd

    def _matched(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], native: bool = False
    ) -> tuple[Kernel, Callable[[], R]] | None:
        """The first kernel that supports a call, of all kernels or the native ones, and a function that computes the
        call.
        """
        for kernel, call in self.kernels(*args, **kwargs):
            if (kernel.native or not native) and not isinstance(match := kernel.match(call), Declined):
                return kernel, functools.partial(match, *self.given(call))
        return None

    def _run(self, /, *args: object, **kwargs: object) -> R:
        memory.check(plan.tensors(args, kwargs))
        matched = self._matched(args, kwargs)
        return self.reference(*args, **kwargs) if matched is None else matched[1]()

    def _lower(self, /, *args: object, **kwargs: object) -> R:
        """Lower a node in Inductor.

        Operands in half precision are rounded: between operators that it fuses, Inductor would omit the rounding, and
        so compute other codes than eager mode.
        """
        matched = self._matched(args, kwargs)
        if matched is not None and matched[0].native:
            return matched[1]()
        args, kwargs = tree_map_only(Tensor, inductor.rounded, (args, kwargs))
        return self._run(*args, **kwargs)

    def kept_native(self, /, *args: object, **kwargs: object) -> R:
        """Decompose a node into native operators where possible, for programs that keep them."""
        with inductor.keeping_native():
            matched = self._matched(args, kwargs, native=True)
            return self.reference(*args, **kwargs) if matched is None else matched[1]()

    def _describe(self, /, *args: object, **kwargs: object) -> object:
        """`fake`, in a form that PyTorch can cache for similar calls: a tensor, or a tuple of tensors."""
        output = self.fake(*args, **kwargs)
        return tuple(output) if isinstance(output, list) else output

    def _trace(self, mode: tracing.ProxyTorchDispatchMode, /, *args: object, **kwargs: object) -> R:
        return tracing.trace_node(mode, self, args, kwargs)

    def _functionalize(self, ctx: Any, /, *args: object, **kwargs: object) -> R:
        inner_args, inner_kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
        with ctx.redispatch_to_next():
            out = self(*inner_args, **inner_kwargs)
        return ctx.wrap_tensors(out)

    # ---- differentiation

    def _autograd(self, /, *args: object, **kwargs: object) -> R:
        tensors = plan.tensors(args, kwargs)
        if self.differentiable(*args, **kwargs):
            if any(map(eager.has_tangent, tensors)):
                return self.forward_mode(*args, **kwargs)  # PyTorch's own rules propagate the tangent and the gradient
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                call, tensors = BareCall.take(self, args, kwargs)
                return AutogradRule.apply(call, *tensors)
        with eager.below_autograd():
            return self(*args, **kwargs)

    def _grad_level(self, interpreter: FuncTorchInterpreter, /, *args: object, **kwargs: object) -> R | Tensor:
        if not self.differentiable(*args, **kwargs):
            return self._level_below(interpreter, args, kwargs)
        call, tensors = BareCall.take(self, args, kwargs)
        return functorch.apply_at_level(Gradient, interpreter, call.run, call, tensors)

    def _jvp_level(self, interpreter: FuncTorchInterpreter, /, *args: object, **kwargs: object) -> R:
        tensors = plan.tensors(args, kwargs)
        if self.differentiable(*args, **kwargs) and any(map(eager.has_tangent, tensors)):
            return self.forward_mode(*args, **kwargs)
        return self._level_below(interpreter, args, kwargs)

    def _level_below(self, interpreter: FuncTorchInterpreter, args: Args, kwargs: Kwargs) -> R:
        """Run the operator at the next level, without a derivative at this one."""
        level = interpreter.level()
        inner = tree_map_only(Tensor, lambda x: functorch.unwrap_for_grad(x, level), (args, kwargs))
        with interpreter.lower():
            out = self(*inner[0], **inner[1])
        return tree_map_only(Tensor, lambda x: functorch.wrap_for_grad(x, level), out)

    def _unwrap_dead(self, /, *args: object, **kwargs: object) -> R:
        """Unwrap tensors whose torch.func level has ended: a backward pass may run later than the level that wrapped
        them.
        """
        args, kwargs = tree_map_only(Tensor, functorch.unwrap_if_dead, (args, kwargs))
        return self(*args, **kwargs)

    def _vmap_level(self, interpreter: VmapInterpreter, /, *args: object, **kwargs: object) -> R | Tensor:
        (inner_args, inner_kwargs), dims = functorch.unwrap_batched((args, kwargs), interpreter.level())
        dims = tree_leaves(dims, is_leaf=lambda d: d is None)
        with interpreter.lower():
            if all(dim is None for dim in dims):
                return self(*inner_args, **inner_kwargs)
            batched = self.batch(interpreter.batch_size(), dims, *inner_args, **inner_kwargs)
        if batched is None:
            return self.reference(*args, **kwargs)
        return functorch.add_batch_dim(*batched, interpreter.level())

    # ---- registrations that wait for an import

    def _register_dtensor(self) -> None:
        from torch.distributed.tensor import DTensor

        self.py_impl(DTensor)(self.shard)

    def _register_flop_counter(self) -> None:
        self.py_impl(eager.flop_counter_mode())(self._count_flops)

    def _count_flops(self, mode: eager.TorchDispatchMode, /, *args: object, **kwargs: object) -> R:
        """Count the FLOPs of the reference, on meta tensors, under the names of its ATen operators."""
        described = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with mode:
            self.reference(*described[0], **described[1])
        return self(*args, **kwargs)


def _is_same(a: _Call, b: _Call) -> bool:
    """Whether two calls are of one operator with the same arguments, by identity."""
    (hop, args, kwargs), (other, others, named) = a, b
    return (
        hop is other
        and len(args) == len(others)
        and kwargs.keys() == named.keys()
        and all(x is y for x, y in zip(args, others, strict=True))
        and all(x is named[name] for name, x in kwargs.items())
    )


def _resolve(x: Tensor) -> Tensor:
    """Materialize a lazy conjugation or negation, for which the dispatcher would need rules from us."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _unknown_subclasses(hop: Hop[object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> set[type]:
    """Types of operands with their own `__torch_dispatch__` for which `hop` has no rule yet."""
    types = {type(x) for x in plan.tensors(args, kwargs)}
    return {t for t in types if t not in hop.python_key_table and subclasses.is_foreign_subclass(t)}
