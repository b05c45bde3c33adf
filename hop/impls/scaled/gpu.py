"""scaled by the kernels of cutlass_kernels, on GPUs: matrix products with all that belongs to them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager, inductor
from hop.compat.memory import holds
from hop.dispatch.kernel import Kernel
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS, aten
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, by_sum, is_batch, misfit, usage
from hop.impls.scaled.operands import block_of, plain
from hop.impls.scaled.outputs import finish, given_buffers
from hop.impls.scaled.products import group_scale, zeros
from hop.kernels.gpu import product as gpu
from hop.numerics import blocks, copies
from hop.numerics.formats import E2M1, E4M3, E8M0
from hop.numerics.layouts import has_plain_codes
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import Division, FloatMultiplier

BLOCK = 128  # of the scales of blocks that kernels take, along K on the left, along K and N on the right
REALS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_GROUPS = {E8M0: torch.float8_e8m0fnu, E4M3: torch.float8_e4m3fn}  # formats of the scales of MX and NVFP4


class Asked(NamedTuple):
    """What the kernel is asked for, and the buffers of a requantized result beside its codes."""

    product: Any
    stored: list[Tensor]


def _declines(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"for GPUs, and the operands are on {call.device}"
    if not (eager.is_plain_eager() or inductor.is_compiling_for_here()):
        return "for eager mode, and programs that are compiled for this process"
    request = asked(call)
    return request if isinstance(request, str) else gpu.declines(request.product)


def asked(call: Call) -> "Asked | str":
    """The call as a product of cutlass_kernels, or why it is none."""
    if call.kwargs:
        return f"alpha and beta are {call.kwargs}"
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if not (isinstance(lhs, Operand) and isinstance(rhs, Operand)):
        return "for two quantized factors"
    batched = call.op is aten.bmm.default
    if not batched and (lhs.dim() < 2 or is_batch(call) or rhs.dim() != 2):
        return "for a matrix on the right, and rows of any dimensions on the left, or two batches of bmm"
    if (reason := misfit(call, lhs, rhs)) is not None:
        return reason
    sides = _batches(call, lhs, rhs) if batched else _sides(call, lhs, rhs)
    if isinstance(sides, str):
        return sides
    result = _finish(call, [*lhs.shape[:-1], sides["rhs"].shape[-1]])
    if isinstance(result, str):
        return result
    if bias is not None:
        allowed = (*REALS, torch.int32) if lhs.quantizer.format.is_integer else REALS
        if bias.dim() != 1 or bias.dtype not in allowed:
            return f"for a bias with one value for each column, in {allowed}; got {bias.dtype} of {tuple(bias.shape)}"
        if result.get("requantize") == "multiplier" and bias.is_floating_point():
            return "a bias of floats is rounded to the unit of the sum"
        result["bias"] = bias
    stored = result.pop("stored", [])
    return Asked(gpu.product(**sides, **result), stored)


# ---- factors and their scales


def _sides(call: Call, lhs: Operand, rhs: Operand) -> "dict[str, Any] | str":
    """The factors, (M, K) and (K, N), with their scales and zero points."""
    for x, role in ((lhs, LHS), (rhs, RHS)):
        q, used = x.quantizer, usage(call, role)
        if q.flat or not has_plain_codes(q.layout) or q.scale.is_compound:
            return f"for the plain form of blocks of a tensor's dimensions, not {q}"
        if used == copies.COLUMNWISE and (q.hadamard is not None or x.dim() != 2):
            return "the copy of a factor is transformed, or of more than two dimensions"
    formats = (lhs.quantizer.format, rhs.quantizer.format)
    if all(f.is_integer for f in formats):
        return _with_sums(call, _integers(call, lhs, rhs), rhs)
    if all(f.is_float for f in formats):
        return _floats(call, lhs, rhs)
    return f"for two factors of integers or of floats, not {formats[0].name} and {formats[1].name}"


def _batches(call: Call, lhs: Operand, rhs: Operand) -> "dict[str, Any] | str":
    """Two batches of matrices, (B, M, K) and (B, K, N), with their scales."""
    for x, role in ((lhs, LHS), (rhs, RHS)):
        q = x.quantizer
        compound = q.scale.is_compound or q.scale.block_scale_format is not None or q.scale.has_offset()
        if q.flat or q.layout is not None or compound or usage(call, role) != copies.ROWWISE or q.hadamard is not None:
            return f"for the plain form of blocks of a batch's dimensions, not {q}"
    formats = (lhs.quantizer.format, rhs.quantizer.format)
    integers = all(f.is_integer for f in formats)
    if not integers and not all(f.dtype in _FLOAT8 for f in formats):
        return f"for two batches of integers or of 8-bit floats, not {formats[0].name} and {formats[1].name}"
    left, right = plain(lhs, copies.ROWWISE), plain(rhs, copies.ROWWISE)
    if any(not isinstance(x.zero, int) or x.zero != 0 for x in (left, right)):
        return "a batch with zero points"
    found = {"lhs": left.codes, "rhs": right.codes}
    of_lhs, of_rhs = block_of(lhs, copies.ROWWISE), block_of(rhs, copies.ROWWISE)
    if of_lhs[-1] == -1 and of_rhs[-2] == -1:
        return found | {"lhs_scale": group_scale(left, -1, 0), "rhs_scale": group_scale(right, -2, 0)}
    if integers or of_lhs != (1, 1, BLOCK) or of_rhs not in ((1, BLOCK, BLOCK), (1, BLOCK, 1)):
        return f"for scales of rows and columns, or blocks of 1 x {BLOCK} on the left, not {of_lhs} and {of_rhs}"
    return found | {"lhs_scale": left.scale, "rhs_scale": right.scale}


def _integers(call: Call, lhs: Operand, rhs: Operand) -> "dict[str, Any] | str":
    along = call.roles.rhs_sums
    left, right = plain(lhs, usage(call, LHS)), plain(rhs, usage(call, RHS))
    if left.block[-1] != -1 or right.block[along] != -1:
        return "a scale of integers changes along the summed dimension"
    result = _transposed(call, left, right)
    result |= {"lhs_scale": scale_of_rows(left), "rhs_scale": _columns(right, along)}
    for name, side, dim in (("lhs_zero", left, -1), ("rhs_zero", right, along)):
        if (zero := zero_of(side, dim)) is not None:
            result[name] = zero
    return result


def zero_of(side: Operand, along: int) -> Tensor | None:
    """The zero point of each row or column of a plain factor, or of all, if there is any."""
    zero = zeros(side, along)
    if isinstance(zero, Tensor):
        return zero.reshape(-1)
    return torch.full((1,), zero, dtype=torch.int32, device=side.codes.device) if zero else None


def _floats(call: Call, lhs: Operand, rhs: Operand) -> "dict[str, Any] | str":
    along, rules = call.roles.rhs_sums, (lhs.quantizer.scale, rhs.quantizer.scale)
    fine = tuple(r.block_scale_format is not None for r in rules)
    if any(fine):
        return _fine(call, lhs, rhs) if type(rules[0]) is type(rules[1]) else "two rules of scales"
    if any(x.quantizer.format.dtype not in _FLOAT8 for x in (lhs, rhs)):
        return "scales in float32 are for floats of 8 bits"
    left, right = plain(lhs, usage(call, LHS)), plain(rhs, usage(call, RHS))
    fused = _transposed(call, left, right)
    of_lhs, of_rhs = block_of(lhs, usage(call, LHS)), block_of(rhs, usage(call, RHS))
    if of_lhs[-1] == -1 and of_rhs[along] == -1:
        return fused | {"lhs_scale": scale_of_rows(left), "rhs_scale": _columns(right, along)}
    across = (1, BLOCK) if along == -1 else (BLOCK, 1)
    if of_lhs[-2:] != (1, BLOCK) or of_rhs not in ((BLOCK, BLOCK), across):
        return f"for blocks of 1 x {BLOCK} and {BLOCK} x {BLOCK}, or {across}, not {of_lhs} and {of_rhs}"
    step = right.scale if along == -2 else right.scale.mT
    return fused | {"lhs_scale": left.scale.flatten(0, -2), "rhs_scale": step}


def _fine(call: Call, lhs: Operand, rhs: Operand) -> "dict[str, Any] | str":
    """Blocks of 16 or 32 along K: MX, NVFP4."""
    along = call.roles.rhs_sums
    if usage(call, LHS) != copies.ROWWISE or (usage(call, RHS) == copies.COLUMNWISE) != (along == -2):
        return "a factor has no copy in blocks along the summed dimension"
    fused: dict[str, Any] = {}
    outer = None
    for name, x, role in (("lhs", lhs, LHS), ("rhs", rhs, RHS)):
        q, copy = x.quantizer, x.of(usage(call, role))
        codes, scale, *_ = copy.tensors
        if blocks.per_dimension(q.block, 2)[0] != 1 or q.hadamard is not None:
            return f"for blocks of one row that are not transformed, not {q}"
        codes = codes if q.per_byte() == 1 else codes.view(torch.float4_e2m1fn_x2)
        scale_dtype = _GROUPS.get(q.scale.block_scale_format)  # type: ignore[arg-type]
        if scale_dtype is None or (q.per_byte() > 1 and q.format != E2M1):
            return f"for scales in e8m0 and e4m3, and of 4 bits e2m1, not {q}"
        scale = scale.view(scale_dtype)
        if not q.scale.outer_scale_is_one():
            outer_scale = q.scale.outer_scale_of(copy.tensors[1:], q.format)
            if outer_scale is None or q.scale.outer_block != (-1, -1):
                return "a second scale for each row"
            outer = outer_scale.reshape(1) if outer is None else outer * outer_scale.reshape(1)
        codes, scale = (t.flatten(0, -2) if name == "lhs" else t.mT for t in (codes, scale))
        fused |= {name: codes, f"{name}_scale": scale}
    return fused if outer is None else fused | {"global_scale": outer}


def _with_sums(call: Call, sides: "dict[str, Any] | str", rhs: Operand) -> "dict[str, Any] | str":
    """The sides with the sums of the weight's codes, where it has them and zero points are multiplied by them."""
    if not isinstance(sides, str) and "lhs_zero" in sides and has_sums(rhs, call.roles.rhs_sums):
        sides["rhs_sum"] = rhs.code_sums.reshape(-1)
    return sides


