"""Which arguments of operators out_dtype leaves as they are, against the schemas and samples of all of ATen."""

import contextlib
import functools
import math
import unittest
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import hop
from hop.compat.pytree import tree_leaves, tree_map
from hop.impls.out_dtype import kept
from hop.impls.out_dtype.arguments import describe

aten = torch.ops.aten

# Every name that ATen gives to tensors whose numbers an operator computes with, or copies.
OPERANDS = set(
    """A B LD LU LU_data a abs alpha anchor angle any append atol aweights b_hh b_ih batch1 batch2 bias bins boundaries
    buffer cdist coefficients data dense dense_B dgrad_glu diagonals dst dx elements end exponent ffn_bias_1 ffn_bias_2
    ffn_weight_1 ffn_weight_2 g glu grad grad_glu grad_in grad_out grad_output grad_x grid hx i1 i2 i3 imag initial inp
    input input1 input2 input3 input_scale invstd is_target key list log_alpha log_probs mat mat1 mat2 matrices max mean
    min n neg_log_likelihood negative noise norm_bias_1 norm_bias_2 norm_weight_1 norm_weight_2 other output
    output_scale padded pdist per_sample_weights pos_weight positive prepend primal proj_bias proj_weight q qScale
    qScaleAndZeros qZeros qkv_bias qkv_weight qtensor query rcond real rtol running_mean running_var scale scales
    scales_zeros self self_or_result sequences sorted_sequence source sparse src start sum_dy sum_dy_xmu t tangent
    target tau tensor tensor1 tensor2 tensors test_elements theta tol total total_weight v value values var vec vec1
    vec2 w_hh w_ih weight weight_arr weight_scale weights window x x1 x2 y z""".split()
)


def functional() -> Iterator[Any]:
    """The overloads of ATen that out_dtype runs."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and not schema.is_mutable:
            packet = getattr(aten, schema.name.removeprefix("aten::"), None)
            op = getattr(packet, schema.overload_name or "default", None)
            if op is not None and is_taken(op):
                yield op


@functools.cache
def is_taken(op: Any) -> bool:
    """Whether out_dtype runs it."""
    try:
        describe(op)
    except ValueError:
        return False
    return True


class Calls(TorchDispatchMode):
    """Records the calls that out_dtype can make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls.append((op, args, kwargs or {}))
        return op(*args, **kwargs or {})


def samples(info: Any, count: int) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of `info`'s own operator, and those that its function and its gradient make of others."""
    packet = getattr(aten, info.aten_name or "", None) or getattr(aten, info.name.split(".")[-1], None)
    for sample in islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), count):
        with (
            Calls() as recorded,
            contextlib.suppress(RuntimeError, AssertionError),
        ):  # some need a GPU, some have no gradient
            out = tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
            out = [y for y in out if isinstance(y, torch.Tensor) and y.requires_grad]
            if out:
                torch.autograd.backward(out, [torch.ones_like(y) for y in out])
        yield from recorded.calls
        for name in packet.overloads() if packet is not None else ():
            yield getattr(packet, name), (sample.input, *sample.args), sample.kwargs


