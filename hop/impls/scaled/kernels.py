"""The kernels of scaled for matrix products, in matching order.

native product        native kernels on the CPU, if they were built (native.py)
native product in parts   plain floats with more bits than bfloat16 (native_parts.py)
native group product  weights as stored in model files (native_groups.py)
GPU product           kernels of cutlass_kernels (gpu.py); 4-bit weights (gpu_nibbles.py)
integer product       torch._int_mm on codes; zero points become corrections of its sums
integer groups        float32 products of groups whose sums are exact
bfloat16 product      torch.mm on values of at most 8 bits, whose products are exact, summed in float32

Convolutions have other kernels (native_convolution.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.dispatch.kernel import Declined, Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.forms import Product, as_product
from hop.impls.scaled.calls import Call, Result, by_sum, check_fit, is_batch, is_integer, usage
from hop.impls.scaled.gpu import GPU
from hop.impls.scaled.gpu_nibbles import NIBBLES
from hop.impls.scaled.native import NATIVE
from hop.impls.scaled.native_groups import GROUPS
from hop.impls.scaled.native_parts import PARTS
from hop.impls.scaled.operands import block_of, centered, plain, spread
from hop.impls.scaled.outputs import finish, requantized
from hop.impls.scaled.products import (
    Sum,
    added,
    biased,
    cut,
    group_scale,
    groups,
    has_wide_sums,
    is_one,
    product,
    with_bias,
    zeros,
)
from hop.kernels.aten import integer
from hop.kernels.aten.quantize import fast, fast_format
from hop.numerics import blocks, copies
from hop.numerics.formats import Integer
from hop.numerics.layouts import Decoded

# ---- integer products


def _plain_factors(call: Call) -> tuple[Operand, Operand]:
    lhs, rhs = ((call.find(role), usage(call, role)) for role in (LHS, RHS))
    return tuple(plain(x, copy, fast_format(x.quantizer.format)) for x, copy in (lhs, rhs))  # type: ignore[return-value]


def _form(call: Call, lhs: Tensor, rhs: Tensor) -> Product | None:
    assert call.roles.product is not None
    return as_product(call.roles.product, (lhs, rhs), {})


def _check_integers(call: Call) -> None:
    """Raise Declined unless the call is a product of two integer matrices, or of batches of them."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    if not (is_integer(lhs) and is_integer(rhs)):
        raise Declined("for two integer operands")
    if has_wide_sums(lhs, rhs):
        raise Declined("codes of 16 bits are summed in 64")
    if min(lhs.dim(), rhs.dim()) < 2:
        raise Declined("one operand is a vector")
    check_fit(call, lhs, rhs)


def _summed_blocks(call: Call) -> list[int]:
    """The size of each factor's blocks along the summed dimension; -1 for one block."""
    sides = ((LHS, -1), (RHS, call.roles.rhs_sums))
    return [block_of(call.find(role), usage(call, role))[dim] for role, dim in sides]


def _prepare_integers(call: Call) -> Plan:
    _check_integers(call)
    lhs, rhs = call.find(LHS), call.find(RHS)
    if lhs.device.type not in ("cpu", "cuda"):
        raise Declined(f"no kernel for device {lhs.device.type}")
    if _summed_blocks(call) != [-1, -1]:
        raise Declined("a scale changes along the summed dimension")
    if is_batch(call):
        if any(x.quantizer.scale.has_zero_point() or x.quantizer.format.zero for x in (lhs, rhs)):
            raise Declined("a batch of products with zero points")
        if not all(isinstance(n, int) for n in (*lhs.shape, *rhs.shape)):
            raise Declined("a batch of products with symbolic sizes")
    return call.plan(_run_integers)


def _run_integers(call: Call) -> Result:
    lhs, rhs = _plain_factors(call)
    form = _form(call, lhs.codes, rhs.codes)
    assert form is not None
    if form.lhs.dim() == 3:
        total = integer.bmm(form.lhs, form.rhs)
    else:
        of_columns = zeros(rhs, call.roles.rhs_sums)
        if isinstance(of_columns, Tensor) and call.roles.rhs_sums == -1:
            of_columns = of_columns.mT
        total = _corrected(form, zeros(lhs, -1), of_columns)
    column = group_scale(rhs, call.roles.rhs_sums, 0)
    column = column.squeeze(-1) if call.roles.rhs_sums == -1 else column
    return _epilogue(call, Sum(form.finish(total), group_scale(lhs, -1, 0), column))


# ---- integer products in groups

_FLOAT32_EXACT = 2**24  # integers up to this magnitude are exact in float32
_ELEMENTS = 2**18  # elements of the result that are summed at once, so that they stay in the cache


