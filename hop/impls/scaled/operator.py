"""scaled: its operators and the public function."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from hop.compat import dynamo, eager, memory
from hop.compat.eager import OpOverload
from hop.compat.profiling import observed
from hop.compat.pytree import Args, ArgsKwargs, Kwargs, tree_flatten, tree_map_only, tree_unflatten
from hop.dispatch import plan
from hop.dispatch.composite import Composite
from hop.dispatch.hop import Hop
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand, decode, encode
from hop.dispatch.operators import LHS, OTHER, RHS, TABLE
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.fitting import check_types
from hop.impls.quantize import fake_quantize_operator, straight_through
from hop.impls.quantize.arguments import check_values, fitting_scales
from hop.impls.scaled import batching, calls, gradient, meaning, sharding
from hop.impls.scaled.arguments import check, check_op, check_output, check_quantized
from hop.impls.scaled.calls import Call, fitted
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Rule
from hop.tensor import QuantizedTensor, parameters
from hop.tensor.buffers.operators import buffers_operator
from hop.tensor.quantized import operand

_Optional = Tensor | None
_Output = str | torch.dtype  # a dtype, or the spelling of a Quantizer


class ScaledBuffers(Hop[Any]):  # a tensor, or the list of a quantized result's buffers
    """The operator hop_scaled_buffers: (op, output, scale, zero_point, *encoded arguments of op)."""

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        call = check(_call(*args, **kwargs))
        return (*args[:2], call.output_scale, call.output_zero_point, *args[4:]), kwargs

    def reference(self, /, *args: object, **kwargs: object) -> Any:
        return meaning.reference(_call(*args, **kwargs))

    def fake(self, /, *args: object, **kwargs: object) -> Any:
        return meaning.described(_call(*args, **kwargs))

    def kernels(self, /, *args: object, **kwargs: object) -> Iterable[tuple[Kernel, Call]]:
        call = _call(*args, **kwargs)
        return ((kernel, call) for kernel in meaning.of(call).kernels)

    def given(self, call: Call) -> Args:
        return call.given

    def differentiable(self, op: OpOverload, output: _Output, /, *args: object, **kwargs: object) -> bool:
        return isinstance(output, torch.dtype)

    def gradient(
        self,
        grad: Tensor,
        needed: Sequence[bool],
        op: OpOverload,
        output: _Output,
        /,
        *args: object,
        **kwargs: object,
    ) -> list[_Optional]:
        """Gradients with respect to plain operands and float32 scales."""
        leaves, spec = tree_flatten((args, kwargs))
        positions = [i for i, need in enumerate(needed[2:]) if need]

        def function(*given: Tensor) -> Tensor:
            inner = list(leaves)
            for i, x in zip(positions, given, strict=True):
                inner[i] = x
            (_, _, *encoded), inner_kwargs = tree_unflatten(inner, spec)
            return self._linearized(op, encoded, inner_kwargs)

        inputs = [leaves[i] for i in positions]
        gradients = gradient.pulled_back(function, inputs, grad.to(gradient.wide_dtype(args)))
        grads: list[_Optional] = [None] * len(needed)
        for i, x, g in zip(positions, inputs, gradients, strict=True):
            grads[i + 2] = g.to(x.dtype)
        return grads

    def forward_mode(self, op: OpOverload, output: _Output, /, *args: object, **kwargs: object) -> Tensor:
        _, _, *encoded = args
        plain_args, plain_kwargs = tree_map_only(Tensor, torch.Tensor.detach, ((op, output, *args), kwargs))
        value = self.reference(*plain_args, **plain_kwargs)
        return gradient.with_derivatives(value, self._linearized(op, encoded, kwargs))

    def _linearized(self, op: OpOverload, encoded: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
        def real(x: object) -> object:
            if isinstance(x, list) and any(isinstance(v, Operand | Tensor) for v in x):
                return [real(v) for v in x]
            return gradient.of_buffers(x) if isinstance(x, Operand) else x

        return gradient.linearized(op, [real(x) for x in decode(op, encoded)], kwargs)

    def shard(self, /, *args: object, **kwargs: object) -> Any:
        return sharding.shard(self, _call(*args, **kwargs))


class Scaled(Composite[Tensor]):
    """The operator hop_scaled: (op, output, scale, zero_point, *arguments of op)."""

    plain = Composite.plain | {QuantizedTensor}
    parts = buffers_operator

    def check(
        self, op: OpOverload, output: _Output, scale: object, zero_point: object, /, *args: object, **kwargs: object
    ) -> ArgsKwargs:
        check_op(op)
        check_output(_read(output))
        bound, kwargs = describe(op).bind(args, kwargs)
        check_types("scaled", op, bound, kwargs)
        check_quantized(op, output, bound)
        if isinstance(output, str) and (parameters.is_number(scale) or parameters.is_number(zero_point)):
            device = next(x.device for x in calls.tensors(bound))
            scale, zero_point = fitting_scales(
                "scaled", calls.OUTPUT_NAMES, Quantizer.parse(output), None, device, scale, zero_point
            )
        return (op, output, scale, zero_point, *bound), kwargs

    def reference(
        self,
        op: OpOverload,
        output: _Output,
        scale: _Optional,
        zero_point: _Optional,
        /,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        encoded = encode([operand(x) for x in args])
        result = scaled_buffers(op, output, scale, zero_point, *encoded, **kwargs)
        if isinstance(output, torch.dtype):
            return result
        return _quantized(Quantizer.parse(output), op, args, kwargs, result)

    def explain(self, op: OpOverload, output: _Output, /, *args: object, **kwargs: object) -> str:
        (_, _, scale, zero_point, *rest), kwargs = self.check(op, output, *args, **kwargs)
        return scaled_buffers.explain(op, output, scale, zero_point, *encode([operand(x) for x in rest]), **kwargs)

    def differentiable(self, /, *args: object, **kwargs: object) -> bool:
        return True

    def gradient(
        self,
        grad: Tensor,
        needed: Sequence[bool],
        op: OpOverload,
        output: _Output,
        scale: _Optional,
        zero_point: _Optional,
        /,
        *args: object,
        **kwargs: object,
    ) -> list[_Optional]:
        gradients: list[_Optional] = [None] * 4
        if not isinstance(output, torch.dtype):
            q = Quantizer.parse(output)
            y = _real(op, args, kwargs)
            given = fitted(Call(op, q, scale, zero_point, (y,), kwargs), y.shape)
            grad, y = through_activation(grad, y, q.scale)
            flags = [False, True, *needed[2:4], False]
            through, *of_scales = straight_through(grad, flags, q, y, *given, None, "clipped")[1:4]
            assert through is not None
            grad = through
            for i, (g, t) in enumerate(zip(of_scales, (scale, zero_point), strict=True), start=2):
                gradients[i] = None if g is None or t is None else g.sum_to_size(t.shape).to(t.dtype)
        return gradients + gradient.through_operator(grad, needed[4:], op, args, kwargs)

    def forward_mode(
        self,
        op: OpOverload,
        output: _Output,
        scale: _Optional,
        zero_point: _Optional,
        /,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        if not isinstance(output, torch.dtype):
            q, y = Quantizer.parse(output), _real(op, args, kwargs)
            given = fitted(Call(op, q, scale, zero_point, (y,), kwargs), y.shape)
            real = fake_quantize_operator(output, activated(y, q.scale), *given, None, "clipped")
            primals = tree_map_only(Tensor, eager.primal, ((scale, zero_point, *args), kwargs))
            return eager.with_tangent(self(op, output, *primals[0], **primals[1]), real)
        plain_args, plain_kwargs = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs))
        value = self(op, output, scale, zero_point, *plain_args, **plain_kwargs)
        return gradient.with_derivatives(value, gradient.linearized(op, args, kwargs))

    def batch(self, size: int, dims: Sequence[int | None], /, *args: object, **kwargs: object) -> tuple[Tensor, int]:
        return batching.batch(self, size, dims, args, kwargs)


scaled_buffers = ScaledBuffers("hop_scaled_buffers")
scaled_operator = Scaled("hop_scaled")


def _read(output: _Output) -> Quantizer | torch.dtype:
    return Quantizer.parse(output) if isinstance(output, str) else output


def _call(op: Any, output: Any, scale: Any, zero_point: Any, /, *encoded: object, **kwargs: object) -> Call:
    """The call that the arguments of hop_scaled_buffers encode."""
    return Call(op, _read(output), scale, zero_point, decode(op, encoded), kwargs)


def _real(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """The result in float32, also for all-plain operands."""
    if any(gradient.is_quantized(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)):
        return scaled_operator(op, torch.float32, None, None, *args, **kwargs)
    return scaled_buffers(op, torch.float32, None, None, *encode(list(args)), **kwargs)


def _appearance(op: OpOverload, args: Args) -> torch.dtype:
    """The dtype of the first operand that may be quantized."""
    first = args[_first_operand(op, args)]
    return first[0].dtype if isinstance(first, list | tuple) else first.dtype


def _first_operand(op: OpOverload, args: tuple[object, ...]) -> int:
    """The position of the first argument that may be quantized."""
    roles = TABLE[op]
    return next(
        i for i, x in enumerate(args) if isinstance(x, Tensor | list | tuple) and roles.role(i) in (LHS, RHS, OTHER)
    )


def _quantized(q: Quantizer, op: OpOverload, args: Args, kwargs: Kwargs, buffers: Sequence[Tensor]) -> QuantizedTensor:
    """The result as a QuantizedTensor with these buffers."""
    shape, dtype = _shape(q, op, args, kwargs, buffers), _appearance(op, args)
    named = zip(copies.names(q, (copies.ROWWISE,)), buffers, strict=True)
    return QuantizedTensor.fitting(dict(named), q, shape, dtype)


def _shape(q: Quantizer, op: OpOverload, args: Args, kwargs: Kwargs, buffers: Sequence[Tensor]) -> Sequence[int]:
    """The shape of the result with these buffers."""
    if q.per_byte() == 1:
        return buffers[0].shape
    return calls.shape(op, [operand(x) for x in args], kwargs)


def through_activation(grad: Tensor, y: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The gradient before a fused activation, and the result after it."""
    after = activated(y, rule)
    return grad if after is y else torch.where(after == y, grad, 0.0), after


