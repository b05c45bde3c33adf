"""Calls of scaled, as cases for the routes.

What they must return is what the operator's reference gives (test_scaled.py holds that against numpy), bit for bit for
integers. Their gradients are those of the operator on fake-quantized floats.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hop
from hop import presets
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import scaled_buffers
from hop.numerics import copies
from hop.numerics.formats import INT4, INT8, UINT5, UINT6, Integer
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import GEMMLOWP
from hop.numerics.scale_rules import Static, StoredScales
from hop.tensor.proto import TensorProto
from tests.support.case import Case

aten = torch.ops.aten


@dataclass(frozen=True)
class Q:
    """A quantized operand."""

    shape: tuple[int, ...]
    quantizer: Quantizer = presets.INT8_ROW
    packed: bool = False

    def made(self, x: Tensor) -> Any:
        """x, quantized."""
        t = hop.quantize(self.quantizer, x)
        return hop.pack(t) if self.packed else t


@dataclass(frozen=True)
class P:
    """A plain operand: floats, or integers below `rows`."""

    shape: tuple[int, ...]
    rows: int = 0


@dataclass(frozen=True)
class ScaledOperator:
    name: str
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = torch.float32  # a dtype or a Quantizer
    terms: int = 40  # how many products one element of the result sums
    plain: tuple[int, ...] = ()  # arguments that may be plain floats while the others stay quantized
    rounds: bool = False  # what lies between, so that the result is further from that of floats than sums round

    # ---- the case of its values

    def case(self) -> Case:
        """The call as a function of buffers and of plain operands."""
        whole, tensors = self._operands(), []
        for x in _flat(whole):
            tensors += list(x.tensors) if isinstance(x, Operand) else [x] if isinstance(x, Tensor) else []
        output = str(self.output) if isinstance(self.output, Quantizer) else self.output
        scale = [torch.tensor(0.5), torch.tensor(3.0)] if self._is_static() else []

        def filled(given: list[Tensor]) -> list[Any]:
            def one(x: Any) -> Any:
                if isinstance(x, list):
                    return [one(v) for v in x] if any(isinstance(v, Operand | Tensor) for v in x) else x
                if isinstance(x, Operand):
                    return x._replace(tensors=tuple(given.pop(0) for _ in x.tensors))
                return given.pop(0) if isinstance(x, Tensor) else x

            return [one(x) for x in whole]

        def function(*given: Tensor) -> Tensor:
            rest = list(given)
            args = [_rebuilt(x) for x in filled(rest)]
            options = dict(zip(("output_scale", "output_zero_point"), rest, strict=False))
            out = hop.scaled(self.op, self.output, *args, **options, **self.kwargs)
            return hop.dequantize(out) if isinstance(self.output, Quantizer) else out

        def reference(*given: Tensor) -> Tensor:
            rest = list(given)
            encoded = encode(filled(rest))
            out = scaled_buffers.reference(self.op, output, *(rest or [None, None]), *encoded, **self.kwargs)
            if not isinstance(self.output, Quantizer):
                return out
            return self.output.dequantize(dict(zip(self.output.buffers(shape), out, strict=True)), shape)

        def inner(*given: Tensor) -> Tensor:
            args = [_numbers(x) for x in filled(list(given))]
            return self.op(*args, **self.kwargs)

        shape = list(inner(*tensors).shape)
        want = reference(*tensors, *scale)
        bound = 0.0 if self._is_exact() else self._bound()

        def check(got: Tensor) -> None:
            assert got.dtype == want.dtype and got.shape == want.shape, self.name
            if bound == 0:
                assert torch.equal(got, want), f"{self.name}: {int((got != want).sum())} of {want.numel()} differ"
            else:
                error = float((got.double() - want.double()).abs().max())
                assert error <= bound + float(want.double().abs().max()) * torch.finfo(want.dtype).eps, self.name

        made = Case(
            function=function,
            tensors=[*tensors, *scale],
            check=check,
            reference=reference,
            inner=inner,
            nodes=1 + isinstance(self.output, Quantizer),
            bound=bound,
            differentiable=False,
            keeps_nodes_under_vmap=False,
        )
        return made.on_device()

    def explained(self) -> str:
        """The output of hop.explain for the call."""
        names = ("output_scale", "output_zero_point")
        options = {n: torch.tensor(v) for n, v in zip(names, (0.5, 3.0), strict=True)} if self._is_static() else {}
        return hop.explain(self.op, self.output, *map(_rebuilt, self._operands()), **options, **self.kwargs)

    def _is_static(self) -> bool:
        return isinstance(self.output, Quantizer) and isinstance(self.output.scale, Static)

    def _is_exact(self) -> bool:
        """Whether its arithmetic is fixed to the bit."""
        operands = [x for x in _flat(self.args) if isinstance(x, Q | P)]
        integer = [isinstance(x, Q) and isinstance(x.quantizer.format, Integer) for x in operands]
        exact = all(integer[i] for i, x in enumerate(operands) if isinstance(x, Q)) and not self.plain
        return self.terms == 1 or exact

    def _bound(self) -> float:
        """Twice that of float32 sums: both sides round."""
        lhs, rhs = (x.values() if isinstance(x, Operand) else x for x in self._factors())
        return 2 * (self.terms + 8) * 2.0**-24 * self.terms * float(lhs.abs().max() * rhs.abs().max())

    def _factors(self) -> list[Any]:
        return [x for x in self._operands() if isinstance(x, Operand | Tensor) and x.dim() > 1][:2]

    def _operands(self) -> list[Any]:
        """The arguments, quantized ones as Operands."""
        generator = torch.Generator().manual_seed(3)

        def one(x: Any) -> Any:
            if isinstance(x, list):
                return [one(v) for v in x]
            if not isinstance(x, Q | P):
                return x
            if isinstance(x, P) and x.rows:
                return torch.randint(0, x.rows, x.shape, generator=generator)
            values = torch.randn(x.shape, generator=generator) * 2
            if isinstance(x, P):
                return values
            t = x.made(values)
            return Operand(t.quantizer, tuple(t.buffers().values()), t.usages, tuple(t.shape))

        return [one(x) for x in self.args]

    # ---- the cases of its gradients

    def gradient_cases(self) -> list[Case]:
        """The call as a function of the floats that are quantized; and of those that may be plain, in float64."""
        return [self._through_quantize(), *([self._beside_constants()] if self.plain else [])]

    def _through_quantize(self) -> Case:
        generator = torch.Generator().manual_seed(4)
        slots = [x for x in _flat(self.args) if isinstance(x, Q | P)]
        tensors = [
            torch.randint(0, x.rows, x.shape, generator=generator)
            if isinstance(x, P) and x.rows
            else torch.randn(x.shape, generator=generator) * 2
            for x in slots
        ]

        def call(quantized: Any, run: Any, given: tuple[Tensor, ...]) -> Tensor:
            rest = list(given)

            def one(x: Any) -> Any:
                if isinstance(x, list) and any(isinstance(v, Q | P) for v in x):
                    return [one(v) for v in x]
                if isinstance(x, Q):
                    return quantized(x, rest.pop(0))
                return rest.pop(0) if isinstance(x, P) else x

            return run(*(one(x) for x in self.args))

        def function(*given: Tensor) -> Tensor:
            return call(Q.made, lambda *a: hop.scaled(self.op, torch.float32, *a, **self.kwargs), given)

        def inner(*given: Tensor) -> Tensor:
            y = call(
                lambda q, x: hop.fake_quantize(q.quantizer, x), lambda *a: self.op(*a, **self.kwargs), given
            ).clone()
            return y + (function(*given) - y).detach() if self.rounds else y

        made = Case(
            function=function,
            tensors=tensors,
            check=lambda got: None,
            reference=function,
            inner=inner,
            nodes=0,
            smooth=False,
        )
        return made.on_device()

    def _beside_constants(self) -> Case:
        operands = self._operands()
        plain = [i for i, x in enumerate(operands) if i in self.plain]
        tensors = [
            x.values().double() if isinstance(x, Operand) else x.double() for i, x in enumerate(operands) if i in plain
        ]

        def filled(given: tuple[Tensor, ...], rest: Any) -> list[Any]:
            found = [rest(_moved(x, given[0].device)) for x in operands]
            for i, x in zip(plain, given, strict=True):
                found[i] = x
            return found

        def function(*given: Tensor) -> Tensor:
            return hop.scaled(self.op, torch.float64, *filled(given, _rebuilt), **self.kwargs)

        def inner(*given: Tensor) -> Tensor:
            return self.op(*filled(given, lambda x: _doubled(_numbers(x))), **self.kwargs)

        made = Case(
            function=function, tensors=tensors, check=lambda got: None, reference=function, inner=inner, nodes=1
        )
        return made.on_device()


def _flat(args: Any) -> list[Any]:
    return [x for a in args for x in (a if isinstance(a, list) else [a])]


def _moved(x: Any, device: torch.device) -> Any:
    """An argument with its tensors on a device; those that are there stay, so that torch.func leaves them alone."""
    if isinstance(x, list):
        return [_moved(v, device) for v in x]
    if isinstance(x, Operand):
        return x._replace(tensors=tuple(_moved(t, device) for t in x.tensors))
    return x.to(device) if isinstance(x, Tensor) and x.device != device else x


def _rebuilt(x: Any) -> Any:
    """A QuantizedTensor of an Operand's tensors."""
    if isinstance(x, list):
        return [_rebuilt(v) for v in x]
    if not isinstance(x, Operand):
        return x
    return TensorProto(x.shape, torch.float32, quantizer=x.quantizer, usages=x.usages).create_tensor(x.tensors)