def _prepare_groups(call: Call) -> Plan:
    _check_integers(call)
    if is_batch(call):
        raise Declined("a batch of products")
    lhs, rhs = call.find(LHS), call.find(RHS)
    length = min([b for b in _summed_blocks(call) if b != -1], default=None)
    if length is None:
        raise Declined("no scale changes along the summed dimension")
    if any(tracing.known_equal(lhs.shape[-1], n) for n in (0, 1)):
        raise Declined("sums of at most one product, which may be -0 in float32")
    largest = length * _largest(lhs) * _largest(rhs)
    if largest > _FLOAT32_EXACT:
        raise Declined(f"sums of {length} may reach {largest}, beyond float32's integers")
    return call.plan(_run_groups)


def _largest(x: Operand) -> int:
    """The largest magnitude of a code minus its zero point."""
    format = x.quantizer.format
    assert isinstance(format, Integer)
    if x.quantizer.scale.has_zero_point():
        return format.high - format.low
    return max(format.high - format.zero, format.zero - format.low)


def _run_groups(call: Call) -> Result:
    """Compute each group's sum in float32, where it is exact."""
    lhs, rhs = _plain_factors(call)
    along = call.roles.rhs_sums
    lead = lhs.shape[:-1]
    a = centered(lhs).to(torch.float32).flatten(0, -2)
    b = centered(rhs).to(torch.float32)
    b = b.t() if along == -1 else b
    parts = groups(lhs, rhs, along)
    scales = []
    for start, length, of_lhs, of_rhs in parts:
        of_rows, of_columns = group_scale(lhs, -1, of_lhs), group_scale(rhs, along, of_rhs)
        of_rows = of_rows.reshape(1, 1) if is_one(of_rows) else of_rows.expand([*lead, 1]).reshape(-1, 1)
        of_columns = of_columns.mT if along == -1 else of_columns
        scales.append((start, length, of_rows.contiguous(), of_columns.contiguous()))
    if eager.is_plain_eager():
        y = _in_parts(a, b, scales)
    else:
        y = added([torch.mm(*_cut(a, b, start, n)) * r * c for start, n, r, c in scales])
    y = y.reshape([*lead, b.shape[1]])
    return finish(call, biased(call, y, call.find(BIAS)))


