"""The table of operators, and what each place that asks it leaves out, with the reason."""

import pkgutil
import unittest
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from parameterized import parameterized

import hop
from hop.compat import inductor, stock
from hop.dispatch import operators
from hop.dispatch.operators import (
    ADD,
    BIAS,
    BOUND,
    CONCATENATE,
    CONVOLUTION,
    DIVIDE,
    EMBEDDING,
    INTERPOLATE,
    LHS,
    MATRIX,
    MAXIMUM,
    MEAN,
    MOVE,
    MULTIPLY,
    NEAREST,
    OTHER,
    RHS,
    SCALED,
    SOFTMAX,
    SUM,
    TABLE,
    VECTOR,
    VIEW,
    Family,
    aten,
)
from hop.export.analysis.intervals import rules
from hop.export.rewrite import integer, scheme, sums
from hop.export.targets.executorch import model as executorch
from hop.export.targets.onnx import others
from hop.impls.out_dtype import batching, forms, gradient, promotion
from hop.impls.quantized import calls
from hop.impls.scaled import families, meaning
from hop.impls.scaled.calls import Call
from hop.impls.scaled.operands import Operand
from hop.numerics import copies
from hop.report import listing
from hop.tensor import table as tensor_rules

CODES = Operand(hop.presets.INT8_TENSOR, (torch.ones(2, 2), torch.ones(1, 1)), (copies.ROWWISE,), (2, 2))


def call_of(op: Any) -> Call:
    """A call of scaled with two operands of one scale each, where there may be operands."""
    row = TABLE[op]
    args: list[Any] = [CODES if role in (OTHER, LHS, RHS) else [2] if not role else torch.ones(2) for role in row.roles]
    args += [-1] if row.family is SOFTMAX else []
    return Call(op, torch.float32, None, None, ([CODES, CODES],) if row.family is CONCATENATE else tuple(args), {})


def known(knows: Callable[[Any], bool]) -> set[Any]:
    return {op for op in TABLE if knows(op)}


def is_exact(op: Any) -> bool:
    return op in SCALED and meaning.exact_declines(call_of(op)) is None


def is_placed(op: Any) -> bool:
    return op in SCALED and meaning.of(call := call_of(op)).places(call, 2) is not None


COVERED: dict[str, set[Any]] = {
    "scaled": known(lambda op: op in SCALED),
    "exact sums": known(is_exact),
    "placements of scaled": known(is_placed),
    "quantized": set(calls.OPERATORS),
    "quantized tensors": known(lambda op: op in tensor_rules.rules()),
    "products of out_dtype": {*forms._PRODUCTS, *forms._CONVOLUTIONS},
    "gradients of out_dtype": {*forms._PRODUCTS, *forms._CONVOLUTIONS, *gradient._RULES},
    "batches of out_dtype": known(
        lambda op: op in batching._RULES or op in forms._CONVOLUTIONS or torch.Tag.pointwise in op.tags
    ),
    "integers of out_dtype": known(
        lambda op: (
            op.overloadpacket in promotion._LINEAR | promotion._INT64_PACKETS | promotion._FLOAT32_PACKETS
            or op in promotion._FLOAT32_FOR_INTEGERS
        )
    ),
    "to_integer, floats as the result": known(
        lambda op: op in SCALED and TABLE[op].family in (*integer._PRODUCTS, EMBEDDING, *integer.VALUES)
    ),
    "to_integer, sums of casts": {*sums._PLAIN, aten.matmul.default},
    "to_scheme": set(scheme.OPERATORS),
    "stock out_dtype": known(lambda op: op in stock.stock_operators),
    "XNNPACK": set(executorch.PRODUCTS),
    "means of float64 in ONNX": set(others._MEANS),
    "ranges": known(lambda op: op in rules.RULES),
    "ranges of floats": known(lambda op: op in rules.MOVES | rules._MONOTONE or op in rules._CHOOSE),
    "products of reports": known(lambda op: op in listing._PRODUCTS),
    "views in Inductor": known(lambda op: op in inductor._VIEWS),
}

