"""PyTorch's higher-order control-flow operators, called with tensor subclasses.

Each operator has functions and operands. A patch for each changes the call, and nothing inside the operator: operands
of a registered class are split into plain tensors before the operator sees them, and are reassembled inside its
functions; results of such a class go the opposite way. So the operator differentiates, traces, saves and compiles plain
tensors.

A tensor that needs a gradient passes an additional proxy: zeros of its shape and dtype, whose gradient is the tensor's.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from hop.compat.patches import Changes, apply_needed, changing
from hop.compat.pytree import Args, Kwargs


class Rules(NamedTuple):
    """The functions that a tensor class registers."""

    apart: Callable[[Any], list[Tensor]]
    """Split a tensor into plain tensors, by operators that graphs record."""
    together: Callable[[Sequence[Tensor], Any], Tensor]
    """Reassemble a tensor from its parts and its form."""
    form: Callable[[Any], Hashable]
    """The tensor's form: everything except the parts. Equal for tensors that may share programs."""
    slices: Callable[[Any], tuple[list[Tensor], Hashable]]
    """The parts of all slices along the first dimension, stacked, and the form of one slice."""
    stacked: Callable[[Any, int], Hashable]
    """The form of that many tensors stacked along a new first dimension."""


RULES: dict[type, Rules] = {}
"""By exact class: subclasses are not included."""


class _Held(NamedTuple):
    """The form in which an operand is passed: the number of tensors, and whether its gradient proxy is the first."""

    rules: Rules
    form: Hashable
    parts: int
    differs: bool
    dtypes: tuple[torch.dtype, ...] = ()  # the parts' dtypes, if they are passed as floats

    @property
    def width(self) -> int:
        return self.parts + self.differs

    def together(self, flat: Sequence[Tensor]) -> Tensor:
        parts = list(flat[self.differs :])
        if self.dtypes:
            parts = [x.to(dtype) for x, dtype in zip(parts, self.dtypes, strict=True)]
        if not self.differs:
            return self.rules.together(parts, self.form)
        return _Joined.apply(flat[0], self.rules, self.form, *parts)


_Layout = tuple["_Held | None", ...]  # None for an operand that is passed unchanged


class _StoodFor(torch.autograd.Function):
    """The gradient proxy of a tensor: zeros, whose gradient becomes the tensor's."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, like: Tensor, dense: bool) -> Tensor:
        tensor = torch.zeros(tuple(x.shape) if dense else (), dtype=x.dtype, device=like.device)
        return tensor if dense else tensor.expand(tuple(x.shape))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


class _Joined(torch.autograd.Function):
    """Reassemble a tensor whose gradient becomes the proxy's."""

    @staticmethod
    def forward(ctx: FunctionCtx, stand_in: Tensor, rules: Rules, form: object, *parts: Tensor) -> Tensor:
        return rules.together([x.detach() for x in parts], form)

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].contiguous(), None, None, *[None] * (len(ctx.needs_input_grad) - 3)


def _held(x: object, parts: Sequence[Tensor], *, differs: bool, floats: bool) -> _Held:
    dtypes = tuple(part.dtype for part in parts) if floats else ()
    return _Held(RULES[_class(x)], RULES[_class(x)].form(x), len(parts), differs, dtypes)


def _flat(x: object, wrapper: _Held, parts: Sequence[Tensor], *, dense: bool) -> list[Tensor]:
    """The tensors that x is passed as, its gradient proxy first."""
    if wrapper.dtypes:
        parts = [part.to(_WIDE.get(part.dtype, torch.float32)) for part in parts]
    return [_StoodFor.apply(x, parts[0], dense), *parts] if wrapper.differs else list(parts)


_WIDE = dict.fromkeys((torch.float64, torch.int32, torch.int64), torch.float64)
"""The float dtypes that represent all values of a dtype that float32 does not."""


def _class(x: object) -> type:
    return type(x.data) if isinstance(x, torch.nn.Parameter) else type(x)


