"""A call of scaled in parts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hop.compat import eager, memory
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.dispatch.kernel import Declined
from hop.dispatch.operand import Operand
from hop.dispatch.operators import CONDITION, INDEX, LHS, MASK, MATRIX, RHS, TABLE, Operator, aten
from hop.dispatch.plan import Plan
from hop.impls.quantize.arguments import fitting_scales
from hop.numerics import copies
from hop.numerics.formats import Codebook, Float, Integer
from hop.numerics.integer.convention import IntegerFunction
from hop.numerics.quantizer import Quantizer
from hop.numerics.stored_scales import has_whole_numbers
from hop.tensor.quantized import operand

Output = torch.dtype | Quantizer
Result = Tensor | list[Tensor]
"""A tensor of the output's dtype, or the buffers of a quantized one."""
OUTPUT_NAMES = ("output_scale", "output_zero_point")


class _Fields(NamedTuple):
    op: OpOverload
    output: Output
    output_scale: Tensor | None
    output_zero_point: Tensor | None
    args: Args
    kwargs: Kwargs


class Call(_Fields):
    """A call of scaled, with quantized arguments as Operands."""

    @property
    def given(self) -> Args:
        """The arguments of its plan: `args`, and the output's scale and zero point if the output is a quantizer."""
        if isinstance(self.output, Quantizer):
            return (*self.args, self.output_scale, self.output_zero_point)
        return self.args

    def bare(self) -> "Call":
        """The call without its tensors, so that a plan may keep it."""
        args = tuple(None if tensors([x]) else x for x in self.args)
        return self._replace(output_scale=None, output_zero_point=None, args=args)

    def of(self, given: Sequence[Any]) -> "Call":
        """A bare call completed with a plan's arguments. Raises if a tensor lost its memory or its buffers changed."""
        memory.check(given)
        count = len(given) - (2 if isinstance(self.output, Quantizer) else 0)
        args = [operand(x) if own is None else own for own, x in zip(self.args, given[:count], strict=False)]
        scale, zero_point = given[count:] or (None, None)
        return Call(self.op, self.output, scale, zero_point, (*args, *self.args[count:]), self.kwargs)

    @property
    def quantizer(self) -> Quantizer:
        """The output, which must be a quantizer."""
        assert isinstance(self.output, Quantizer)
        return self.output

    def plan(self, compute: "Callable[[Call], Result]") -> Plan:
        """The plan that describes each call again and runs `compute` on it."""
        bare = self.bare()
        return lambda *given: compute(bare.of(given))

    @functools.cached_property
    def roles(self) -> Operator:
        return TABLE[self.op]

    @property
    def device(self) -> torch.device:
        return tensors(self.args)[0].device

    def find(self, role: str) -> Any:
        """The argument with `role`, or None."""
        return self.roles.find(role, self.args)


def check_tensors(given: Sequence[object]) -> None:
    """Raise if a tensor has lost its memory, or a quantized one has invalid buffers."""
    memory.check(given)
    for x in given:
        operand(x)


def size_of(shape: Sequence[int]) -> torch.Size | None:
    """The shape a plan's result must have; None while tracing, where sizes may be symbolic."""
    return torch.Size(shape) if eager.is_plain_eager() else None


def changed() -> RuntimeError:
    """The error a plan raises if operands changed since they were described; `check_tensors` gives the reason."""
    return RuntimeError("scaled: a buffer of an operand is of another shape or device than its tensor; make it anew")


def tensors(args: Sequence[object]) -> list[Tensor | Operand]:
    """The tensors and Operands among the arguments, including list members."""
    flat = [x for a in args for x in (a if isinstance(a, list | tuple) and not isinstance(a, Operand) else [a])]
    return [x for x in flat if isinstance(x, Tensor | Operand)]


def values(x: object, dtype: torch.dtype, usage: str = "") -> Any:
    """Dequantize an Operand, or cast a float tensor, to `dtype`; anything else is returned unchanged."""
    if isinstance(x, Operand):
        return x.values(usage).to(dtype)
    if isinstance(x, list | tuple):
        return [values(v, dtype) for v in x]
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def is_integer(x: object) -> TypeGuard[Operand]:
    """Whether x is an operand whose codes can be multiplied as integers."""
    if not isinstance(x, Operand) or x.quantizer.flat:
        return False
    return x.quantizer.format.is_integer and not x.quantizer.scale.is_compound