def refuse_floats(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Names of arguments that hold integers beside floats, and for which `op` refuses the same numbers in floats."""
    given = dict(zip((a.name for a in op._schema.arguments if not a.kwarg_only), args, strict=False)) | kwargs
    tensors = {name: [x for x in tree_leaves(v) if isinstance(x, torch.Tensor)] for name, v in given.items()}
    if len({x.is_floating_point() for xs in tensors.values() for x in xs}) < 2:
        return
    try:
        op(**given)
    except (RuntimeError, TypeError, NotImplementedError):
        return  # another overload than that of these arguments
    for name, xs in tensors.items():
        if xs and not any(x.is_floating_point() or x.is_complex() for x in xs):
            cast = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) else x, given[name])
            try:
                op(**{**given, name: cast})
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                yield name


def halves(*shape: int) -> torch.Tensor:
    """Numbers that bfloat16 holds."""
    return torch.arange(1, 1 + math.prod(shape)).remainder(13).view(shape) / 8


def integers(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


CLASSES = integers(1, 0, 3)
CASES: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("narrow", aten.narrow.Tensor, (halves(5, 3), 0, torch.tensor(2), 2), {}),
    ("one_hot", aten.one_hot.default, (CLASSES, 5), {}),
    ("bincount", aten.bincount.default, (CLASSES, halves(3)), {}),
    ("cov", aten.cov.default, (halves(3, 4),), {"fweights": integers(1, 2, 3, 1)}),
    ("both_weights", aten.cov.default, (halves(3, 4),), {"fweights": integers(1, 2, 3, 1), "aweights": halves(4)}),
    ("lengths", aten.segment_reduce.default, (halves(6, 2), "sum"), {"lengths": integers(1, 5)}),
    ("offsets", aten.segment_reduce.default, (halves(6, 2), "max"), {"offsets": integers(0, 2, 6)}),
    (*("searchsorted", aten.searchsorted.Tensor, (halves(3).flip(0), halves(4) + 0.0625)),
        {"sorter": integers(2, 1, 0)}),
    ("lu_solve", aten.linalg_lu_solve.default, (*torch.linalg.lu_factor(torch.eye(3).flip(0)), halves(3, 2)), {}),
    (*("fake_quantize", aten.fake_quantize_per_channel_affine.default),
        (halves(3, 4), torch.tensor([0.5, 0.25, 1.0]), integers(1, 0, -3, dtype=torch.int32), 0, -8, 7), {}),
    (*("nll_backward", aten.nll_loss_backward.default),
        (halves(3), halves(3, 4), CLASSES, None, 0, -100, torch.tensor(3.0)), {}),
    ("margin_backward", aten.multi_margin_loss_backward.default, (halves(3), halves(3, 4), CLASSES, 1, 1.0, None, 0),
        {}),
    ("ctc", aten.ctc_loss.Tensor, (halves(5, 1, 4), integers(1, 2)[None], integers(5), integers(2)), {}),
    ("scatter", aten.scatter.src, (halves(4), 0, CLASSES, halves(3)), {}),
]  # fmt: skip


class TestKeptArguments(unittest.TestCase):
    def test_every_argument_of_aten_is_an_operand_or_kept(self):
        unknown = {
            (str(op), a.name)
            for op in functional()
            for a in op._schema.arguments
            if "Tensor" in str(a.type) and a.name not in OPERANDS | kept.kept(op) | kept.kept_integers(op)
        }
        assert not unknown, "add them to the lists of hop.impls.out_dtype.kept, or to OPERANDS"

    def test_every_name_in_the_lists_exists(self):
        arguments = {(op._schema.name, a.name) for op in functional() for a in op._schema.arguments}
        operators, names = ({pair[i] for pair in arguments} for i in (0, 1))
        assert names >= kept._NAMES | kept._INTEGERS
        listed = {(o, name) for name, given in kept._OPERATORS.items() for o in given if o in operators}
        assert arguments >= listed
        assert len(listed) > 30

    @pytest.mark.full
    def test_arguments_that_refuse_floats_are_kept(self):
        """Every call of PyTorch's own samples of operators and their gradients: where an operator takes integers beside
        floats, and refuses floats for them, they are kept."""
        seen: set[tuple[Any, str]] = set()
        infos = [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op, args, kwargs in (call for info in infos for call in samples(info, 3) if is_taken(call[0])):
                detached = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (args, kwargs))
                seen |= {(op, name) for name in refuse_floats(op, *detached)}
        assert len(seen) > 50
        promoted = {
            (str(op), name) for op, name in seen if describe(op).promotes(name, torch.ones(1, dtype=torch.int64))
        }
        assert not promoted

    @parameterized.expand(CASES)
    def test_operator(self, _name, op, args, kwargs):
        """The operator on floats, and out_dtype of the same numbers in other floats."""
        want = op(*args, **kwargs).to(torch.float64)
        narrow = [x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        for output, given in ((torch.bfloat16, args), (torch.float32, args), (torch.float32, narrow)):
            got = hop.out_dtype(op, output, *given, **kwargs)
            assert got.dtype is output
            torch.testing.assert_close(got.to(torch.float64), want.to(output).to(torch.float64), rtol=1e-6, atol=1e-6)

    def test_templates_do_not_count_in_promotion(self):
        x = torch.tensor([2**30 + 1, 5], dtype=torch.int32)
        assert torch.equal(hop.out_dtype(aten.view_as.default, torch.int32, x, torch.ones(2, 1)), x[:, None])
        assert torch.equal(hop.out_dtype(aten.expand_as.default, torch.int32, x, torch.ones(3, 2)), x.expand(3, 2))

    def test_codes_keep_their_dtype(self):
        a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((17, 32), (32, 16)))
        a, b = a % 16, b % 16  # sums that every CPU's kernel gives exactly
        assert torch.equal(hop.out_dtype(aten._int_mm.default, torch.int64, a, b), a.long() @ b.long())
