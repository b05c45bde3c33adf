"""quantized: its operator and the public function."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import dynamo, eager
from hop.compat.eager import OpOverload
from hop.compat.profiling import observed
from hop.compat.pytree import Args, ArgsKwargs, tree_leaves, tree_map_only
from hop.dispatch import plan
from hop.dispatch.composite import Composite
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.fitting import check_shapes, check_types
from hop.impls.quantize import fake_quantize_operator, straight_through
from hop.impls.quantized import calls, gradient, noisy, operands
from hop.impls.quantized.calls import Scales, SchemeCall, check_op, is_quantized, taken
from hop.impls.scaled import activated, scaled, through_activation
from hop.impls.scaled import explain as explain_scaled
from hop.impls.scaled.gradient import with_derivatives
from hop.numerics.schemes import Scheme
from hop.numerics.schemes import named as scheme_named
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor, parameters
from hop.tensor.buffers.operators import buffers_operator

_Optional = Tensor | None
_SCALES = 4  # position of the first scale among the arguments
_FIXED = _SCALES + len(Scales._fields)  # position of the operator's first own argument
_PLACES = {name: _SCALES + i for i, name in enumerate(Scales._fields)}


class Quantized(Composite[Tensor]):
    """The operator hop_quantized."""

    plain = Composite.plain | {QuantizedTensor}
    parts = buffers_operator

    def check(
        self, op: OpOverload, scheme: str, dtype: torch.dtype | None, /, *rest: object, **kwargs: object
    ) -> ArgsKwargs:
        check_op(op)
        count = _FIXED - 3
        bound, kwargs = describe(op).bind(rest[count:], kwargs)
        check_types("quantized", op, bound, kwargs)
        calls.check(taken(op, scheme, dtype, (*rest[:count], *bound), kwargs))
        return (op, scheme, dtype, *rest[:count], *bound), kwargs

    def reference(
        self, op: OpOverload, scheme: str, dtype: torch.dtype | None, /, *rest: object, **kwargs: object
    ) -> Tensor:
        call = taken(op, scheme, dtype, rest, kwargs)
        args, named = _to_scaled(call)
        result = scaled(*args, **named)
        if call.scheme.output is None or result.dtype == call.dtype:
            return result
        assert isinstance(result, QuantizedTensor)
        return result.rebuilt(result.buffers(), dtype=call.dtype)

    def explain(self, /, *args: Any, **kwargs: Any) -> str:
        """Explain which kernel computes the product of codes."""
        (op, scheme, dtype, *rest), kwargs = self.check(*args, **kwargs)
        args, named = _to_scaled(taken(op, scheme, dtype, rest, kwargs))
        return (
            explain_scaled(*args, **named) if any(isinstance(x, QuantizedTensor) for x in args) else "reference: chosen"
        )

    def differentiable(self, /, *args: object, **kwargs: object) -> bool:
        return True

    def gradient(
        self,
        grad: Tensor,
        needed: Sequence[bool],
        op: OpOverload,
        scheme: str,
        dtype: torch.dtype | None,
        /,
        *rest: object,
        **kwargs: object,
    ) -> list[_Optional]:
        call = taken(op, scheme, dtype, rest, kwargs)
        result: list[_Optional] = [None] * len(needed)
        if call.scheme.output is not None:
            pair = slice(_PLACES["output"], _PLACES["output"] + 2)
            grad, *result[pair] = _through_output(call, grad, needed[pair])
        starts = [_FIXED]
        for x in call.args:
            starts.append(starts[-1] + len(tree_leaves(x)))
        wanted: list[str] = []
        places: dict[str, tuple[int, int, list[bool]]] = {}  # of the operand and its scale, and which are needed
        for role in (LHS, RHS, BIAS):
            place = call.place(role)
            if place is not None:
                first = _PLACES.get(role, 0)  # a bias has no scale
                flags = [needed[starts[place]], *(needed[first : first + 2] if first else [False, False])]
                places[role] = (starts[place], first, flags)
                wanted += [role] * any(flags)
        through = gradient.through_operator(call, grad, wanted) if wanted else {}
        for role, g in through.items():
            at, first, flags = places[role]
            if role == BIAS:
                result[at] = g.to(call.find(BIAS).dtype)
                continue
            dx, *of_scales = gradient.through_quantizer(call, role, g, flags)
            result[at] = dx if flags[0] else None
            for i, d in enumerate(of_scales):
                if flags[1 + i]:
                    result[first + i] = d
        return result

    def forward_mode(
        self, op: OpOverload, scheme: str, dtype: torch.dtype | None, /, *rest: object, **kwargs: object
    ) -> Tensor:
        """The value, with the derivatives of the operator on fake-quantized operands."""
        call = taken(op, scheme, dtype, rest, kwargs)
        if call.scheme.output is not None:
            return self._quantized_forward(call, (op, scheme, dtype, *rest), kwargs)
        constants = tree_map_only(Tensor, torch.Tensor.detach, (op, scheme, dtype, *rest))
        value = self(*constants, **kwargs)
        factors = {
            role: operands.numbers(call, role, call.dtype) for role in (LHS, RHS) if call.place(role) is not None
        }
        bias = {BIAS: call.find(BIAS).to(call.dtype)} if call.place(BIAS) is not None else {}
        linear = op(*call.replaced(factors | bias), **kwargs)
        return with_derivatives(value, linear)

    def _quantized_forward(self, call: SchemeCall, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
        """The codes, with the tangent of the fake-quantized result."""
        q = call.scheme.output
        assert q is not None
        unquantized = str(replace(call.scheme, output=None))
        scales = call.scales._replace(output=None, output_zero_point=None)
        y = self(call.op, unquantized, torch.float32, call.seed, *scales, *call.args, **kwargs)
        given = calls.fitted(call, calls.OUTPUT, y)
        real = fake_quantize_operator(str(q), activated(y, q.scale), *given, None, "clipped")
        primals = tree_map_only(Tensor, eager.primal, (args, kwargs))
        return eager.with_tangent(self(*primals[0], **primals[1]), real)

    def batch(self, size: int, dims: Sequence[int | None], /, *args: object, **kwargs: object) -> tuple[Tensor, int]:
        return torch.stack(gradient.members(self, size, dims, args, kwargs)), 0


def _to_scaled(call: SchemeCall) -> ArgsKwargs:
    """The arguments for hop.scaled."""
    codes = call.replaced({role: operands.argument(call, role) for role in (LHS, RHS)})
    output, scales = call.scheme.output, call.scales
    if output is None:
        return (call.op, call.dtype, *codes), call.kwargs
    of_output = {"output_scale": scales.output, "output_zero_point": scales.output_zero_point}
    return (call.op, output, *codes), of_output | call.kwargs


def _through_output(call: SchemeCall, grad: Tensor, needed: Sequence[bool]) -> tuple[Tensor, _Optional, _Optional]:
    """The gradient with respect to the unquantized output, and those of its scale and zero point."""
    q, scales = call.scheme.output, call.scales
    assert q is not None
    args = call.replaced({role: operands.argument(call, role) for role in (LHS, RHS)})
    y = scaled(call.op, torch.float32, *args, **call.kwargs)
    grad, y = through_activation(grad, y, q.scale)
    given = (scales.output, scales.output_zero_point)
    fitted = calls.fitted(call, calls.OUTPUT, y)
    flags = [False, True, *needed, False, False]
    through, *of_scales = straight_through(grad, flags, q, y, *fitted, None, "clipped")[1:4]
    assert through is not None
    pairs = zip(of_scales, given, strict=True)
    ds, dz = (None if g is None or t is None else g.sum_to_size(t.shape).to(t.dtype) for g, t in pairs)
    return through, ds, dz


quantized_operator = Quantized("hop_quantized")


def quantized(
    op: OpOverload,
    scheme: Scheme | str,
    /,
    *args: object,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
    seed: Tensor | None = None,
    **kwargs: object,
) -> Tensor:
    """Run `op` on float tensors in low precision: quantize the operands, and run hop.scaled on the codes.

    The result is that of hop.scaled for the operands that hop.quantize returns, bit for bit for integer formats: the
    arithmetic of the deployed program. It is differentiable as the scheme says; see docs/training.md.

    Args:
        op: mm, bmm, addmm, linear, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d or
            embedding, as an operator overload.
        scheme: how the operands, the result and the gradient are quantized, such as hop.schemes.INT8_DYNAMIC;
            or the name of a scheme, such as "int8".
        args, kwargs: the arguments of `op`, in its own order. A QuantizedTensor must have the scheme's quantizer, and
            is used as it is.
        dtype: the dtype of the result and of the backward's products; by default that of the operands, or the autocast
            dtype. In traced programs the default stays open and follows later casts of the module.
        scales: static, calibrated or learned scales and zero points that replace the rules of the scheme's quantizers.
            Floating-point ones get gradients, except `grad`.
        seed: int64 of shape (), from which the random bits of stochastic rounding and noise are derived; by default
            drawn from PyTorch's generator if the scheme needs it.

    Returns:
        The result of `op` in `dtype`; if the scheme has an output, a QuantizedTensor that appears in `dtype`.

    Raises:
        ValueError: `op` is not supported, or scales or operands do not match the scheme.
        TypeError: scheme is not a Scheme, or an operand is not a float tensor.
        RuntimeError: operands are on different devices or do not match the schema of `op`, or `op` itself raises.
    """
    known = None
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    fixed = type(op) is OpOverload and type(scheme) is Scheme and (dtype is None or type(dtype) is torch.dtype)
    if fixed and scales is None and seed is None and not kwargs:
        known = _key((_NAME, op, scheme, dtype), args)
    if known is not None:
        return (_find(known) or plan.remember(known, _planned(op, scheme, dtype, args)))(*args)
    named = {"dtype": dtype, "scales": scales, "seed": seed, **kwargs}
    if (watched := observed(quantized, (op, scheme, *args), named)) is not None:
        return watched
    return _traced(op, scheme, *args, **named)


_NAME = "quantized"
_key, _find = plan.key, plan.find  # a module's global names are found faster than attributes


def _planned(op: OpOverload, scheme: Scheme, dtype: torch.dtype | None, args: Args) -> Plan:
    """The plan of calls like this one, built on the plans of hop.quantize and hop.scaled."""
    if scheme.is_stochastic():
        return lambda *args: _traced(op, scheme, *args, dtype=dtype)
    check_op(op)
    described = describe(op)
    bound, _ = described.bind(args, {})
    if calls.is_unbatched(op, bound):
        return lambda *args: _traced(op, scheme, *args, dtype=dtype)
    autocast = calls.autocast_dtype(calls.operands_of(op, bound)[0]) if dtype is None else dtype
    fixed = (op, str(scheme), autocast, None, *Scales())
    quantized_operator.check(*fixed, *bound)
    call = taken(op, str(scheme), autocast, (None, *Scales(), *bound), {})
    floats = [role for role in (LHS, RHS) if call.quantizer(role) is not None and not is_quantized(call.find(role))]
    if scheme.output is not None or any(map(call.is_transposed, floats)):
        return lambda *args: quantized_operator.reference(*fixed, *described.bind(args, {})[0])
    factors = [place for role in (LHS, RHS) if (place := call.place(role)) is not None]
    places = [
        (place, q)
        for role in floats
        if (place := call.place(role)) is not None and (q := call.quantizer(role)) is not None
    ]

    def run(*args: Any) -> Tensor:
        """Call hop.quantize and hop.scaled, which use cached plans. These do not depend on the appearance dtype."""
        dtypes = {args[place].dtype for place in factors}
        result = dtype or (dtypes.pop() if len(dtypes) == 1 else functools.reduce(torch.promote_types, dtypes))
        codes = list(args)
        for place, q in places:
            codes[place] = operands.found_scales(q, codes[place])
        return scaled(op, result, *codes)

    return run


def _traced(
    op: OpOverload,
    scheme: Scheme | str,
    /,
    *args: object,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
    seed: Tensor | None = None,
    **kwargs: object,
) -> Tensor:
    """The form of quantized that Dynamo traces."""
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"quantized: scheme must be a hop.Scheme, got {shown(scheme)}; give one such as hop.schemes.INT8_DYNAMIC"
        )
    scales = Scales() if scales is None else scales
    if not isinstance(scales, Scales):
        raise TypeError(
            f"quantized: scales must be hop.Scales, got {shown(scales)}; give one such as hop.Scales(lhs=...)"
        )
    return _node(op, str(scheme), dtype, scales, seed, *args, **kwargs)


def _node(
    op: OpOverload,
    text: str,
    dtype: torch.dtype | None,
    scales: Scales,
    seed: _Optional,
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Call the operator, with defaults for dtype and seed."""
    check_op(op)
    bound, kwargs = describe(op).bind(args, kwargs)
    factors = calls.operands_of(op, bound)
    if any(map(parameters.is_number, scales)):
        scales = Scales(*parameters.as_tensors(scales._asdict(), bound))
    if calls.is_unbatched(op, bound):
        check_shapes("quantized", op, bound)
        return _node(op, text, dtype, scales, seed, bound[0].unsqueeze(0), *bound[1:], **kwargs).squeeze(0)
    if dtype is None:
        dtype = calls.autocast_dtype(factors[0])
    scheme = Scheme.parse(text)
    if seed is None and scheme.is_stochastic():
        seed = torch.randint(2**62, (), device=factors[0].device)
    if scheme.adds_noise():
        call = taken(op, text, dtype, (seed, *scales, *bound), kwargs)
        with_noise = noisy.with_noise(call)
        if with_noise.scheme is None:
            return noisy.in_floats(call, with_noise.args)
        text, scales, bound = str(with_noise.scheme), with_noise.scales, with_noise.args
        seed = seed if with_noise.scheme.is_stochastic() else None
    return quantized_operator(op, text, dtype, seed, *scales, *bound, **kwargs)


dynamo.allow_in_graph(_node)
dynamo.CACHED.add(Scales)  # a node too, if it contains tensors
dynamo.trace_as(quantized, _traced)