def has_stored_sums(call: Call) -> bool:
    """Whether a matrix product multiplies integers by a weight as stored in files of quantized models.

    Such weights have integer codes with two-level scales or offsets, or codes such as those of IQ4_NL that stand for
    integers.
    """
    lhs, rhs = call.find(LHS), call.find(RHS)
    if call.roles.family is not MATRIX or not is_integer(lhs) or not isinstance(rhs, Operand) or rhs.dim() != 2:
        return False
    q = rhs.quantizer
    return (q.format.is_integer and q.scale.is_compound and not q.flat) or has_whole_numbers(q)


_KINDS: dict[type, str] = {Integer: "integers", Float: "floats of 8 or 4 bits", Codebook: "codebooks"}


def kind(x: Tensor | Operand) -> str:
    """The kind of an operand, as in PAIRS."""
    if isinstance(x, Tensor):
        return "plain floats"
    return next(name for cls, name in _KINDS.items() if isinstance(x.quantizer.format, cls))


def described(x: Tensor | Operand) -> str:
    """Describe an operand in an error message."""
    return str(x.dtype) if isinstance(x, Tensor) else str(x.quantizer)


def usage(call: Call, role: str) -> str:
    """The copy of an operand that a product reads: the one whose last dimension is summed, if it exists."""
    operand = call.find(role)
    transposed = role == RHS and call.roles.family is MATRIX and call.roles.rhs_sums == -2 and operand.dim() == 2
    wanted = copies.COLUMNWISE if transposed else copies.ROWWISE
    return wanted if wanted in operand.usages else operand.usages[0]


def compute_dtype(call: Call) -> torch.dtype:
    """float64 if a plain operand has that dtype, else float32."""
    plain = [x for x in tensors(call.args) if isinstance(x, Tensor)]
    return torch.float64 if any(x.dtype == torch.float64 for x in plain) else torch.float32


def by_sum(output: Output) -> bool:
    """Whether the output is computed from the integer sum rather than from its float value."""
    convention = output.scale.requantization if isinstance(output, Quantizer) else None
    return convention is not None and convention.exact


def integer_function(output: Output) -> IntegerFunction | None:
    """The convention that computes the output from codes in integers; None if there is none."""
    convention = output.scale.requantization if isinstance(output, Quantizer) else None
    return convention if isinstance(convention, IntegerFunction) else None


def fitted(call: Call, shape: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    """The output's scale and zero point in the shapes of their buffers, for a result of `shape`."""
    assert isinstance(call.output, Quantizer)
    return fitting_scales(
        "scaled", OUTPUT_NAMES, call.output, shape, call.device, call.output_scale, call.output_zero_point
    )


def keeps_dims(call: Call, position: int) -> bool:
    """Whether a reduction keeps the dimensions that it sums over; `position` is that of its argument keepdim."""
    return bool(call.args[position] if len(call.args) > position else call.kwargs.get("keepdim", False))


def shape(op: OpOverload, args: Sequence[object], kwargs: Kwargs) -> list[int]:
    """The shape of the result, independent of quantization."""

    def described(x: object, role: str | None) -> object:
        if isinstance(x, list | tuple) and not isinstance(x, Operand):
            return [described(v, role) for v in x]
        if not isinstance(x, Operand | Tensor):
            return x
        stays = role in (INDEX, CONDITION) or (role == MASK and x.dtype == torch.bool)
        dtype = x.dtype if isinstance(x, Tensor) and stays else torch.float32
        return torch.empty(tuple(x.shape), dtype=dtype, device="meta")

    return list(op(*(described(x, TABLE[op].role(i)) for i, x in enumerate(args)), **kwargs).shape)


def check_fit(call: Call, lhs: Tensor | Operand, rhs: Tensor | Operand) -> None:
    """Raise Declined for shapes that the operator rejects with its own error."""
    wanted = {aten.mm.default: (2, 2), aten.bmm.default: (3, 3), aten.linear.default: (lhs.dim(), 2)}
    dims = (lhs.dim(), rhs.dim())
    fits = wanted.get(call.roles.product, dims) == dims and lhs.shape[-1] == rhs.shape[call.roles.rhs_sums]  # type: ignore[arg-type]
    if fits and is_batch(call):
        pairs = zip(reversed(lhs.shape[:-2]), reversed(rhs.shape[:-2]), strict=False)
        broadcasts = call.roles.product is aten.matmul.default
        fits = all(a == b or (broadcasts and 1 in (a, b)) for a, b in pairs)
    if not fits:
        raise Declined(f"shapes {tuple(lhs.shape)} and {tuple(rhs.shape)} do not fit together")


def is_batch(call: Call) -> bool:
    return call.find(RHS).dim() > 2
