"""What cannot work says so: the same type and words in eager, under torch.compile, under export and with fakes."""

import unittest
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hop
from tests.support.errors import assert_refused

aten = torch.ops.aten


def i8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8)


A, B = i8(2, 3), i8(3, 4)
# name, error, words that it must hold, arguments
CASES: list[tuple[str, type[Exception], list[str], tuple[Any, ...]]] = [
    ("mutable", ValueError, ["aten.add_.Tensor", "functional"], (aten.add_.Tensor, torch.int32, A, A)),
    ("out_variant", ValueError, ["aten.mm.out", "functional"], (aten.mm.out, torch.int32, A, B)),
    ("several_outputs", ValueError, ["exactly one tensor", "topk"], (aten.topk.default, torch.int32, A, 1)),
    ("list_output", ValueError, ["exactly one tensor", "split"], (aten.split.Tensor, torch.int32, A, 1)),
    ("no_tensor", ValueError, ["exactly one tensor", "equal"], (aten.equal.default, torch.int32, A, A)),
    ("random", ValueError, ["aten.rand_like.default", "random"], (aten.rand_like.default, torch.float32, A)),
    ("dropout", ValueError, ["aten.dropout.default", "random"], (aten.dropout.default, torch.float32, A, 0.5, True)),
    ("packet", ValueError, ["aten.mm", "aten.mm.default", "overload"], (aten.mm, torch.int32, A, B)),
    ("function", ValueError, ["overload", "built-in"], (torch.mm, torch.int32, A, B)),
    ("dtype_name", TypeError, ["output_dtype", "'int32'", "torch.int32"], (aten.mm.default, "int32", A, B)),
    ("dtype_none", TypeError, ["output_dtype", "None"], (aten.mm.default, None, A, B)),
    ("quantized_dtype", TypeError, ["output_dtype", "torch.qint8"], (aten.mm.default, torch.qint8, A, B)),
    ("packed_operand", TypeError, ["'mat2'", "torch.float4_e2m1fn_x2", "aten.mm.default"],
        (aten.mm.default, torch.int32, A, torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))),
    ("too_few", RuntimeError, ["'mat2'", "aten.mm.default"], (aten.mm.default, torch.int32, A)),
    ("too_many", RuntimeError, ["2 positional", "aten.mm.default"], (aten.mm.default, torch.int32, A, B, A)),
    ("devices", RuntimeError, ["'mat2'", "meta", "cpu"], (aten.mm.default, torch.int32, A, B.to("meta"))),
    ("shapes", RuntimeError, ["'mat2'", "(2, 3)"], (aten.mm.default, torch.int32, A, A)),
    ("shapes_bmm", RuntimeError, ["'mat2'", "(3, 4, 5)"], (aten.bmm.default, torch.int32, i8(2, 3, 4), i8(3, 4, 5))),
    ("shapes_linear", RuntimeError, ["'weight'", "(5, 4)"], (aten.linear.default, torch.int32, A, i8(5, 4))),
    ("rank", RuntimeError, ["'self'", "(2, 3, 4)"], (aten.mm.default, torch.int32, i8(2, 3, 4), B)),
    ("channels", RuntimeError, ["'input'", "channels"],
        (aten.conv2d.default, torch.int32, i8(1, 3, 5, 5), i8(2, 2, 3, 3))),
    ("kernel_too_large", RuntimeError, ["'weight'", "larger"],
        (aten.conv2d.default, torch.int32, i8(1, 2, 2, 2), i8(2, 2, 3, 3))),
    ("stride", RuntimeError, ["'stride'", "1 or more"],
        (aten.conv2d.default, torch.int32, i8(1, 2, 4, 4), i8(2, 2, 3, 3), None, [0, 1])),
    ("groups", RuntimeError, ["'groups'", "1 or more"],
        (aten.conv_transpose2d.input, torch.int32, i8(1, 2, 4, 4), i8(2, 2, 3, 3), None, 1, 0, 0, 0)),
]  # fmt: skip


class TestErrors(unittest.TestCase):
    @parameterized.expand(CASES)
    def test_eager(self, name, error, words, args):
        assert_refused(error, words, lambda: hop.out_dtype(*args))

    @parameterized.expand(CASES)
    def test_make_fx(self, name, error, words, args):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        assert_refused(error, words, lambda: make_fx(lambda *_: hop.out_dtype(*args))(*tensors))

    @parameterized.expand([c for c in CASES if c[0] != "packed_operand"])
    def test_fake(self, name, error, words, args):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            assert_refused(error, words, lambda: hop.out_dtype(*fakes))

    @parameterized.expand([c for c in CASES if c[0] != "packed_operand"])
    @pytest.mark.quick(3)
    def test_compile(self, name, error, words, args):
        """Dynamo wraps what a call raises while it traces, and keeps type and words."""

        def f(*tensors):
            rest = iter(tensors)
            return hop.out_dtype(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        # What is no overload cannot stand in a graph: Dynamo leaves the call to eager, unless it must not.
        fullgraph = name not in ("packet", "function")
        with self.assertRaises(Exception) as caught:
            torch.compile(f, backend="aot_eager", fullgraph=fullgraph)(*tensors)
        text = str(caught.exception)
        assert error.__name__ in text or isinstance(caught.exception, error), text
        for word in words:
            assert word.strip("'") in text, f"{word!r} not in: {text}"

    @parameterized.expand([("strict", True), ("nonstrict", False)])
    def test_export(self, _name, strict):
        class Bad(torch.nn.Module):
            def forward(self, x):
                return hop.out_dtype(aten.topk.default, torch.int32, x, 1)

        with self.assertRaises(Exception) as caught:
            torch.export.export(Bad(), (A,), strict=strict)
        assert "exactly one tensor" in str(caught.exception)

    def test_nothing_is_corrupted(self):
        a, b = A.clone(), B.clone()
        for _, error, _, args in CASES:
            with self.assertRaises(error):
                hop.out_dtype(*args)
        assert torch.equal(a, A) and torch.equal(b, B)
        assert torch.equal(hop.out_dtype(aten.mm.default, torch.int32, A, B), A.int() @ B.int())

    def test_codes_and_an_integer_result(self):
        x = hop.quantize(hop.presets.INT8_ROW, torch.ones(2, 4))
        codes = hop.out_dtype(aten.mm.default, torch.int32, x.codes, torch.ones(4, 2, dtype=torch.int8))
        assert torch.equal(codes, torch.full((2, 2), 4 * 127, dtype=torch.int32))

    def test_unknown_argument_name(self):
        with self.assertRaisesRegex(RuntimeError, "has no argument 'gamma'"):
            hop.out_dtype(aten.addmm.default, torch.int32, i8(4), A, B, gamma=2)
        with self.assertRaisesRegex(RuntimeError, "two values for argument 'mat1'"):
            hop.out_dtype(aten.addmm.default, torch.int32, i8(4), A, B, mat1=A)