def _is_such(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and _class(x) in RULES


def _taken_apart(row: "Operator", group: int, operands: Sequence[object], trains: bool) -> tuple[list[object], _Layout]:
    """Split the operands of such classes; also returns the layout, to reassemble them or slices of them."""
    flat: list[object] = []
    layout: list[_Held | None] = []
    carried = group == row.carried
    for x in operands:
        if not _is_such(x):
            flat.append(x)
            layout.append(None)
            continue
        rules = RULES[_class(x)]
        parts = rules.apart(x)
        wrapper = _held(
            x, parts, differs=trains and (carried or x.requires_grad), floats=trains and carried and row.stacks
        )
        if group in row.sliced:
            parts, form = rules.slices(x)
            wrapper = wrapper._replace(form=form)
        layout.append(wrapper)
        flat += _flat(x, wrapper, parts, dense=carried)
    return flat, tuple(layout)


def _together(flat: Sequence[Tensor], layout: _Layout) -> list[Tensor]:
    """The inverse of `_taken_apart`; extra tensors are appended unchanged."""
    args, at = [], 0
    for wrapper in layout:
        width = 1 if wrapper is None else wrapper.width
        args.append(flat[at] if wrapper is None else wrapper.together(flat[at : at + width]))
        at += width
    return [*args, *flat[at:]]


class Function:
    """A function of an operator that takes and returns the parts of the tensors that `function` takes and returns."""

    def __init__(self, function: Callable[..., object], layout: _Layout, differs: bool, floats: int) -> None:
        self.function, self.layout, self.differs, self.floats = function, layout, differs, floats
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    @property
    def meta(self) -> dict[str, object]:
        """The `meta` of the graph, which says how a region of it is compiled."""
        return getattr(self.function, "meta", {})

    @property
    def results(self) -> _Layout | None:
        """The layout of the results of the last run, and so of every run; None if the function has not run."""
        return _results.get(self.function, {}).get((self.layout, self.differs, self.floats))

    def __call__(self, *flat: Tensor) -> object:
        output = self.function(*_together(flat, self.layout))
        many = output if isinstance(output, list | tuple) else [output]
        results: list[_Held | None] = []
        flat_results: list[object] = []
        for i, x in enumerate(many):
            if not _is_such(x):
                results.append(None)
                flat_results.append(x)
                continue
            parts = RULES[_class(x)].apart(x)
            wrapper = _held(x, parts, differs=self.differs, floats=i < self.floats)
            results.append(wrapper)
            flat_results += _flat(x, wrapper, parts, dense=True)
        _results.setdefault(self.function, {})[self.layout, self.differs, self.floats] = tuple(results)
        return tuple(flat_results) if any(results) else output


# Keyed by functions, which live as long as the operator's caller keeps them.
_Key = tuple[_Layout, bool, int]
_Function = Callable[..., object]
_results: "weakref.WeakKeyDictionary[_Function, dict[_Key, _Layout]]" = weakref.WeakKeyDictionary()
_functions: "weakref.WeakKeyDictionary[_Function, weakref.WeakValueDictionary[_Key, Function]]" = (
    weakref.WeakKeyDictionary()
)


def _wrapped(function: _Function, layout: _Layout, differs: bool, floats: int) -> Function:
    """Wrap a function; returns the same object for equal arguments, since some operators identify functions by
    identity.

    The first `floats` results are passed as floats.
    """
    known = _functions.setdefault(function, weakref.WeakValueDictionary())
    wrapper = known.get((layout, differs, floats))
    if wrapper is None:
        known[layout, differs, floats] = wrapper = Function(function, layout, differs, floats)
    return wrapper


@dataclass(frozen=True)
class Operator:
    """The arguments of a higher-order operator, by position."""

    functions: tuple[int, ...]
    groups: tuple[int, ...]
    """Positions of sequences of operands, in the order in which the functions take their members."""
    sliced: tuple[int, ...] = ()
    """Positions of sequences whose members are passed to the functions as slices."""
    carried: int | None = None
    """The sequence whose members have the form of the first results."""
    rest: int | None = None
    """The position from which operands are separate arguments."""
    loops: bool = False
    """Whether all results have the form of the carried operands."""
    stacks: bool = False
    """Whether the results after the carried ones are stacked."""
    named: int | None = None
    """The position of the name that identifies calls of equal functions."""


OPERATORS: dict[str, Operator] = {
    "cond": Operator((1, 2), (3,)),
    "map_impl": Operator((0,), (1, 2), sliced=(1,), stacks=True),
    "scan": Operator((0,), (1, 2, 3), sliced=(2,), carried=1, stacks=True),
    "while_loop": Operator((0, 1), (2, 3), carried=2, loops=True),
    "invoke_subgraph": Operator((0,), (2,), rest=2, named=1),
}


def call(row: Operator, plain: Callable[..., Any], args: Args, kwargs: Kwargs) -> object:
    """Call an operator, `plain`, some of whose operands may be of registered classes."""
    if not any(map(_is_such, tree_leaves(args))):
        return plain(*args, **kwargs)
    given = list(args) if row.rest is None else [*args[: row.rest], args[row.rest :]]
    trains = _trains(given)
    layouts: dict[int, _Layout] = {}
    for group in row.groups:
        given[group], layouts[group] = _taken_apart(row, group, given[group], trains)
    layout = tuple(wrapper for group in layouts.values() for wrapper in group)
    floats = len(layouts[row.carried]) if trains and row.stacks and row.carried is not None else 0
    for i in row.functions:
        given[i] = _wrapped(given[i], layout, trains, floats)
    if row.named is not None:
        given[row.named] = f"{given[row.named]}_{_name(layout, trains)}"
    functions = [given[i] for i in row.functions]
    if row.rest is not None:
        given = [*given[: row.rest], *given[row.rest]]
    output = plain(*given, **_moved(kwargs, layout))
    results: _Layout = next((f.results for f in functions if f.results is not None), ())
    if row.loops and row.carried is not None:
        results = layouts[row.carried]  # its function may not run at all
    return _put_back(row, output, results, layouts)


def _trains(given: object) -> bool:
    """Whether a gradient may be needed."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return False
    return any(x.requires_grad for x in tree_leaves(given) if isinstance(x, Tensor))


_names: dict[tuple[_Layout, bool], int] = {}


def _name(layout: _Layout, trains: bool) -> int:
    """A number for a layout of operands: functions with different layouts need different names."""
    return _names.setdefault((layout, trains), len(_names))


def _moved(kwargs: Kwargs, layout: _Layout) -> Kwargs:
    """The keyword arguments, with the indices of mutated operands adapted to the split operands."""
    written = kwargs.get("mutated_arg_indices")
    if not written:
        return kwargs
    widths = [1 if wrapper is None else wrapper.width for wrapper in layout]
    moved = [str(sum(widths[: int(i)])) for i in written.split(",")]
    return kwargs | {"mutated_arg_indices": ",".join(moved)}


def _put_back(
    row: Operator, output: Sequence[Tensor], results: _Layout, layouts: dict[int, _Layout]
) -> Sequence[Tensor]:
    """Reassemble the results of an operator."""
    if not any(results):
        return output
    carried = 0 if row.carried is None else len(layouts[row.carried])
    layout = [
        wrapper._replace(form=wrapper.rules.stacked(wrapper.form, output[-1].shape[0]))
        if wrapper and row.stacks and i >= carried
        else wrapper
        for i, wrapper in enumerate(results)
    ]
    return tuple(_together(output, tuple(layout)))


def _entered(name: str) -> Callable[[], Changes]:
    def changes() -> Changes:
        operator = getattr(torch.ops.higher_order, name)
        cls = type(operator)
        original = cls.__call__

        @functools.wraps(original)
        def called(self: HigherOrderOperator, /, *args: object, **kwargs: object) -> object:
            return call(OPERATORS[name], functools.partial(original, self), args, kwargs)

        yield cls, "__call__", called

    changes.__name__ = f"operands_of_{name}"
    return changes


_MODULES = {"map_impl": "map"}

for _name_of in OPERATORS:
    changing(
        f"torch._higher_order_ops.{_MODULES.get(_name_of, _name_of)}",
        f"torch.ops.higher_order.{_name_of} refuses operands that are tensor subclasses",
    )(_entered(_name_of))


@changing(
    "torch._dynamo.variables.higher_order_ops",
    "Dynamo refuses tensor subclasses in the body of a loop because it expects one storage per tensor",
    since=(2, 13),
)
def storages_of_parts() -> Changes:
    from torch._dynamo.variables import higher_order_ops

    module = higher_order_ops
    of_plain = module.get_tensor_storages

    def storages(tensor: Any) -> set[StorageWeakRef]:
        if type(tensor) not in RULES:
            return of_plain(tensor)
        names, _ = tensor.__tensor_flatten__()
        return set().union(*(of_plain(getattr(tensor, name)) for name in names))

    yield module, "get_tensor_storages", storages


@changing(
    "torch._higher_order_ops.utils",
    "Dynamo refuses tensor subclasses among the operands that the body of a higher-order operator reads",
    until=(2, 13),
)
def fakes_of_parts() -> Changes:
    from torch._higher_order_ops import utils

    module = utils
    collect = module._collect_fake_inputs

    def collect_parts(inputs: Sequence[object]) -> list[object]:
        parts: list[object] = []
        for x in inputs:
            value: Any = getattr(getattr(x, "node", x), "meta", {}).get("example_value")
            if type(value) in RULES:
                parts += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            else:
                parts += collect([x])
        return parts

    yield module, "_collect_fake_inputs", collect_parts


@changing(
    "torch._higher_order_ops.partitioner",
    "scan traces its backward a second time, on operands that require gradients, when it may contain operators "
    "without a derivative",
)
def gradients_traced_again() -> Changes:
    from torch._higher_order_ops import partitioner

    module = partitioner
    trace = module.materialize_as_graph

    @functools.wraps(trace)
    def traced(*args: Any, force_enable_grad: bool = False, **kwargs: Any) -> torch.fx.GraphModule:
        with torch.set_grad_enabled(force_enable_grad):
            return trace(*args, force_enable_grad=force_enable_grad, **kwargs)

    yield module, "materialize_as_graph", traced


apply_needed()
