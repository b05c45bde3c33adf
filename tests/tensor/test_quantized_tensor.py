"""QuantizedTensor: every rule of its table over every kind of quantizer, and all that PyTorch does with a tensor."""

import copy
import functools
import io
import itertools
import pickle
import subprocess
import sys
import tempfile
import textwrap
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn, optim
from torch.optim import swa_utils

import hop
import hop.optim
from hop import QuantizedTensor, Quantizer, TensorProto
from hop import presets as P
from hop.numerics.formats import INT4, INT8
from hop.numerics.scale_rules import Static
from hop.numerics.schemes import for_convolution
from hop.tensor import table
from tests.support.files import read_back, reloaded

aten = torch.ops.aten

QUANTIZERS = {
    "int8_tensor": P.INT8_TENSOR,
    "int8_row": P.INT8_ROW,
    "int8_column": P.INT8_COLUMN,
    "int8_groups": Quantizer(INT8, (1, 32)),
    "int4": P.INT4_32,
    "uint4_affine": P.UINT4_32_AFFINE,
    "fp8_row": P.FP8_ROW,
    "fp8_tiles": P.FP8_128X128,
    "mxfp8": P.MXFP8,
    "nvfp4": P.NVFP4,
    "nvfp4_row": P.NVFP4_ROW,
    "state8": P.STATE8,
    "state4": P.STATE4,
    "flat": Quantizer(INT8, (-1,), flat=True),  # one block, flat
    "flat_odd": Quantizer(INT4, (3,), flat=True),  # blocks that end in the middle of a byte
}
BY_NAME = list(QUANTIZERS.items())
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(130, 70), (2, 1, 4, 32), (5, 3), ()]
MORE_SHAPES = [
    *[(256, 256), (129, 257), (3, 5, 96), (2, 3, 4, 32), (4, 64), (1, 33), (33, 1), (2, 1, 64), (64,), (1,), (1, 1, 1)],
    *[(0, 4), (4, 0), (0,), (2, 0, 3)],
]


def made(q: Quantizer, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    return hop.quantize(q, x, generator=generator if q.stochastic else None)


def numbers(x: Any) -> Any:
    return hop.dequantize(x).contiguous() if isinstance(x, QuantizedTensor) else x


def listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple | list) else [x]


