"""Calls of quantized, as cases for the routes.

What they must return is what scaled gives for the operands as quantize makes them (test_quantized.py holds both against
numpy). Their gradients are those of the operator on fake-quantized floats, or of a function that says in plain PyTorch
what the products of codes are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hop
from hop import presets, schemes
from hop.impls.quantized import quantized_operator
from hop.numerics.formats import INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from tests.support.case import Case

aten = torch.ops.aten


@dataclass(frozen=True)
class F:
    """A float operand, or indices below `rows`."""

    shape: tuple[int, ...]
    rows: int = 0


@dataclass(frozen=True)
class QuantizedOperator:
    name: str
    op: Any
    args: tuple[Any, ...]
    scheme: Scheme
    scales: tuple[float | None, ...] = ()  # the leading fields of hop.Scales
    kwargs: tuple[tuple[str, Any], ...] = ()
    exact: bool = True  # whether its arithmetic is fixed to the bit
    inner: Callable[..., Tensor] | None = None  # of its tensors, where it is not the operator on fake-quantized ones

    def case(self) -> Case:
        return self._case(2.0)

    def gradient_cases(self) -> list[Case]:
        return [self._case(1.0)]

    def _case(self, spread: float) -> Case:
        generator = torch.Generator().manual_seed(5)
        tensors = [
            torch.randint(0, x.rows, x.shape, generator=generator)
            if x.rows
            else torch.randn(x.shape, generator=generator) * spread
            for x in self.args
            if isinstance(x, F)
        ]
        tensors += [torch.tensor(s) for s in self.scales if s is not None]
        tensors += [torch.tensor(7)] * self.scheme.is_stochastic()

        def split(given: tuple[Tensor, ...]) -> tuple[list[Any], hop.Scales, Tensor | None]:
            rest = list(given)
            args = [rest.pop(0) if isinstance(x, F) else x for x in self.args]
            scales = hop.Scales(*(None if s is None else rest.pop(0) for s in self.scales))
            return args, scales, rest[0] if rest else None

        def function(*given: Tensor) -> Tensor:
            args, scales, seed = split(given)
            out = hop.quantized(self.op, self.scheme, *args, scales=scales, seed=seed, **dict(self.kwargs))
            return hop.dequantize(out) if self.scheme.output is not None else out

        def reference(*given: Tensor) -> Tensor:
            args, scales, seed = split(given)
            out = quantized_operator.reference(
                self.op, str(self.scheme), torch.float32, seed, *scales, *args, **dict(self.kwargs)
            )
            return hop.dequantize(out) if self.scheme.output is not None else out

        def inner(*given: Tensor) -> Tensor:
            if self.inner is not None:
                return self.inner(*given)
            args, scales, seed = split(given)
            out = self.op(*_faked(self, args, scales, seed), **dict(self.kwargs))
            if self.scheme.output is None:
                return out
            return hop.fake_quantize(self.scheme.output, out, scale=scales.output, zero_point=scales.output_zero_point)

        want = function(*tensors)
        bound = 0.0 if self.exact else 1e-5 * float(want.abs().max())

        def check(got: Tensor) -> None:
            assert got.dtype == want.dtype and got.shape == want.shape, self.name
            error = float((got - want).abs().max())
            assert error <= bound, f"{self.name}: {error} above {bound}"

        quantizes = (self.scheme.lhs is not None and self.op is not aten.embedding.default) + 1
        made = Case(
            function=function,
            tensors=tensors,
            check=check,
            reference=reference,
            inner=inner,
            nodes=1 + (self.scheme.output is not None),
            nodes_below=quantizes + 1 + (self.scheme.output is not None) + self.scheme.is_stochastic(),
            bound=bound,
            smooth=False,
            keeps_nodes_under_vmap=False,
        )
        return made.on_device()


def _faked(o: QuantizedOperator, args: list[Any], scales: hop.Scales, seed: Any) -> list[Any]:
    """The arguments, fake-quantized as rows that are summed over."""
    places = {aten.addmm.default: (1, 2), aten.embedding.default: (None, 0)}.get(o.op, (0, 1))
    transposed = o.op in (aten.mm.default, aten.bmm.default, aten.addmm.default)
    found = list(args)
    for place, q, scale, zero_point in zip(
        places, (o.scheme.lhs, o.scheme.rhs), scales[:3:2], scales[1:4:2], strict=True
    ):
        if place is None or q is None:
            continue
        x = args[place]
        if "conv" in str(o.op) and q.block == (1, -1):
            channel = place == 1 and "transpose" in str(o.op)  # of the weight: (I, O / groups, *kernel)
            q = Quantizer(q.format, tuple(1 if d == channel else -1 for d in range(x.dim())), q.scale)
        rows = x.mT if transposed and place == places[1] else x
        noise = hop.noise(seed, rows.shape, stream=place) if q.stochastic else None
        fake = hop.fake_quantize(q, rows, scale=scale, zero_point=zero_point, noise=noise)
        found[place] = fake.mT if rows is not x else fake
    return found


class CodesOfRows(torch.autograd.Function):
    """linear(x, w) of int8 rows, whose gradient is made of products of codes, as docs/training.md has the formulas."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _rows(x) @ _rows(w).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = (t + 0.0 for t in ctx.saved_tensors)  # vjp runs this when its level has ended
        scale_x, scale_w = (t.detach().abs().amax(-1, keepdim=True) / 127 for t in (x, w))
        codes_x, codes_w = _rows(x.detach()) / scale_x, _rows(w.detach()) / scale_w
        of_x = _rows(grad.detach() * scale_w.mT) @ codes_w
        of_w = _rows((grad.detach() * scale_x).mT) @ codes_x
        return _with(of_x, grad @ _rows(w)), _with(of_w, grad.mT @ _rows(x))

    @staticmethod
    def jvp(ctx: Any, dx: Any, dw: Any) -> Tensor:  # type: ignore[override]
        x, w = ctx.saved_tensors
        zero = torch.zeros(())
        return (zero if dx is None else dx @ _rows(w).mT) + (zero if dw is None else _rows(x) @ dw.mT)