def activated(y: Tensor, rule: Rule) -> Tensor:
    """Apply the activation that is fused into a result's quantizer."""
    convention = rule.requantization
    return y if convention is None else convention.bounded(y)


# ---- the public function

# A module's global names are found faster than attributes.
_key, _find, _dtype, _Quantizer = plan.key, plan.find, torch.dtype, Quantizer
_named = plan.named


@overload
def scaled(
    op: OpOverload,
    output: torch.dtype,
    /,
    *args: object,
    output_scale: Tensor | float | None = ...,
    output_zero_point: Tensor | float | None = ...,
    **kwargs: object,
) -> Tensor: ...


@overload
def scaled(
    op: OpOverload,
    output: Quantizer,
    /,
    *args: object,
    output_scale: Tensor | float | None = ...,
    output_zero_point: Tensor | float | None = ...,
    **kwargs: object,
) -> QuantizedTensor: ...


def scaled(
    op: OpOverload,
    output: torch.dtype | Quantizer,
    /,
    *args: object,
    output_scale: Tensor | float | None = None,
    output_zero_point: Tensor | float | None = None,
    **kwargs: object,
) -> Tensor:
    """Run `op` on operands with scales: quantized tensors, possibly together with plain floats.

    Integer operands are multiplied and summed as integers; see docs/scaled.md for the arithmetic, which gives the same
    bits on every route.

    Args:
        op: an operator overload: mm, bmm, addmm, baddbmm, matmul, linear, a convolution, embedding, or an operator used
            between products (add, mul, cat, relu, gelu, softmax, layer_norm, pooling, views, ...).
        output: a floating-point dtype, or a Quantizer.
        args, kwargs: the arguments of `op`, in its own order. At least one must be a QuantizedTensor, or, for operators
            other than products, the output a Quantizer; the others are plain floats. A product's bias may be int32, in
            units of the product of the scales.
        output_scale, output_zero_point: replace the scale rule of an output Quantizer, as in hop.quantize.

    Returns:
        A new tensor with the shape of `op`'s result: of dtype `output`, or a QuantizedTensor that appears in the dtype
        of the first operand. It is differentiable with respect to floating-point arguments, straight through every
        rounding.

    Raises:
        ValueError: `op` is not supported or does not accept these operands together, or scales do not match.
        TypeError: `output` or an argument has an invalid dtype, or nothing is quantized.
        RuntimeError: arguments do not match the schema of `op`, operands are on different devices, or `op` itself
            raises.

    Example:
        >>> x = hop.quantize(hop.presets.INT8_ROW, torch.randn(2, 64))
        >>> w = hop.quantize(hop.presets.INT8_ROW, torch.randn(8, 64))
        >>> hop.scaled(torch.ops.aten.linear.default, torch.bfloat16, x, w).dtype
        torch.bfloat16
    """
    codes = type(output) is _Quantizer
    fits = codes or (type(output) is _dtype and output_scale is None and output_zero_point is None)
    named = _named(kwargs) if kwargs else ()
    if fits and type(op) is OpOverload and named is not None:
        given = (*args, output_scale, output_zero_point) if codes else args
        if (known := _key((op, output, *named), given)) is not None:
            if output_scale is not None:
                check_values("scaled", calls.OUTPUT_NAMES, output, output_scale, output_zero_point)  # type: ignore[arg-type]
            compute = _find(known)
            if compute is None:
                return _planned(known, op, output, given, kwargs)
            try:
                return compute(*given)
            except RuntimeError:
                calls.check_tensors(given)  # gives the reason if an operand changed since it was described
                raise
    scales = {"output_scale": output_scale, "output_zero_point": output_zero_point}
    if (watched := observed(scaled, (op, output, *args), scales | kwargs)) is not None:
        return watched
    return _traced(op, output, *args, output_scale=output_scale, output_zero_point=output_zero_point, **kwargs)


