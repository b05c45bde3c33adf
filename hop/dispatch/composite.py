"""Composite: operators with arguments or results that are tensor subclasses defined in Python."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from hop.compat import dtensor, functorch, subclasses, tracing
from hop.compat.eager import DispatchKey
from hop.compat.pytree import tree_map_only
from hop.dispatch import plan
from hop.dispatch.hop import Hop, R


class Composite(Hop[R]):
    """An operator with arguments or results of a tensor subclass defined in Python (hop.tensor.QuantizedTensor).

    It has rules for autograd, torch.func and pre-dispatch tracing. Below those it runs its reference, which calls
    operators on plain tensors; these are the operators that graphs contain and that have kernels.
    """

    parts: "Composite[list[Tensor]] | None" = None  # the operator that returns the plain tensors of a result
    of_dtensors: ClassVar[dict[type, Callable[[Tensor], Tensor]]] = {}
    """For each tensor subclass, the function that turns a DTensor of it into that subclass over DTensors."""

    def _run(self, /, *args: object, **kwargs: object) -> R:
        return self.reference(*args, **kwargs)  # the operators in it check memory and have kernels

    def _of_parts(self, /, *args: Any, **kwargs: Any) -> R:
        """Run the reference, rewriting DTensor(QuantizedTensor) as QuantizedTensor(DTensor buffers)."""
        if any(map(dtensor.is_dtensor, plan.tensors(args, kwargs))):
            args, kwargs = tree_map_only(Tensor, self._transposed, (args, kwargs))
        return self.reference(*args, **kwargs)

    def _transposed(self, x: Tensor) -> Tensor:
        if not dtensor.is_dtensor(x):
            return x
        part: object = dtensor.own_part(x)
        turn = self.of_dtensors.get(type(part))
        return x if turn is None else turn(x)

    def dispatch(self, /, dispatch_key: object, *args: object, **kwargs: object) -> R:
        if dispatch_key == DispatchKey.Python:
            return self._of_parts(*args, **kwargs)
        return super().dispatch(dispatch_key, *args, **kwargs)

    def _made_of(
        self, is_such: Callable[[Tensor], bool], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> bool:
        """Whether `is_such` is true of the inner tensors of any operand."""
        return any(is_such(part) for x in plan.tensors(args, kwargs) for part in subclasses.parts(x))

    def _functionalize(self, ctx: object, /, *args: object, **kwargs: object) -> R:
        if self._made_of(subclasses.is_functional, args, kwargs):
            return self._of_parts(*args, **kwargs)
        return super()._functionalize(ctx, *args, **kwargs)

    def _trace(self, mode: tracing.ProxyTorchDispatchMode, /, *args: object, **kwargs: object) -> R:
        wrappers = [x for x in plan.tensors(args, kwargs) if subclasses.parts(x)]
        if not all(tracing.is_tracked(mode, x) for x in wrappers):
            with mode:  # one was created from inner tensors that the graph tracks
                return self._of_parts(*args, **kwargs)
        out = super()._trace(mode, *args, **kwargs)
        if self.parts is not None and isinstance(out, Tensor):
            tracing.trace_parts(mode, self.parts, out)
        return out

    def _vmap_level(self, interpreter: functorch.VmapInterpreter, /, *args: object, **kwargs: object) -> R | Tensor:
        if self._made_of(functorch.is_batched, args, kwargs):
            return self._of_parts(*args, **kwargs)
        return super()._vmap_level(interpreter, *args, **kwargs)
