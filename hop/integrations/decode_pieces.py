"""The parts of a decode step that are compiled: what precedes the layers, each kind of layer, and what follows them.

Compiling a whole step takes a time that grows with the number of layers, which are equal up to their weights. Here
layers of one kind share a program, and each loads it with its own tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from hop.compat.eager import OpOverload, TorchDispatchMode
from hop.compat.export import WithoutGradModes
from hop.compat.pytree import Args, Kwargs, TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from hop.integrations.decode_program import Inputs, NumberIsUsed, Slots, Step, traceable

LEAST = 24
"""The fewest layers of a step that is divided.

Compiling an 18-layer step in six parts takes 87 s of processor time, seven of each for C++ that is the same in all; as
a whole 74, which grows with the layers. Steps in parts take 5 % longer (Gemma-3-270M, AVX2).
"""


@dataclass(frozen=True)
class Argument:
    """A tensor that a layer's call takes: an entry of the pool, or the hidden states where `index` is None.

    The pool contains the inputs of the step, flattened, and then the other tensors that layers share.
    """

    index: int | None


@dataclass(frozen=True)
class CacheArgument:
    """The cache that a layer's call takes."""


@dataclass(frozen=True)
class Call:
    """A layer's call in a step.

    Attributes:
        leaves, form: the flattened arguments and keyword arguments, with tensors as Argument, and their tree.
        result: the tree of the result, which contains one tensor.
    """

    leaves: tuple[object, ...]
    form: TreeSpec
    result: TreeSpec

    @property
    def uses(self) -> list[int]:
        """The indices in the pool, in order."""
        return sorted({x.index for x in self.leaves if isinstance(x, Argument) and x.index is not None})


@dataclass(frozen=True)
class Plan:
    """How a step divides.

    Attributes:
        layers: the modules.
        calls: their calls.
        shared: for each tensor of the pool after the inputs, the first layer that takes it, and the leaf.
        hidden, pool: examples of the hidden states and of the pool.
    """

    layers: Sequence[nn.Module]
    calls: Sequence[Call]
    shared: Sequence[tuple[int, int]]
    hidden: Tensor
    pool: Sequence[Tensor]


@contextmanager
def _replaced(layers: Iterable[nn.Module], functions: Iterable[Callable[..., object]]) -> Iterator[None]:
    """Give each module another forward."""
    changed: list[nn.Module] = []
    try:
        for layer, function in zip(layers, functions, strict=True):
            layer.forward = function  # type: ignore[method-assign]
            changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