def has_sums(x: Operand, along: int) -> bool:
    """Whether the sums of the codes of a matrix along a dimension are stored beside them."""
    stored = x.quantizer.stored().get("code_sums")
    return stored is not None and stored[1][along] == -1


def _transposed(call: Call, left: Operand, right: Operand) -> dict[str, Any]:
    return {"lhs": left.codes.flatten(0, -2), "rhs": right.codes if call.roles.rhs_sums == -2 else right.codes.mT}


def scale_of_rows(left: Operand) -> Tensor:
    """The scale of each row of a plain factor, or of all."""
    scale = group_scale(left, -1, 0)
    return scale.reshape(-1) if scale.dim() == 2 else scale.expand([*left.shape[:-1], 1]).reshape(-1)


def _columns(right: Operand, along: int) -> Tensor:
    return group_scale(right, along, 0).reshape(-1)


# ---- the result


def _finish(call: Call, shape: list[Any]) -> "dict[str, Any] | str":
    """What a kernel is told of its result; `stored` are the buffers beside codes."""
    output = call.output
    if isinstance(output, torch.dtype):
        floats = not call.find(LHS).quantizer.format.is_integer
        return {"out_dtype": output if output in REALS or (floats and output in _FLOAT8) else torch.float32}
    if (reason := _is_not_fused(call)) is None:
        stored = given_buffers(call, shape)
        if all(t.numel() == t.shape[-1] for t in stored):
            return _requantized(output, stored)
        reason = "a scale of the result for each row"
    return reason if by_sum(output) else {"out_dtype": torch.float32}  # to be quantized


