"""A trainable linear layer: quantized, saving as little as its backward needs (contract.py).

    hop_linear_forward(scheme, dtype, needs, options, seed, *scales, x, weight, bias, held) -> [y, *copies]
    hop_linear_backward(scheme, dtype, needs, options, shapes, dtypes, seed, *scales, grad, x, weight, of_x, of_weight)
        -> gradients

`needs` and `options` are the fields of Needs and Options, `scales` those of Scales. `held` are the weight's codes that
the caller keeps. In the backward, x and weight are saved operands, and of_x and of_weight the buffers of saved copies.
Results and gradients have the same bits as those of hop_quantized.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hop.compat import dynamo, eager
from hop.compat.pytree import ArgsKwargs
from hop.dispatch.hop import Hop
from hop.dispatch.operators import BIAS, LHS, RHS, aten
from hop.impls.quantized import calls, gradient, operands, quantized_operator
from hop.impls.quantized.calls import Scales, SchemeCall
from hop.impls.quantized.contract import Contract, Needs, Options
from hop.impls.quantized.operands import TRANSPOSED_LHS_STREAM, TRANSPOSED_RHS_STREAM
from hop.impls.scaled import scaled
from hop.numerics import copies
from hop.numerics.copies import COLUMNWISE, ROWWISE
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor
from hop.tensor.proto import TensorProto

_Optional = Tensor | None
_LINEAR = aten.linear.default
_SCALES = len(Scales._fields)


def _contract(scheme: str, needs: Sequence[bool], options: Sequence[bool], scales: Sequence[_Optional]) -> Contract:
    of = Scales(*scales)
    given = (of.lhs is not None, of.rhs is not None)
    return Contract(Scheme.parse(scheme), Needs(*needs), Options(*options), given)


class LinearForward(Hop[list[Tensor]]):
    """The operator hop_linear_forward."""

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        return args, kwargs  # Layer.check has checked them

    def reference(
        self,
        scheme: str,
        dtype: torch.dtype,
        needs: Sequence[bool],
        options: Sequence[bool],
        seed: _Optional,
        /,
        *rest: Any,
    ) -> list[Tensor]:
        *scales, x, weight, bias, held = rest
        contract = _contract(scheme, needs, options, scales)
        call = SchemeCall(_LINEAR, contract.scheme, dtype, seed, Scales(*scales), (x, weight), {})
        kept = contract.kept_of_weight(TensorProto.of(weight))
        of_x = operands.rows(call, LHS)
        of_weight = kept.create_tensor(held) if kept is not None and held else operands.rows(call, RHS)
        outputs = [scaled(_LINEAR, dtype, of_x, of_weight, bias)]
        copy = contract.copy_of_x(TensorProto.of(x))
        if copy is not None:
            outputs += _buffers(call, LHS, copy.usages, of_x)
        if not held:
            copy = kept or contract.copy_of_weight(TensorProto.of(weight))
            outputs += [] if copy is None else _buffers(call, RHS, copy.usages, of_weight)
        return [t.contiguous() for t in outputs]

    def fake(
        self,
        scheme: str,
        dtype: torch.dtype,
        needs: Sequence[bool],
        options: Sequence[bool],
        seed: _Optional,
        /,
        *rest: Any,
    ) -> list[Tensor]:
        *scales, x, weight, _, held = rest
        contract = _contract(scheme, needs, options, scales)
        y = TensorProto((*x.shape[:-1], weight.shape[0]), dtype, x.device)
        return _made([y, *contract.forward(TensorProto.of(x), TensorProto.of(weight), bool(held))])


class LinearBackward(Hop[list[Tensor]]):
    """The operator hop_linear_backward."""

    def check(self, /, *args: object, **kwargs: object) -> ArgsKwargs:
        return args, kwargs

    def reference(
        self,
        scheme: str,
        dtype: torch.dtype,
        needs: Sequence[bool],
        options: Sequence[bool],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        seed: _Optional,
        /,
        *rest: Any,
    ) -> list[Tensor]:
        *scales, grad, x, weight, of_x, of_weight = rest
        contract = _contract(scheme, needs, options, scales)
        need, protos = contract.needs, _described(shapes, dtypes, grad.device)
        factors = (
            _factor(x, of_x, contract.copy_of_x(protos[0]), protos[0]),
            _factor(weight, of_weight, contract.copy_of_weight(protos[1]), protos[1]),
        )
        bias = (torch.empty(protos[2].shape, dtype=dtypes[2], device="meta"),) if need.bias else ()
        call = SchemeCall(_LINEAR, contract.scheme, dtype, seed, Scales(*scales), (*factors, *bias), {})
        wanted = [LHS] * need.of_x() + [RHS] * need.of_weight() + [BIAS] * need.bias
        through = gradient.through_operator(call, grad, wanted)
        grads: dict[str, _Optional] = {}
        for role, name, saved, proto in (
            (LHS, "x", contract.of_x(), protos[0]),
            (RHS, "weight", contract.of_weight(), protos[1]),
        ):
            if role not in through:
                continue
            if saved.original:
                names = (name, f"{name}_scale", f"{name}_zero_point")
                flags = [getattr(need, n) for n in names]
                grads |= zip(names, gradient.through_quantizer(call, role, through[role], flags), strict=True)
            else:  # nothing was clipped, and no scale is learned
                grads[name] = through[role].to(proto.dtype)
        if need.bias:
            grads["bias"] = through[BIAS].to(dtypes[2])
        outputs = [grads[name] for name in Needs._fields if getattr(need, name)]
        result: list[Tensor] = []
        for g in outputs:
            assert g is not None
            result.append(g.contiguous())
        return result

    def fake(
        self,
        _scheme: str,
        _dtype: torch.dtype,
        needs: Sequence[bool],
        _options: object,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        /,
        *rest: Any,
    ) -> list[Tensor]:
        _, *scales, grad, _, _, _, _ = rest
        of: list[TensorProto | None] = [*_described(shapes, dtypes, grad.device)]
        of += [None] * (3 - len(of)) + [None if s is None else TensorProto.of(s) for s in scales[:4]]
        return _made([p for p, need in zip(of, needs, strict=True) if need and p is not None])


def _described(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device: torch.device
) -> list[TensorProto]:
    return [TensorProto(tuple(shape), dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _made(protos: Sequence[TensorProto]) -> list[Tensor]:
    return [torch.empty(b.shape, dtype=b.dtype, device=p.device) for p in protos for b in p.buffers()]


def _factor(original: _Optional, buffers: Sequence[Tensor], copy: TensorProto | None, described: TensorProto) -> Tensor:
    """The saved form of an operand; a meta tensor if no product reads it."""
    if original is not None:
        return original
    if copy is not None:
        return copy.create_tensor(list(buffers))
    return torch.empty(described.shape, dtype=described.dtype, device="meta")


def _buffers(call: SchemeCall, role: str, usages: tuple[str, ...], rows: QuantizedTensor) -> list[Tensor]:
    """The copies of an operand to save; `rows` is its row-wise copy."""
    q, x = call.quantizer(role), call.find(role)
    assert q is not None
    buffers = rows.buffers() if ROWWISE in usages else {}
    if COLUMNWISE in usages:
        stream = TRANSPOSED_LHS_STREAM if role == LHS else TRANSPOSED_RHS_STREAM
        transposed, _ = gradient.transposed_rows(call, role, x.reshape(copies.columns(x.shape)[::-1]), stream)
        names = copies.names(q, (COLUMNWISE,))
        buffers = buffers | dict(zip(names, transposed.buffers().values(), strict=True))
    return [buffers[b.name] for b in copies.describe(q, x.shape, usages)]


linear_forward = LinearForward("hop_linear_forward")
linear_backward = LinearBackward("hop_linear_backward")


class _Context(BackwardCFunction):
    """The values, besides tensors, that a layer saves for its backward."""

    node: tuple[str, torch.dtype, list[bool], list[bool]]  # the first arguments of hop_linear_backward
    described: tuple[list[list[int]], list[torch.dtype]]  # shapes and dtypes of x, weight and bias
    count: int  # buffers of x among the saved tensors
    main_grad: _Optional


class _Linear(torch.autograd.Function):
    """Compute (y, *kept) of a layer that needs a gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context,
        scheme: str,
        dtype: torch.dtype,
        options: Options,
        main_grad: _Optional,
        held: Sequence[Tensor],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        _, *scales, x, weight, bias = tensors
        flags = ctx.needs_input_grad[-len(tensors) + 1 :]
        needs = Needs(*flags[_SCALES:], *flags[:4])
        with eager.below_autograd():
            y, *copies_saved = linear_forward(scheme, dtype, list(needs), list(options), *tensors, held)
        contract = _contract(scheme, needs, list(options), scales)
        of_x, of_weight = (TensorProto.of(t) for t in (x, weight))
        count = _count(contract.copy_of_x(of_x))
        saved, kept = contract.copy_of_weight(of_weight), contract.kept_of_weight(of_weight)
        new = copies_saved[count:]
        copy = new
        if kept is not None:
            named = dict(zip([b.name for b in kept.buffers()], held or new, strict=True))
            copy = [] if saved is None else [named[b.name] for b in saved.buffers()]
        forms = ((x, contract.of_x()), (weight, contract.of_weight()))
        originals: list[Any] = [t if s.original else None for t, s in forms]
        ctx.save_for_backward(*tensors[: 1 + _SCALES], *originals, *copies_saved[:count], *copy)
        ctx.node = (scheme, dtype, list(needs), list(options))
        ctx.described = ([list(t.shape) for t in (x, weight)], [x.dtype, weight.dtype])
        if bias is not None:
            ctx.described[0].append(list(bias.shape))
            ctx.described[1].append(bias.dtype)
        ctx.count, ctx.main_grad = count, main_grad
        if kept is None:
            return (y,)
        ctx.mark_non_differentiable(*new)
        return (y, *new)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, *_: object) -> tuple[_Optional, ...]:  # type: ignore[override]
        seed, *rest = ctx.saved_tensors
        scales, (x, weight), buffers = rest[:_SCALES], rest[_SCALES : _SCALES + 2], rest[_SCALES + 2 :]
        of_x, of_weight = buffers[: ctx.count], buffers[ctx.count :]
        needs = Needs(*ctx.node[2])
        if torch.is_grad_enabled() or eager.has_tangent(grad):
            gradients = _differentiable(ctx, needs, grad, seed, scales, x, weight)
        else:
            outputs = iter(linear_backward(*ctx.node, *ctx.described, seed, *scales, grad, x, weight, of_x, of_weight))
            gradients = [next(outputs) if need else None for need in needs]
        if needs.weight and ctx.main_grad is not None:
            of_weight, gradients[1] = gradients[1], None
            assert of_weight is not None
            ctx.main_grad.add_(of_weight.detach())
        return (None,) * 6 + (*gradients[3:], *(None,) * (_SCALES - 4), *gradients[:3])


