"""The gradient of quantized, in three ways.

For y = op(l̂, r̂), where l̂ and r̂ are the dequantized operands, and G the gradient of y:

    ste         dl̂ = G r̂ᵀ, dr̂ = l̂ᵀ G        the gradient of fake quantization
    original    dl̂ = G rᵀ, dr̂ = lᵀ G        with the operands before quantization
    quantized   the products of "ste", computed on codes. Each sums over another dimension than the forward:
        one scale per row of r          multiplied into G first: dl̂ = s_g · Σ q((G · s_r) / s_g) · r_codes
        one scale for the tensor        factored out of the sum
        blocks along the rows           r is quantized again, transposed, in blocks along the columns

dr̂ is computed likewise; q is the scheme's grad quantizer. From l̂ and r̂ the gradient passes to the operands and their
scales as in hop.quantize (hop.numerics.quantizer.Derivatives): "ste" and "original" zero it for clipped elements,
"quantized" does not. The bias gets the sum of G.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, ArgsKwargs, tree_flatten, tree_unflatten
from hop.dispatch.composite import Composite
from hop.dispatch.operators import BIAS, CONVOLUTION, LHS, MATRIX, RHS, aten
from hop.impls.out_dtype import gradient as of_out_dtype
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import as_convolution, as_product, convolution_arguments
from hop.impls.quantize import straight_through
from hop.impls.quantized import calls, operands
from hop.impls.quantized.calls import SchemeCall, is_quantized, taken
from hop.impls.quantized.operands import COLUMNS_STREAM, ROWS_STREAM, TRANSPOSED_LHS_STREAM, TRANSPOSED_RHS_STREAM
from hop.impls.scaled import scaled
from hop.impls.scaled.gradient import with_derivatives
from hop.kernels.aten.convolution import Convolution
from hop.numerics import copies, schemes
from hop.numerics.schemes import ORIGINAL, QUANTIZED
from hop.tensor import QuantizedTensor

Gradients = dict[str, Tensor]


class CodesGradient(Composite[Tensor]):
    """hop_quantized_gradient: a product of codes, which has no derivatives itself.

    hop_quantized_gradient(role, grad, op, scheme, dtype, seed, *scales, *args) -> tensor
    """

    plain = Composite.plain | {QuantizedTensor}

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        return args, kwargs

    def reference(
        self,
        role: str,
        grad: Tensor,
        op: OpOverload,
        scheme: str,
        dtype: torch.dtype,
        /,
        *rest: object,
        **kwargs: object,
    ) -> Tensor:
        call = taken(op, scheme, dtype, rest, kwargs)
        return (_matrix if call.roles.family is MATRIX else _convolution)(call, grad, role)

    def batch(self, size: int, dims: Sequence[int | None], /, *args: object, **kwargs: object) -> tuple[Tensor, int]:
        return torch.stack(members(self, size, dims, args, kwargs)), 0


def members(
    hop: Callable[..., Tensor], size: int, dims: Sequence[int | None], args: object, kwargs: object
) -> list[Tensor]:
    """Run `hop` for each member of a batch separately, because each has separate scales."""
    leaves, spec = tree_flatten((args, kwargs))
    result = []
    for i in range(size):
        member = [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, dims, strict=True)]
        inner, options = tree_unflatten(member, spec)
        result.append(hop(*inner, **options))
    return result


codes_gradient = CodesGradient("hop_quantized_gradient")


def through_operator(call: SchemeCall, grad: Tensor, wanted: Sequence[str]) -> Gradients:
    """Gradients of the operands' dequantized values, by role, in the dtype of the call."""
    if call.scheme.backward != QUANTIZED or call.roles.family not in (MATRIX, CONVOLUTION):
        return _through_numbers(call, grad, wanted)
    args = (call.op, str(call.scheme), call.dtype, call.seed, *call.scales, *call.args)
    gradients = {role: codes_gradient(role, grad, *args, **call.kwargs) for role in wanted if role != BIAS}
    # differentiated again, or with a tangent: use straight-through derivatives
    again = torch.is_grad_enabled() or eager.has_tangent(grad)
    linear = _through_numbers(call, grad, wanted if again else [role for role in wanted if role == BIAS])
    return {
        role: with_derivatives(gradients[role], linear[role]) if again else gradients[role] for role in gradients
    } | {role: g for role, g in linear.items() if role == BIAS}


