"""quantize, fake_quantize and dequantize: their operators and public functions."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import dynamo, eager
from hop.compat.profiling import observed
from hop.compat.pytree import Args, ArgsKwargs, tree_map_only
from hop.dispatch import plan
from hop.dispatch.composite import Composite
from hop.dispatch.hop import PLAIN, Hop
from hop.dispatch.kernel import Kernel
from hop.impls.quantize.arguments import SCALES, check_values, checked, needless
from hop.impls.quantize.kernels import dequantizing, quantizing
from hop.kernels.aten import quantize as kernels
from hop.kernels.cpu import quantize as native
from hop.kernels.gpu import quantize as gpu
from hop.numerics import blocks, copies, memory_format
from hop.numerics.estimators import Derivatives, Position
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor
from hop.tensor.buffers import sharding
from hop.tensor.buffers.noise import drawn_noise
from hop.tensor.buffers.operators import Usages, buffers_operator, dequantize_operator, quantize_buffers

_Optional = Tensor | None
Given = Tensor | float | None


class Inputs(NamedTuple):
    """The tensor arguments of quantize and fake_quantize."""

    x: Tensor
    scale: _Optional
    zero_point: _Optional
    noise: _Optional

    @property
    def constants(self) -> tuple[_Optional, ...]:
        """The tensors without gradients."""
        return tuple(None if t is None else t.detach() for t in self)


class FakeQuantize(Hop[Tensor]):
    """The operator hop_fake_quantize: (quantizer, x, scale, zero_point, noise, gradient)."""

    def check(
        self, q: str, x: Tensor, scale: Given, zero_point: Given, noise: _Optional, gradient: str, /
    ) -> ArgsKwargs:
        given = (x, scale, zero_point, noise)
        scales = checked("fake_quantize", Quantizer.parse(q), *given, usages=(copies.ROWWISE,), gradient=gradient)
        return (q, x, *scales, noise, gradient), {}

    def reference(
        self, q: str, x: Tensor, scale: _Optional, zero_point: _Optional, noise: _Optional, gradient: str, /
    ) -> Tensor:
        return Quantizer.parse(q).fake_quantize(x, scale, zero_point, noise).to(x.dtype)

    def fake(self, q: str, x: Tensor, /, *rest: object) -> Tensor:
        if Quantizer.parse(q).keeps_memory_format():
            return memory_format.empty(x.shape, x, x.dtype)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def kernels(self, /, *args: object) -> Iterable[tuple[Kernel, Args]]:
        return ((native.FAKE_QUANTIZE, args), (gpu.FAKE_QUANTIZE, args), (kernels.FAKE_QUANTIZE, args))

    def differentiable(self, /, *args: object) -> bool:
        return True

    def gradient(self, grad: Tensor, needed: Sequence[bool], q: str, /, *rest: Any) -> list[_Optional]:
        return straight_through(grad, needed, Quantizer.parse(q), *rest)

    def shard(
        self, q: str, x: Tensor, scale: _Optional, zero_point: _Optional, noise: _Optional, gradient: str, /
    ) -> Tensor:
        def of_parts(own: Quantizer, x: Tensor, *others: _Optional) -> list[Tensor]:
            if sharding.is_shared(own):
                return [own.fake_quantize(x, *others).to(x.dtype)]
            return [self(q, x, *others, gradient)]

        given = (x, scale, zero_point, noise)
        return sharding.run(Quantizer.parse(q), x.shape, (copies.ROWWISE,), given, of_parts, [x.shape])[0]

    def batch(self, size: int, dims: Sequence[int | None], q: str, /, *rest: Any) -> tuple[Tensor, int] | None:
        *given, gradient = rest
        batched = _of_batch(Quantizer.parse(q), size, dims[1:5], *given)
        if batched is None:
            return None
        whole, tensors = batched
        return self(str(whole), *tensors, gradient), 0

    def forward_mode(self, q: str, /, *rest: Any) -> Tensor:
        """The value, plus a zero per operand that has the straight-through derivative (0 at non-finite elements)."""
        parsed, call, gradient = Quantizer.parse(q), Inputs(*rest[:-1]), rest[-1]
        if parsed.gradient is not None:
            raise NotImplementedError(
                f"fake_quantize: forward mode does not support gradient={parsed.gradient}; use a quantizer "
                "with gradient=None"
            )
        x, scale, zero_point, _ = call
        out, masks = self(q, *call.constants, gradient), _masks(parsed, scale, gradient)
        zero = (x - x.detach()).nan_to_num(0.0)
        if scale is None and not masks:
            return out + zero
        out, by = out.to(torch.float32), parsed.derivatives(*call.constants)  # type: ignore[arg-type]
        inside = by.inside if masks else torch.ones_like(by.inside)
        out = out + torch.where(inside, zero, 0.0).to(torch.float32)
        if scale is not None and scale.is_floating_point():
            step = (scale - scale.detach()) * parsed.scale_slope(x.detach(), scale.detach())
            out = out + parsed.spread(step, x.shape) * by.scale
        if zero_point is not None and zero_point.is_floating_point():
            out = out + parsed.spread(zero_point - zero_point.detach(), x.shape) * by.zero_point
        return out.to(x.dtype)


class Quantize(Composite[QuantizedTensor]):
    """The operator hop_quantize: (quantizer, x, scale, zero_point, noise, usages, gradient)."""

    plain = PLAIN
    parts = buffers_operator

    def check(
        self, q: str, x: Tensor, scale: Given, zero_point: Given, noise: _Optional, usages: Usages, gradient: str, /
    ) -> ArgsKwargs:
        parsed = Quantizer.parse(q)
        if parsed.adds_noise():
            raise ValueError(
                f"quantize: gradient={parsed.gradient} of {q} produces floats instead of codes; use "
                "hop.fake_quantize, or replace(q, gradient=None)"
            )
        usages = copies.checked(parsed, usages)
        scales = checked("quantize", parsed, x, scale, zero_point, noise, usages=usages, gradient=gradient)
        return (q, x, *scales, noise, list(usages), gradient), {}

    def reference(
        self, q: str, x: Tensor, scale: Given, zero_point: Given, noise: _Optional, usages: Usages, gradient: str, /
    ) -> QuantizedTensor:
        buffers, parsed = quantize_buffers(q, x, scale, zero_point, noise, usages), Quantizer.parse(q)
        named = zip(copies.names(parsed, tuple(usages)), buffers, strict=True)
        return QuantizedTensor.fitting(dict(named), parsed, x.shape, x.dtype)

    def explain(self, /, *args: Any) -> str:
        (*checked, _), _ = self.check(*args)
        return quantize_buffers.explain(*checked)

    def differentiable(self, /, *args: object) -> bool:
        return True

    def gradient(self, grad: Tensor, needed: Sequence[bool], q: str, /, *rest: Any) -> list[_Optional]:
        *given, usages, gradient = rest
        grads = straight_through(grad, needed, Quantizer.parse(q), *given, gradient=gradient)
        return [*grads, *[None] * len(usages)]

    def batch(self, size: int, dims: Sequence[int | None], q: str, /, *rest: Any) -> tuple[Tensor, int] | None:
        *given, usages, gradient = rest
        batched = _of_batch(Quantizer.parse(q), size, dims[1:5], *given)
        if batched is None or list(usages) != [copies.ROWWISE]:
            raise NotImplementedError(
                f"quantize: under vmap, {q} with usages {list(usages)} would share blocks between the members of the "
                "batch; use fake_quantize, or quantize outside"
            )
        whole, tensors = batched
        return self(str(whole), *tensors, usages, gradient), 0

    def forward_mode(self, q: str, /, *rest: Any) -> QuantizedTensor:
        """The codes, with the tangent of fake_quantize."""
        *given, usages, gradient = rest
        real = fake_quantize_operator(q, *given, gradient)
        primals = tree_map_only(Tensor, eager.primal, given)
        return eager.with_tangent(self(q, *primals, usages, gradient), real)


quantize_operator = Quantize("hop_quantize")
fake_quantize_operator = FakeQuantize("hop_fake_quantize")


def straight_through(
    grad: Tensor,
    needed: Sequence[bool],
    q: Quantizer,
    x: Tensor,
    scale: _Optional,
    zero_point: _Optional,
    noise: _Optional,
    gradient: str,
) -> list[_Optional]:
    """The gradients of (quantizer, x, scale, zero_point, noise, gradient); see hop.numerics.quantizer.Derivatives."""
    masks = _masks(q, scale, gradient)
    if not masks and not any(needed[2:4]):
        return [None, grad.to(x.dtype), None, None, None, None]
    tensors = (x, grad, scale, zero_point, noise)
    if sharding.is_sharded(tensors):

        def of_parts(
            own: Quantizer, x: Tensor, grad: Tensor, scale: _Optional, zero_point: _Optional, noise: _Optional
        ) -> list[_Optional]:
            return straight_through(grad, needed, own, x, scale, zero_point, noise, gradient)

        shapes = [() if t is None else t.shape for t in (None, x, scale, zero_point, None, None)]
        return sharding.run(q, x.shape, (copies.ROWWISE,), tensors, of_parts, shapes)
    by = q.derivatives(x, scale, zero_point, noise)
    wide = grad.to(torch.float32)
    if q.gradient is None or gradient != "clipped":
        dx = (torch.where(by.inside, grad, 0.0) if masks else grad).to(x.dtype)
        by_element = wide * by.scale
    else:
        at = _position(q, by, scale)
        dx = q.gradient.of_input(wide, at).to(x.dtype)
        by_element = q.gradient.of_scale(wide, at)
    ds = dz = None
    if scale is not None and needed[2]:
        per_block = q.per_block(by_element) * q.scale_slope(x, scale)
        served = blocks.per_dimension(list(q.stored_by_rule().values())[-1][1], scale.dim())
        ds = q.combined(per_block.sum_to_size(scale.shape), "sum", served).to(scale.dtype)
    if zero_point is not None and needed[3]:
        dz = q.combined(q.per_block(wide * by.zero_point), "sum", blocks.per_dimension(q.block, zero_point.dim()))
        dz = dz.to(zero_point.dtype)
    return [None, dx, ds, dz, None, None]


def _masks(q: Quantizer, scale: _Optional, gradient: str) -> bool:
    """Whether x's gradient differs from 1 anywhere. Scales found by a rule clip nothing, except with AbsMean."""
    return gradient == "clipped" and (scale is not None or q.scale.clips() or q.gradient is not None)


