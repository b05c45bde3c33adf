"""Grouped products and their gradients on GPUs: one kernel for all groups (hop.impls.scaled.gpu_groups).

Rows are sorted by group, and each is multiplied with its group's matrix. The sizes of groups stay on the device.

    y  = x · wᵀ             grouped by rows
    dx = q(dy · s_w) · w    grouped by rows; s_w are the scales of w's rows, applied to dy instead of to w's codes
    dw = q(dy · s_x)ᵀ · x   grouped along the summed dimension

This is what hop.impls.quantized.gradient computes for backward="quantized". Codes, scales and integer sums are bit for
bit those of each group alone:

    scales of rows            computed for each row
    one scale per matrix      the amax of its group is appended to each row
    the rows of dyᵀ           each element is paired with the amax of its column in its group, as a block of two
    blocks of 128 of xᵀ       groups are padded with zeros so that each begins with a block
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat.pytree import Args, Kwargs
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.impls.quantize import quantize
from hop.impls.quantized import calls
from hop.impls.scaled import gpu_groups
from hop.kernels.gpu import product as gpu
from hop.numerics import blocks, schemes
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Amax, BlockScaling, CurrentScaling, Static
from hop.numerics.schemes import QUANTIZED, Scheme
from hop.tensor import QuantizedTensor
from hop.tensor.quantized import operand

REALS = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = gpu_groups.BLOCK
_BY_AMAX = (Amax, CurrentScaling, BlockScaling)  # rules that find a scale from an amax alone
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_PADDING = 16  # elements appended to a row for its group's amax; 16 keeps rows aligned to 16 bytes


class Stack(NamedTuple):
    """A stack of matrices and biases, one for each group."""

    weight: Tensor  # (E, R, K), float or quantized; (E, K, R) where products sum over the first dimension
    bias: Tensor | None  # (E, R), float


class Groups(NamedTuple):
    """The assignment of rows to groups."""

    ends: Tensor  # int64 (E,), ascending
    rows: Tensor  # int64 (S,): the group of each row; the last group for rows outside of all

    @classmethod
    def of(cls, ends: Tensor, count: int) -> "Groups":
        """The groups of `count` rows."""
        at = torch.arange(count, device=ends.device)
        return cls(ends, torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1))

    def reduced(self, x: Tensor, how: str) -> Tensor:
        """Reduce the columns of each group: (S, N) -> (E, N), by "max" of non-negative values, or by "sum"."""
        offsets = torch.nn.functional.pad(self.ends, (1, 0))
        return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True, initial=0)

    def amax(self, q: Quantizer, x: Tensor) -> Tensor:
        """The largest magnitude of each column of each group, ignoring NaN if the format has a code for it."""
        return self.reduced(_magnitudes(q, x), "max")

    def apart(self, x: Tensor) -> Tensor:
        """Pad groups with zeros so that each starts at a multiple of BLOCK: (S, N) -> (P, N). P depends only on S and
        E.
        """
        starts = self.moved() - self._blocks()
        at = torch.arange(len(x), device=x.device)
        before = torch.nn.functional.pad(self.ends, (1, 0))[self.rows]
        count = -(-len(x) // BLOCK) * BLOCK + len(self.ends) * BLOCK
        place = torch.where(at < self.ends[-1], starts[self.rows] + at - before, count)
        return x.new_zeros(count + 1, x.shape[1]).index_copy_(0, place, x)[:-1]

    def moved(self) -> Tensor:
        """The ends of the groups in the result of `apart`."""
        return self._blocks().cumsum(0)

    def _blocks(self) -> Tensor:
        sizes = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        return -(-sizes // BLOCK) * BLOCK


# ---- codes


@functools.lru_cache(maxsize=1024)
def is_by_rows(q: Quantizer) -> bool:
    """Whether each row of a matrix is quantized independently of the others."""
    return not q.flat and all(blocks.per_dimension(block, 2)[0] == 1 for _, block in q.stored().values())


@functools.lru_cache(maxsize=1024)
def is_by_group(q: Quantizer) -> bool:
    """Whether rows of a group share one scale that `of_rows` can find."""
    return type(q.scale) in _BY_AMAX and not q.flat and q.shares_scale() and q.per_byte() == 1 and not q.is_random()


def of_rows(q: Quantizer, x: Tensor, groups: Groups | None) -> tuple[QuantizedTensor, Tensor | None]:
    """Quantize rows. If all rows of a group share one scale, also return these scales, (E, 1).

    `groups` may be None where each row is quantized independently.
    """
    if is_by_rows(q):
        return quantize(q, x), None
    assert groups is not None
    by_row = replace(q, block=(1, -1))
    amax = groups.amax(q, _magnitudes(q, x).amax(1, keepdim=True))
    padded = x.new_zeros(len(x), _PADDING)
    padded[:, :1] = amax[groups.rows]
    codes = quantize(by_row, torch.cat([x, padded], 1))
    return codes.rebuilt(codes.buffers() | {"codes": codes.codes[:, : x.shape[1]]}, shape=x.shape), _scale(by_row, amax)


def of_columns(q: Quantizer, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Quantize the columns of x, (S, N), in each group separately, as q quantizes rows.

    Returns the codes, and the scales: (E, N), or (E, 1) where all columns of a group share one.
    """
    if not is_by_rows(q):
        codes, scale = of_rows(q, x, groups)
        assert scale is not None
        return codes.codes, scale
    amax = groups.amax(q, x)
    pairs = torch.stack([x, amax[groups.rows]], 2)
    return quantize(replace(q, block=(1, 1, 2)), pairs).codes[..., 0], _scale(replace(q, block=(1, 1)), amax)