def _is_not_fused(call: Call) -> str | None:
    """Why a kernel cannot give the codes of a quantized result itself."""
    q = call.output
    assert isinstance(q, Quantizer)
    if q.scale.requantization is None or not q.format.is_integer:
        return "the scale of the result is found from it"
    info = torch.iinfo(q.format.dtype)
    if (q.format.min, q.format.max) != (info.min, info.max) or q.layout is not None or q.format.zero:
        return f"for results of all codes of int8 or uint8, not {q.format.name}"
    if not isinstance(q.scale.requantization, Division | FloatMultiplier):
        return f"requantizes by division or a float multiplier, not {q.scale.requantization}"
    return None if call.find(LHS).quantizer.format.is_integer else "requantizes sums of integers"


def _requantized(q: Quantizer, stored: list[Tensor]) -> dict[str, Any]:
    rule = q.scale.requantization
    assert rule is not None
    options = {
        "out_dtype": q.format.dtype,
        "out_scale": stored[0].reshape(-1),
        "requantize": "division" if isinstance(rule, Division) else "multiplier",
        "low": rule.low,
        "high": rule.high,
        "stored": stored,
    }
    return options | ({"out_zero": stored[1].reshape(-1)} if len(stored) > 1 else {})


def _run(call: Call) -> Any:
    request = asked(call)
    assert not isinstance(request, str)
    y = gpu.run(request.product)
    y = y.reshape([*call.find(LHS).shape[:-1], y.shape[-1]])
    return [y, *request.stored] if request.stored else finish(call, y)