class _Results(TorchDispatchMode):
    """Keeps the tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.tensors += [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out


class _Recorder:
    """Records the calls of a step's layers, and whether the step divides at them."""

    def __init__(self, layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> None:
        self.layers, self.results = layers, _Results()
        self.ahead = ExitStack()  # until the first layer: in a dispatch mode our operators run no kernels
        self.pool: list[Tensor] = list(inputs)
        self.shared: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.divides = True
        self.hidden: Tensor | None = None

    def forward(self, number: int) -> Callable[..., object]:
        inner = self.layers[number].forward

        def recorded(*args: object, **kwargs: object) -> object:
            self.ahead.close()
            if number != len(self.calls):
                self.divides = False
                return inner(*args, **kwargs)
            leaves, form = tree_flatten((args, kwargs))
            described = [self._described(number, i, leaf) for i, leaf in enumerate(leaves)]
            out = inner(*args, **kwargs)
            results, result = tree_flatten(out)
            self.hidden = results[0] if len(results) == 1 and isinstance(results[0], Tensor) else None
            self.divides &= self.hidden is not None
            self.calls.append(Call(tuple(described), form, result))
            return out

        return recorded

    def _described(self, number: int, position: int, leaf: object) -> object:
        if isinstance(leaf, Slots):
            return CacheArgument()
        if not isinstance(leaf, Tensor):
            self.divides &= isinstance(leaf, bool | int | float | str | type(None))
            return leaf
        if position == 0 and (number == 0 or leaf is self.hidden):
            return Argument(None)
        for index, known in enumerate(self.pool):
            if leaf is known:
                return Argument(index)
        # A tensor that depends on earlier layers cannot be computed ahead of them.
        self.divides &= any(leaf is t for t in self.results.tensors)
        self.pool.append(leaf)
        self.shared.append((number, position))
        return Argument(len(self.pool) - 1)


def planned(step: Step, inputs: Inputs) -> Plan | None:
    """How the step divides into layers, from running it once; None if it does not.

    It divides if it has at least LEAST layers, and the model has a ModuleList with a module per layer of the cache.
    Each must run once and in order on the hidden states that the one before returns; other tensors that it takes must
    not depend on earlier layers.

    Raises:
        ValueError: the step fails.
    """
    count = len(step.caches)
    lists = [m for m in step.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if count < LEAST or not lists:
        return None
    layers = list(lists[0])
    recorder = _Recorder(layers, tree_leaves(inputs))
    with traceable(step.model), _replaced(layers, [recorder.forward(i) for i in range(count)]), recorder.ahead:
        recorder.ahead.enter_context(recorder.results)
        step(*inputs)
    if not recorder.divides or len(recorder.calls) != count or recorder.hidden is None:
        return None
    return Plan(layers, recorder.calls, recorder.shared, recorder.hidden, recorder.pool)


class Before(nn.Module):
    """The piece of a step ahead of its layers: the first hidden states, and the tensors that layers share."""

    def __init__(self, step: Step, plan: Plan) -> None:
        super().__init__()
        self.step = step
        self.plan = plan

    def settings(self) -> str:
        """A description of the division, which a program depends on besides the modules."""
        return f"{self.plan.calls} {self.plan.shared}"

    def forward(self, *inputs: object) -> list[Tensor]:
        """The hidden states, and the tensors of `plan.shared`."""
        seen: list[list[Any]] = []

        def skipped(call: Call) -> Callable[..., object]:
            def forward(*args: object, **kwargs: object) -> object:
                seen.append(tree_leaves((args, kwargs)))
                return tree_unflatten([seen[-1][0]], call.result)

            return forward

        with _replaced(self.plan.layers, [skipped(call) for call in self.plan.calls]):
            self.step(*inputs)
        return [seen[0][0], *(seen[layer][leaf] for layer, leaf in self.plan.shared)]


class After(nn.Module):
    """The piece of a step that computes logits from the last hidden states."""

    def __init__(self, step: Step, plan: Plan) -> None:
        super().__init__()
        self.step = step
        self.plan = plan

    def settings(self) -> str:
        """A description of the division, as for Before."""
        return f"{self.plan.calls}"

    def forward(self, hidden: Tensor, *inputs: object) -> Tensor:
        """The logits. Exporting removes what does not depend on `hidden`."""
        given = [lambda *_, call=call, **__: tree_unflatten([hidden], call.result) for call in self.plan.calls]
        with _replaced(self.plan.layers, given):
            return self.step(*inputs)


class _AnyNumber:
    """A layer's number in a program for several layers: it may be passed on, and nothing else."""

    def _raise(self, *_: object) -> NoReturn:
        raise NumberIsUsed

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __index__ = __int__ = _raise
    __float__ = __str__ = __repr__ = __format__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __mod__ = __truediv__ = __floordiv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __pow__ = __rpow__ = _raise


@contextmanager
def _any_number(layer: nn.Module) -> Iterator[None]:
    """Replace the numbers that the modules of a layer keep."""
    before = [(m, m.layer_idx) for m in layer.modules() if "layer_idx" in m.__dict__]
    try:
        for module, _ in before:
            module.layer_idx = _AnyNumber()  # type: ignore[assignment]
        yield
    finally:
        for module, number in before:
            module.layer_idx = number


class Layer(nn.Module):
    """A layer of a step with its cache, whatever the layer's number is.

    Args:
        plan: the division of the step.
        number: the layer's number.
        cache: its KVCache.
        slot, mask: the indices in the pool of where to write keys and values, and of the visible slots.
    """

    def __init__(self, plan: Plan, number: int, cache: nn.Module, slot: int, mask: int) -> None:
        super().__init__()
        self.layer, self.cache, self.call = plan.layers[number], cache, plan.calls[number]
        self.slot, self.mask, self.uses = slot, mask, sorted({*self.call.uses, slot, mask})

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """The next hidden states; `others` are those of the pool that `uses` lists. May raise NumberIsUsed."""
        pool: Mapping[int, Tensor] = dict(zip(self.uses, others, strict=True))
        cache = Slots([self.cache], [(pool[self.slot], pool[self.mask].shape[-1])], alone=True)

        def value(leaf: object) -> object:
            if isinstance(leaf, Argument):
                return hidden if leaf.index is None else pool[leaf.index]
            return cache if isinstance(leaf, CacheArgument) else leaf

        args, kwargs = tree_unflatten([value(leaf) for leaf in self.call.leaves], self.call.form)
        with WithoutGradModes(), _any_number(self.layer):
            (out,) = tree_leaves(self.layer(*args, **kwargs))
        return out

    def settings(self) -> str:
        """A description of the call, which a program depends on besides the modules."""
        return f"{self.call.leaves} {self.call.form} {self.uses} {self.slot} {self.mask}"