def _numbers(x: Any) -> Any:
    if isinstance(x, list):
        return [_numbers(v) for v in x]
    return copies.dequantize(x.quantizer, x.buffers, x.shape) if isinstance(x, Operand) else x


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


_AFFINE, _ROW, _TENSOR = presets.INT8_ROW_AFFINE, presets.INT8_ROW, presets.INT8_TENSOR
_STATIC = presets.INT8_TENSOR_STATIC_AFFINE
_CHANNEL, _WHOLE = presets.INT8_CONV, presets.UINT8_TENSOR_AFFINE
_CHANNEL1 = Quantizer(INT8, (1, -1, -1))
_CHANNEL3 = Quantizer(INT8, (1, -1, -1, -1, -1))
_SUPERBLOCK = Quantizer(UINT5, (1, 16), StoredScales(UINT6, (1, 32), offset=True), layout=Planes())
_GROUPS = Quantizer(INT4, (1, 4))
_GEMMLOWP = Quantizer(INT8, scale=Static(affine=True, requantize=GEMMLOWP))

SCALED = [
    ScaledOperator("mm", aten.mm.default, (Q((5, 24), _AFFINE), Q((24, 7), presets.INT8_COLUMN))),
    ScaledOperator("bmm", aten.bmm.default, (Q((3, 5, 24)), Q((3, 24, 7), _TENSOR))),
    ScaledOperator(
        "addmm",
        aten.addmm.default,
        (P((7,)), Q((5, 24), presets.INT4_32), Q((24, 7), presets.INT8_COLUMN)),
        {"beta": 2, "alpha": 3},
    ),
    ScaledOperator(
        "baddbmm",
        aten.baddbmm.default,
        (P((3, 1, 7)), Q((3, 5, 24), presets.UINT8_ROW_AFFINE), Q((3, 24, 7), _TENSOR)),
        {"beta": 0.5},
    ),
    ScaledOperator("matmul", aten.matmul.default, (Q((2, 1, 5, 24)), Q((3, 24, 7), _TENSOR))),
    ScaledOperator("linear", aten.linear.default, (Q((2, 3, 40), _AFFINE), Q((7, 40)), P((7,))), output=torch.bfloat16),
    ScaledOperator(
        "linear_groups", aten.linear.default, (Q((2, 3, 40), _AFFINE), Q((7, 40), presets.UINT4_32_AFFINE), P((7,)))
    ),
    ScaledOperator(
        "linear_weight_only",
        aten.linear.default,
        (P((2, 3, 40)), Q((7, 40), presets.INT4_32), P((7,))),
        plain=(0, 2),
    ),
    ScaledOperator(
        "linear_superblock",
        aten.linear.default,
        (P((2, 3, 64)), Q((7, 64), _SUPERBLOCK), P((7,))),
        terms=64,
        plain=(0, 2),
    ),
    ScaledOperator(  # three blocks, which two processes cannot share: they would add their halves in another order
        "linear_offsets", aten.linear.default, (Q((2, 3, 96), presets.INT8_32), Q((7, 96), _SUPERBLOCK), P((7,)))
    ),
    ScaledOperator(
        "linear_fp8",
        aten.linear.default,
        (Q((2, 3, 40), presets.FP8_ROW), Q((7, 40), presets.FP8_E5M2_ROW), P((7,))),
        plain=(0, 2),
    ),
    ScaledOperator(
        "linear_nvfp4",
        aten.linear.default,
        (Q((2, 3, 40), presets.NVFP4), Q((7, 40), presets.NVFP4, packed=True), P((7,))),
        output=torch.bfloat16,
        plain=(0,),
    ),
    ScaledOperator("linear_dynamic", aten.linear.default, (Q((2, 3, 40)), Q((7, 40)), P((7,))), output=_AFFINE),
    ScaledOperator("linear_static", aten.linear.default, (Q((2, 3, 40)), Q((7, 40)), P((7,))), output=_STATIC),
    ScaledOperator("linear_fixed_point", aten.linear.default, (Q((2, 3, 40)), Q((7, 40)), P((7,))), output=_GEMMLOWP),
    ScaledOperator("conv1d", aten.conv1d.default, (Q((2, 3, 9), _WHOLE), Q((4, 3, 3), _CHANNEL1), None, [2], [1])),
    ScaledOperator(
        "conv2d",
        aten.conv2d.default,
        (Q((2, 4, 6, 5), _WHOLE), Q((6, 2, 3, 3), _CHANNEL), P((6,)), [1, 2], [1, 0], [1, 1], 2),
        output=_STATIC,
    ),
    ScaledOperator(
        "conv2d_same",
        aten.conv2d.padding,
        (P((2, 3, 6, 5)), Q((4, 3, 2, 3), presets.FP8_TENSOR), None, [1, 1], "same"),
        plain=(0,),
    ),
    ScaledOperator("conv3d", aten.conv3d.default, (Q((1, 2, 4, 5, 4), _TENSOR), Q((3, 2, 2, 3, 2), _CHANNEL3))),
    ScaledOperator(
        "conv_transpose2d",
        aten.conv_transpose2d.input,
        (
            *(Q((2, 4, 4, 3), _TENSOR), Q((4, 3, 3, 2), Quantizer(INT8, (-1, 1, -1, -1)))),
            *(P((6,)), [2, 3], [1, 0], [1, 2], 2, [1, 1]),
        ),
    ),
    ScaledOperator("embedding", aten.embedding.default, (Q((9, 40), presets.INT4_32), P((2, 3), 9)), terms=1),
    ScaledOperator("add", aten.add.Tensor, (Q((4, 1, 5), _AFFINE), Q((3, 5), _TENSOR)), {"alpha": 3}, _STATIC, terms=1),
    ScaledOperator("sub", aten.sub.Tensor, (Q((4, 5), presets.FP8_ROW), P((4, 5))), terms=1, plain=(1,)),
    ScaledOperator("mul", aten.mul.Tensor, (Q((4, 1, 5)), Q((3, 5), _WHOLE)), output=_GEMMLOWP, terms=1),
    ScaledOperator("cat", aten.cat.default, ([Q((4, 5)), Q((4, 3), _WHOLE)], 1), output=_TENSOR, terms=1),
    ScaledOperator("relu", aten.relu.default, (Q((4, 6), _AFFINE),), output=_STATIC, terms=1),
    ScaledOperator("clamp", aten.clamp.default, (Q((4, 6), presets.MXFP8), -1.01, 2.49), terms=1),
    ScaledOperator("relu6", aten.relu6.default, (Q((4, 6), _TENSOR),), output=_STATIC, terms=1),
    ScaledOperator(
        "upsample_nearest2d", aten.upsample_nearest2d.vec, (Q((2, 3, 6, 5), _WHOLE), None, [2.0, 2.0]), terms=1
    ),
    ScaledOperator(
        "upsample_bilinear2d", aten.upsample_bilinear2d.vec, (Q((2, 3, 6, 5), _WHOLE), [9, 13], False, None), terms=1
    ),
    ScaledOperator("hardtanh", aten.hardtanh.default, (Q((4, 6), _TENSOR),), output=_STATIC, terms=1),
    ScaledOperator("max_pool2d", aten.max_pool2d.default, (Q((2, 3, 6, 5), _WHOLE), [3, 2], [2, 2], [1, 1]), terms=1),
    ScaledOperator(
        "avg_pool2d",
        aten.avg_pool2d.default,
        (Q((2, 3, 6, 5), _WHOLE), [3, 2], [2, 2], [1, 1]),
        output=_STATIC,
        terms=1,
    ),
    ScaledOperator(
        "adaptive_avg_pool2d", aten.adaptive_avg_pool2d.default, (Q((2, 3, 6, 5), _TENSOR), [2, 3]), terms=1
    ),
    ScaledOperator("mean", aten.mean.dim, (Q((4, 6, 5), _AFFINE), [0, 2]), output=_TENSOR, terms=1),
    ScaledOperator("permute", aten.permute.default, (Q((4, 6, 5)), [2, 0, 1]), output=_STATIC, terms=1),
    ScaledOperator("gelu", aten.gelu.default, (Q((4, 6), _TENSOR),), output=_STATIC, terms=1),
    ScaledOperator("gelu_tanh", aten.gelu.default, (Q((4, 6), _AFFINE),), {"approximate": "tanh"}, terms=1),
    ScaledOperator("tanh", aten.tanh.default, (Q((4, 6), presets.MXFP8),), output=_AFFINE, terms=1),
    ScaledOperator("exp", aten.exp.default, (Q((4, 6), _TENSOR),), terms=1),
    ScaledOperator("hardswish", aten.hardswish.default, (Q((4, 6), _TENSOR),), output=_STATIC, terms=1),
    ScaledOperator("leaky_relu", aten.leaky_relu.default, (Q((4, 6)), 0.1), output=torch.bfloat16, terms=1),
    ScaledOperator("silu_mul", torch.ops.hop.silu_mul.default, (Q((4, 6)), P((4, 6))), output=_AFFINE, terms=1),
    ScaledOperator("div", aten.div.Scalar, (Q((4, 6), _AFFINE), 3.0), terms=1),
    ScaledOperator("maximum", aten.maximum.default, (Q((4, 6), _AFFINE), Q((6,), _TENSOR)), output=_ROW, terms=1),
    ScaledOperator("prelu", aten.prelu.default, (Q((4, 6), _AFFINE), Q((6,), _TENSOR)), output=_STATIC, terms=1),
    ScaledOperator("amax", aten.amax.default, (Q((4, 6), _AFFINE), [1]), output=_STATIC, terms=1),
    ScaledOperator("softmax", aten.softmax.int, (Q((3, 4, 6), _AFFINE), -1), output=_STATIC, terms=1),
    ScaledOperator("log_softmax", aten.log_softmax.int, (Q((3, 4, 6)), 1), terms=1),
    ScaledOperator(
        "layer_norm", aten.layer_norm.default, (Q((3, 4, 6)), [6], P((6,)), P((6,))), output=_AFFINE, terms=1
    ),
    ScaledOperator("hadamard", torch.ops.hop.hadamard.default, (Q((3, 4, 16), _AFFINE), 8), output=_ROW, terms=8),
    ScaledOperator(
        "attention",
        aten.scaled_dot_product_attention.default,
        (Q((2, 3, 5, 8)), Q((2, 3, 7, 8)), Q((2, 3, 7, 6), _TENSOR), None, 0.0, True),
        output=torch.bfloat16,
        rounds=True,
    ),
    ScaledOperator(
        "attention_grouped",
        aten.scaled_dot_product_attention.default,
        (Q((2, 4, 5, 8)), Q((2, 2, 7, 8), _AFFINE), Q((2, 2, 7, 6)), P((5, 7))),
        {"scale": 0.5, "enable_gqa": True},
        output=_ROW,
        rounds=True,
    ),
    ScaledOperator(
        "attention_of_groups",
        aten.scaled_dot_product_attention.default,
        (Q((2, 3, 5, 8)), Q((2, 3, 7, 8), _GROUPS), Q((2, 3, 7, 6), _GROUPS)),
        rounds=True,
    ),
    ScaledOperator(
        "attention_floats",
        aten.scaled_dot_product_attention.default,
        (P((2, 5, 8)), Q((2, 7, 8), presets.FP8_ROW), Q((2, 7, 6), presets.FP8_ROW), P((2, 5, 7))),
        plain=(0, 3),
    ),
    ScaledOperator("rms_norm", aten.rms_norm.default, (Q((3, 4, 6)), [4, 6], P((4, 6)), 1e-6), terms=1),
]