def _position(q: Quantizer, by: Derivatives, scale: _Optional) -> Position:
    """The position of each element within its format, for an estimator. Scales found by a rule clip nothing."""
    numbers = by.scale + torch.where(by.inside, by.units, 0.0)
    inside = by.inside if scale is not None or q.scale.clips() else torch.ones_like(by.inside)
    sharing = 1.0 if scale is None else by.units.numel() / max(scale.numel(), 1)
    return Position(by.units, numbers, inside, sharing, q.format.max)


# ---- the public functions

_ROWWISE, _DEQUANTIZE = (copies.ROWWISE,), "dequantize"
_key, _find = plan.key, plan.find  # a module's global names are found faster than attributes


def quantize(
    q: Quantizer,
    x: Tensor,
    /,
    *,
    scale: Tensor | float | None = None,
    zero_point: Tensor | float | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    usages: str | Sequence[str] = _ROWWISE,
    gradient: str = "clipped",
) -> QuantizedTensor:
    """Quantize `x` with the quantizer `q`.

    Args:
        q: the quantizer: format, blocks, scale rule, rounding.
        x: float16, bfloat16, float32 or float64, any shape and strides. Computed in float32.
        scale: replaces the scale rule: a number, or float32, broadcastable to the shape of its buffer (listed by
            `TensorProto.buffers`), differentiable. For a two-level quantizer it is the amax of the tensor.
        zero_point: the zero point for `scale`, for a quantizer that has one: a code of the format, as a number or a
            tensor of any integer dtype; or floating point, which is rounded to the nearest code and gets a gradient.
        noise: the random integers of stochastic rounding, of x's shape: int32, uniform from 0 to 2^24 - 1, as
            `hop.noise` creates from a seed; or uint8, uniform from 0 to 255, for which the probability of rounding up
            is rounded down to a multiple of 1/256.
        generator: in eager mode, draws the seed of `noise` from this generator.
        usages: the copies to create, "rowwise", "columnwise" or both (hop.numerics.copies).
        gradient: "clipped": x's gradient is 0 for elements beyond the largest code; "plain": it is passed through.

    Returns:
        A QuantizedTensor of x's shape, in x's dtype, on its device; differentiable, straight through the rounding.

    Raises:
        TypeError: x is not a float tensor, or q is not a Quantizer.
        ValueError: arguments do not match x, q or each other.
    """
    plain = noise is None and generator is None and usages == _ROWWISE and gradient == "clipped"
    if plain and type(q) is Quantizer:
        scales = () if scale is None and zero_point is None else (scale, zero_point)
        known = _key((q,), (x, *scales))
        if known is not None:
            if scale is not None:
                check_values("quantize", SCALES, q, scale, zero_point)  # type: ignore[arg-type]
            found = _find(known)
            if found is None:
                found = plan.remember(known, _planned(q, x, scales))
            return found(x, *scales)
    given = {"scale": scale, "zero_point": zero_point, "noise": noise, "generator": generator}
    named = given | {"usages": usages, "gradient": gradient}
    if (watched := observed(quantize, (q, x), named)) is not None:
        return watched
    return _traced_quantize(q, x, **named)


