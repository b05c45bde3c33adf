"""Operators of PyTorch on quantized tensors: numbers and gradients of the dequantized tensors.

Samples are those of PyTorch's own tests."""

import itertools
import unittest
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils._pytree import tree_leaves, tree_map

import hop
from hop import QuantizedTensor
from hop import presets as P

LEFT_OUT = {
    **dict.fromkeys(("empty_like", "new_empty", "empty_permuted", "new_empty_strided"), "not initialized"),
    **dict.fromkeys(("resize_", "resize_as_"), "raise: they change the shape of an argument"),
    **dict.fromkeys(("as_strided", "stft"), "raise: windows that overlap are no view of codes"),
}
OPERATORS = [op for op in invocations.op_db if torch.float32 in op.dtypes and op.name not in LEFT_OUT]
FOREACH = [
    *(*invocations.foreach_unary_op_db, *invocations.foreach_binary_op_db, *invocations.foreach_pointwise_op_db),
    *(*invocations.foreach_reduce_op_db, *invocations.foreach_other_op_db),
]
GROUPS = 40
SOME = ["nn.functional.hinge_embedding_loss", "nn.functional.pad", "cat", "stack", "rsub", "_native_batch_norm_legit"]


def quantized(x: Any, q: Any) -> Any:
    if type(x) is not Tensor or x.dtype != torch.float32 or x.layout != torch.strided or not x.numel():
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
    with torch.no_grad():
        return hop.quantize(q, x.contiguous()).requires_grad_(x.requires_grad)


def dequantized(x: Any) -> Any:
    if isinstance(x, QuantizedTensor):
        return hop.dequantize(x.detach()).contiguous().requires_grad_(x.requires_grad)
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def results(op: Any, call: Any) -> list[Any]:
    """What `op` gives, and the gradients of its arguments; or the error."""
    torch.manual_seed(0)
    first, args, kwargs = call
    leaves = [x for x in tree_leaves(call) if isinstance(x, Tensor) and x.requires_grad]
    try:
        out = tree_leaves(op(first, *args, **kwargs))
        with_gradients = [x for x in out if isinstance(x, Tensor) and x.requires_grad]
        if with_gradients and leaves:
            generator = torch.Generator().manual_seed(1)
            grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in with_gradients]
            out += torch.autograd.grad(with_gradients, leaves, grads, allow_unused=True)
    except Exception as error:  # noqa: BLE001  whatever PyTorch raises
        return [error]
    return out


def assert_close(got: Any, want: Any) -> None:
    """Equal, but for the order of sums, which another layout in memory may change."""
    assert isinstance(got, Tensor) == isinstance(want, Tensor)
    if not isinstance(want, Tensor):
        assert got == want or got != got
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    got, want = (dequantized(x).detach().to_dense() for x in (got, want))
    exact = not (want.is_floating_point() or want.is_complex())
    largest = want.abs().nan_to_num(0, 0, 0).max().item() if not exact and want.numel() and not want.is_complex() else 1
    torch.testing.assert_close(
        got, want, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4 * largest, equal_nan=True
    )


def calls(op: Any, q: Any, requires_grad: bool) -> Iterator[Any]:
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=requires_grad):
        call = tree_map(lambda x: quantized(x, q), (sample.input, sample.args, sample.kwargs))
        if any(isinstance(x, QuantizedTensor) for x in tree_leaves(call)):
            yield call


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
class TestOperators(unittest.TestCase):
    def check(self, operators: list[Any], q: Any) -> int:
        count = 0
        for op in operators:
            for i, call in enumerate(calls(op, q, op.supports_autograd)):
                want = results(op.op, tree_map(dequantized, call))
                if isinstance(want[0], Exception):
                    continue
                with self.subTest(op=op.full_name, sample=i):
                    got = results(op.op, call)
                    assert not isinstance(got[0], Exception), got
                    assert len(got) == len(want)
                    for g, w in zip(got, want, strict=True):
                        assert_close(g, hop.quantize(q, w) if g is call[0] else w)  # written in place
                count += 1
        return count

    @parameterized.expand([("int8", P.INT8_ROW), ("int4", P.INT4_32)])
    @pytest.mark.full
    def test_some(self, _name, q):
        assert self.check([op for op in OPERATORS if op.name in SOME], q) > 100

    @parameterized.expand([(str(i), i) for i in range(GROUPS)])
    @pytest.mark.full
    @pytest.mark.sampled(8)
    def test_all(self, _name, group):
        q = (P.INT8_ROW, P.INT4_32)[group % 2]
        chosen = [op for op in OPERATORS if zlib.crc32(op.name.encode()) % GROUPS == group]
        assert self.check(chosen, q) > 0

    @parameterized.expand(itertools.product(("int8", "int4"), ("whole", "transposed", "step", "expanded")))
    def test_gradients_that_depend_on_strides(self, name: str, view: str):
        """The derivatives of these transpose the factors of contiguous matrices. The codes of int4 rows are padded."""
        q = {"int8": P.INT8_ROW, "int4": P.INT4_32}[name]
        views = {"whole": lambda x: x, "transposed": lambda x: x.mT, "step": lambda x: x[::2]}
        views["expanded"] = lambda x: x[:1].expand(3, -1, -1)
        x = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1)) + 2 * torch.eye(5)
        for op in (torch.logdet, torch.linalg.det, torch.linalg.slogdet, torch.linalg.inv, torch.linalg.solve):
            args = (torch.ones(5, 2),) if op is torch.linalg.solve else ()
            call = (quantized(x, q).requires_grad_(), args, {})
            got, want = (
                results(lambda x, *args, op=op: op(views[view](x), *args), c)
                for c in (call, tree_map(dequantized, call))
            )
            assert len(got) == len(want) >= 2
            for g, w in zip(got, want, strict=True):
                assert_close(g, w)

    @parameterized.expand([(op.name, op) for op in FOREACH])
    @pytest.mark.quick(30)
    def test_foreach(self, _name, op):
        """Lists of quantized and plain tensors, into which the operators in place write what is quantized anew."""
        for in_place in (False, True):
            function = op.inplace_variant if in_place else op.method_variant
            for i, sample in enumerate(op.sample_inputs("cpu", torch.float32, noncontiguous=False) if function else ()):
                first = [x if j == 1 else quantized(x, P.INT8_ROW) for j, x in enumerate(sample.input)]
                args = tree_map(lambda x: quantized(x, P.INT8_ROW), sample.args)
                plain = tree_map(dequantized, (first, args, sample.kwargs))
                want = results(function, plain)
                if isinstance(want[0], Exception) or not any(isinstance(x, QuantizedTensor) for x in first):
                    continue
                with self.subTest(sample=i, in_place=in_place):
                    got = results(function, (first, args, sample.kwargs))
                    assert not any(isinstance(x, Exception) for x in got), got
                    got, want = (first, plain[0]) if in_place else (got, want)
                    for g, w in zip(got, want, strict=True):
                        w = (
                            dequantized(hop.quantize(P.INT8_ROW, w))
                            if isinstance(g, QuantizedTensor) and in_place
                            else w
                        )
                        assert_close(g, w)
