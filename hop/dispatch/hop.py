"""Hop, the base class of our operators: every dispatch key and transform, each written once.

A concrete operator supplies what it means, and nothing about dispatch:

    check       validate the arguments and bring them to one canonical form
    reference   the meaning, in plain ATen; also the decomposition, the fallback, the shape rule and the oracle of tests
    kernels     the fast implementations, in the order in which they are asked
    gradient    the gradient of each tensor argument, made of operators of ours
    batch       the rule under vmap that keeps our node, or None where there is none
    shard       the rule for DTensors

A call takes the first of these routes that applies:

    plain eager tensors, nothing watching      check, then the first kernel that supports the call, else the reference
    everything else                            PyTorch's dispatcher, by the rules registered in `Hop.__init__`
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hop.compat import dtensor, eager, functorch, imports, inductor, memory, subclasses, tracing
from hop.compat.eager import DispatchKey, HigherOrderOperator
from hop.compat.export import as_decomposition, core_decompositions
from hop.compat.functorch import TransformType
from hop.compat.pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from hop.dispatch import compiled as _leaf
from hop.dispatch.kernel import Kernel

_hops: list["Hop"] = []
PLAIN = memory.PLAIN
_LISTS = (list, tuple)


class Hop(HigherOrderOperator):
    """A higher-order operator that returns one tensor, or, where it has no gradient, a list of tensors; never an alias
    of an input. It mutates nothing."""

    plain: frozenset[type] = PLAIN  # the types of operands that need no rule of the dispatcher

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.py_impl(DispatchKey.CompositeExplicitAutograd)(self._run)
        self.py_impl(DispatchKey.Autograd)(self._autograd)
        self.py_impl(DispatchKey.FuncTorchGradWrapper)(self._unwrap_dead)
        self.py_impl(TransformType.Grad)(self._grad_level)
        self.py_impl(TransformType.Jvp)(self._jvp_level)
        self.py_impl(TransformType.Vmap)(self._vmap_level)
        self.py_impl(tracing.ProxyTorchDispatchMode)(self._trace)
        self.py_functionalize_impl(self._functionalize)
        eager.register_fake(self, self.fake)
        inductor.register_inductor_decomposition(self, self._lower)
        imports.when_imported("torch.distributed.tensor", self._register_dtensor)
        imports.when_imported("torch.utils.flop_counter", self._register_flop_counter)
        _leaf.register(name, self)
        _hops.append(self)

    # ---- what a concrete operator supplies

    @abc.abstractmethod
    def check(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Raise for arguments that break a rule; return them in canonical form. Does not touch data."""

    @abc.abstractmethod
    def reference(self, /, *args: Any, **kwargs: Any) -> Any:
        """The meaning, in plain ATen."""

    def fake(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result for fake tensors: of the same shapes, dtypes and strides."""
        return self.reference(*args, **kwargs)

    def forward_mode(self, /, *args: Any, **kwargs: Any) -> Tensor:
        """The meaning, in operators whose derivative is that of this one."""
        return self.reference(*args, **kwargs)

    def kernels(self, /, *args: Any, **kwargs: Any) -> Iterable[tuple[Kernel, Any]]:
        """The kernels to ask for this call, best first, each with the call in the form that it takes."""
        return ()

    def returns_list(self, /, *args: Any) -> bool:
        """Whether the result is a list of tensors."""
        return False

    def differentiable(self, /, *args: Any, **kwargs: Any) -> bool:
        """Whether the result can carry a gradient at all."""
        return False

    def gradient(self, grad: Tensor, needed: Sequence[bool], /, *args: Any, **kwargs: Any) -> Sequence[Tensor | None]:
        """The gradient of each leaf of `(args, kwargs)` for which `needed` is true, in that leaf's dtype."""
        raise NotImplementedError(f"{self.name()} says that it is differentiable and has no gradient")

    def batch(self, size: int, dims: Sequence[int | None], /, *args: Any, **kwargs: Any) -> tuple[Tensor, int] | None:
        """Compute all `size` members of a batch at once; `dims` has the batch dimension (or None) of each leaf. Returns
        the result and its batch dimension, or None where the reference should be batched by PyTorch's rules."""
        return None

    def shard(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result for operands some of which are DTensors: DTensors."""
        return self.reference(*args, **kwargs)

    # ---- calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if eager.is_autocasting():  # our operators say themselves in which dtype they compute
            with eager.no_autocast():
                return self(*args, **kwargs)
        plain = eager.is_plain_eager()
        if not plain:
            eager.refuse_script()
        args, kwargs = self.check(*args, **kwargs)
        if plain and _all_plain(self.plain, args, kwargs):
            return self._run(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _resolve, (args, kwargs))
        return cast(Any, super().__call__(*args, **kwargs))

    def dispatch(self, /, dispatch_key: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key == DispatchKey.Python:
            mode = eager.current_mode()
            known = mode is None or type(mode) in self.python_key_table
            if not known and not getattr(mode, "supports_higher_order_operators", False):
                return self.reference(*args, **kwargs)  # a mode that knows ATen only sees ATen
            for subclass in _unknown_subclasses(self, args, kwargs):
                self.py_impl(subclass)(self.reference)
        return cast(Any, super().dispatch(dispatch_key, *args, **kwargs))

    def explain(self, /, *args: Any, **kwargs: Any) -> str:
        """Which implementation a call would take, and why each one before it declined."""
        args, kwargs = self.check(*args, **kwargs)
        lines: list[str] = []
        for kernel, call in self.kernels(*args, **kwargs):
            reason = kernel.declines(call)
            lines.append(f"{kernel.name}: {'chosen' if reason is None else reason}")
            if reason is None:
                return "\n".join(lines)
        return "\n".join([*lines, "reference: chosen"])

    # ---- below autograd

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        memory.check(_tensors(args, kwargs))
        for kernel, call in self.kernels(*args, **kwargs):
            if kernel.declines(call) is None:
                return kernel.run(call)
        return self.reference(*args, **kwargs)

    def _lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """What Inductor makes of a node. Between operators that it fuses it would leave out the rounding of half
        floats, and so give other codes than eager mode."""
        takes = (x for x in self.kernels(*args, **kwargs) if x[0].declines(x[1]) is None)
        chosen, call = next(takes, (None, None))
        if chosen is not None and chosen.native:
            return chosen.run(call)
        if chosen is not None and chosen.leaf and not kwargs:
            made = _leaf.call(self.name(), args)
            return made if self.returns_list(*args) else made[0]
        args, kwargs = tree_map_only(Tensor, inductor.rounded, (args, kwargs))
        return self._run(*args, **kwargs)

    def kept_native(self, /, *args: Any, **kwargs: Any) -> Any:
        """What becomes of a node of a program that keeps native operators."""
        with inductor.keeping_native():
            takes = (x for x in self.kernels(*args, **kwargs) if x[0].native and x[0].declines(x[1]) is None)
            kernel, call = next(takes, (None, None))
            return self.reference(*args, **kwargs) if kernel is None else kernel.run(call)

    def in_program(self, /, *args: Any) -> Any:
        """What hop::run does in a compiled program: the call in eager mode, its arguments checked when traced."""
        with eager.below_autograd():
            return self._run(*args)

    def _trace(self, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        return tracing.trace_node(mode, self, args, kwargs)

    def _functionalize(self, ctx: Any, /, *args: Any, **kwargs: Any) -> Any:
        inner_args, inner_kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
        with ctx.redispatch_to_next():
            out = self(*inner_args, **inner_kwargs)
        return ctx.wrap_tensors(out)

    # ---- differentiation

    def _autograd(self, /, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs)
        if self.differentiable(*args, **kwargs):
            if any(map(eager.has_tangent, tensors)):
                return self.forward_mode(*args, **kwargs)  # PyTorch's own rules propagate tangent and gradient
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                call, tensors = _Call.take(self, args, kwargs)
                return cast(Any, _AutogradRule.apply(call, *tensors))
        with eager.below_autograd():
            return self(*args, **kwargs)

    def _grad_level(self, interpreter: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.differentiable(*args, **kwargs):
            return self._level_below(interpreter, args, kwargs)
        call, tensors = _Call.take(self, args, kwargs)
        return functorch.apply_at_level(_Rule, interpreter, call.run, call, tensors)

    def _jvp_level(self, interpreter: Any, /, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs)
        if self.differentiable(*args, **kwargs) and any(map(eager.has_tangent, tensors)):
            return self.forward_mode(*args, **kwargs)
        return self._level_below(interpreter, args, kwargs)

    def _level_below(self, interpreter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the next level says, with no derivative at this one."""
        level = interpreter.level()
        inner = tree_map_only(Tensor, lambda x: functorch.unwrap_for_grad(x, level), (args, kwargs))
        with interpreter.lower():
            out = self(*inner[0], **inner[1])
        return tree_map_only(Tensor, lambda x: functorch.wrap_for_grad(x, level), out)

    def _unwrap_dead(self, /, *args: Any, **kwargs: Any) -> Any:
        """A backward pass may run after the level of torch.func that wrapped its tensors has ended."""
        args, kwargs = tree_map_only(Tensor, functorch.unwrap_if_dead, (args, kwargs))
        return self(*args, **kwargs)

    def _vmap_level(self, interpreter: Any, /, *args: Any, **kwargs: Any) -> Any:
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

    def _count_flops(self, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count what the reference does, on tensors without data, under the names of its ATen operators."""
        described = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with mode:
            self.reference(*described[0], **described[1])
        return self(*args, **kwargs)


class Composite(Hop):
    """An operator that takes or returns tensors which only Python knows (hop.tensor.QuantizedTensor).

    It has the rules of autograd, torch.func and pre-dispatch tracing. Below them it is its reference, which calls
    operators on plain tensors: those stand in graphs, and have kernels."""

    parts: "Composite | None" = None  # the operator that takes a result apart
    of_dtensors: ClassVar[dict[type, Callable[[Tensor], Tensor]]] = {}
    """By a class of tensors, what makes of a DTensor of such tensors one of DTensors."""

    def _run(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)  # the operators that it calls look at memory, and have kernels

    def _of_parts(self, /, *args: Any, **kwargs: Any) -> Any:
        """The reference, for which a DTensor of such tensors is such a tensor of DTensors."""
        if any(map(dtensor.is_dtensor, _tensors(args, kwargs))):
            args, kwargs = tree_map_only(Tensor, self._turned, (args, kwargs))
        return self.reference(*args, **kwargs)

    def _turned(self, x: Tensor) -> Tensor:
        if not dtensor.is_dtensor(x):
            return x
        part: object = dtensor.own_part(x)
        turn = self.of_dtensors.get(type(part))
        return x if turn is None else turn(x)

    def dispatch(self, /, dispatch_key: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key == DispatchKey.Python:
            return self._of_parts(*args, **kwargs)
        return super().dispatch(dispatch_key, *args, **kwargs)

    def _made_of(self, is_such: Callable[[Tensor], bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the parts of an operand are such tensors."""
        return any(is_such(part) for x in _tensors(args, kwargs) for part in subclasses.parts(x))

    def _functionalize(self, ctx: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._made_of(subclasses.is_functional, args, kwargs):
            return self._of_parts(*args, **kwargs)
        return super()._functionalize(ctx, *args, **kwargs)

    def _trace(self, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        wrappers = [x for x in _tensors(args, kwargs) if subclasses.parts(x)]
        if not all(tracing.is_tracked(mode, x) for x in wrappers):
            with mode:  # one was made of parts, which the graph knows
                return self._of_parts(*args, **kwargs)
        out = super()._trace(mode, *args, **kwargs)
        if self.parts is not None:
            tracing.trace_parts(mode, self.parts, out)
        return out

    def _vmap_level(self, interpreter: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._made_of(functorch.is_batched, args, kwargs):
            return self._of_parts(*args, **kwargs)
        return super()._vmap_level(interpreter, *args, **kwargs)


def decompositions(*, keep: Iterable[Any] = (), native: bool = False) -> Any:
    """PyTorch's default decomposition table for `ExportedProgram.run_decompositions`, plus our operators: what is left
    afterwards is core ATen. Returns a fresh table that the caller may change.

    Args:
        keep: operators of ours that stay as they are: functions such as hop.out_dtype, nodes' targets such as
            torch.ops.higher_order.hop_out_dtype, or their names. What others become may hold them: hop.scaled is made
            of hop.out_dtype.
        native: only our operators, which become those of the native library, hop_native::*, where its kernels take a
            call, as in eager mode: for packages of AOTInductor that run where the library is loaded.

    Raises TypeError for a string, and ValueError for what names no operator of ours.
    """
    if isinstance(keep, str | Hop) or callable(keep):
        raise TypeError(f"decompositions: keep must be a list, got {keep!r}; for one operator, a list of one")
    kept = set[str]()
    for x in keep:
        if not (found := operators_named(x)):
            known = ", ".join(sorted(h.name() for h in _hops))
            raise ValueError(f"decompositions: keep must name operators of ours, which are {known}; got {x!r}")
        kept.update(h.name() for h in found)
    table: Any = {} if native else core_decompositions()
    for hop in _hops:
        if hop.name() not in kept:
            table[hop] = as_decomposition(hop.kept_native if native else hop.reference)
    return table


def operators_named(x: Any) -> list[Hop]:
    """Our operators that a function of ours, an operator or a name stands for: hop.scaled and "scaled" for hop_scaled
    and hop_scaled_buffers. None for others."""
    if isinstance(x, Hop):
        return [x]
    is_ours = callable(x) and getattr(x, "__module__", "").startswith("hop.")
    name = x if isinstance(x, str) else getattr(x, "__name__", "") if is_ours else ""
    if exact := [h for h in _hops if h.name() == name]:
        return exact
    name = f"hop_{name.removeprefix('hop.')}"
    return [h for h in _hops if name != "hop_" and (h.name() == name or h.name().startswith(f"{name}_"))]


class _Call:
    """One call without its tensors: a context that outlives the call keeps none of them alive."""

    def __init__(self, hop: Hop, leaves: list[Any], spec: Any) -> None:
        self.hop, self.spec = hop, spec
        self.positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.rest = [None if isinstance(x, Tensor) else x for x in leaves]

    @classmethod
    def take(cls, hop: Hop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["_Call", list[Tensor]]:
        leaves, spec = tree_flatten((args, kwargs))
        call = cls(hop, leaves, spec)
        return call, [leaves[i] for i in call.positions]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.rest)
        for i, x in zip(self.positions, tensors, strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, self.spec)

    def run(self, *tensors: Tensor) -> Tensor:
        args, kwargs = self.arguments(tensors)
        return self.hop(*args, **kwargs)


class _Rule:
    """The gradient of a call, for torch.autograd.Function: inputs are the _Call, then its tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.save_for_backward(*tensors)
        if not (output.is_floating_point() or output.is_complex()):
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), call = grad_outputs, ctx.call
        needed = [False] * len(call.rest)
        for i, need in zip(call.positions, ctx.needs_input_grad[1:], strict=True):
            needed[i] = need
        # torch.func.vjp gives functions that run when their level has ended
        args, kwargs = call.arguments([functorch.unwrap_if_dead(x) for x in ctx.saved_tensors])
        grads = call.hop.gradient(grad, needed, *args, **kwargs)
        return None, *(grads[i] for i in call.positions)


class _AutogradRule(_Rule, torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Tensor:
        with eager.below_autograd():
            return call.run(*tensors)


def _all_plain(plain: frozenset[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if no operand needs a rule of the dispatcher: strided tensors of PyTorch's own class, without a gradient or
    tangent to propagate and without a lazy conjugation or negation."""
    grad = torch.is_grad_enabled()
    forward_ad = eager.is_dual_level_open()
    for x in _tensors(args, kwargs):
        if (
            type(x) not in plain
            or x.layout is not torch.strided
            or (grad and x.requires_grad)
            or (forward_ad and x.is_floating_point())
            or x.is_conj()
            or x.is_neg()
        ):
            return False
    return True


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments and in the lists that are among them; a tenth of the time of tree_leaves."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, _LISTS) and x and not isinstance(x[0], int):
            found += [y for y in cast(list[Any], x) if isinstance(y, Tensor)]
    return found


def _resolve(x: Tensor) -> Tensor:
    """Carry out a lazy conjugation or negation, for which the dispatcher would ask us for rules."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _unknown_subclasses(hop: Hop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[type]:
    """Types of operands with a `__torch_dispatch__` of their own that have no rule for `hop` yet."""
    types = {type(x) for x in _tensors(args, kwargs)}
    return {t for t in types if t not in hop.python_key_table and subclasses.is_foreign_subclass(t)}