def _planned(call: Call, general: Plan) -> Plan | None:
    """For linear and mm of factors that are multiplied as they lie: 8-bit codes with scales in float32."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    if call.op not in (aten.linear.default, aten.mm.default) or call.output not in REALS or lhs.dim() != 2:
        return None
    if not all(_lies_plainly(x) for x in (lhs, rhs)) or not isinstance(request := asked(call), Asked):
        return None
    transposed, p, output = call.op is aten.linear.default, request.product, call.output
    if (p.lhs_scale.numel(), p.rhs_scale.numel()) != (lhs.scale.numel(), rhs.scale.numel()):  # one for several rows
        return None
    multiply, layouts, blocks = gpu.prepared(p), (p.lhs.stride(), p.rhs.stride()), p.scaling in ("block", "1x128")
    of_lhs, of_rhs = (x.quantizer.scale.has_zero_point() for x in (lhs, rhs))
    of_sums = of_lhs and has_sums(rhs, call.roles.rhs_sums)

    def run(lhs: Any, rhs: Any, bias: Tensor | None = None) -> Tensor:
        a, b, of_columns = lhs.codes, rhs.codes, rhs.scale
        if transposed:
            b = b.t()
            of_columns = of_columns.t() if blocks else of_columns
        negates = lhs.scale.is_neg() or of_columns.is_neg() or (bias is not None and bias.is_neg())
        fits = lhs.fits() and rhs.fits() and (bias is None or holds(bias))
        if (a.stride(), b.stride()) != layouts or negates or not fits:
            return general(lhs, rhs) if bias is None else general(lhs, rhs, bias)
        fused = {"lhs_scale": lhs.scale, "rhs_scale": of_columns}
        if of_lhs:
            fused["lhs_zero"] = lhs.zero_point
        if of_rhs:
            fused["rhs_zero"] = rhs.zero_point
        if of_sums:
            fused["rhs_sum"] = rhs.code_sums
        if bias is not None:
            fused["bias"] = bias
        return multiply(a, b, output, **fused)

    return run


def _lies_plainly(x: Operand) -> bool:
    """Whether a factor's buffers are what the kernels read."""
    q = x.quantizer
    is_plain = (
        (q.format.is_integer or q.format.is_float) and q.per_byte() == 1 and has_plain_codes(q.layout) and not q.flat
    )
    own_zero = q.format.zero != 0 and not q.scale.has_zero_point()
    is_alone = x.usages == (copies.ROWWISE,) and q.hadamard is None
    return is_plain and not own_zero and is_alone and q.scale.scale_is_stored


GPU = Kernel("GPU product", _declines, _run, _planned)