def quietly(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The result, or the error; and the warnings of QuantizedTensor, as if there had been none before."""
    table._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out = function(*args)
        except Exception as error:  # noqa: BLE001  whatever PyTorch raises
            out = error
    return out, [str(w.message) for w in caught if "QuantizedTensor" in str(w.message)]


# ---- views: the calls of each rule

Call = Callable[[Any, Any], Any]  # of the operator and a tensor

VIEWS: dict[Any, dict[str, Call]] = {
    aten.detach.default: {"detach": lambda op, x: op(x)},
    aten.alias.default: {"alias": lambda op, x: op(x)},
    aten.view.dtype: {"view_dtype": lambda op, x: op(x, x.dtype)},
    aten.view.default: {
        "view_same": lambda op, x: op(x, x.shape),
        "view_flat": lambda op, x: op(x, [-1]),
        "view_ones": lambda op, x: op(x, [1, *x.shape, 1]),
        "view_halves": lambda op, x: op(x, [2, -1]),
        "view_rows_of_32": lambda op, x: op(x, [-1, 32]),
        "view_split_first": lambda op, x: op(x, [2, -1, *x.shape[1:]]),
        "view_split_last": lambda op, x: op(x, [*x.shape[:-1], 2, -1]),
        "view_merged": lambda op, x: op(x, [x.shape[0] * x.shape[1], *x.shape[2:]]),
        "view_too_many": lambda op, x: op(x, [7, 11, 13]),
    },
    aten._unsafe_view.default: {"unsafe_view": lambda op, x: op(x, [*x.shape, 1])},
    aten._reshape_alias.default: {
        "reshape_alias": lambda op, x: op(x, [1, *x.shape], [0, *x.stride()]) if x.dim() else op(x, [1], [1])
    },
    aten.as_strided.default: {
        "as_strided_same": lambda op, x: op(x, x.shape, x.stride()),
        "as_strided_rows": lambda op, x: op(x, [2, *x.shape[1:]], x.stride(), x.storage_offset() + x.stride(0)),
        "as_strided_one_row": lambda op, x: op(x, x.shape[1:], x.stride()[1:], x.storage_offset() + 2 * x.stride(0)),
        "as_strided_expanded": lambda op, x: op(x, [3, *x.shape], [0, *x.stride()]),
        "as_strided_ones": lambda op, x: op(x, [*x.shape, 1], [*x.stride(), 1]),
    },
    aten.t.default: {"t": lambda op, x: op(x)},
    aten.transpose.int: {
        "transpose_ends": lambda op, x: op(x, 0, -1),
        "transpose_first": lambda op, x: op(x, 0, 1),
        "transpose_none": lambda op, x: op(x, 0, 0),
        "transpose_beyond": lambda op, x: op(x, 0, 9),
    },
    aten.permute.default: {
        "permute_reversed": lambda op, x: op(x, list(range(x.dim()))[::-1]),
        "permute_none": lambda op, x: op(x, list(range(x.dim()))),
        "permute_rolled": lambda op, x: op(x, [-1, *range(x.dim() - 1)] if x.dim() else []),
        "permute_twice": lambda op, x: op(x, [0] * x.dim() or [0]),
    },
    aten.unsqueeze.default: {
        "unsqueeze_first": lambda op, x: op(x, 0),
        "unsqueeze_second": lambda op, x: op(x, 1),
        "unsqueeze_last": lambda op, x: op(x, -1),
        "unsqueeze_beyond": lambda op, x: op(x, 9),
    },
    aten.squeeze.default: {"squeeze": lambda op, x: op(x)},
    aten.squeeze.dim: {
        "squeeze_first": lambda op, x: op(x, 0),
        "squeeze_last": lambda op, x: op(x, -1),
        "squeeze_beyond": lambda op, x: op(x, 9),
    },
    aten.squeeze.dims: {"squeeze_two": lambda op, x: op(x, [0, 1])},
    aten.expand.default: {
        "expand_front": lambda op, x: op(x, [3, *x.shape]),
        "expand_ones": lambda op, x: op(x, [5 if n == 1 else -1 for n in x.shape]),
        "expand_none": lambda op, x: op(x, x.shape),
        "expand_fewer": lambda op, x: op(x, list(x.shape[1:])),
        "expand_others": lambda op, x: op(x, [n + 1 for n in x.shape]),
    },
    aten.slice.Tensor: {
        "slice_rows": lambda op, x: op(x, 0, 1, 3),
        "slice_steps": lambda op, x: op(x, 0, 0, None, 2),
        "slice_group": lambda op, x: op(x, -1, 32, 64),
        "slice_into_group": lambda op, x: op(x, -1, 1, 3),
        "slice_tile": lambda op, x: op(x, 0, 128),
        "slice_from_end": lambda op, x: op(x, 0, -2, -1),
        "slice_empty": lambda op, x: op(x, 0, 2, 1),
        "slice_all": lambda op, x: op(x, 0, -999, 999),
        "slice_no_step": lambda op, x: op(x, 0, 0, 1, 0),
        "slice_beyond": lambda op, x: op(x, 9, 0, 1),
    },
    aten.select.int: {
        "select_row": lambda op, x: op(x, 0, 1),
        "select_last_row": lambda op, x: op(x, 0, -1),
        "select_column": lambda op, x: op(x, -1, 0),
        "select_beyond": lambda op, x: op(x, 0, 999),
    },
    aten.split.Tensor: {
        "split_pairs": lambda op, x: op(x, 2),
        "split_groups": lambda op, x: op(x, 32, -1),
        "split_negative": lambda op, x: op(x, -1),
        "split_beyond": lambda op, x: op(x, 2, 9),
    },
    aten.split_with_sizes.default: {
        "sizes": lambda op, x: op(x, [1, x.shape[0] - 1]),
        "sizes_zero": lambda op, x: op(x, [0, x.shape[0]]),
        "sizes_wrong": lambda op, x: op(x, [1, 1, 1, 1, 1, 1, 1]),
    },
    aten.unbind.int: {
        "unbind": lambda op, x: op(x),
        "unbind_last": lambda op, x: op(x, -1),
        "unbind_beyond": lambda op, x: op(x, 9),
    },
}
CALLS = [(op, name, call) for op, calls in VIEWS.items() for name, call in calls.items()]

# What of VIEWS gives a plain tensor for shape (64, 128); everything else that is no error gives views.
PACKED = {
    *("view_ones", "unsafe_view", "t", "transpose_ends", "transpose_first", "permute_reversed", "permute_rolled"),
    "unsqueeze_last",  # all of these would put another dimension last
}
IN_GROUPS = {"slice_into_group", "select_column", "unbind_last"}
ROWS_MERGED = {"view_flat", "view_halves", "view_rows_of_32", "view_merged"}
FLAT = {
    *("t", "transpose_ends", "transpose_first", "permute_reversed", "permute_rolled", "expand_front"),
    *("slice_steps", "slice_group", "slice_into_group", "select_column", "split_groups", "unbind_last"),
}
ROWS_CUT = {"slice_rows", "slice_from_end", "select_row", "sizes", "unbind"}
PLAIN: dict[str, set[str]] = {
    "int8_tensor": set(),
    "int8_row": set(),
    "int8_column": ROWS_MERGED,
    "int8_groups": IN_GROUPS,
    "int4": PACKED | IN_GROUPS,
    "uint4_affine": PACKED | IN_GROUPS,
    "fp8_row": set(),
    "fp8_tiles": ROWS_CUT
    | {*IN_GROUPS, "slice_steps", "slice_tile", "slice_empty", "slice_group", "select_last_row", "split_pairs"}
    | {"split_groups"},
    "mxfp8": IN_GROUPS,
    "nvfp4": PACKED | IN_GROUPS,
    "nvfp4_row": PACKED | IN_GROUPS | ROWS_MERGED,  # an outer block must be the inner one or a whole dimension
    "state8": FLAT | ROWS_CUT | {"select_last_row"},
    "state4": FLAT,  # a row is a block
    "flat": FLAT,
    "flat_odd": FLAT | ROWS_CUT | {"slice_tile", "slice_empty", "split_pairs"},
}


def check_view(op: Any, call: Call, b: QuantizedTensor) -> set[bool]:
    """One call on `b` and on its numbers. Returns whether its results are views."""
    plain = numbers(b)
    want = quietly(call, op, plain)[0]
    got, warned = quietly(call, op, b)
    if isinstance(want, Exception):
        assert type(got) is type(want), (got, want)
        assert not warned
        return set()
    if isinstance(got, RuntimeError) and "as_strided of a QuantizedTensor" in str(got):
        return set()
    assert not isinstance(got, Exception), got
    wants, gots = listed(want), listed(got)
    assert len(gots) == len(wants) and isinstance(got, tuple | list) == isinstance(want, tuple | list)
    some = {0, len(gots) // 2, len(gots) - 1} if gots else set()
    for i, (g, w) in enumerate(zip(gots, wants, strict=True)):
        assert g.dtype == w.dtype and g.shape == w.shape, (g.dtype, g.shape, w.shape)
        assert i not in some or torch.equal(numbers(g), w)
    views = {isinstance(g, QuantizedTensor) for g in gots}
    assert len(views) <= 1
    if views == {False}:
        assert len(warned) == 1 and str(op) in warned[0] and "instead of a view" in warned[0], warned
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(op, b)
        return views
    assert not warned, warned
    for i in some:
        TensorProto.of(gots[i]).create_tensor(list(gots[i].buffers().values()))  # those of its quantizer
        if b.numel():
            check_alias(op, call, b, i)
    return views


def check_alias(op: Any, call: Call, b: QuantizedTensor, i: int) -> None:
    """Zeros written to the codes of the i-th view appear in the base, in the places of the view and in no other."""
    base, zeros = b.clone(), b.clone()
    view = listed(call(op, base))[i]
    for name, buffer in view.buffers().items():
        assert (
            not buffer.numel()
            or buffer.untyped_storage().data_ptr() == getattr(base, name).untyped_storage().data_ptr()
        )
    if any(n > 1 and s == 0 for n, s in zip(view.codes.shape, view.codes.stride(), strict=True)):
        return  # expanded: PyTorch does not write to those
    places = torch.arange(b.numel()).as_strided(b.shape, torch.empty(b.shape).stride())
    if op is aten.as_strided.default or op is aten._reshape_alias.default:  # strides are those of the tensor at hand
        places = torch.zeros(b.numel() * 2 + 2).as_strided(b.shape, b.stride()).copy_(places).to(torch.int64)
    inside = torch.zeros(b.numel(), dtype=torch.bool)
    inside[listed(call(op, places))[i].reshape(-1)] = True
    view.codes.zero_()
    zeros.codes.zero_()
    want = torch.where(inside.reshape(b.shape), numbers(zeros), numbers(b))
    assert torch.equal(numbers(base), want)


class TestTable(unittest.TestCase):
    def test_every_rule_is_tested(self):
        assert not VIEWS.keys() & OTHERS.keys()
        # tests/distributed/test_tensor.py runs all collectives, and padding
        elsewhere = {op for op in table.rules() if op.namespace in ("c10d", "_c10d_functional")}
        # tests/compat/test_control_flow.py slices by copies, as scan and map do
        elsewhere |= {aten.constant_pad_nd.default, aten.select_copy.int}
        # tests/tensor/test_collation.py joins into what is given, as DataLoader's workers do
        elsewhere |= {aten.stack.out, aten.cat.out}
        assert VIEWS.keys() | OTHERS.keys() | elsewhere == table.rules().keys()

    def test_an_operator_has_one_rule(self):
        with self.assertRaisesRegex(ValueError, "aten.clone.default has two rules: clone and another"):

            @table.implements(aten.clone.default)
            def another(op, t):
                """never called"""

    @parameterized.expand(
        [
            ("pointwise", lambda x: x + 1, "aten.add.Tensor"),
            ("reduction", lambda x: x.sum(0), "aten.sum.dim_IntList"),
            ("other_argument", lambda x: torch.mm(torch.ones(2, 4), x), "aten.mm.default"),
            ("keyword", lambda x: aten.add.Tensor(torch.ones(4, 64), other=x), "aten.add.Tensor"),
            ("list", lambda x: torch._foreach_add([x, x], 1.0)[1], "aten._foreach_add.Scalar"),
            ("like", torch.ones_like, "aten.ones_like.default"),
            ("view", lambda x: x.diagonal(), "aten.diagonal.default"),
            ("index", lambda x: x[[0, 2]], "aten.index.Tensor"),
        ]
    )
    def test_operators_without_a_rule(self, _name, function, op):
        """They run on dequantized numbers, and warn once."""
        b = made(P.INT8_ROW, 4, 64)
        got, warned = quietly(function, b)
        assert type(got) is Tensor and torch.equal(got, function(numbers(b)))
        assert len(warned) == 1 and warned[0].startswith(op), warned
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(b)

    @parameterized.expand(
        [
            ("mul", lambda x: x.mul_(2.0)),
            ("add", lambda x: x.add_(torch.ones(64))),
            ("fill", lambda x: x.fill_(0.25)),
            ("clamp", lambda x: x.clamp_(min=0.0)),
            ("part", lambda x: x[1:3].mul_(2.0)),
            ("item", lambda x: x.__setitem__(1, 0.5)),
            ("out", lambda x: torch.add(torch.ones(4, 64), 1, out=x)),
            ("foreach", lambda x: torch._foreach_add_([x], 1.0)),
            ("foreach_scalars", lambda x: torch._foreach_mul_([torch.ones(2), x], [3.0, 2.0])),
            ("foreach_lists", lambda x: torch._foreach_lerp_([x], [torch.ones(4, 64)], 0.25)),
            ("foreach_zero", lambda x: torch._foreach_zero_([x])),
            ("foreach_copy", lambda x: torch._foreach_copy_([x], [torch.ones(4, 64)])),
            ("foreach_tensor", lambda x: aten._foreach_addcmul_.Tensor([x], [x + 1], [x], torch.ones(1))),
        ]
    )
    def test_in_place_operators_without_a_rule(self, _name, function):
        """They compute with numbers and quantize them anew, into the same buffers."""
        b = made(P.INT8_ROW, 4, 64)
        want, codes = numbers(b), b.codes
        quietly(function, b)
        function(want)
        assert b.codes is codes and torch.equal(numbers(b), numbers(hop.quantize(P.INT8_ROW, want)))

    def test_several_written_arguments(self):
        x, stats = torch.randn(8, 64), [made(P.INT8_TENSOR, 64, seed=i) for i in (0, 1)]
        wants = [numbers(t) for t in stats]
        got, _ = quietly(lambda: aten._native_batch_norm_legit.default(x, None, None, *stats, True, 0.1, 1e-5))
        want = aten._native_batch_norm_legit.default(x, None, None, *wants, True, 0.1, 1e-5)
        assert all(map(torch.equal, got, want))
        for t, new in zip(stats, wants, strict=True):
            assert torch.equal(numbers(t), numbers(hop.quantize(P.INT8_TENSOR, new)))

    def test_foreach_results(self):
        b, x = made(P.INT8_ROW, 4, 64), torch.ones(3)
        for function in (
            lambda t: torch._foreach_add([t, x], [1.0, 2.0]),
            lambda t: torch._foreach_norm([x, t], 1),
            lambda t: torch._foreach_pow(2.0, [t, x]),
            lambda t: torch._foreach_addcdiv([t], [t], [t.abs() + 1], value=2),
        ):
            got, want = quietly(function, b)[0], function(numbers(b))
            assert type(got) is type(want) and len(got) == len(want) and all(map(torch.equal, got, want))
        copies = torch._foreach_clone([b, x]) if hasattr(torch, "_foreach_clone") else [b.clone(), x.clone()]
        assert isinstance(copies[0], QuantizedTensor) and fresh(copies[0], b) and torch.equal(copies[1], x)

    def test_steps_within_operators_are_not_rounded(self):
        """Operators in C++ write intermediate numbers to new tensors like their arguments."""
        b, target = made(P.INT8_ROW, 4, 64), torch.randint(2, (4, 64)) * 2 - 1
        for function in (
            lambda t: nn.functional.hinge_embedding_loss(t, target, reduction="none"),
            lambda t: nn.functional.pad(t[None], (3, 2), mode="circular"),
            lambda t: torch.cat([torch.zeros(1, 64), t]),
        ):
            assert torch.equal(quietly_raised(function, b), function(numbers(b)))

    def test_a_plain_tensor_takes_numbers(self):
        b, x = made(P.INT8_ROW, 4, 64), torch.ones(4, 64)
        quietly(x.add_, b)
        assert type(x) is Tensor and torch.equal(x, 1 + numbers(b))
        assert quietly(lambda: torch.add(b, 1, out=x))[0] is x and torch.equal(x, 1 + numbers(b))

    @parameterized.expand(
        [
            ("resize", lambda x: x.resize_(2), "whose shape it would change"),
            ("transpose", lambda x: x.t_(), "whose shape it would change"),
        ]
    )
    def test_operators_that_are_refused(self, _name, function, message):
        b = made(P.INT8_ROW, 4, 64)
        before = numbers(b)
        with self.assertRaisesRegex(NotImplementedError, message):
            quietly_raised(function, b)
        assert torch.equal(numbers(b), before)


def quietly_raised(function: Callable[..., Any], *args: Any) -> Any:
    out, _ = quietly(function, *args)
    if isinstance(out, Exception):
        raise out
    return out


class TestViews(unittest.TestCase):
    @parameterized.expand(BY_NAME)
    @pytest.mark.quick(11)
    def test_rules(self, name, q):
        for (i, shape), (op, call_name, call) in itertools.product(enumerate(SHAPES), CALLS):
            with self.subTest(op=str(op), call=call_name, shape=shape):
                check_view(op, call, made(q, *shape, dtype=DTYPES[i % 3]))

    @parameterized.expand(BY_NAME)
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_rules_in_other_shapes(self, _name, q):
        for (i, shape), (op, call_name, call) in itertools.product(enumerate(MORE_SHAPES), CALLS):
            with self.subTest(op=str(op), call=call_name, shape=shape):
                check_view(op, call, made(q, *shape, dtype=DTYPES[i % 3]))

    @parameterized.expand([(name, q) for name, q in P.PRESETS.items() if not isinstance(q.scale, Static)])
    @pytest.mark.full
    @pytest.mark.sampled(3)
    def test_rules_of_presets(self, _name, q):
        for shape, (op, call_name, call) in itertools.product([(130, 70), (2, 3, 4, 32)], CALLS):
            with self.subTest(op=str(op), call=call_name, shape=shape):
                check_view(op, call, made(q, *shape, dtype=torch.bfloat16))

    @parameterized.expand(BY_NAME)
    @pytest.mark.quick(2)
    def test_which_are_views(self, name, q):
        b = made(q, 64, 128, dtype=torch.bfloat16)
        for op, call_name, call in CALLS:
            with self.subTest(call=call_name):
                got, want = (quietly(call, op, x)[0] for x in (b, torch.empty(64, 128)))
                if isinstance(want, Exception) or (op is aten.as_strided.default and isinstance(got, Exception)):
                    continue
                assert {isinstance(g, QuantizedTensor) for g in listed(got)} == {call_name not in PLAIN[name]}

    @parameterized.expand(BY_NAME)
    def test_views_of_views(self, name, q):
        """Strides, offsets and cut dimensions that one view leaves to the next."""
        b = made(q, 256, 256, dtype=torch.bfloat16)
        chains = [
            lambda x: x[128:][:, 128:].view(2, 64, 128).transpose(0, 1)[32:],
            lambda x: x.view(2, 128, 2, 128)[1].select(1, 1)[64:].transpose(0, 1),
            lambda x: x.t()[128:].t().view(256, 128, 1).squeeze(-1),
            lambda x: x.view(256, 4, 64).permute(1, 0, 2)[1:3].reshape(-1),
            lambda x: x.transpose(0, 1).reshape(-1, 256).view(2, 128, -1)[1:],
            lambda x: x.transpose(0, 1).contiguous().view(4, 64, 256).unbind(0)[1],
            lambda x: x.unsqueeze(0).expand(3, 256, 256)[1, 128:].unflatten(-1, (2, 128)).flatten(0, 1),
        ]
        for i, chain in enumerate(chains):
            with self.subTest(chain=i):
                got, _ = quietly(chain, b)
                want = chain(numbers(b))
                assert got.dtype == torch.bfloat16 and torch.equal(numbers(got), want)

    def test_a_reshape_that_is_no_view_copies(self):
        for q in (P.INT4_32, P.MXFP8, P.INT8_ROW):
            b = made(q, 2, 3, 64)
            got = b.transpose(0, 1).reshape(6, 64)
            assert isinstance(got, QuantizedTensor) and torch.equal(
                numbers(got), numbers(b).transpose(0, 1).reshape(6, 64)
            )
            assert got.codes.untyped_storage().data_ptr() != b.codes.untyped_storage().data_ptr()

    def test_a_view_back_has_the_same_quantizer(self):
        for q in (P.INT8_ROW, P.MXFP8, P.FP8_128X128, P.NVFP4, P.INT8_TENSOR, P.STATE8):
            b = made(q, 256, 256)
            for there, back in (
                (lambda x: x.view(2, 128, 256), lambda x: x.view(256, 256)),
                (lambda x: x.unsqueeze(1), lambda x: x.squeeze(1)),
                (lambda x: x.view(1, 256, 256, 1)[..., 0], lambda x: x[0]),
            ):
                there_and_back, _ = quietly(lambda x, f=there, g=back: g(f(x)), b)
                if isinstance(there_and_back, QuantizedTensor):
                    assert there_and_back.quantizer == q, (there_and_back.quantizer, q)

    def test_both_copies(self):
        """A view would leave the column-wise copy behind."""
        x = torch.randn(64, 64)
        for usages in (("rowwise", "columnwise"), ("columnwise",)):
            b = hop.quantize(P.MXFP8, x, usages=usages)
            for view in (lambda x: x.view(-1), lambda x: x[:32], lambda x: x.t(), lambda x: x.unsqueeze(0)):
                got, warned = quietly(view, b)
                assert type(got) is Tensor and torch.equal(got, view(numbers(b)))
                assert "column-wise copy would go stale" in warned[0]
            for same in (b.detach(), b.clone(), b.to(torch.bfloat16), copy.deepcopy(b), b[:], b.view(64, 64)):
                assert same.usages == usages
                for mine, its in zip(same.buffers().values(), b.buffers().values(), strict=True):
                    assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))

    def test_strides_of_its_own_keep_blocks(self):
        """Along dimensions of one element too, as weights of a convolution of one channel have."""
        for q, shape in (
            (for_convolution(hop.presets.INT8_ROW, 4), (8, 1, 3, 3)),
            (hop.presets.FP8_128X128, (1, 128)),
            (hop.presets.INT4_32, (1, 33)),
        ):
            t = hop.quantize(q, torch.randn(shape))
            got = t.as_strided(t.shape, t.stride())
            assert got.quantizer == q and torch.equal(numbers(got), numbers(t))

    def test_view_as_another_dtype(self):
        b = made(P.INT8_ROW, 4, 64, dtype=torch.bfloat16)
        for dtype in (torch.int16, torch.float16, torch.float32):
            with self.assertRaisesRegex(
                RuntimeError, rf"its bits are codes.* use \.to\({dtype}\).* for the codes \.codes"
            ):
                b.view(dtype)

    def test_a_view_that_strides_cannot_say(self):
        b = made(P.INT8_ROW, 4, 64)
        with self.assertRaisesRegex(RuntimeError, "as_strided of a QuantizedTensor .* dequantize it first"):
            b.as_strided((4, 64), (63, 1))  # overlapping windows
        with self.assertRaisesRegex(RuntimeError, "not a view that its blocks and bytes allow"):
            b.as_strided((5, 64), (64, 1))


# ---- the rules of other operators


def fresh(new: QuantizedTensor, old: QuantizedTensor) -> bool:
    """Whether no buffer shares memory."""
    mine = {b.untyped_storage().data_ptr() for b in new.buffers().values()}
    return not mine & {b.untyped_storage().data_ptr() for b in old.buffers().values()}


def check_clone(q: Quantizer) -> None:
    b = made(q, 2, 32, 4, 32, dtype=torch.bfloat16)
    new = b.clone()
    assert fresh(new, b) and new.dtype == b.dtype and new.quantizer == q and torch.equal(numbers(new), numbers(b))
    last = b.clone(memory_format=torch.channels_last)
    assert fresh(last, b) and torch.equal(numbers(last), numbers(b))
    assert last.is_contiguous(memory_format=torch.channels_last) == (q.per_byte() == 1)
    transposed, _ = quietly(lambda: b.transpose(0, 1))
    whole = transposed.clone(memory_format=torch.contiguous_format)
    assert whole.is_contiguous() and torch.equal(numbers(whole), numbers(b).transpose(0, 1))


def check_to_copy(q: Quantizer) -> None:
    b = made(q, 32, 64, dtype=torch.bfloat16)
    want = numbers(b)
    for new in (aten._to_copy.default(b), b.to("cpu", copy=True), b.to(torch.bfloat16, copy=True)):
        assert fresh(new, b) and new.dtype == torch.bfloat16 and torch.equal(numbers(new), want)
    wide = made(q, 32, 64).to(torch.float64)
    for dtype in (torch.float16, torch.float32, torch.float64):
        for new in (b.to(dtype), b.type(dtype), b.to("cpu", dtype), b.to(torch.empty(0, dtype=dtype))):
            assert fresh(new, b) and new.dtype == dtype and new.quantizer == q
            assert numbers(new).dtype == dtype
            exact = hop.dequantize(hop.quantize(q, made_of(b)).to(torch.float32))
            assert torch.equal(numbers(new), exact.to(dtype))  # from the codes, not from bfloat16
    assert [b.float().dtype, b.half().dtype, b.double().dtype] == [torch.float32, torch.float16, torch.float64]
    assert b.bfloat16() is b and b.to("cpu") is b  # as for any tensor
    assert numbers(wide).dtype == torch.float64
    meta = b.to("meta")
    assert isinstance(meta, QuantizedTensor) and meta.device.type == "meta" and meta.shape == b.shape
    assert all(x.device.type == "meta" for x in meta.buffers().values()) and TensorProto.of(meta).quantizer == q
    for dtype in (torch.int32, torch.bool, torch.complex64):
        assert type(b.to(dtype)) is Tensor and torch.equal(b.to(dtype), want.to(dtype))
    image = made(q, 2, 32, 4, 32)
    last = image.to(torch.float16, memory_format=torch.channels_last)
    assert fresh(last, image) and last.is_contiguous(memory_format=torch.channels_last) == (q.per_byte() == 1)
    assert torch.equal(numbers(last), numbers(image).half())
    assert image.to(torch.int8, memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)


def made_of(b: QuantizedTensor) -> Tensor:
    """What `made` quantized to b."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(b.shape, generator=generator).to(b.dtype)


def check_pin_memory(q: Quantizer) -> None:
    b = made(q, 4, 64)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
            b.pin_memory()
        return
    pinned = b.pin_memory()
    assert fresh(pinned, b) and pinned.is_pinned() and torch.equal(numbers(pinned), numbers(b))


def check_is_pinned(q: Quantizer) -> None:
    assert made(q, 4, 64).is_pinned() is False


def check_empty_like(q: Quantizer) -> None:
    check_new(q, torch.empty_like)


def check_new_empty(q: Quantizer) -> None:
    check_new(q, lambda b, **options: b.new_empty(b.shape, **options))
    assert TensorProto.of(made(q, 4, 64).new_empty(3, 130)).shape == (3, 130)


def check_zeros_like(q: Quantizer) -> None:
    check_new(q, torch.zeros_like)
    assert_zeros(torch.zeros_like(made(q, 3, 70)))


def check_new_zeros(q: Quantizer) -> None:
    check_new(q, lambda b, **options: b.new_zeros(b.shape, **options))
    new = made(q, 3, 70, dtype=torch.float16).new_zeros(2, 130)
    assert new.shape == (2, 130) and new.dtype == torch.float16 and new.quantizer == q
    assert_zeros(new)


def check_new(q: Quantizer, function: Callable[..., Any]) -> None:
    b = made(q, 3, 70, dtype=torch.bfloat16)
    proto = TensorProto.of(b)
    new = function(b)
    assert TensorProto.of(new) == proto and fresh(new, b)
    new.buffers()  # all there, in the shapes that the proto describes
    proto.create_tensor(list(new.buffers().values()))
    assert function(b, dtype=torch.float16).dtype == torch.float16
    assert function(b, device="meta").codes.device.type == "meta"
    assert type(function(b, dtype=torch.int64)) is Tensor


def assert_zeros(b: QuantizedTensor) -> None:
    smallest = 1e-12 if isinstance(b.quantizer.scale, type(P.STATE8.scale)) else 0.0
    assert numbers(b).abs().max() <= smallest * abs(b.quantizer.scale.__dict__.get("floor", 0.0) > 0)


def check_zero_(q: Quantizer) -> None:
    b = made(q, 3, 70, dtype=torch.bfloat16)
    buffers = b.buffers()
    assert b.zero_() is b and all(mine is its for mine, its in zip(b.buffers().values(), buffers.values(), strict=True))
    want = hop.quantize(q, torch.zeros(3, 70, dtype=torch.bfloat16))
    assert torch.equal(b.codes, want.codes) and torch.equal(numbers(b), numbers(want))
    assert_zeros(b)


def check_equal(q: Quantizer) -> None:
    b, other = made(q, 4, 64), made(q, 4, 64, seed=1)
    assert torch.equal(b, b.clone()) and not torch.equal(b, other)
    assert torch.equal(b, numbers(b)) and torch.equal(numbers(b), b)
    assert not torch.equal(b, made(q, 4, 65)) and not torch.equal(b, torch.ones(4, 64))


def check_dequantize(q: Quantizer) -> None:
    for dtype in DTYPES:
        b = made(q, 5, 70, dtype=dtype)
        got = b.dequantize()
        assert (
            type(got) is Tensor
            and got.dtype == dtype
            and torch.equal(got, q.dequantize(b.buffers(), b.shape).to(dtype))
        )


def check_copy_(q: Quantizer) -> None:
    b, other = made(q, 4, 96, dtype=torch.bfloat16), made(q, 4, 96, dtype=torch.bfloat16, seed=1)
    buffers = b.buffers()
    assert b.copy_(other) is b and fresh(b, other)  # one quantizer: the buffers
    assert all(torch.equal(mine, its) for mine, its in zip(b.buffers().values(), other.buffers().values(), strict=True))
    assert all(b.buffers()[name] is buffer for name, buffer in buffers.items())
    x = torch.randn(4, 96)
    b.copy_(x)  # a plain tensor, of another dtype: quantized anew in b's
    assert b.dtype == torch.bfloat16 and torch.equal(numbers(b), numbers(hop.quantize(q, x)).bfloat16())
    b.copy_(x[1])  # broadcast
    assert torch.equal(numbers(b), numbers(hop.quantize(q, x[1].expand(4, 96).contiguous())).bfloat16())
    for target in (torch.empty(4, 96), torch.empty(4, 96, dtype=torch.int32)):
        assert target.copy_(other) is target and torch.equal(target, numbers(other).to(target.dtype))
    for name, q2 in QUANTIZERS.items():
        source = made(q2, 4, 96, dtype=torch.float32, seed=2)
        b.copy_(source)
        want = source if q2 == q else hop.quantize(q, numbers(source))
        assert b.quantizer == q and torch.equal(numbers(b), numbers(want.to(torch.bfloat16))), name
    with pytest.raises(RuntimeError):
        b.copy_(torch.ones(5, 96))


def check_cat(q: Quantizer) -> None:
    check_joined(q, torch.cat, CAT)


def check_stack(q: Quantizer) -> None:
    check_joined(q, torch.stack, STACK)


# The dimensions along which tensors of (64, 128) are joined without a look at their numbers.
CAT = {name: set() if name == "flat_odd" else {0} if q.flat else {0, 1} for name, q in QUANTIZERS.items()}
STACK = {  # but for codes that share a byte, which lie along the last dimension
    name: CAT[name] if q.flat else {0, 1} if q.per_byte() > 1 else {0, 1, 2} for name, q in QUANTIZERS.items()
}


def check_joined(q: Quantizer, join: Callable[..., Any], dims: dict[str, set[int]]) -> None:
    name = next(n for n, own in QUANTIZERS.items() if own == q)
    tensors = [made(q, 64, 128, dtype=torch.bfloat16, seed=i) for i in range(3)]
    for dim in range(2 if join is torch.cat else 3):
        got, warned = quietly(join, tensors, dim)
        want = join([numbers(t) for t in tensors], dim)
        assert isinstance(got, QuantizedTensor) == (dim in dims.get(name, set())), (name, dim)
        assert len(warned) == (not isinstance(got, QuantizedTensor)), warned
        assert got.dtype == torch.bfloat16 and torch.equal(numbers(got), want)
        assert torch.equal(numbers(quietly(join, tensors, dim - want.dim())[0]), want)
        if isinstance(got, QuantizedTensor):
            assert all(fresh(got, t) for t in tensors)
            TensorProto.of(got).create_tensor(list(got.buffers().values()))
    mixed = [tensors[0], made(q, 64, 128, dtype=torch.float32, seed=1)]
    got, _ = quietly(join, mixed)
    assert got.dtype == torch.float32 and got.shape == join([torch.empty(64, 128)] * 2).shape
    if isinstance(got, QuantizedTensor):
        want = join([numbers(t.to(torch.float32)) for t in mixed])  # from the codes
        assert torch.equal(numbers(got), want)
    for others in (numbers(tensors[1]), made(P.FP8_TENSOR, 64, 128, dtype=torch.bfloat16)):
        got, warned = quietly(join, [tensors[0], others])
        assert (
            type(got) is Tensor and torch.equal(got, join([numbers(tensors[0]), numbers(others)])) and len(warned) == 1
        )
    with pytest.raises(IndexError):
        quietly_raised(join, tensors, 5)
    with pytest.raises(RuntimeError):
        quietly_raised(join, [tensors[0], made(q, 64, 127, dtype=torch.bfloat16)])


def check_is_same_size(q: Quantizer) -> None:
    b = made(q, 4, 64)
    assert b.is_same_size(made(q, 4, 64, seed=1)) and b.is_same_size(torch.ones(4, 64))
    assert torch.ones(4, 64).is_same_size(b) and not b.is_same_size(made(q, 64, 4))


def check_has_same_storage_numel(q: Quantizer) -> None:
    """What autograd asks of a tensor and its tangent, which is a plain one."""
    b, tangent = made(q, 4, 64), torch.randn(4, 64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(b, tangent)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


OTHERS: dict[Any, Callable[[Quantizer], None]] = {
    aten.clone.default: check_clone,
    aten._pin_memory.default: check_pin_memory,
    aten.is_pinned.default: check_is_pinned,
    aten._to_copy.default: check_to_copy,
    aten.cat.default: check_cat,
    aten.stack.default: check_stack,
    aten.empty_like.default: check_empty_like,
    aten.new_empty.default: check_new_empty,
    aten.zeros_like.default: check_zeros_like,
    aten.new_zeros.default: check_new_zeros,
    aten.copy_.default: check_copy_,
    aten.zero_.default: check_zero_,
    aten.equal.default: check_equal,
    aten.dequantize.self: check_dequantize,
    aten.is_same_size.default: check_is_same_size,
    aten._has_same_storage_numel.default: check_has_same_storage_numel,
}


class TestOthers(unittest.TestCase):
    @parameterized.expand([(check.__name__[6:], check) for check in OTHERS.values()])
    @pytest.mark.quick(2)
    def test_rule(self, _name, check):
        for name, q in QUANTIZERS.items():
            with self.subTest(quantizer=name):
                check(q)


class TestWriting(unittest.TestCase):
    @parameterized.expand(
        [
            ("row_of_rows", P.INT8_ROW, lambda x: x[1:3]),
            ("one_row", P.FP8_ROW, lambda x: x[2]),
            ("column_of_columns", P.INT8_COLUMN, lambda x: x[:, 3:5]),
            ("turned", P.INT8_ROW, lambda x: x.t()[:, 1:3]),
            ("groups", P.INT4_32, lambda x: x[:, 32:64]),
            ("cut_off_group", P.MXFP8, lambda x: x[:, 64:]),
            ("outer_rows", P.NVFP4_ROW, lambda x: x[1:]),
            ("flat_blocks", P.STATE8, lambda x: x.view(-1)[256:]),
            ("whole", P.INT8_TENSOR, lambda x: x.view(-1)),
            ("given", P.INT8_TENSOR_STATIC, lambda x: x[1:2]),
        ]
    )
    def test_into_a_part(self, _name, q, part):
        """What has scales of its own is written, and the rest stays as it is."""
        scale = torch.tensor(0.01) if isinstance(q.scale, Static) else None
        b = hop.quantize(q, torch.randn(4, 70 if "cut" in _name else 128), scale=scale)
        want, new = numbers(b), torch.randn(part(numbers(b)).shape) / 8
        part(want).copy_(numbers(hop.quantize(part(b).quantizer, new, scale=scale)))
        part(b).copy_(new)
        assert torch.equal(numbers(b), want)

    @parameterized.expand(
        [
            ("tensor", P.INT8_TENSOR, lambda x: x[1:3]),
            ("row", P.INT8_ROW, lambda x: x[:, :64]),
            ("column_of_rows", P.INT8_ROW, lambda x: x[:, 0]),
            ("row_of_columns", P.INT8_COLUMN, lambda x: x[0]),
            ("element", P.INT8_ROW, lambda x: x[1, 2]),
            ("turned", P.INT8_ROW, lambda x: x.t()[1]),
            ("viewed", P.FP8_TENSOR, lambda x: x.view(2, 2, 128)[1].view(-1)),
            ("global_amax", P.NVFP4, lambda x: x[1:]),
            ("flat", Quantizer(INT8, (-1,), flat=True), lambda x: x[1:]),
            ("mixed", Quantizer(INT8, (-1, 32)), lambda x: x[:3, :32]),
        ]
    )
    def test_into_a_part_that_shares_a_scale(self, _name, q, part):
        b = made(q, 4, 128)
        before = numbers(b)
        assert isinstance(part(b), QuantizedTensor)
        for write in (
            lambda p: p.copy_(torch.ones(p.shape)),
            lambda p: p.copy_(p.clone()),
            lambda p: p.zero_(),
            lambda p: p.mul_(2.0),
        ):
            with self.assertRaisesRegex(RuntimeError, "share a scale with others, outside of the part"):
                quietly_raised(write, part(b))
        assert torch.equal(numbers(b), before)

    def test_given_scale_of_a_part_stays(self):
        x = torch.randn(4, 64)
        a, b = (hop.quantize(P.INT8_TENSOR_STATIC, x, scale=torch.tensor(s)) for s in (0.02, 0.05))
        a[1].copy_(b[1])
        assert a.scale.item() == torch.tensor(0.02)
        want = hop.quantize(P.INT8_TENSOR_STATIC, numbers(b[1]), scale=torch.tensor(0.02))
        assert torch.equal(numbers(a[1]), numbers(want))
        a.copy_(b)
        assert torch.equal(numbers(a), numbers(b)) and a.scale.item() == torch.tensor(0.05)

    def test_given_scales_belong_to_the_caller(self):
        """A tensor has its own scale: what is written to it later does not reach the one that was given."""
        for q in (P.INT8_TENSOR_STATIC_AFFINE, Quantizer(INT8, (1, -1), Static(affine=True)), P.INT8_ROW_AFFINE):
            for shape in ((), (1, 1)):
                scale, zero_point = torch.full(shape, 0.25), torch.full(shape, 3, dtype=torch.int8)
                b = hop.quantize(q, torch.randn(4, 64), scale=scale, zero_point=zero_point)
                b.copy_(hop.quantize(q, torch.ones(4, 64), scale=scale * 2, zero_point=zero_point + 1))
                assert numbers(b).unique().tolist() == [1.0]
                assert scale.unique().tolist() == [0.25] and zero_point.unique().tolist() == [3]

    def test_given_scales(self):
        """A quantizer that finds no scale keeps the one that the tensor has."""
        q = P.INT8_TENSOR_STATIC_AFFINE
        b = hop.quantize(q, torch.randn(4, 64), scale=torch.tensor(0.05), zero_point=torch.tensor(3, dtype=torch.int8))
        b.copy_(torch.full((4, 64), 0.5))
        assert torch.equal(numbers(b), torch.full((4, 64), 10 * torch.tensor(0.05))) and b.zero_point.item() == 3
        assert numbers(b.zero_()).abs().max() == 0 and b.scale.item() == torch.tensor(0.05)
        zeros = b.new_zeros(2, 3)
        assert zeros.quantizer == q and zeros.scale.item() == 1 and numbers(zeros).abs().max() == 0

    def test_stochastic(self):
        b = hop.quantize(P.NVFP4_STOCHASTIC, torch.zeros(64, 64), noise=torch.zeros(64, 64, dtype=torch.uint8))
        x = torch.full((64, 64), 2.5)
        x[:, ::16] = 6.0
        x[0] = 448 * 6.0  # so that all other scales are 1
        b.copy_(x)  # draws its own noise: both neighbours of 2.5
        assert set(numbers(b)[1:].unique().tolist()) == {2.0, 3.0, 6.0}

    def test_both_copies_are_written(self):
        x = torch.randn(64, 64)
        b = hop.quantize(P.MXFP8, torch.zeros(64, 64), usages=("rowwise", "columnwise"))
        b.copy_(x)
        want = hop.quantize(P.MXFP8, x, usages=("rowwise", "columnwise"))
        for mine, its in zip(b.buffers().values(), want.buffers().values(), strict=True):
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


# ---- modules, autograd, copies


class Holder(nn.Module):
    """A weight that its forward dequantizes."""

    def __init__(self, q: Quantizer, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(made(q, 64, 128, dtype=dtype), requires_grad=requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        return x @ hop.dequantize(self.weight).t()


class TestModules(unittest.TestCase):
    @parameterized.expand(
        [
            ("to", lambda m: m.to(torch.float32), torch.float32),
            ("float", lambda m: m.float(), torch.float32),
            ("half", lambda m: m.half(), torch.float16),
            ("double", lambda m: m.double(), torch.float64),
            ("type", lambda m: m.type(torch.float32), torch.float32),
            ("type_by_name", lambda m: m.type("torch.FloatTensor"), torch.float32),
            ("twice", lambda m: m.float().half(), torch.float16),
        ]
    )
    def test_cast(self, _name, cast, dtype):
        for q, requires_grad in itertools.product((P.INT8_ROW, P.INT4_32, P.MXFP8, P.STATE8), (False, True)):
            m = Holder(q, torch.bfloat16, requires_grad)
            weight, codes = m.weight, m.weight.codes
            assert cast(m) is m
            assert isinstance(m.weight, QuantizedTensor) and isinstance(m.weight, nn.Parameter)
            assert m.weight is weight and m.weight.requires_grad == requires_grad  # an optimizer still has it
            assert m.weight.dtype == numbers(m.weight).dtype == m(torch.ones(2, 128, dtype=dtype)).dtype == dtype
            assert torch.equal(m.weight.codes.view(torch.uint8), codes.view(torch.uint8))

    def test_meta(self):
        m = Holder(P.MXFP8, torch.bfloat16).to("meta")
        assert m.weight.device.type == "meta" and isinstance(m.weight, QuantizedTensor)
        m = m.to_empty(device="cpu")
        assert TensorProto.of(m.weight) == TensorProto.of(Holder(P.MXFP8, torch.bfloat16).weight)

    @parameterized.expand(BY_NAME)
    def test_load_state_dict(self, _name, q):
        source, target, other = Holder(q), Holder(q), Holder(P.INT8_TENSOR)
        with torch.no_grad():
            source.weight.copy_(torch.randn(64, 128))
            want = numbers(source.weight)
        weight = target.weight
        target.load_state_dict(source.state_dict())
        assert target.weight is weight and fresh(target.weight, source.weight)
        assert torch.equal(numbers(target.weight), want)
        with torch.no_grad():
            source.weight.zero_()  # what was loaded does not change with it
        assert torch.equal(numbers(target.weight), want)
        other.load_state_dict(target.state_dict())  # another quantizer: quantized anew
        assert other.weight.quantizer == P.INT8_TENSOR
        assert torch.equal(numbers(other.weight), numbers(hop.quantize(P.INT8_TENSOR, want)))
        other.load_state_dict(target.state_dict(), assign=True)
        assert other.weight.quantizer == q and torch.equal(numbers(other.weight), want)
        target.load_state_dict({"weight": torch.ones(64, 128)})
        assert torch.equal(numbers(target.weight), numbers(hop.quantize(q, torch.ones(64, 128))))

    def test_in_linear(self):
        """A module that knows nothing of it computes with its numbers."""
        m, x = nn.Linear(128, 64), torch.randn(3, 128)
        m.weight = nn.Parameter(made(P.INT8_ROW, 64, 128))
        got, _ = quietly(m, x)
        want = nn.functional.linear(x, numbers(m.weight), m.bias)
        torch.testing.assert_close(got, want)
        quietly(lambda: got.sum().backward())
        torch.testing.assert_close(m.weight.grad, x.sum(0).expand(64, 128))

    def test_data(self):
        w = nn.Parameter(made(P.INT8_ROW, 4, 64))
        other = made(P.MXFP8, 4, 64, dtype=torch.bfloat16)
        assert isinstance(w.data, QuantizedTensor) and not w.data.requires_grad
        w.data = other
        assert w.quantizer == P.MXFP8 and w.dtype == torch.bfloat16 and torch.equal(numbers(w.data), numbers(other))

    def test_shared_memory(self):
        b = made(P.NVFP4, 4, 64)
        assert not b.is_shared()
        assert b.share_memory_() is b and b.is_shared() and all(x.is_shared() for x in b.buffers().values())


OPTIMIZERS = [
    *[(c.__name__, functools.partial(c, lr=0.1)) for c in (optim.Adadelta, optim.Adafactor, optim.Adamax, optim.ASGD)],
    *[(c.__name__, functools.partial(c, lr=0.1)) for c in (optim.LBFGS, optim.Muon, optim.NAdam, optim.RAdam)],
    *[(c.__name__, functools.partial(c, lr=0.1)) for c in (optim.RMSprop, optim.Rprop)],
    *[
        (f"{c.__name__}_{how}", functools.partial(c, lr=0.1, **{how: True}))
        for c in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
        for how in ("foreach", "fused", "maximize")
    ],
    ("SGD_momentum", functools.partial(optim.SGD, lr=0.1, momentum=0.9)),
    *[(f"hop_{c.__name__}", c) for c in (hop.optim.AdamW, hop.optim.Adam, hop.optim.Lion)],
    ("hop_SGD", functools.partial(hop.optim.SGD, lr=0.1)),
]


class TestAutograd(unittest.TestCase):
    @parameterized.expand(BY_NAME)
    def test_gradients_accumulate(self, _name, q):
        w = nn.Parameter(made(q, 4, 64, dtype=torch.bfloat16))
        x = torch.randn(4, 64).bfloat16()
        for times in (1, 2):
            (hop.dequantize(w) * x).sum().backward()
            assert type(w.grad) is Tensor and w.grad.dtype == torch.bfloat16 and torch.equal(w.grad, times * x)

    def test_through_views_and_casts(self):
        w = nn.Parameter(made(P.INT8_ROW, 4, 64, dtype=torch.bfloat16))
        x = torch.randn(2, 64)
        (hop.dequantize(w[1:3].float()) * x).sum().backward()
        want = torch.zeros(4, 64)
        want[1:3] = x
        assert w.grad.dtype == torch.bfloat16 and torch.equal(w.grad, want.bfloat16())

    def test_through_a_plain_result(self):
        """The gradient of a view that had to be dequantized."""
        w = nn.Parameter(made(P.INT4_32, 4, 64))
        x = torch.randn(64, 4)
        quietly_raised(lambda: (w.t() * x).sum().backward())
        assert type(w.grad) is Tensor and torch.equal(w.grad, x.t())

    @parameterized.expand(OPTIMIZERS)
    def test_an_optimizer_raises(self, _name, make):
        """Codes would round small steps away; nothing changes, and floats beside it can be trained."""
        w, x = nn.Parameter(made(P.INT8_ROW, 4, 64)), nn.Parameter(torch.ones(3))
        before = numbers(w.data)
        optimizer = quietly_raised(make, [w])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (hop.dequantize(w) ** 2).sum()
            loss.backward()
            return loss

        closure()
        with self.assertRaisesRegex(RuntimeError, r"QuantizedTensor of shape \(4, 64\).*Train floats"):
            quietly_raised(optimizer.step, closure)
        assert torch.equal(numbers(w.data), before)
        w.grad, x.grad = None, torch.ones(3)
        if not isinstance(optimizer, optim.LBFGS | optim.Muon):  # of dense gradients alone, and of matrices
            quietly_raised(make, [w.requires_grad_(False), x]).step()
            assert not torch.equal(x, torch.ones(3)) and torch.equal(numbers(w), before)

    @pytest.mark.full
    def test_a_compiled_optimizer_raises(self):
        for make in (torch.optim.SGD, torch.optim.Adagrad, hop.optim.AdamW):
            w = nn.Parameter(made(P.INT8_ROW, 4, 64))
            w.grad = torch.ones(4, 64)
            before = numbers(w.data)
            with self.assertRaisesRegex(Exception, "Train floats"):
                quietly_raised(lambda make=make, w=w: torch.compile(make([w], lr=0.1).step, backend="aot_eager")())
            assert torch.equal(numbers(w.data), before)

    def test_gradients_of_quantized_parameters_clip_and_scale(self):
        w = nn.Parameter(made(P.INT8_ROW, 4, 64))
        w.grad = torch.full((4, 64), 2.0)
        norm = nn.utils.clip_grad_norm_([w], 1.0)
        assert norm == 32 and type(w.grad) is Tensor and abs(w.grad.norm() - 1) < 1e-4
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        w.grad = scaler.scale(torch.full((4, 64), 2.0))
        optimizer = torch.optim.SGD([w], lr=0.1)
        scaler.unscale_(optimizer)
        assert torch.equal(w.grad, torch.full((4, 64), 2.0))
        with self.assertRaisesRegex(RuntimeError, "Train floats"):
            quietly_raised(scaler.step, optimizer)

    def test_assigning_still_works(self):
        """What does not depend on the old numbers, as loading, does not train."""
        w, x = nn.Parameter(made(P.INT8_ROW, 4, 64)), torch.randn(4, 64)
        with torch.no_grad():
            w.copy_(x)
            assert torch.equal(numbers(w), numbers(hop.quantize(P.INT8_ROW, x)))
            assert not numbers(w.zero_()).any()

    @parameterized.expand(
        [
            ("ema", {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)}),
            ("ema_of_each", {"avg_fn": swa_utils.get_ema_avg_fn(0.5)}),
            ("swa", {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}),
            ("default", {}),
        ]
    )
    def test_averaged_model(self, _name, options):
        m = Holder(P.INT8_ROW)
        averaged, old = swa_utils.AveragedModel(m, **options), numbers(m.weight)
        quietly_raised(averaged.update_parameters, m)
        assert torch.equal(numbers(averaged.module.weight), old)
        m.weight.copy_(torch.randn(64, 128))
        quietly_raised(averaged.update_parameters, m)
        want = numbers(hop.quantize(P.INT8_ROW, old.lerp(numbers(m.weight), 0.5)))
        got = averaged.module.weight
        assert isinstance(got, QuantizedTensor)
        torch.testing.assert_close(numbers(got), want, rtol=0, atol=float(got.scale.max()) * 1.01)  # ties may turn
        assert (numbers(got) != want).sum() < 10

    def test_requires_grad(self):
        b = made(P.INT8_ROW, 4, 64)
        assert not b.requires_grad and b.requires_grad_().requires_grad and b.is_leaf
        assert not b.detach().requires_grad and b.detach().codes.data_ptr() == b.codes.data_ptr()
        assert b[1:].requires_grad and b[1:].grad_fn is not None
        with self.assertRaisesRegex(RuntimeError, "leaf Variable that requires grad"):
            b.zero_()


class TestCopies(unittest.TestCase):
    def assert_same(self, got: Any, want: Any) -> None:
        assert type(got) is type(want) and isinstance(got, nn.Parameter) == isinstance(want, nn.Parameter)
        assert TensorProto.of(got) == TensorProto.of(want)
        assert torch.equal(numbers(got.detach()), numbers(want.detach()))

    @parameterized.expand(BY_NAME)
    @pytest.mark.quick(2)
    def test_deepcopy_and_pickle(self, _name, q):
        whole = made(q, 256, 256, dtype=torch.bfloat16)
        part, _ = quietly(lambda: whole[128:])  # at an offset, where it is a view
        learned = nn.Parameter(made(q, 4, 64, dtype=torch.float16))
        tensors = [
            whole,
            whole.to("meta"),
            learned,
            nn.Parameter(made(q, 3, 5), requires_grad=False),
            made(q),
            made(q, 0, 3),
        ]
        for b in [*tensors, part] if isinstance(part, QuantizedTensor) else tensors:
            deep = copy.deepcopy(b)
            shallow = copy.copy(b)
            assert shallow.codes.untyped_storage()._cdata == b.codes.untyped_storage()._cdata
            if b.is_meta:
                assert TensorProto.of(deep) == TensorProto.of(b)
                continue
            assert fresh(deep, b) or b.numel() == 0
            for got in (deep, shallow, pickle.loads(pickle.dumps(b)), read_back(b, weights_only=True)):
                self.assert_same(got, b)

    def test_deepcopy_keeps_gradients_and_ties(self):
        w = nn.Parameter(made(P.INT8_ROW, 4, 64))
        hop.dequantize(w).sum().backward()
        one, other = copy.deepcopy([w, w])
        assert one is other and torch.equal(one.grad, w.grad) and one.grad is not w.grad
        with self.assertRaisesRegex(RuntimeError, "graph leaves"):
            copy.deepcopy(w[1:])

    def test_both_copies(self):
        for usages in (("rowwise", "columnwise"), ("columnwise",)):
            b = hop.quantize(P.NVFP4_HADAMARD, torch.randn(32, 64), usages=usages)
            for got in (copy.deepcopy(b), pickle.loads(pickle.dumps(b)), read_back(b, weights_only=True)):
                self.assert_same(got, b)

    def test_optimizer_state(self):
        """What torchao's states lack: an optimizer whose states are quantized can be copied and loaded."""
        w = nn.Parameter(torch.randn(64))
        optimizer = torch.optim.SGD([w], lr=0.1)
        optimizer.state[w]["momentum_buffer"] = made(P.STATE8, 1024, dtype=torch.bfloat16)
        twin = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(twin)
        loaded = optimizer.state[w]["momentum_buffer"]
        self.assert_same(loaded.bfloat16(), twin["state"][0]["momentum_buffer"])
        assert loaded.dtype == torch.float32  # load_state_dict casts states to the parameter's dtype

    @pytest.mark.full
    def test_in_a_fresh_process(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tensors.pt"
            tensors = {name: made(q, 5, 130, dtype=torch.bfloat16) for name, q in QUANTIZERS.items()}
            want = {name: numbers(b) for name, b in tensors.items()}
            model = Holder(P.MXFP8).state_dict()
            torch.save({"tensors": tensors, "want": want, "model": model, "w": Holder(P.INT4_32).weight}, path)
            code = """
                import sys, torch, hop
                found = torch.load(sys.argv[1], weights_only=True)
                for name, want in found["want"].items():
                    b = found["tensors"][name]
                    assert isinstance(b, hop.QuantizedTensor) and b.dtype == torch.bfloat16
                    assert torch.equal(hop.dequantize(b), want), name
                assert isinstance(found["w"], torch.nn.Parameter) and isinstance(found["w"], hop.QuantizedTensor)
                assert found["model"]["weight"].quantizer == hop.presets.MXFP8
                mapped = torch.load(sys.argv[1], weights_only=True, map_location="meta", mmap=True)
                assert mapped["w"].codes.is_meta and mapped["w"].is_meta
                """
            run_python(textwrap.dedent(code), str(path))

    @pytest.mark.full
    def test_without_the_library(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tensors.pt"
            torch.save(made(P.INT8_ROW, 4, 64), path)
            with self.assertRaisesRegex(AssertionError, "(?s)UnpicklingError.*hop.tensor.quantized"):
                run_python("import sys, torch\ntorch.load(sys.argv[1], weights_only=True)", str(path))

    def test_damaged_files(self):
        file = io.BytesIO()
        torch.save(made(P.INT8_ROW, 64, 64), file)
        for damaged in (file.getvalue()[:-100], file.getvalue()[:200], b"", b"\0" * 64):
            with self.assertRaises((RuntimeError, EOFError, ValueError, pickle.UnpicklingError)):
                torch.load(io.BytesIO(damaged), weights_only=True)

    @parameterized.expand(
        [
            ("missing", {"buffers": lambda b: b[:1]}, ValueError, r"buffers must be \['codes', 'scale'\], got 1"),
            ("swapped", {"buffers": lambda b: b[::-1]}, ValueError, "buffer codes must be torch.int8"),
            ("quantizer", {"quantizer": "hop1:Quantizer(format=int9)"}, ValueError, "'int9' is not a known value"),
            ("code", {"quantizer": "__import__('os')"}, ValueError, "position 0"),
            ("shape", {"shape": (4, 65)}, ValueError, r"buffer codes must be torch.int8 of \(4, 65\)"),
            ("dtype", {"dtype": torch.int8}, TypeError, "must be floating point"),
            ("usages", {"usages": ("sideways",)}, ValueError, "usages must name"),
        ]
    )
    def test_parts_that_do_not_fit(self, _name, changes, error, message):
        b = made(P.INT8_ROW, 4, 64)
        rebuild, (buffers, *described) = b.__reduce_ex__(2)
        names = ["quantizer", "shape", "dtype", "usages", "requires_grad", "is_parameter"]
        given = dict(zip(names, described, strict=True))
        change = changes.pop("buffers", lambda b: b)
        file = io.BytesIO()
        torch.save(Tampered(rebuild, (change(buffers), *(given | changes).values())), file)
        file.seek(0)
        with self.assertRaisesRegex(error, message):
            torch.load(file, weights_only=True)


class Tampered:
    """Pickles as a call of what builds quantized tensors."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def run_python(code: str, *args: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class TestPrinting(unittest.TestCase):
    @parameterized.expand(BY_NAME)
    def test_repr(self, _name, q):
        b = made(q, 3, 70, dtype=torch.bfloat16)
        shown = repr(b)
        assert shown == str(b) == f"{b}"
        for part in ("shape=(3, 70)", "dtype=torch.bfloat16", str(q), f"nbytes={b.nbytes}", "device=cpu", "rowwise"):
            assert part in shown, (part, shown)
        assert "requires_grad" not in shown and "requires_grad=True" in repr(b.requires_grad_())
        assert "QuantizedTensor" in repr(nn.Parameter(b)) and "QuantizedTensor" in repr([b])

    @parameterized.expand(
        [
            ("int8_row", P.INT8_ROW, 64 * 100 + 64 * 4),
            ("int4", P.INT4_32, 64 * 50 + 64 * 4 * 4),
            ("uint4_affine", P.UINT4_32_AFFINE, 64 * 50 + 64 * 4 * (4 + 1)),
            ("mxfp8", P.MXFP8, 64 * 100 + 64 * 4),
            ("nvfp4", P.NVFP4, 64 * 50 + 64 * 7 + 4),
            ("state8", P.STATE8, 6400 + 25 * 4),
            ("state4", P.STATE4, 3200 + 50 * 4),
        ]
    )
    def test_nbytes(self, _name, q, nbytes):
        assert made(q, 64, 100, dtype=torch.bfloat16).nbytes == nbytes


# ---- torch.compile and torch.export


def compiled(
    function: Callable[..., Any], dynamic: bool | None = None, backend: str = "aot_eager"
) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def assert_alike(got: Any, want: Any) -> None:
    """The same tensors, classes, dtypes and quantizers included."""
    assert type(got) is type(want) and len(listed(got)) == len(listed(want))
    for g, w in zip(listed(got), listed(want), strict=True):
        assert type(g) is type(w) and g.dtype == w.dtype and g.shape == w.shape, (g, w)
        assert getattr(g, "quantizer", None) == getattr(w, "quantizer", None)
        assert torch.equal(numbers(g), numbers(w))


# Programs of a quantized tensor (64, 128), and of a plain one that `q` quantizes.
ON_QUANTIZED: dict[str, Callable[[Any], Any]] = {
    "input": lambda b: hop.dequantize(b) + 1,
    "unchanged": lambda b: b,
    "flat": lambda b: b.view(b.numel()),
    "rows": lambda b: b[32:],
    "rows_of_a_view": lambda b: (b.view(2, 32, 128)[1], b.view(2, 32, 128).transpose(0, 1)),
    "row": lambda b: b[3],
    "columns": lambda b: b[:, 32:64],
    "columns_of_a_view": lambda b: b[:, 32:64].view(2, 32, 32),
    "turned": lambda b: b.t(),
    "parts": lambda b: b.split([16, 48]),
    "expanded": lambda b: (b[:1].expand(4, 128), b[3].expand(2, 128)),
    "part_of_turned": lambda b: b[16:48].t()[32:96],
    "strides": lambda b: b[::2],
    "inside": lambda b: hop.dequantize(b.view(2, 32, 128)[1]) * 2,
    "cast": lambda b: (b.to(torch.float32), hop.dequantize(b.half())),
    "joined": lambda b: torch.cat([b, b]),
    "cloned": lambda b: b.clone(),
    "zeros": lambda b: (torch.zeros_like(b), b.new_zeros(3, 64)),
    "no_rule": lambda b: b + 1,
    "detached": lambda b: b.detach(),
}
QUANTIZING: dict[str, Callable[[Quantizer, Tensor], Any]] = {
    "output": lambda q, x: hop.quantize(q, x),
    "intermediate": lambda q, x: hop.dequantize(hop.quantize(q, x).view(2, 32, 128)) * 2,
    "both": lambda q, x: (hop.quantize(q, x), hop.quantize(q, x * 2)[:32]),
    "written": lambda q, x: hop.quantize(q, torch.zeros_like(x)).copy_(x),
}
IN_PLACE: dict[str, Callable[[Any, Tensor], Any]] = {
    "copied": lambda b, x: hop.dequantize(b.copy_(x)) + 1,
    "viewed": lambda b, x: hop.dequantize(b.view(-1).copy_(x.view(-1))),
    "part": lambda b, x: (b[32:].copy_(x[32:]), hop.dequantize(b))[1],
    "scaled": lambda b, x: hop.dequantize(b.mul_(2)) + x,
    "zeroed": lambda b, x: hop.dequantize(b.zero_()) + x,
    "into_plain": lambda b, x: x.copy_(b) + 1,
}
PROGRAMS = [*ON_QUANTIZED, *QUANTIZING, *IN_PLACE]
QUICK = [(name, QUANTIZERS[name]) for name in ("int8_row", "int4", "mxfp8", "nvfp4", "state8")]
OTHER = [row for row in BY_NAME if row not in QUICK]
WHICH = {"int8_row_dynamic", "int4_static", "state8_static"}  # in the quick suite
PRODUCT = [
    *[(f"{name}_static", q, False) for name, q in BY_NAME],
    *[(f"{name}_dynamic", q, True) for name, q in QUICK],  # packing with symbolic sizes takes long to trace
]


@pytest.mark.filterwarnings("ignore:.*QuantizedTensor:UserWarning")
class TestCompile(unittest.TestCase):
    def check(self, q: Quantizer, dynamic: bool | None, backend: str = "aot_eager") -> None:
        """All programs; with dynamic sizes, which take long to trace, two of five with each quantizer of QUICK."""
        place = QUICK.index(next(row for row in QUICK if row[1] == q)) if dynamic else 0
        left_out = [name for i, name in enumerate(PROGRAMS) if dynamic and (i + place) % len(QUICK) > 1]
        dtype = torch.float32 if backend == "inductor" else torch.bfloat16  # Inductor does not round in between
        b = made(q, 64, 128, dtype=dtype)
        for name, program in ON_QUANTIZED.items():
            if name in left_out:
                continue
            with self.subTest(program=name):
                want = quietly(program, b)[0]
                if isinstance(want, TypeError):
                    continue  # dequantize of a view that is plain already
                got = compiled(program, dynamic, backend)(b)
                assert_alike(got, want)
                for g, w in zip(listed(got), listed(want), strict=True):  # views stay views
                    shares = [isinstance(x, QuantizedTensor) and not fresh(x, b) for x in (g, w)]
                    assert shares[0] == shares[1]
        x = torch.randn(64, 128).to(dtype)
        for name, program in QUANTIZING.items():
            if name in left_out:
                continue
            with self.subTest(program=name):
                want = quietly(program, q, x)[0]
                if not isinstance(want, TypeError):
                    assert_alike(compiled(program, dynamic, backend)(q, x), want)
        for name, program in IN_PLACE.items():
            if name in left_out:
                continue
            with self.subTest(program=name):
                if name == "viewed" and type(quietly(lambda: b.view(-1))[0]) is Tensor:
                    continue  # no view: what is written there stays there
                mine, its, x2 = b.clone(), b.clone(), x.clone()
                if name == "part" and (-1 in q.block or q is P.NVFP4):
                    continue  # refused where a scale is shared: tested above, and not the same for all of these
                assert_alike(compiled(program, dynamic, backend)(mine, x2), program(its, x.clone()))
                assert_alike(mine, its)

    @parameterized.expand([(n, q, d) for n, q, d in PRODUCT if n in WHICH])
    @pytest.mark.full
    def test_programs(self, _name, q, dynamic):
        self.check(q, dynamic)

    @parameterized.expand([row for row in PRODUCT if row[0] not in WHICH])
    @pytest.mark.full
    @pytest.mark.sampled(5)
    def test_every_program(self, _name, q, dynamic):
        self.check(q, dynamic)

    @parameterized.expand(QUICK)
    @pytest.mark.full
    @pytest.mark.compiler
    @pytest.mark.sampled(5)
    def test_every_program_in_inductor(self, _name, q):
        self.check(q, None, "inductor")

    @pytest.mark.compiler
    @pytest.mark.full
    def test_inductor(self):
        b, x = made(P.MXFP8, 64, 128, dtype=torch.bfloat16), torch.randn(64, 128).bfloat16()

        def program(b, x):
            b.copy_(x)
            return b[32:], hop.dequantize(b.view(2, 32, 128)) + 1, hop.quantize(P.INT4_32, x)

        twin = b.clone()
        assert_alike(compiled(program, backend="inductor")(b, x), program(twin, x))
        assert_alike(b, twin)

    @parameterized.expand(QUICK)
    @pytest.mark.quick(4)
    def test_flat_state(self, _name, q):
        """What DTensor.from_local does to an optimizer's state: a view has its base's dtype, compiled too."""
        self.check_flat_state(q)

    @parameterized.expand(OTHER)
    @pytest.mark.full
    def test_flat_state_of_others(self, _name, q):
        self.check_flat_state(q)

    def check_flat_state(self, q: Quantizer) -> None:
        state = made(q, 16, 64, dtype=torch.bfloat16)
        for dynamic in (False, True):
            flat = compiled(lambda state: state.view(state.numel()), dynamic)(state)
            assert flat.dtype == torch.bfloat16 and torch.equal(numbers(flat), numbers(state).view(-1))
        view = quietly_raised(lambda: state.view(4, 4, 64))  # a view as input
        if isinstance(view, QuantizedTensor):
            again = compiled(lambda view: hop.dequantize(view.view(16, 64)) + 1)(view)
            assert again.dtype == torch.bfloat16 and torch.equal(again, numbers(state) + 1)

    def test_input_decides_the_program(self):
        """Another quantizer, dtype or copy is another program; the same ones are not."""
        count = torch._dynamo.testing.CompileCounter()
        function = compiled(lambda b: hop.dequantize(b) + 1, backend=count)
        x = torch.randn(4, 64)
        both = hop.quantize(P.INT8_ROW, x, usages=("rowwise", "columnwise"))
        for i, b in enumerate(
            [made(P.INT8_ROW, 4, 64), made(P.MXFP8, 4, 64), made(P.MXFP8, 4, 64).half(), both], start=1
        ):
            for _ in range(2):
                assert torch.equal(function(b.clone()), numbers(b) + 1)
                assert count.frame_count == i

    @pytest.mark.compiler
    @pytest.mark.full
    def test_programs_on_disk(self):
        """A program compiled once is found again, but not by other rules than those that were traced into it."""
        b, found = made(P.STATE8, 64, 128), []
        counters = torch._dynamo.utils.counters
        with torch._inductor.utils.fresh_cache():
            for sources in ("these", "others", "these"):
                with mock.patch("hop.compat.values.sources", lambda sources=sources: sources):
                    counters.clear()
                    assert_alike(compiled(lambda b: torch.cat([b, b]), backend="inductor")(b), torch.cat([b, b]))
                    found.append(counters["aot_autograd"]["autograd_cache_hit"])
        assert found == [0, 0, 1]

    @parameterized.expand([("aot_eager",), ("inductor",)])
    @pytest.mark.compiler
    @pytest.mark.quick(2)
    def test_parameter_and_gradients(self, backend):
        m = Holder(P.INT8_ROW, requires_grad=True)
        x = torch.randn(3, 128, requires_grad=True)
        want = m(x)
        want.sum().backward()
        grads = [m.weight.grad, x.grad]
        m.weight.grad = x.grad = None
        got = compiled(m, backend=backend)(x)
        got.sum().backward()
        torch.testing.assert_close([got, m.weight.grad, x.grad], [want, *grads])
        assert type(m.weight.grad) is Tensor

    def test_quantizing_with_gradients(self):
        x = torch.randn(64, 128, requires_grad=True)
        compiled(lambda x: (hop.dequantize(hop.quantize(P.INT8_ROW, x).view(-1)) * 2).sum())(x).backward()
        assert torch.equal(x.grad, torch.full((64, 128), 2.0))

    @pytest.mark.full
    def test_dtensor(self):
        """The case in which an optimizer's state meets FSDP2: a DTensor of a quantized local tensor."""
        code = """
            import sys, torch, hop
            import torch.distributed as dist
            from torch.distributed.tensor import DTensor, Shard, init_device_mesh

            dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
            mesh = init_device_mesh("cpu", (1,))
            for q in (hop.presets.STATE8, hop.presets.STATE4, hop.presets.INT8_ROW):
                local = hop.quantize(q, torch.randn(64, 128).bfloat16())
                state = DTensor.from_local(local, mesh, [Shard(0)])
                assert isinstance(state.to_local(), hop.QuantizedTensor) and state.dtype == torch.bfloat16
                torch._dynamo.reset()
                flat = torch.compile(lambda s: s.to_local().view(s.numel()), fullgraph=True, backend="aot_eager")(state)
                assert isinstance(flat, hop.QuantizedTensor) and flat.dtype == torch.bfloat16
                assert torch.equal(hop.dequantize(flat), hop.dequantize(local).view(-1))
            dist.destroy_process_group()
            """
        with tempfile.TemporaryDirectory() as folder:
            run_python(textwrap.dedent(code), str(Path(folder) / "store"))


def operators(program: torch.export.ExportedProgram) -> list[Any]:
    return [n.target for n in program.graph.nodes if n.op == "call_function"]


class TestExport(unittest.TestCase):
    @parameterized.expand(QUICK)
    @pytest.mark.full
    def test_parameter(self, _name, q):
        """The tensor stays whole in the program; what is left after decompositions is core ATen on its buffers."""
        self.check_parameter(q)

    @parameterized.expand(OTHER)
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_parameter_of_others(self, _name, q):
        self.check_parameter(q)

    def check_parameter(self, q: Quantizer) -> None:
        m, x = Holder(q, torch.bfloat16).to(torch.float32), torch.randn(3, 128)
        for strict in (False, True):
            exported = torch.export.export(m, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            assert "hop_dequantize" in [str(op) for op in operators(exported)]
            lowered = exported.run_decompositions(hop.decompositions())
            assert all(torch.Tag.core in op.tags for op in operators(lowered)), operators(lowered)
            for program in (exported, lowered):
                for program_or_loaded in (program, reloaded(program)):
                    for rows in (3, 7):
                        x = torch.randn(rows, 128)
                        got = program_or_loaded.module()(x)
                        assert got.dtype == torch.float32
                        torch.testing.assert_close(got, m(x))

    @pytest.mark.full
    def test_quantizing_inside(self):
        class Inside(nn.Module):
            def forward(self, x):
                return hop.dequantize(hop.quantize(P.MXFP8, x).view(-1))

        x = torch.randn(4, 64)
        exported = torch.export.export(Inside(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        lowered = exported.run_decompositions(hop.decompositions())
        ops = [op for op in operators(lowered) if op.__module__ != "_operator"]  # sums and products of sizes
        assert all(torch.Tag.core in op.tags for op in ops), ops
        for rows in (4, 6):
            x = torch.randn(rows, 64)
            assert torch.equal(exported.module()(x), Inside()(x)) and torch.equal(lowered.module()(x), Inside()(x))

    def test_input_and_output(self):
        class Through(nn.Module):
            def forward(self, b, x):
                return hop.dequantize(b) + x, hop.quantize(P.INT8_ROW, x)

        b, x = made(P.MXFP8, 4, 64), torch.randn(4, 64)
        for strict in (False, True):
            exported = torch.export.export(Through(), (b, x), strict=strict)
            assert_alike(list(exported.module()(b, x)), list(Through()(b, x)))

    def test_cast_before_export(self):
        """The dtype is stored once: what was quantized in bfloat16 and cast is float32 in the program too."""
        for q, strict in itertools.product((P.INT8_ROW, P.INT4_32), (False, True)):
            m = Holder(q, torch.bfloat16).float()
            exported = torch.export.export(m, (torch.ones(2, 128),), strict=strict)
            (node,) = [n for n in exported.graph.nodes if "hop_dequantize" in str(n.target)]
            assert node.meta["val"].dtype == torch.float32
            assert exported.module()(torch.ones(2, 128)).dtype == torch.float32


class TestAppearance(unittest.TestCase):
    @parameterized.expand([(str(d), d) for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool)])
    def test_other_dtypes_are_plain(self, _name, dtype):
        """Neither integers nor the 8-bit floats are what a quantized tensor can look like."""
        t = hop.quantize(P.INT8_ROW, torch.randn(4, 64))
        for plain in (t.to(dtype), t.new_zeros(3, dtype=dtype), t.new_empty(3, dtype=dtype)):
            assert type(plain) is Tensor and plain.dtype == dtype
        want = hop.dequantize(t).to(dtype)
        assert torch.equal(t.to(dtype).float(), want.float())
        for make in (
            lambda: QuantizedTensor(t.buffers(), t.quantizer, t.shape, dtype),
            lambda: hop.TensorProto((4, 64), dtype, quantizer=t.quantizer),
        ):
            with self.assertRaisesRegex(TypeError, f"floating point.*{dtype}"):
                make()