_ELEMENTS = (CONCATENATE, BOUND, MAXIMUM, NEAREST, VIEW, MOVE)
_REAL = (MULTIPLY, DIVIDE, ADD, SUM, MEAN, INTERPOLATE)
_PADDED = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
_TURNED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_ADAPTIVE = (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default)
_COMPOSITE = (
    *(aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.narrow.default, aten.movedim.int),
    *(aten.movedim.intlist, aten.contiguous.default),
)
_KEEP = "its result has other dimensions than its operand"
_NO_PRODUCT = "no product"
_DECOMPOSED = "not in core ATen: a program is brought there first"
_NO_CODES = "scaled has no meaning for it"
_BY_PYTORCH = "through the reference, by PyTorch's own rules"
_STRINGS = "padding as a string is none of the normal forms"

LEFT: dict[str, dict[tuple[Any, ...], str]] = {
    "scaled": {
        (VECTOR,): "linear takes vectors",
        (MOVE, aten.stack.default): "operators on quantized tensors that nobody has asked for",
    },
    "exact sums": {
        (VECTOR, MOVE): _NO_CODES,
        (ADD, DIVIDE, SUM, MEAN, INTERPOLATE): "its result is no integer times one unit",
        (CONCATENATE,): "operands have scales of their own",
        (aten.mul.Scalar,): "one factor is not quantized",
        (aten.clamp.default, aten.hardtanh.default, aten.relu6.default): "bounds are no multiples of the scale",
    },
    "placements of scaled": {
        (VECTOR, MOVE): _NO_CODES,
        (
            SUM,
            MEAN,
            INTERPOLATE,
            CONCATENATE,
            MAXIMUM,
            NEAREST,
        ): "dimensions of its result are not those of its operand: gathered",
        tuple(op for op in operators.within(VIEW) if not TABLE[op].stays): f"{_KEEP}: gathered",
    },
    "quantized": {
        (VECTOR, *_REAL, *_ELEMENTS): "a scheme says how a product is computed",
        (aten.matmul.default, aten.baddbmm.default): "no layer computes it: linear and bmm are theirs",
        (aten.convolution.default, *_PADDED): "no layer of hop.nn computes it",
    },
    "quantized tensors": {
        (MATRIX, VECTOR, CONVOLUTION, EMBEDDING, *_REAL, BOUND, MAXIMUM, NEAREST): "by dequantizing; scaled has codes",
        _COMPOSITE: "made of others before tensors see it",
        (aten.flip.default, aten.repeat.default, aten.index_select.default): "by dequantizing",
        (aten.lift_fresh_copy.default,): "of constants of programs, which are plain",
    },
    "products of out_dtype": {(EMBEDDING, *_REAL, *_ELEMENTS): _NO_PRODUCT, _PADDED: _STRINGS},
    "gradients of out_dtype": {
        (INTERPOLATE, CONCATENATE, MAXIMUM, NEAREST, VIEW, MOVE): _BY_PYTORCH,
        (aten.relu.default, aten.relu6.default, aten.hardtanh.default): _BY_PYTORCH,
        (*_ADAPTIVE, aten.avg_pool1d.default, aten.avg_pool3d.default): _BY_PYTORCH,
        _PADDED: _BY_PYTORCH,
    },
    "batches of out_dtype": {
        (EMBEDDING, SUM, MEAN, INTERPOLATE, CONCATENATE, MAXIMUM, NEAREST, MOVE): _BY_PYTORCH,
        tuple(op for op in operators.within(VIEW) if torch.Tag.pointwise not in op.tags): _BY_PYTORCH,
        _PADDED: _BY_PYTORCH,
    },
    "integers of out_dtype": {(EMBEDDING, *_ELEMENTS): "it chooses among numbers, in any dtype"},
    "to_integer, floats as the result": {
        (VECTOR, MOVE, aten.stack.default): _NO_CODES,
        (MULTIPLY, ADD, DIVIDE, SUM, MEAN, INTERPOLATE, aten.cat.default): "in floats they stay as they were",
    },
    "to_integer, sums of casts": {
        (VECTOR, CONVOLUTION, EMBEDDING, *_REAL, *_ELEMENTS): "nobody writes such sums",
        (aten.bmm.default, aten.addmm.default, aten.baddbmm.default): "nobody writes such sums",
    },
    "to_scheme": {
        (VECTOR, *_REAL, *_ELEMENTS): "it has no weight",
        (aten.mm.default, aten.bmm.default, aten.addmm.default): "which factor is the weight is not said",
        (aten.baddbmm.default, aten.matmul.default): "which factor is the weight is not said",
        (aten.convolution.default, *_TURNED): "its weight has its output channels in another dimension, or may have",
    },
    "stock out_dtype": {
        (VECTOR, EMBEDDING, ADD, SUM, MEAN, INTERPOLATE, *_ELEMENTS): "PyTorch's operator takes eight",
        (aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.matmul.default): "PyTorch's takes eight",
        (aten.conv1d.default, aten.conv3d.default, *_PADDED, *_TURNED): "PyTorch's operator takes eight",
    },
    "XNNPACK": {
        (VECTOR, CONVOLUTION, EMBEDDING, *_REAL, *_ELEMENTS): "it takes no weight in groups",
        (aten.matmul.default, aten.baddbmm.default): "not tried with XNNPACK",
    },
    "means of float64 in ONNX": {
        (MATRIX, VECTOR, CONVOLUTION, EMBEDDING, MULTIPLY, DIVIDE, ADD, SUM, *_ELEMENTS): "no mean",
        (INTERPOLATE,): "scaled writes it as sums of rows",
        (aten.mean.default, aten.mean.dim): "ONNX has it in float64",
        _ADAPTIVE: _DECOMPOSED,
    },
    "ranges": {
        (VECTOR, MAXIMUM, NEAREST): _DECOMPOSED,
        (aten.matmul.default, aten.linear.default, aten.relu6.default, aten.hardtanh.default): _DECOMPOSED,
        (*operators.within(CONVOLUTION) - {aten.convolution.default},): _DECOMPOSED,
        (DIVIDE, MEAN, INTERPOLATE): "its result is float",
        (aten.cumsum.default,): "no sum of quantized operands has it",
    },
    "ranges of floats": {
        (MATRIX, VECTOR, CONVOLUTION, SUM, MEAN, INTERPOLATE): "the bound would need that of each rounding on the way",
        (MAXIMUM, NEAREST): _DECOMPOSED,
    },
    "products of reports": {
        (VECTOR,): "scaled has no roles for its factors",
        (*_REAL, *_ELEMENTS): _NO_PRODUCT,
    },
    "views in Inductor": {
        (MATRIX, VECTOR, CONVOLUTION, EMBEDDING, *_REAL, CONCATENATE, BOUND, MAXIMUM, NEAREST): "no view",
        (
            aten.clone.default,
            *(op for op in operators.within(MOVE) if op is not aten._unsafe_view.default),
        ): "no view there",
        tuple(op for op in _COMPOSITE if op is not aten.reshape.default): "made of others before Inductor sees it",
        (
            aten.squeeze.default,
            aten.squeeze.dims,
            aten.select.int,
            aten.alias.default,
        ): "costs an operation",
    },
}
"""What a place leaves out, families or single operators, and why. A new row of a family that is named here fails until
each place has it or says why not; so does a reason that is out of date. A family that is named nowhere is scaled's
alone: to the other places its operators are like all those that the table does not have."""