def _planned(known: plan.Key, op: OpOverload, output: torch.dtype | Quantizer, given: Args, kwargs: Kwargs) -> Tensor:
    """Run a call without a cached plan, and cache its plan. `kwargs` are plain numbers, which the plan contains."""
    check_op(op)
    check_output(output)
    bound, named = describe(op).bind(given[:-2] if isinstance(output, Quantizer) else given, kwargs)
    check_types("scaled", op, bound, named)
    check_quantized(op, output, bound)
    memory.check(given)
    scale, zero_point = given[-2:] if isinstance(output, Quantizer) else (None, None)
    call = check(Call(op, output, scale, zero_point, tuple(map(operand, bound)), named))
    plans = (kernel.match(call) for kernel in meaning.of(call).kernels)
    compute = next((p for p in plans if not isinstance(p, Declined)), None) or call.plan(meaning.reference)
    result = compute(*call.given)
    if isinstance(output, Quantizer):
        result = _quantized(output, op, bound, named, result)
        compute = _of_codes(compute, _first_operand(op, given), result)
    stored = (call.output_scale, call.output_zero_point)
    if stored[0] is scale and stored[1] is zero_point:
        plan.remember(known, compute)
    elif not isinstance(scale, Tensor) and not isinstance(zero_point, Tensor):
        # The key contains numbers by value, so a plan may keep the tensors that they became.
        plan.remember(known, lambda *given: compute(*given[:-2], *stored))
    return result