def _count(copy: TensorProto | None) -> int:
    return 0 if copy is None else len(copy.buffers())


def _differentiable(
    ctx: _Context,
    needs: Needs,
    grad: Tensor,
    seed: _Optional,
    scales: Sequence[_Optional],
    x: _Optional,
    weight: _Optional,
) -> list[_Optional]:
    """The gradients, computed by differentiable operators."""
    scheme, dtype, *_ = ctx.node
    if x is None or weight is None:
        raise RuntimeError(
            "hop.nn.Linear: create_graph=True, or a tangent, differentiates the gradient, so the layer must "
            "save its operands themselves; set its save_original=True"
        )
    bias = grad.new_empty(ctx.described[0][2]) if needs.bias else None
    needed = [False] * 4 + [*needs[3:], *[False] * (_SCALES - 4), *needs[: 2 + needs.bias]]
    gradients = quantized_operator.gradient(
        grad, needed, _LINEAR, scheme, dtype, seed, *scales, x, weight, *(() if bias is None else (bias,))
    )
    of_scales, own = gradients[4:8], gradients[4 + _SCALES :]
    return [*own, *[None] * (3 - len(own)), *of_scales]


def linear(
    scheme: Scheme,
    x: Tensor,
    weight: Tensor,
    bias: _Optional = None,
    *,
    scales: Scales,
    options: Options,
    main_grad: _Optional = None,
    held: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """The result of a linear layer, and the weight's codes if options.keep requests them and they are new."""
    y, *kept = _node(str(scheme), scales, list(options), main_grad, list(held), x, weight, bias)
    return y, kept


def _node(
    text: str,
    scales: Scales,
    listed: list[bool],
    main_grad: _Optional,
    held: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: _Optional,
) -> tuple[Tensor, ...]:
    options, args = Options(*listed), (x, weight, bias)
    dtype = calls.default_dtype(calls.operands_of(_LINEAR, args))
    named = calls.autocast_dtype(x)
    scheme, seed = Scheme.parse(text), None
    if scheme.is_stochastic():
        seed = torch.randint(2**62, (), device=x.device)
    quantized_operator.check(_LINEAR, text, named, seed, *scales, *args)
    _check(main_grad, *args)
    given = [t for t in (*scales, *args) if t is not None]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if eager.is_ordinary(given) and scheme.output is None:
        if trains:
            return _Linear.apply(text, dtype, options, main_grad, held, seed, *scales, *args)  # type: ignore[return-value]
        if options != Options():
            return tuple(linear_forward(text, dtype, list(Needs()), listed, seed, *scales, *args, held))
    if trains and main_grad is not None:
        raise NotImplementedError(f"{_UNSUPPORTED} its weight has a main_grad; remove it, or call the layer plainly")
    return (quantized_operator(_LINEAR, text, named, seed, *scales, *args),)


_UNSUPPORTED = (
    "hop.nn.Linear: under torch.func, in exports, in forward mode, on tensor subclasses (such as frozen weights and "
    "DTensors) and with a scheme that has an output it computes by hop.quantized, which cannot run this layer:"
)


def _check(main_grad: _Optional, x: Tensor, weight: Tensor, bias: _Optional) -> None:
    """Raise unless the operands' shapes and main_grad are valid."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            f"hop.nn.Linear: input must be (..., K) for a weight of (N, K), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}; give one with as many features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise RuntimeError(
            f"hop.nn.Linear: bias must be of ({weight.shape[0]},), got {tuple(bias.shape)}; give one for each output"
        )
    if main_grad is None:
        return
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"hop.nn.Linear: weight.main_grad must be a tensor, got {type(main_grad).__name__}")
    if main_grad.shape != weight.shape or not main_grad.is_floating_point() or main_grad.requires_grad:
        raise ValueError(
            "hop.nn.Linear: weight.main_grad must be a floating-point tensor of the weight's shape "
            f"{tuple(weight.shape)} that needs no gradient itself; got {main_grad.dtype} of {tuple(main_grad.shape)}, "
            f"requires_grad={main_grad.requires_grad}"
        )


dynamo.allow_in_graph(_node)