def _magnitudes(q: Quantizer, x: Tensor) -> Tensor:
    return torch.where(x == x, x.abs(), 0.0) if q.format.has_nan else x.abs()


def _scale(q: Quantizer, amax: Tensor) -> Tensor:
    """The scales of blocks with this amax."""
    return quantize(q, amax).scale


def _numbers(codes: QuantizedTensor, shape: tuple[int, ...], block: tuple[int, ...]) -> QuantizedTensor:
    """Replace the scale of `codes` by ones of `shape`, so that products use plain code values."""
    q = replace(codes.quantizer, block=block, scale=Static())
    return codes.rebuilt({"codes": codes.codes, "scale": codes.scale.new_ones(shape)}, quantizer=q)


def of_weight(x: Tensor, weight: Tensor, scheme: Scheme, columns: bool) -> Tensor:
    """Quantize a stack of matrices, each separately.

    Returned unchanged if it is quantized already, if kernels do not read such codes, or if results have another dtype
    than x.
    """
    q = scheme.rhs
    if isinstance(weight, QuantizedTensor) or q is None or not _are_read(q) or _dtype(x, weight) != x.dtype:
        return weight
    return quantize(stack_quantizer(q, columns), weight)


def _are_read(q: Quantizer) -> bool:
    """Whether kernels read codes of this quantizer, and it draws no random bits."""
    return q.format.dtype in _CODES and q.format.bits == 8 and not q.format.zero and not q.is_random()


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of results."""
    return calls.default_dtype((x, weight))


def stack_quantizer(q: Quantizer, columns: bool) -> Quantizer:
    """The quantizer of a stack whose matrices are quantized by q, with the summed dimension as rows."""
    return (q.transposed(2) if columns else q).of_batch(2)


# ---- requests to kernels


def asked(x: Tensor, ends: Tensor, stack: Stack, scheme: Scheme | None, columns: bool) -> Kwargs:
    """Plans of the product and its gradients for rows x, (S, K), or Declined with the reason."""
    names, q = ["product", "gradient of x", "gradient of weight"], None if scheme is None else scheme.lhs
    grad = x.new_zeros(len(x), stack.weight.shape[2 if columns else 1])
    if not gpu.takes(x):
        elsewhere = f"for GPUs, in eager mode and in programs for this process; x is on {x.device}"
        return dict.fromkeys(names, Declined(elsewhere))
    found: dict[str, object] = {names[0]: Declined("for rows that are quantized one by one or group by group")}
    if scheme is not None and q is not None and (is_by_rows(q) or is_by_group(q)):
        rows, _ = of_rows(q, x, Groups.of(ends, len(x)))
        codes = of_weight(x, stack.weight, scheme, columns)
        dtype = x.dtype if x.dtype in REALS else torch.float32
        found[names[0]] = product(rows, codes, ends, stack.bias, dtype, columns)
    of_gradients = asked_for_gradients(grad, x, ends, stack, scheme, columns)
    return found | {f"gradient of {name}": p for name, p in of_gradients.items()}


def product(
    x: QuantizedTensor, weight: object, ends: Tensor, bias: Tensor | None, dtype: torch.dtype, columns: bool
) -> Any:
    """The plan of the product, (S, R), or Declined."""
    if not isinstance(weight, QuantizedTensor):
        return Declined("the matrices are floats")
    return _ROWS.match((operand(x), operand(weight), ends, bias, dtype, columns))


def _prepare(asked: Callable[..., Any], call: Args) -> Plan:
    """The plan of a product; it takes no arguments."""
    product = asked(*call)
    decline(gpu.declines(product))
    return lambda: gpu.run(product)


_ROWS = Kernel("GPU groups", functools.partial(_prepare, gpu_groups.asked))
_DEPTH = Kernel("GPU groups", functools.partial(_prepare, gpu_groups.asked_in_depth))


def check_gradients(x: Tensor, weight: Tensor, scheme: Scheme | None, columns: bool) -> None:
    """Raise Declined unless kernels compute the gradients of such products."""
    if scheme is None or scheme.backward != QUANTIZED:
        raise Declined("for backward='quantized', whose products are those of codes")
    quantizers = [q for q in (scheme.lhs, scheme.rhs, scheme.grad) if q is not None]
    for q in quantizers:
        if q.is_random() or q.hadamard is not None or type(q.scale) not in _BY_AMAX:
            rules = [t.__name__ for t in _BY_AMAX]
            raise Declined(f"for scales by {rules}, round-to-nearest and no transform, not {q}")
        if not _are_read(q):
            raise Declined(f"for int8 and 8-bit floats, not {q.format.name}")
    lhs, rhs, grad = (q.block for q in quantizers)
    in_blocks = lhs == grad == (1, BLOCK) and rhs == (BLOCK, BLOCK)
    if not in_blocks and not all(map(schemes.rows_share_scales, quantizers)):
        wanted = f"scales of rows, of matrices, and of blocks of 1 x {BLOCK} by {BLOCK} x {BLOCK}"
        raise Declined(f"for {wanted}, not {scheme}")
    if isinstance(weight, QuantizedTensor) and weight.quantizer != stack_quantizer(quantizers[1], columns):
        raise Declined(f"for matrices by the scheme's {quantizers[1]}, not {weight.quantizer}")
    if x.dtype not in REALS or _dtype(x, weight) != x.dtype:
        raise Declined(f"for results in the dtype of the rows, of {REALS}, not {x.dtype} by {weight.dtype}")
    if not len(x):
        raise Declined("there are no rows")


def gradient_of_rows(grad: Tensor, weight: Tensor, groups: Groups, scheme: Scheme, columns: bool) -> Any:
    """The plan of x's gradient, (S, K), in the dtype of dy, (S, R)."""
    codes, q, dtype = of_weight(grad, weight, scheme, columns), scheme.grad, grad.dtype
    assert scheme.rhs is not None and q is not None
    if schemes.rows_share_scales(scheme.rhs) and not scheme.rhs.shares_scale():
        assert isinstance(codes, QuantizedTensor)  # as check_gradients demands
        by_row = codes.scale.squeeze(1 if columns else 2)
        grad = grad.to(torch.float32) * by_row[groups.rows]
        codes = _numbers(codes, (len(by_row), 1, 1), (1, -1, -1))
    rows, _ = of_rows(q, grad, groups)
    return product(rows, codes, groups.ends, None, dtype, not columns)


