"""out_dtype: its operator and the public function."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hop.compat import dynamo
from hop.compat.eager import OpOverload
from hop.compat.profiling import observed
from hop.compat.pytree import Args, ArgsKwargs
from hop.dispatch import plan
from hop.dispatch.hop import Hop
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.plan import Plan
from hop.impls.out_dtype import batching, gradient, kernels, meaning, sharding
from hop.impls.out_dtype.kernels import FormedCall


class OutDtype(Hop[Tensor]):
    """The operator of `hop.out_dtype`."""

    def check(self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> ArgsKwargs:
        args, kwargs = meaning.check(op, output_dtype, args, kwargs)
        return (op, output_dtype, *args), kwargs

    def reference(self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
        return meaning.reference(op, output_dtype, *args, **kwargs)

    def kernels(
        self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object
    ) -> Iterable[tuple[Kernel, FormedCall]]:
        return kernels.candidates(op, output_dtype, args, kwargs)

    def given(self, call: FormedCall) -> Args:
        return call.given

    def differentiable(self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> bool:
        return output_dtype.is_floating_point or output_dtype.is_complex

    def gradient(
        self,
        grad: Tensor,
        needed: Sequence[bool],
        op: OpOverload,
        output_dtype: torch.dtype,
        /,
        *args: object,
        **kwargs: object,
    ) -> Sequence[Tensor | None]:
        return gradient.gradient(grad, needed, op, output_dtype, args, kwargs)

    def forward_mode(self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
        return gradient.forward_mode(op, output_dtype, *args, **kwargs)

    def batch(
        self,
        size: int,
        dims: Sequence[int | None],
        op: OpOverload,
        output_dtype: torch.dtype,
        /,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, int] | None:
        return batching.batch(size, dims[2:], op, output_dtype, args, kwargs)

    def shard(self, op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
        return sharding.shard(op, output_dtype, args, kwargs)


out_dtype_operator = OutDtype("hop_out_dtype")

_NAME = "out_dtype"
_key, _find = plan.key, plan.find  # a module's global names are found faster than attributes


def out_dtype(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    """Run `op` on operands of any dtypes and return its result in `output_dtype`.

    The tensor and Scalar arguments of `op` are cast to one common dtype together with `output_dtype` (PyTorch's
    elementwise promotion, extended to 8-bit floats and unsigned integers), `op` runs, and its result is cast. Index
    arguments keep their dtype. Linear operators on integers are exact, modulo 2^bits of `output_dtype`; int8, uint8 and
    int16 matrix products and convolutions run on integer kernels.

    Args:
        op: a functional operator overload that returns one tensor, such as `torch.ops.aten.mm.default`.
        output_dtype: dtype of the result.
        args, kwargs: the arguments of `op`, in its own order.

    Returns:
        A new tensor with the shape of `op`'s result and dtype `output_dtype`. It is differentiable with respect to
        floating-point operands if `output_dtype` is floating point.

    Raises:
        ValueError: `op` is not an operator overload, writes to its arguments, returns several tensors or draws random
            numbers.
        TypeError: tensors cannot be cast to `output_dtype` or from an operand's dtype.
        RuntimeError: arguments do not match the schema of `op`, operands are on different devices, or `op` itself
            raises (for example for shapes that do not match).

    Example:
        >>> a = torch.randint(-128, 128, (2, 64), dtype=torch.int8)
        >>> b = torch.randint(-128, 128, (64, 3), dtype=torch.int8)
        >>> out_dtype(torch.ops.aten.mm.default, torch.int32, a, b).dtype
        torch.int32
    """
    known = None
    if not kwargs and type(op) is OpOverload and type(output_dtype) is torch.dtype:
        known = _key((_NAME, op, output_dtype), args)
    if known is not None:
        return (_find(known) or _planned(known, op, output_dtype, args))(*args)
    if (watched := observed(out_dtype, (op, output_dtype, *args), kwargs)) is not None:
        return watched
    return out_dtype_operator(op, output_dtype, *args, **kwargs)


def _planned(known: plan.Key, op: OpOverload, output_dtype: torch.dtype, given: Args) -> Plan:
    """Create and remember the plan of calls like this one: that of the first matching kernel, for plain tensors."""
    args, kwargs = meaning.check(op, output_dtype, given, {})
    plans: Iterable[object] = ()
    if plan.is_plain(plan.PLAIN, args, kwargs):
        plans = (kernel.match(call) for kernel, call in kernels.candidates(op, output_dtype, args, kwargs))
    compute = next((p for p in plans if not isinstance(p, Declined)), None)
    return plan.remember(known, compute or (lambda *given: out_dtype_operator(op, output_dtype, *given)))


def _node(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    return out_dtype_operator(op, output_dtype, *args, **kwargs)


def _traced(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    """The form of out_dtype that Dynamo traces.

    Dynamo's graph only accepts operator overloads; for anything else its own error would not name the argument.
    """
    if not isinstance(op, OpOverload):
        raise ValueError(
            f"out_dtype: op must be an operator overload of torch.ops, got {op}; use one such as "
            "torch.ops.aten.mm.default"
        )
    return _node(op, output_dtype, *args, **kwargs)


dynamo.allow_in_graph(_node)
dynamo.trace_as(out_dtype, _traced)


def explain(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> str:
    """Explain which implementation computes an `out_dtype` call, and why those before it declined: one line each."""
    return out_dtype_operator.explain(op, output_dtype, *args, **kwargs)
