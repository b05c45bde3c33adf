"""Composite: operators that take or return tensors which only Python knows."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from hop.compat import dtensor, functorch, subclasses, tracing
from hop.compat.eager import DispatchKey
from hop.compat.pytree import tree_map_only
from hop.dispatch import plan
from hop.dispatch.hop import Hop


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
        if any(map(dtensor.is_dtensor, plan.tensors(args, kwargs))):
            args, kwargs = tree_map_only(Tensor, self._transposed, (args, kwargs))
        return self.reference(*args, **kwargs)

    def _transposed(self, x: Tensor) -> Tensor:
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
        return any(is_such(part) for x in plan.tensors(args, kwargs) for part in subclasses.parts(x))

    def _functionalize(self, ctx: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._made_of(subclasses.is_functional, args, kwargs):
            return self._of_parts(*args, **kwargs)
        return super()._functionalize(ctx, *args, **kwargs)

    def _trace(self, mode: Any, /, *args: Any, **kwargs: Any) -> Any:
        wrappers = [x for x in plan.tensors(args, kwargs) if subclasses.parts(x)]
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