NAMED = {x for left in LEFT.values() for named in left for x in named}
SHARED = {op for op, row in TABLE.items() if op in NAMED or row.family in NAMED}


class TestTable(unittest.TestCase):
    @parameterized.expand(list(COVERED))
    def test_every_place_has_every_row_or_says_why_not(self, place):
        left = {x for named in LEFT[place] for x in named}
        families = {x for x in left if isinstance(x, Family)}
        expected = {op for op, row in TABLE.items() if op in left or row.family in families}
        missing = (TABLE.keys() if place == "scaled" else SHARED) - COVERED[place] - expected
        assert not missing, f"{place} has none of {sorted(map(str, missing))}: add them, or a reason here"
        stale = expected & COVERED[place]
        assert not stale, f"{place} has {sorted(map(str, stale))}: take their reasons away"
        assert left - families <= TABLE.keys() and {row.family for row in TABLE.values()} >= families

    def test_the_reasons_are_of_places(self):
        assert LEFT.keys() == COVERED.keys()

    def test_every_family_that_scaled_runs_has_a_meaning(self):
        """In the file that its row names; and no file and no meaning is left over."""
        assert {row.family for row in SCALED.values()} == meaning.MEANINGS.keys()
        files = {
            m.name: import_module(f"{families.__name__}.{m.name}") for m in pkgutil.iter_modules(families.__path__)
        }
        assert {f: f.file for f in meaning.MEANINGS} == {f: name for name, m in files.items() for f in m.MEANINGS}

    def test_rows_say_what_schemas_say(self):
        """Roles are of arguments that take tensors, biases are called so, and a product is one of the same family."""
        for op, row in TABLE.items():
            arguments = op._schema.arguments
            bias = "self" if op in (aten.addmm.default, aten.baddbmm.default) else "bias"
            for argument, role in zip(arguments, row.roles, strict=False):
                assert ("Tensor" in str(argument.type)) == bool(role), (op, role)
                assert (role == BIAS) == (argument.name == bias), (op, role)
            assert len(row.roles) <= len(arguments)
            if row.family in (MATRIX, CONVOLUTION):
                assert row.product is not None and TABLE[row.product].family is row.family, op
            digits = [int(c) for c in op.__name__.partition(".")[0] if c.isdigit()]
            if row.family in (CONVOLUTION, MAXIMUM, MEAN):
                assert row.spatial == (digits[0] if digits else 0), op
            assert row.transposed == ("transpose" in op.__name__ and row.family is CONVOLUTION), op

    def test_what_moves_gives_elements_of_its_operands(self):
        """In the order of the operand where the row says that elements stay."""
        x = torch.arange(6.0).reshape(2, 3)
        given: dict[Any, Any] = {
            aten.cat.default: ([x, x],), aten.stack.default: ([x, x],), aten.view.default: (x, [6]),
            aten._unsafe_view.default: (x, [6]), aten.reshape.default: (x, [6]), aten.unflatten.int: (x, 1, [3, 1]),
            aten.permute.default: (x, [1, 0]), aten.transpose.int: (x, 0, 1), aten.unsqueeze.default: (x, 0),
            aten.squeeze.dim: (x, 0), aten.squeeze.dims: (x, [0]), aten.expand.default: (x, [2, 2, 3]),
            aten.slice.Tensor: (x, 1, 0, 2), aten.select.int: (x, 0, 1), aten.narrow.default: (x, 0, 1, 1),
            aten.movedim.int: (x, 0, 1), aten.movedim.intlist: (x, [0], [1]), aten.flip.default: (x, [0]),
            aten.repeat.default: (x, [2, 1]), aten.index_select.default: (x, 1, torch.tensor([2, 0])),
        }  # fmt: skip
        for op, row in TABLE.items():
            if row.family.moves:
                y = op(*given.get(op, (x,)))
                assert set(y.flatten().tolist()) <= set(x.flatten().tolist()), op
                assert not row.stays or torch.equal(x, y), op

    def test_what_is_unknown(self):
        for op in (aten.erfc.default, aten.mm, "mm", None):
            assert operators.of(op) is operators.UNKNOWN


class TestLists(unittest.TestCase):
    """What lists had left out before they were one table."""

    def test_adaptive_pooling_of_integers_in_three_dimensions(self):
        x = torch.from_numpy(np.random.default_rng(0).integers(-128, 128, (1, 2, 4, 6, 8), dtype=np.int8))
        want = x.double().reshape(1, 2, 2, 2, 3, 2, 4, 2).mean((3, 5, 7))
        for output in (torch.float32, torch.int32):
            got = hop.out_dtype(aten.adaptive_avg_pool3d.default, output, x, [2, 3, 4])
            assert torch.equal(got, want.to(output))
