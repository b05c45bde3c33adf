"""A call of quantized in parts, and its argument checks."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import functorch
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.dispatch.operators import BIAS, CONVOLUTION, EMBEDDING, LHS, MATRIX, RHS, TABLE, Operator, aten
from hop.impls.out_dtype.fitting import check_shapes
from hop.impls.quantize.arguments import fitting_scales
from hop.impls.scaled.arguments import check_devices
from hop.numerics import blocks, copies, schemes
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import QUANTIZED, Scheme
from hop.numerics.spelling import shown

OPERATORS = (
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.linear.default),
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
    aten.embedding.default,
)
"""The operators that quantized supports."""

OUTPUT = "output"


class Scales(NamedTuple):
    """Scales and zero points that replace the rules of a scheme's quantizers.

    Each is a number, or has the shape of its buffer or one that broadcasts to it.
    """

    lhs: Tensor | None = None
    lhs_zero_point: Tensor | None = None
    rhs: Tensor | None = None
    rhs_zero_point: Tensor | None = None
    output: Tensor | None = None
    output_zero_point: Tensor | None = None
    grad: Tensor | None = None


class SchemeCall(NamedTuple):
    """A call of quantized in parts."""

    op: OpOverload
    scheme: Scheme
    dtype: torch.dtype  # of the result, or the dtype a quantized result appears in
    seed: Tensor | None
    scales: Scales
    args: Args
    kwargs: Kwargs

    @property
    def roles(self) -> Operator:
        return TABLE[self.op]

    def find(self, role: str) -> Any:
        """The argument with `role`, or None."""
        return self.roles.find(role, self.args)

    def place(self, role: str) -> int | None:
        """The position of the argument with `role`, or None."""
        if role not in self.roles.roles:
            return None
        position = self.roles.roles.index(role)
        return position if position < len(self.args) and self.args[position] is not None else None

    def replaced(self, given: Mapping[str, object]) -> Args:
        """The arguments with those of some roles replaced."""
        args = list(self.args)
        for role, x in given.items():
            place = self.place(role)
            if place is not None:
                args[place] = x
        return tuple(args)

    def quantizer(self, role: str) -> Quantizer | None:
        """The quantizer of the argument with `role`, as rows that the operator sums over."""
        q = self.scheme.lhs if role == LHS else self.scheme.rhs
        if q is None or self.roles.family is not CONVOLUTION:
            return q
        return schemes.for_convolution(q, self.find(role).dim(), self.roles.transposed and role == RHS)

    def given(self, role: str) -> tuple[Tensor | None, Tensor | None]:
        """The scale and zero point that replace the rule of `role`'s quantizer."""
        return self.scales[:2] if role == LHS else self.scales[2:4]

    @property
    def gradient(self) -> str:
        """The gradient option for hop.quantize: products of codes do not record what was clipped."""
        return "plain" if self.scheme.backward == QUANTIZED else "clipped"

    def is_transposed(self, role: str) -> bool:
        """Whether the operator sums over the second-to-last dimension, so that the transposed argument is quantized."""
        return role == RHS and self.roles.family is MATRIX and self.roles.rhs_sums == -2


def is_quantized(x: object) -> bool:
    """Whether x is a quantized tensor, at any level of torch.func."""
    return isinstance(x, Tensor) and hasattr(functorch.innermost(x), "quantizer")


def check(call: SchemeCall) -> None:
    """Raise for an invalid call."""
    check_op(call.op)
    if not isinstance(call.dtype, torch.dtype) or call.dtype not in copies.APPEARANCES:
        raise TypeError(
            f"quantized: dtype must be float16, bfloat16, float32 or float64, got {call.dtype!r}; use one of them"
        )
    _check_operands(call)
    _check_scales(call)
    scheme, seed = call.scheme, call.seed
    if seed is not None and (not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.dim()):
        raise ValueError(
            f"quantized: seed must be an int64 tensor of shape (), got {shown(seed)}; make one with torch.tensor"
        )
    if scheme.is_stochastic() and seed is None:
        raise ValueError(f"quantized: {scheme!r} rounds at random; pass seed=, an int64 tensor of shape ()")
    if call.roles.family is CONVOLUTION and scheme.backward == QUANTIZED:
        for role in (LHS, RHS):
            q = call.quantizer(role)
            assert q is not None
            if not schemes.rows_share_scales(q):
                raise ValueError(
                    f"quantized: with backward='quantized' {call.op} takes one scale for each "
                    f"{'example' if role == LHS else 'output channel'} at most; the scheme's {role} is {q}"
                )
        assert scheme.grad is not None
        if not schemes.rows_share_scales(schemes.for_convolution(scheme.grad, 4)):
            raise ValueError(
                f"quantized: with backward='quantized' {call.op} takes one scale for each row at most; the scheme's "
                f"grad is {scheme.grad}"
            )


def check_op(op: object) -> None:
    """Raise ValueError unless quantized supports `op`."""
    if op not in OPERATORS:
        known = ", ".join(sorted(str(o) for o in OPERATORS))
        raise ValueError(f"quantized: op must be one of {known}; got {op}; use one of them")


def is_unbatched(op: OpOverload, args: Sequence[object]) -> bool:
    """Whether `op` is a convolution of one example, (C, *spatial), which runs as a batch of one."""
    row, x = TABLE[op], args[0] if args else None
    return row.family is CONVOLUTION and isinstance(x, Tensor) and x.dim() == row.spatial + 1


def _quantizer_of(x: Tensor) -> Quantizer | None:
    """The quantizer of a quantized tensor with plain layout; inside vmap, for one member. None for others."""
    inner = functorch.innermost(x)
    quantizer = getattr(inner, "quantizer", None)
    if quantizer is None:
        return None
    quantizer, members = _per_dimension(quantizer.plain, inner.shape), inner.dim() - x.dim()
    return (
        replace(quantizer, block=quantizer.block[members:])
        if members and set(quantizer.block[:members]) == {1}
        else quantizer
    )