def _of_codes(compute: Plan, first: int, like: QuantizedTensor) -> Plan:
    """Wrap a plan of buffers into one that returns quantized tensors like `like`, with new data and dtypes."""
    names, quantizer, shape = like._names, like.quantizer, like.shape

    def run(*given: Any) -> QuantizedTensor:
        buffers = dict(zip(names, compute(*given), strict=True))
        return QuantizedTensor.fitting(buffers, quantizer, shape, given[first].dtype)

    return run


def _traced(
    op: OpOverload,
    output: object,
    /,
    *args: object,
    output_scale: Tensor | float | None = None,
    output_zero_point: Tensor | float | None = None,
    **kwargs: object,
) -> Tensor:
    """The form of scaled that Dynamo traces."""
    # a tuple, because Dynamo of torch 2.11 does not support | between these classes
    if not isinstance(output, (torch.dtype, Quantizer)):
        check_output(output)
    spelled = str(output) if isinstance(output, Quantizer) else output
    return _node(op, spelled, output_scale, output_zero_point, *args, **kwargs)


def _node(*args: object, **kwargs: object) -> Tensor:
    return scaled_operator(*args, **kwargs)


dynamo.allow_in_graph(_node)
dynamo.trace_as(scaled, _traced)


def explain(
    op: OpOverload,
    output: torch.dtype | Quantizer,
    /,
    *args: object,
    output_scale: _Optional = None,
    output_zero_point: _Optional = None,
    **kwargs: object,
) -> str:
    """Explain which implementation computes a `scaled` call, and why those before it declined: one line each."""
    spelled = str(output) if isinstance(output, Quantizer) else output
    return scaled_operator.explain(op, spelled, output_scale, output_zero_point, *args, **kwargs)