def through_quantizer(
    call: SchemeCall, role: str, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of an operand, its scale and its zero point, from the gradient of its dequantized values."""
    x, q = call.find(role), call.quantizer(role)
    if q is None or is_quantized(x):
        return grad.to(x.dtype), None, None
    rows, as_columns, given = operands.plain_rows(call, role), call.is_transposed(role), call.given(role)
    bits = operands.bits_of(q, rows, call.seed, operands.stream(role))
    flags = [False, *needed, False, False]
    fitted = calls.fitted(call, role, rows)
    grad = grad.mT if as_columns else grad
    dx, ds, dz = straight_through(grad, flags, q, rows, *fitted, bits, call.gradient)[1:4]
    assert dx is not None
    pairs = zip((ds, dz), given, strict=True)
    ds, dz = (None if d is None or t is None else d.sum_to_size(t.shape).to(t.dtype) for d, t in pairs)
    return dx.mT if as_columns else dx, ds, dz


def _through_numbers(call: SchemeCall, grad: Tensor, wanted: Sequence[str]) -> Gradients:
    """Gradients for "ste" and "original": float products in the dtype of the call."""
    dtype, original = call.dtype, call.scheme.backward == ORIGINAL
    other = {LHS: RHS, RHS: LHS}

    def real(role: str) -> Tensor | None:
        x = call.find(role)
        if x is None or role == BIAS:
            return x
        if call.roles.family in (MATRIX, CONVOLUTION) and other[role] not in wanted:
            return torch.empty(x.shape, dtype=dtype, device="meta")  # only its shape is read
        if original and not is_quantized(x):
            return x.to(dtype)
        # `rows` carries the mask of clipped elements
        found = operands.numbers_of_codes if call.gradient == "clipped" else operands.numbers
        return found(call, role, dtype)

    bound, kwargs = describe(call.op).bind(call.replaced({r: real(r) for r in (LHS, RHS, BIAS)}), call.kwargs)
    places = {i: role for role in wanted if (i := call.place(role)) is not None}
    found = of_out_dtype.by_rule(grad.to(dtype), set(places), dtype, call.op, bound, kwargs)
    assert found is not None  # there is one for each operator of hop.quantized
    return {places[i]: g for i, g in found.items() if i in places}


# ---- products of codes


def _matrix(call: SchemeCall, grad: Tensor, role: str) -> Tensor:
    product = as_product(call.op, _plain(call), call.kwargs)
    assert product is not None and call.scheme.grad is not None
    lhs, rhs = product.lhs, product.rhs
    g = grad.reshape(*lhs.shape[:-1], rhs.shape[-1])
    g = g if product.alpha == 1 else g * product.alpha
    if role == LHS:
        as_columns, block_scale = transposed_rows(call, RHS, rhs.mT, TRANSPOSED_RHS_STREAM)
        codes = _gradient_codes(call, g, ROWS_STREAM, None if block_scale is None else block_scale.mT)
        return product.restore[0](_multiplied(codes, as_columns, call.dtype))
    as_columns, block_scale = transposed_rows(call, LHS, lhs, TRANSPOSED_LHS_STREAM)
    columns, factor, hadamard = g.mT, None if block_scale is None else block_scale.mT, call.scheme.grad.hadamard
    if hadamard is not None:
        columns, factor = hadamard.apply(_times(columns, factor)), None
    codes = _gradient_codes(call, columns, COLUMNS_STREAM, factor)
    return product.restore[1](_multiplied(codes, as_columns, call.dtype).mT)


def _convolution(call: SchemeCall, grad: Tensor, role: str) -> Tensor:
    form = as_convolution(call.op, _plain(call))
    assert form is not None
    conv, op = form.conv, aten.convolution.default
    g = grad.unsqueeze(0) if form.unbatched else grad
    if role == LHS:
        weight, block_scale = _codes(call, RHS, conv.weight)
        block_scale = None if block_scale is None else _beside_channels(conv, block_scale)
        codes = _gradient_codes(call, _times(g, block_scale), ROWS_STREAM)
        adjoint = of_out_dtype.adjoint(conv, g)._replace(x=codes, weight=weight)
        d = of_out_dtype.input_of(conv, scaled(op, call.dtype, *convolution_arguments(adjoint)))
        return d.squeeze(0) if form.unbatched else d
    x, block_scale = _codes(call, LHS, conv.x)
    g, transposed = _times(g, block_scale), conv.transposed
    adjoint = of_out_dtype.filter_adjoint(conv, *((g, x.codes) if transposed else (x.codes, g)))
    of_x, of_g = ("weight", "x") if transposed else ("x", "weight")  # which operand of the adjoint each one is
    codes = getattr(adjoint, of_x)
    sides = {
        of_x: x.rebuilt(x.buffers() | {"codes": codes}, shape=codes.shape),
        of_g: _gradient_codes(call, getattr(adjoint, of_g), COLUMNS_STREAM),
    }
    d = scaled(op, call.dtype, *convolution_arguments(adjoint._replace(**sides)))
    return of_out_dtype.filter_of(conv, d)


def _beside_channels(conv: Convolution, block_scale: Tensor) -> Tensor:
    """Shape the weight's output-channel scales to multiply the gradient's channels."""
    if not conv.transposed:
        return block_scale.transpose(0, 1)
    return block_scale.repeat(1, conv.groups, *[1] * (block_scale.dim() - 2))  # groups share the scales


def _plain(call: SchemeCall) -> Args:
    """The arguments, with quantized ones replaced by meta tensors."""
    return tuple(torch.empty(x.shape, device="meta") if is_quantized(x) else x for x in call.args)


def transposed_rows(call: SchemeCall, role: str, x: Tensor, stream: int) -> tuple[QuantizedTensor, Tensor | None]:
    """Transpose and quantize the rows x of an operand, (..., A, B).

    Returns the codes, and the scales that must be multiplied into the gradient, (..., A, 1), or None.
    """
    q = call.quantizer(role)
    assert q is not None
    if schemes.rows_share_scales(q):
        codes, block_scale = _codes(call, role, x)
        return operands.swapped_codes(codes), block_scale
    if is_quantized(call.find(role)):
        if copies.COLUMNWISE in call.find(role).usages:
            return operands.rows_of_columns(call.find(role)), None
        if schemes.turns_exactly(q):
            return operands.swapped_codes(operands.quantized_rows(call, role)), None
        values = operands.numbers(call, role, call.dtype)
        x = (values.mT if call.is_transposed(role) else values).reshape(x.shape)
    scale = call.given(role)[0]  # a scale of the whole tensor serves both copies
    x = x.mT if q.hadamard is None else q.hadamard.apply(x.mT)
    return operands.quantize(replace(q, hadamard=None), x, call.seed, stream, scale), None


def _codes(call: SchemeCall, role: str, x: Tensor) -> tuple[QuantizedTensor, Tensor | None]:
    """The forward's codes of an operand with one scale per row, and these scales separately.

    x are the operand's rows or a view of them. The scales are None if one scale serves the whole tensor.
    """
    codes, q = operands.quantized_rows(call, role), call.quantizer(role)
    assert q is not None
    # with symbolic sizes reshape would not be a view
    flat: Any = codes if codes.shape == x.shape else codes.contiguous().view(x.shape)
    if q.shares_scale():
        return flat, None
    step = flat.quantizer.scale.scale_of(list(flat.buffers().values())[1:], flat.quantizer.format)
    return operands.without_scale(flat), step


def _gradient_codes(call: SchemeCall, g: Tensor, stream: int, factor: Tensor | None = None) -> QuantizedTensor:
    """Quantize g, or g times a factor, with the scheme's grad quantizer."""
    q = call.scheme.grad
    assert q is not None
    q = schemes.for_convolution(q, g.dim()) if call.roles.family is CONVOLUTION else q
    q = replace(q, hadamard=None)
    if factor is not None and call.scales.grad is None:
        return operands.quantize_product(q, g, factor, call.seed, stream)
    return operands.quantize(q, _times(g, factor), call.seed, stream, call.scales.grad)


def _times(g: Tensor, block_scale: Tensor | None) -> Tensor:
    return g if block_scale is None else g.to(torch.float32) * block_scale


def _multiplied(lhs: Any, rhs: Any, dtype: torch.dtype) -> Tensor:
    """lhs @ rhsᵀ for (..., M, K) and (..., N, K), both with at most one batch dimension."""
    if lhs.dim() == 2:
        return scaled(aten.linear.default, dtype, lhs, rhs)
    return scaled(aten.bmm.default, dtype, lhs, operands.transposed(rhs))