def _rows(x: Tensor) -> Tensor:
    return hop.fake_quantize(presets.INT8_ROW, x)


def _with(value: Tensor, linear: Tensor) -> Tensor:
    """`value`, with the derivatives of `linear`."""
    return value + (linear - linear.detach())


_PLAIN_GRAD = Scheme(presets.INT8_ROW, presets.INT8_ROW, grad=Quantizer(INT8, (1, -1)), backward="quantized")
_OUTPUT = Scheme(presets.INT8_ROW, presets.INT8_ROW, output=presets.INT8_TENSOR_STATIC_AFFINE)
_X, _W, _B = F((6, 40)), F((7, 40)), F((7,))
linear = aten.linear.default

QUANTIZED = [
    QuantizedOperator("mm", aten.mm.default, (_X, F((40, 7))), schemes.INT8_DYNAMIC),
    QuantizedOperator("bmm", aten.bmm.default, (F((3, 6, 40)), F((3, 40, 7))), schemes.INT8_DA_INT4_W),
    QuantizedOperator("addmm", aten.addmm.default, (_B, _X, F((40, 7))), schemes.INT8_DYNAMIC,
        kwargs=(("beta", 2), ("alpha", 3))),
    QuantizedOperator("linear", linear, (F((2, 3, 40)), _W, _B), schemes.INT8_DYNAMIC),
    QuantizedOperator("linear_static", linear, (_X, _W, _B), schemes.INT8_STATIC, (0.03, 5.0)),
    QuantizedOperator("linear_groups", linear, (_X, _W), schemes.INT8_DA_INT4_W),
    QuantizedOperator("linear_weight_only", linear, (_X, _W), schemes.INT4_WEIGHT_32, exact=False),
    QuantizedOperator("linear_ternary", linear, (_X, _W), schemes.INT8_DA_TERNARY_W),
    QuantizedOperator("linear_output", linear, (_X, _W, _B), _OUTPUT, (None, None, None, None, 0.2, 3.0)),
    QuantizedOperator("linear_codes", linear, (_X, _W), _PLAIN_GRAD, inner=CodesOfRows.apply),
    QuantizedOperator("linear_mx", linear, (_X, _W, _B), Scheme(presets.MXFP8, presets.MXFP8), exact=False),
    QuantizedOperator("linear_stochastic", linear, (_X, _W),
        Scheme(presets.INT8_ROW, Quantizer(INT8, (1, -1), stochastic=True))),
    QuantizedOperator("conv1d", aten.conv1d.default, (F((2, 3, 9)), F((4, 3, 3)), None, [2], [1]),
        schemes.INT8_DYNAMIC),
    QuantizedOperator("conv2d", aten.conv2d.default,
        (F((2, 4, 6, 5)), F((6, 2, 3, 3)), F((6,)), [1, 2], [1, 0], [1, 1], 2), schemes.INT8_STATIC, (0.03, 5.0)),
    QuantizedOperator("conv3d", aten.conv3d.default, (F((1, 2, 4, 5, 4)), F((3, 2, 2, 3, 2))), schemes.INT8_DYNAMIC),
    QuantizedOperator("conv_transpose1d", aten.conv_transpose1d.default,
        (F((2, 3, 5)), F((3, 4, 3)), None, [2], [1], [1]), schemes.INT8_DYNAMIC),
    QuantizedOperator("conv_transpose2d", aten.conv_transpose2d.input,
        (F((2, 4, 4, 5)), F((4, 3, 3, 2)), F((6,)), [2, 1], [1, 0], [1, 0], 2, [1, 2]), schemes.INT8_STATIC,
        (0.03, 5.0)),
    QuantizedOperator("conv_transpose3d", aten.conv_transpose3d.input,
        (F((1, 2, 3, 2, 3)), F((2, 3, 2, 3, 2)), F((3,)), [2, 2, 2]), schemes.INT8_DYNAMIC),
    QuantizedOperator("embedding", aten.embedding.default, (F((9, 40)), F((2, 3), 9)), schemes.INT4_WEIGHT_32),
]  # fmt: skip