def _per_dimension(q: Quantizer, shape: Sequence[int]) -> Quantizer:
    """The quantizer with a block size for each dimension, 1 for dimensions of size 1."""
    if q.scale.is_delayed:
        return q  # its only block is the tensor
    sizes = zip(blocks.per_dimension(q.block, len(shape)), shape, strict=True)
    return replace(q, block=tuple(1 if isinstance(n, int) and n == 1 else size for size, n in sizes))


def _check_operands(call: SchemeCall) -> None:
    names = [a.name for a in call.op._schema.arguments]
    operands = []
    for role in (LHS, RHS, BIAS):
        place = call.place(role)
        if place is None:
            continue
        x, name = call.args[place], names[place]
        if not isinstance(x, Tensor):
            raise TypeError(_no_tensor(call.op, name, x))
        operands.append((name, x))
        if x.dtype not in copies.APPEARANCES:
            raise TypeError(
                f"quantized: argument {name!r} of {call.op} must be float16, bfloat16, float32 or float64, got "
                f"{x.dtype}; cast it, or use hop.out_dtype for bare codes"
            )
        quantizer = _quantizer_of(x)
        wanted = call.quantizer(role) if role != BIAS else None
        fits = [] if wanted is None else [wanted, *([wanted.transposed(x.dim())] * call.is_transposed(role))]
        if quantizer is not None and quantizer not in [_per_dimension(q, x.shape) for q in fits]:
            raise ValueError(
                f"quantized: argument {name!r} of {call.op} is quantized by {quantizer}, but the scheme says {wanted}; "
                "pass a float tensor, or a scheme that matches"
            )
    check_devices("quantized", call.op, operands)
    check_shapes("quantized", call.op, call.args)
    if call.roles.family is EMBEDDING and call.scheme.rhs is None:
        raise ValueError(
            f"quantized: {call.op} looks up rows of its rhs, which {call.scheme!r} leaves in floats; use a scheme "
            "with rhs"
        )


def _check_scales(call: SchemeCall) -> None:
    """Raise unless scales are given exactly for the quantizers that need them, and have valid shapes."""
    scales = call.scales
    for role, scale, zero_point in (
        (LHS, scales.lhs, scales.lhs_zero_point),
        (RHS, scales.rhs, scales.rhs_zero_point),
        (OUTPUT, scales.output, scales.output_zero_point),
        ("grad", scales.grad, None),
    ):
        q = getattr(call.scheme, role)
        if q is None:
            if scale is not None or zero_point is not None:
                raise ValueError(
                    f"quantized: scales.{role} is given, as {shown(zero_point if scale is None else scale)}, but the "
                    f"scheme's {role} is None; leave it out"
                )
        elif scale is None and _uses(call, role) and (missing := q.scale.missing()) is not None:
            affine = f", {role}_zero_point=..." if q.scale.has_zero_point() else ""
            option = f"scales=hop.Scales({role}=...{affine})"
            words = missing.partition("; pass ")[0]
            raise ValueError(f"quantized: {role}={q} of the scheme: {words}; pass {option}")
        elif role in (LHS, RHS) and call.place(role) is not None and not is_quantized(call.find(role)):
            x = call.find(role)
            fitted(call, role, x.mT if call.is_transposed(role) else x)


def _uses(call: SchemeCall, role: str) -> bool:
    """Whether the quantizer of `role` is used in this call, and may need a scale."""
    if role == "grad":
        return call.roles.family is not EMBEDDING
    return role == OUTPUT or (call.place(role) is not None and not is_quantized(call.find(role)))


def taken(op: OpOverload, scheme: str, dtype: torch.dtype | None, rest: Sequence[Any], kwargs: Kwargs) -> SchemeCall:
    """Parse a graph's call (op, scheme, dtype, seed, *scales, *args).

    A dtype of None becomes that of the operands, which may be cast after tracing.
    """
    seed, *more = rest
    count = len(Scales._fields)
    args = tuple(more[count:])
    if dtype is None:
        dtype = _promoted(operands_of(op, args))
    return SchemeCall(op, Scheme.parse(scheme), dtype, seed, Scales(*more[:count]), args, kwargs)


def _no_tensor(op: OpOverload, name: str, x: object) -> str:
    return f"quantized: argument {name!r} of {op} must be a tensor, got {shown(x)}; make one with torch.tensor"


def operands_of(op: OpOverload, args: Sequence[object]) -> list[Tensor]:
    """The factors among the arguments. Raises TypeError if one is missing or not a tensor."""
    names = [a.name for a in op._schema.arguments]
    result = []
    for place, role in enumerate(TABLE[op].roles[: len(args)]):
        if role in (LHS, RHS):
            if not isinstance(args[place], Tensor):
                raise TypeError(_no_tensor(op, names[place], args[place]))
            result.append(args[place])
    return result


def default_dtype(operands: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the result if the call does not specify one."""
    return autocast_dtype(operands[0]) or _promoted(operands)


def _promoted(operands: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in operands))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The autocast dtype of x's device; None if autocast is off."""
    device = x.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def fitted(call: SchemeCall, role: str, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The given scale and zero point of an operand or of the output, in the shapes of the buffers of `rows`."""
    q = call.scheme.output if role == OUTPUT else call.quantizer(role)
    given = call.scales[4:6] if role == OUTPUT else call.given(role)
    assert q is not None
    return fitting_scales(
        "quantized", (f"scales.{role}", f"scales.{role}_zero_point"), q, rows.shape, rows.device, *given
    )
