"""Results for tensors without values: those that the reference gives, from fewer operators."""

import itertools
import unittest
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import hop
from hop import presets
from hop.dispatch.operand import Operand, encode
from hop.impls.scaled import scaled_buffers
from hop.numerics import memory_format
from hop.numerics.formats import INT4, INT8
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FloatMultiplier
from hop.numerics.scale_rules import Static
from tests.support.scaled import SCALED, P, Q, ScaledOperator

aten = torch.ops.aten
OUTPUTS = (
    *(torch.float32, torch.bfloat16, presets.INT8_TENSOR_STATIC_AFFINE, presets.INT8_ROW, presets.MXFP8),
    Quantizer(INT8, scale=Static(affine=True, requantize=FloatMultiplier(low=0.0))),
    Quantizer(INT4, (-1,), Static()),
)
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


def turned(x: Any) -> Any:
    """x, which lies channels last, or transposed."""
    if isinstance(x, list):
        return [turned(v) for v in x]
    if isinstance(x, Operand):
        return x._replace(tensors=(turned(x.tensors[0]), *x.tensors[1:])) if x.quantizer.keeps_memory_format() else x
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 3 else x.mT.contiguous().mT


def result(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The form of what it returns, or the error."""
    try:
        made = function(*args, **kwargs)
    except ERRORS as e:
        return type(e), str(e)
    tensors = list(made) if isinstance(made, list | tuple) else [made]
    return [(t.shape, t.dtype, t.stride(), t.storage_offset(), t.device, t.requires_grad) for t in tensors]


def wrong(operator: ScaledOperator) -> Iterator[ScaledOperator]:
    """The call with an operand that has one element more, or less, in one dimension."""
    for i, x in enumerate(operator.args):
        if isinstance(x, Q | P):
            for dim, more in itertools.product(range(len(x.shape)), (-1, 1)):
                shape = (*x.shape[:dim], x.shape[dim] + more, *x.shape[dim + 1 :])
                yield replace(operator, args=(*operator.args[:i], replace(x, shape=shape), *operator.args[i + 1 :]))


def compare(operator: ScaledOperator, output: Any, args: list[Any]) -> Any:
    """The fake and the reference on fakes, which are equal; None where what is given is refused before."""
    spelled = str(output) if isinstance(output, Quantizer) else output
    static = isinstance(output, Quantizer) and isinstance(output.scale, Static)
    scale = torch.tensor(0.5) if static else None
    zero_point = torch.tensor(3, dtype=torch.int8) if static and output.scale.has_zero_point() else None
    with FakeTensorMode() as mode:
        given = tree_map_only(Tensor, mode.from_tensor, (spelled, scale, zero_point, *encode(args)))
        try:
            checked, named = scaled_buffers.check(operator.op, *given, **operator.kwargs)
        except ERRORS:
            return None
        want = result(scaled_buffers.reference, *checked, **named)
        assert result(scaled_buffers.fake, *checked, **named) == want, operator.name
        if not isinstance(want[0], type):  # and the call, the first time and once more
            assert result(scaled_buffers, operator.op, *given, **operator.kwargs) == want
            assert result(scaled_buffers, operator.op, *given, **operator.kwargs) == want
    return want


class TestScaled(unittest.TestCase):
    @parameterized.expand([(o.name, o) for o in SCALED])
    @pytest.mark.quick(36)
    def test_are_those_of_the_reference(self, _name: str, operator: ScaledOperator) -> None:
        """Contiguous operands and others, for every kind of output."""
        operands, count = operator._operands(), 0
        for output, args in itertools.product((operator.output, *OUTPUTS), (operands, turned(operands))):
            count += compare(operator, output, args) is not None
        assert count >= 10

    @parameterized.expand([(o.name, o) for o in SCALED])
    @pytest.mark.quick(30)
    def test_errors_are_those_of_the_reference(self, _name: str, operator: ScaledOperator) -> None:
        for other in wrong(operator):
            try:
                args = other._operands()
            except ERRORS:
                continue
            compare(other, torch.float32, args)
            compare(other, presets.INT8_TENSOR_STATIC_AFFINE, args)

    def test_some_errors(self) -> None:
        """So that there are such to compare."""
        x, norm = Q((4, 6)), aten.layer_norm.default
        short = ScaledOperator("norm", norm, (x, [6], P((5,))))
        found = compare(short, torch.float32, short._operands())
        assert found[0] is RuntimeError and "length 5" in found[1]

    def test_few_operators(self) -> None:
        """Of a product of integers, as of one of floats."""

        class Counter(TorchDispatchMode):
            supports_higher_order_operators, count = True, 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.count += 1
                return func(*args, **(kwargs or {}))

        for shapes, op, most in (
            (((5, 64), (7, 64)), aten.linear.default, 8),
            (((2, 3, 5, 8),) * 3, aten.scaled_dot_product_attention.default, 100),
        ):
            operands = [hop.quantize(presets.INT8_ROW, torch.randn(s)).operand for s in shapes]
            counts: list[int] = []
            with FakeTensorMode() as mode:
                given = [torch.float32, None, None, *tree_map_only(Tensor, mode.from_tensor, encode(operands))]
                for run in (scaled_buffers.fake, scaled_buffers.reference):
                    with Counter() as counter:
                        run(op, *given)
                    counts.append(counter.count)
            assert counts[0] <= most and counts[0] < counts[1], counts

    def test_channels_last(self) -> None:
        x = hop.quantize(presets.INT8_TENSOR, torch.randn(2, 4, 6, 5).contiguous(memory_format=torch.channels_last))
        with FakeTensorMode() as mode:
            fake = tree_map_only(Tensor, mode.from_tensor, encode([x.operand]))
            made = scaled_buffers.fake(aten.relu.default, torch.float32, None, None, *fake)
        assert memory_format.is_channels_last(made)