def _planned(q: Quantizer, x: Tensor, scales: tuple[()] | tuple[Given, Given]) -> plan.Plan:
    """The plan of row-wise quantizing, with a scale and a zero point, or none."""
    text, fixed = str(q), (None, list(_ROWWISE), "clipped")
    if not scales:
        return quantizing(q, x, lambda x: quantize_operator(text, x, None, None, *fixed))
    (_, _, *fitted, _, _, _), _ = quantize_operator.check(text, x, *scales, *fixed)
    return quantizing(q, x, lambda x, *scales: quantize_operator(text, x, *scales, *fixed), scales, fitted)


def is_plain(q: Quantizer, x: object) -> bool:
    """Whether hop.quantize(q, x) runs a cached plan: nothing observes the call, and x needs no gradient."""
    return _key((q,), (x,)) is not None


def _traced_quantize(
    q: Quantizer,
    x: Tensor,
    /,
    *,
    scale: Tensor | float | None = None,
    zero_point: Tensor | float | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    usages: str | Sequence[str] = _ROWWISE,
    gradient: str = "clipped",
) -> QuantizedTensor:
    text, noise = _prepared("quantize", q, x, noise, generator)
    named = [usages] if isinstance(usages, str) else list(usages) if isinstance(usages, list | tuple) else usages
    return _quantize_node(text, x, scale, zero_point, noise, named, gradient)