def gradient_of_matrices(grad: Tensor, x: Tensor, groups: Groups, scheme: Scheme) -> Any:
    """The plan of the matrices' gradients, (E, R, K), in the dtype of dy, (S, R)."""
    lhs, q, dtype = scheme.lhs, scheme.grad, grad.dtype
    assert lhs is not None and q is not None
    if not schemes.rows_share_scales(lhs):
        (a, of_rows_), (b, of_columns_) = (_apart(own, t, groups) for own, t in ((q, grad), (lhs, x)))
        return _DEPTH.match((a, b, groups.moved(), dtype, of_rows_.mT, of_columns_))
    codes, scale = of_rows(lhs, x, groups)
    if scale is None:
        grad = grad.to(torch.float32) * codes.scale
        scale = codes.scale.new_ones(1)
    a, of_rows_ = of_columns(q, grad, groups)
    return _DEPTH.match((a, codes.codes, groups.ends, dtype, of_rows_, scale))


def _apart(q: Quantizer, x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks of rows, for groups that are padded to whole blocks."""
    moved = quantize(q.transposed(2), groups.apart(x))
    return moved.codes, moved.scale


# ---- gradients


def asked_for_gradients(
    grad: Tensor, x: Tensor, ends: Tensor, stack: Stack, scheme: Scheme | None, columns: bool
) -> Kwargs:
    """Plans of the gradients of "x", (S, K), and of a float "weight", from dy, (S, R); or Declined."""
    wanted = ["x"] if isinstance(stack.weight, QuantizedTensor) else ["x", "weight"]
    try:
        check_gradients(x, stack.weight, scheme, columns)
    except Declined as declined:
        return dict.fromkeys(wanted, declined)
    assert scheme is not None
    groups = Groups.of(ends, len(x))
    found = {"x": gradient_of_rows(grad, stack.weight, groups, scheme, columns)}
    if len(wanted) > 1:
        found["weight"] = gradient_of_matrices(grad, x, groups, scheme)
    return found


def gradients(
    grad: Tensor, x: Tensor, rows: Tensor | None, ends: Tensor, stack: Stack, scheme: Scheme, columns: bool
) -> list[Tensor | None] | Declined:
    """Gradients of x, of a float weight and of the bias; or Declined if grouped kernels do not compute them."""
    found = asked_for_gradients(grad, x if rows is None else x[rows], ends, stack, scheme, columns)
    if (declined := next((p for p in found.values() if isinstance(p, Declined)), None)) is not None:
        return declined
    of_x = found["x"]()
    if rows is not None:  # a row of x may be in several groups
        of_x = torch.zeros_like(x).index_put_((rows,), of_x, accumulate=True)
    of_weight = found["weight"]() if "weight" in found else None
    if of_weight is not None and columns:
        of_weight = of_weight.mT.contiguous()
    groups, of_bias = Groups.of(ends, len(grad)), None
    if stack.bias is not None:
        of_bias = groups.reduced(grad.to(torch.float32), "sum").to(stack.bias.dtype)
    return [of_x, of_weight, of_bias]