def _in_parts(a: Tensor, b: Tensor, scales: Sequence[tuple[int, int | None, Tensor, Tensor]]) -> Tensor:
    """Compute some rows at a time, reusing temporaries."""
    (m, _), n = a.shape, b.shape[1]
    y = a.new_empty((m, n))
    rows = max(1, min(m, _ELEMENTS // max(n, 1)))
    term = a.new_empty((rows, n))
    for first in range(0, m, rows):
        part, into = a[first : first + rows], y[first : first + rows]
        for i, (start, length, of_rows, of_columns) in enumerate(scales):
            out = into if i == 0 else term[: len(part)]
            torch.mm(*_cut(part, b, start, length), out=out)
            out.mul_(of_rows if of_rows.shape[0] == 1 else of_rows[first : first + rows]).mul_(of_columns)
            if i:
                into.add_(out)
    return y


def _cut(a: Tensor, b: Tensor, start: int, length: int | None) -> tuple[Tensor, Tensor]:
    return cut(a, 1, start, length), cut(b, 0, start, length)


# ---- zero points


def _corrected(form: Product, row_zero: Tensor | int, column_zero: Tensor | int) -> Tensor:
    """Σ (lhs - row_zero) · (rhs - column_zero), computed from lhs @ rhs.

    It equals lhs @ rhs - row_zero · colsum - rowsum · column_zero + K · row_zero · column_zero. The column sums come
    from a row of ones that is appended to lhs.
    """
    lhs, rhs = form.lhs, form.rhs
    (m, k), plain = lhs.shape, eager.is_plain_eager()
    if not _is_zero(row_zero):
        product = integer.mm(torch.cat([lhs, lhs.new_ones((1, k))]), rhs)
        total, columns = product.narrow(0, 0, m), product.narrow(0, m, 1)
        if not _is_zero(column_zero):
            columns = columns - column_zero * k
        if plain and isinstance(row_zero, Tensor):
            total = total.addcmul_(row_zero, columns, value=-1)
        else:
            total = total - row_zero * columns
    else:
        total = integer.mm(lhs, rhs)
    if not _is_zero(column_zero):
        rows = integer.mm(lhs, torch.ones((k, 1), dtype=torch.int8, device=lhs.device))
        total = total - rows * column_zero
    return total


def _is_zero(zero: Tensor | int) -> bool:
    return isinstance(zero, int) and zero == 0


def _epilogue(call: Call, total: Sum) -> Result:
    """The result, computed from one sum."""
    bias = call.find(BIAS)
    if by_sum(call.output):
        return requantized(call, with_bias(call, total))
    if bias is not None and not bias.is_floating_point():
        total, bias = total._replace(total=total.total + bias), None
    if not eager.is_plain_eager() or call.kwargs:
        return finish(call, biased(call, total.real(), bias))
    y = total.total.to(torch.float32).mul_(total.lhs).mul_(total.rhs)
    if bias is not None:
        y = y.add_(bias) if bias.dtype == torch.float32 else y.add_(bias.to(torch.float32))
    return finish(call, y)


# ---- products in bfloat16


def _check_factor(call: Call, role: str, along: int) -> None:
    """Raise Declined unless a factor consists of bfloat16 values and a scale per row or column."""
    x = call.find(role)
    if isinstance(x, Tensor):
        if x.dtype != torch.bfloat16:
            raise Declined(f"bfloat16 cannot represent {x.dtype} exactly")
        return
    q = x.quantizer
    if q.flat or not (q.format.is_float or q.format.is_integer):
        raise Declined(f"for integers and floats, not {q.format.name}")
    if q.scale.is_compound or (q.layout is not None and q.layout.stored(q.format) and not q.is_tiled()):
        raise Declined(f"for codes with one scale per block, not {q}")
    if x.usages != (copies.ROWWISE,):
        raise Declined("for row-wise copies")
    outer = [block for name, (_, block) in q.stored().items() if name == q.scale.outer_scale_name]
    sizes = [blocks.per_dimension(block, x.dim())[along] for block in outer]
    if any(b != -1 and not tracing.known_equal(x.shape[along], b) for b in sizes):
        raise Declined(f"a float32 scale changes along the summed dimension ({q})")


def _in_bfloat16(x: Tensor | Operand) -> Tensor:
    """A factor's values without its outer scale, in bfloat16."""
    if isinstance(x, Tensor):
        return x
    q = x.quantizer
    if q.format.is_integer:
        return centered(plain(x, copies.ROWWISE, fast_format(q.format))).to(torch.bfloat16)
    if q.layout is not None and q.layout.is_decoded:
        return x.codes
    return fast(str(q)).packed(x.buffers, x.shape, Decoded())["codes"]


def _outer_scale(x: Tensor | Operand, along: int) -> Tensor | None:
    """The scale of each row or column that the bfloat16 values do not include; None if there is none."""
    if isinstance(x, Tensor):
        return None
    rule, (_, *stored) = x.quantizer.scale, x.tensors
    scale = rule.outer_scale_of(stored, x.quantizer.format)
    if scale is None:
        return None
    block = blocks.per_dimension(rule.outer_block or x.quantizer.block, x.dim())
    dim = x.dim() + along
    return spread(scale, tuple(-1 if d == dim else b for d, b in enumerate(block)), x.shape)


def _prepare_bfloat16(call: Call) -> Plan:
    if call.output is not torch.bfloat16:
        raise Declined(f"returns bfloat16, but the output is {call.output}")
    lhs, rhs = call.find(LHS), call.find(RHS)
    if is_integer(lhs) and is_integer(rhs):
        raise Declined("two integer operands need exact sums")
    if min(lhs.dim(), rhs.dim()) < 2:
        raise Declined("one operand is a vector")
    _check_factor(call, LHS, -1)
    _check_factor(call, RHS, call.roles.rhs_sums)
    return call.plan(_run_bfloat16)


def _run_bfloat16(call: Call) -> Tensor:
    lhs, rhs, bias, along = call.find(LHS), call.find(RHS), call.find(BIAS), call.roles.rhs_sums
    of_rows, of_columns = _outer_scale(lhs, -1), _outer_scale(rhs, along)
    y = product(call, _in_bfloat16(lhs), _in_bfloat16(rhs))
    if of_rows is None and of_columns is None and bias is None and not call.kwargs:
        return y
    if of_columns is not None and along == -1:
        of_columns = of_columns.squeeze(-1)
    wide = y.to(torch.float32)
    multiply = Tensor.mul_ if eager.is_plain_eager() else Tensor.mul
    for scale in (of_rows, of_columns):
        wide = wide if scale is None else multiply(wide, scale)
    return biased(call, wide, bias).to(torch.bfloat16)


TABLE: tuple[Kernel, ...] = (
    NATIVE,
    PARTS,
    GROUPS,
    GPU,
    NIBBLES,
    Kernel("integer product", _prepare_integers),
    Kernel("integer groups", _prepare_groups),
    Kernel("bfloat16 product", _prepare_bfloat16),
)