def fake_quantize(
    q: Quantizer,
    x: Tensor,
    /,
    *,
    scale: Tensor | float | None = None,
    zero_point: Tensor | float | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    gradient: str = "clipped",
) -> Tensor:
    """dequantize(quantize(q, x)) as one operator on floats: the same bits, forward-mode derivatives included.

    Arguments, gradient and errors are those of `quantize`.

    Returns:
        A tensor of x's shape and dtype.
    """
    if not torch.compiler.is_compiling():
        given = {"scale": scale, "zero_point": zero_point, "noise": noise, "generator": generator}
        if (watched := observed(fake_quantize, (q, x), given | {"gradient": gradient})) is not None:
            return watched
    text, noise = _prepared("fake_quantize", q, x, noise, generator)
    return _fake_quantize_node(text, x, scale, zero_point, noise, gradient)


def dequantize(x: Tensor, /, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a quantized tensor to floats.

    Args:
        x: a QuantizedTensor of any shape.
        dtype: float16, bfloat16, float32 or float64; by default the dtype x appears in. Values are computed in float32
            and cast once.

    Returns:
        A tensor of x's shape, in `dtype`. Gradients pass through unchanged.

    Raises:
        TypeError: x is not a QuantizedTensor, or dtype is another one.
    """
    known = None
    if dtype is None or type(dtype) is torch.dtype:
        known = _key((_DEQUANTIZE, getattr(x, "dtype", None) if dtype is None else dtype), (x,))
    if known is not None:
        found = _find(known)
        if found is None:
            found = plan.remember(known, dequantizing(x, dtype, lambda x: dequantize_operator(x, dtype)))
        return found(x)
    watched = observed(dequantize, (x, dtype), {})
    return dequantize_operator(x, dtype) if watched is None else watched


def _prepared(name: str, q: object, x: Tensor, noise: _Optional, generator: object) -> tuple[str, _Optional]:
    if not isinstance(q, Quantizer):
        raise TypeError(f"{name}: q must be a Quantizer, got {shown(q)}; give one such as hop.presets.INT8_ROW")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"{name}: generator must be a torch.Generator, got {generator!r}; give one, or None")
        if noise is not None:
            raise ValueError(
                f"{name}: noise and generator exclude each other, got noise of {noise.dtype}; give one of them"
            )
        if not q.is_random():
            raise ValueError(f"{name}: {needless('generator', q, generator)}")
        noise = drawn_noise(x, generator)
    return str(q), noise


def _quantize_node(*args: object) -> QuantizedTensor:
    return quantize_operator(*args)


def _fake_quantize_node(*args: object) -> Tensor:
    return fake_quantize_operator(*args)


dynamo.allow_in_graph(_quantize_node)
dynamo.allow_in_graph(_fake_quantize_node)
dynamo.allow_in_graph(dequantize)
dynamo.trace_as(quantize, _traced_quantize)


def _of_batch(
    q: Quantizer, size: int, dims: Sequence[int | None], x: Tensor, *others: Tensor | None
) -> tuple[Quantizer, list[Tensor | None]] | None:
    """A quantizer for the whole batch, and the tensors with the batch first; None if a block would span members.

    `others` are the scale, the zero point and the noise, each with the shape for one member.
    """
    front = [None if t is None else _batch_first(t, dim, size) for t, dim in zip((x, *others), dims, strict=True)]
    member = x.shape[: dims[0]] + x.shape[dims[0] + 1 :] if dims[0] is not None else x.shape
    if q.flat:
        if member.numel() % q.block[0]:
            return None
        codes, *scales = front[0], *(None if t is None else t.flatten(0, 1) for t in front[1:3])
        return q, [codes, *scales, front[3]]
    return q.of_batch(len(member)), front


def _batch_first(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
