"""scaled with the kernels of cutlass_kernels on GPUs: matrix products with fused scales, bias and output."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from hop.compat import eager, inductor
from hop.compat.memory import holds
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import BIAS, LHS, RHS, aten
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, Result, check_fit, is_batch, usage
from hop.impls.scaled.operands import FLOAT8, PlainForm
from hop.impls.scaled.outputs import finish, given_buffers, of_codes
from hop.impls.scaled.products import group_scale, zeros
from hop.kernels.gpu import product as gpu
from hop.numerics import blocks, copies
from hop.numerics.formats import E2M1, E4M3, E8M0
from hop.numerics.requantization import Division, FloatMultiplier

if TYPE_CHECKING:
    from cutlass_kernels.product import Product

BLOCK = 128  # block size of scales: along K on the left, along K and N on the right
REALS = (torch.bfloat16, torch.float16, torch.float32)
_GROUPS = {E8M0: torch.float8_e8m0fnu, E4M3: torch.float8_e4m3fn}  # formats of block scales in MX and NVFP4


class Asked(NamedTuple):
    """A product for the kernel, and the buffers of a requantized result other than its codes."""

    product: "Product"
    stored: list[Tensor]


class _Dtype(TypedDict):
    out_dtype: torch.dtype


class Options(_Dtype, total=False):
    """Options of the kernel for the result."""

    bias: Tensor
    out_scale: Tensor
    out_zero: Tensor
    requantize: str
    low: float | None
    high: float | None


def check_device(call: Call) -> None:
    """Raise Declined unless the operands are on a GPU and kernels may run now."""
    if call.device.type != "cuda":
        raise Declined(f"for GPUs, but the operands are on {call.device}")
    if not (eager.is_plain_eager() or inductor.is_compiling_for_here()):
        raise Declined("for eager mode, and programs compiled for this process")


def asked(call: Call) -> Asked:
    """The call as a product of cutlass_kernels. Raises Declined if it cannot be expressed."""
    if call.kwargs:
        raise Declined(f"alpha and beta are {call.kwargs}")
    lhs, rhs, bias = call.find(LHS), call.find(RHS), call.find(BIAS)
    if not (isinstance(lhs, Operand) and isinstance(rhs, Operand)):
        raise Declined("for two quantized factors")
    batched = call.op is aten.bmm.default
    if not batched and (lhs.dim() < 2 or is_batch(call) or rhs.dim() != 2):
        raise Declined("for a matrix on the right, and rows of any dimensions on the left, or two batches of bmm")
    check_fit(call, lhs, rhs)
    left, right = PlainForm.of(lhs, usage(call, LHS)), PlainForm.of(rhs, usage(call, RHS))
    sides = _batches(left, right) if batched else _sides(left, right, call.roles.rhs_sums)
    result, stored = _finish(call, [*lhs.shape[:-1], sides["rhs"].shape[-1]])
    if bias is not None:
        allowed = (*REALS, torch.int32) if lhs.quantizer.format.is_integer else REALS
        if bias.dim() != 1 or bias.dtype not in allowed:
            got = f"{bias.dtype} of {tuple(bias.shape)}"
            raise Declined(f"for a bias with one value for each column, in {allowed}; got {got}")
        if result.get("requantize") == "multiplier" and bias.is_floating_point():
            raise Declined("a bias of floats is rounded to the unit of the sum")
        result["bias"] = bias
    return Asked(gpu.product(**sides, **result), stored)


# ---- factors and their scales


def _sides(lhs: PlainForm, rhs: PlainForm, along: int) -> dict[str, Tensor]:
    """The factors, (M, K) and (K, N), with their scales and zero points.

    `along` is the summed dimension of the right factor.
    """
    formats = (lhs.format, rhs.format)
    if any(f.is_integer != formats[0].is_integer or not (f.is_integer or f.is_float) for f in formats):
        raise Declined(f"for two factors of integers or of floats, not {formats[0].name} and {formats[1].name}")
    if lhs.is_fine or rhs.is_fine:
        return _fine(lhs, rhs, along)
    left, right = lhs.bytes(), rhs.bytes()
    sides = {"lhs": left.codes.flatten(0, -2), "rhs": right.codes if along == -2 else right.codes.mT}
    if lhs.block[-1] == -1 and rhs.block[along] == -1:
        sides |= {"lhs_scale": scale_of_rows(left), "rhs_scale": group_scale(right, along, 0).reshape(-1)}
        zeros = {"lhs_zero": zero_of(left, -1), "rhs_zero": zero_of(right, along)}
        sides |= {name: zero for name, zero in zeros.items() if zero is not None}
        if "lhs_zero" in sides and has_sums(rhs.operand, along):
            sides["rhs_sum"] = rhs.operand.code_sums.reshape(-1)
        return sides
    if formats[0].is_integer:
        raise Declined("a scale of integers changes along the summed dimension")
    across = (1, BLOCK) if along == -1 else (BLOCK, 1)
    if lhs.block[-2:] != (1, BLOCK) or rhs.block not in ((BLOCK, BLOCK), across):
        blocks = f"1 x {BLOCK} and {BLOCK} x {BLOCK}, or {across}"
        raise Declined(f"for blocks of {blocks}, not {lhs.block} and {rhs.block}")
    step = right.scale if along == -2 else right.scale.mT
    return sides | {"lhs_scale": left.scale.flatten(0, -2), "rhs_scale": step}


def _batches(lhs: PlainForm, rhs: PlainForm) -> dict[str, Tensor]:
    """Two batches of matrices, (B, M, K) and (B, K, N), with their scales."""
    left, right = lhs.bytes(), rhs.bytes()
    if lhs.format.is_integer != rhs.format.is_integer:
        raise Declined(f"for two batches of integers or of 8-bit floats, not {lhs.format.name} and {rhs.format.name}")
    if any(not isinstance(x.zero, int) or x.zero != 0 for x in (left, right)):
        raise Declined("a batch with zero points")
    found = {"lhs": left.codes, "rhs": right.codes}
    if lhs.block[-1] == -1 and rhs.block[-2] == -1:
        return found | {"lhs_scale": group_scale(left, -1, 0), "rhs_scale": group_scale(right, -2, 0)}
    in_blocks = lhs.block == (1, 1, BLOCK) and rhs.block in ((1, BLOCK, BLOCK), (1, BLOCK, 1))
    if lhs.format.is_integer or not in_blocks:
        got = f"{lhs.block} and {rhs.block}"
        raise Declined(f"for scales of rows and columns, or blocks of 1 x {BLOCK} on the left, not {got}")
    return found | {"lhs_scale": left.scale, "rhs_scale": right.scale}


def zero_of(side: Operand, along: int) -> Tensor | None:
    """The zero point of each row or column of a plain factor, or one for all; None if it is 0."""
    zero = zeros(side, along)
    if isinstance(zero, Tensor):
        return zero.reshape(-1)
    return torch.full((1,), zero, dtype=torch.int32, device=side.codes.device) if zero else None


def _fine(lhs: PlainForm, rhs: PlainForm, along: int) -> dict[str, Tensor]:
    """Factors with blocks of 16 or 32 along K: MX, NVFP4."""
    if type(lhs.operand.quantizer.scale) is not type(rhs.operand.quantizer.scale):
        raise Declined("the factors have different scale rules")
    if lhs.usage != copies.ROWWISE or (rhs.usage == copies.COLUMNWISE) != (along == -2):
        raise Declined("a factor has no copy with blocks along the summed dimension")
    fused: dict[str, Tensor] = {}
    outer = None
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        q, copy = x.operand.quantizer, x.operand.of(x.usage)
        codes, scale, *_ = copy.tensors
        if blocks.per_dimension(q.block, 2)[0] != 1 or q.hadamard is not None:
            raise Declined(f"for blocks of one row that are not transformed, not {q}")
        codes = codes if q.per_byte() == 1 else codes.view(torch.float4_e2m1fn_x2)
        scale_dtype = _GROUPS.get(q.scale.block_scale_format)  # type: ignore[arg-type]
        if scale_dtype is None or (q.per_byte() > 1 and q.format != E2M1):
            raise Declined(f"for scales in e8m0 and e4m3, and of 4 bits e2m1, not {q}")
        scale = scale.view(scale_dtype)
        if not q.scale.outer_scale_is_one():
            outer_scale = q.scale.outer_scale_of(copy.tensors[1:], q.format)
            if outer_scale is None or q.scale.outer_block != (-1, -1):
                raise Declined("a second scale for each row")
            outer = outer_scale.reshape(1) if outer is None else outer * outer_scale.reshape(1)
        codes, scale = (t.flatten(0, -2) if name == "lhs" else t.mT for t in (codes, scale))
        fused |= {name: codes, f"{name}_scale": scale}
    return fused if outer is None else fused | {"global_scale": outer}


def has_sums(x: Operand, along: int) -> bool:
    """Whether sums of the matrix's codes along a dimension are stored."""
    stored = x.quantizer.stored().get("code_sums")
    return stored is not None and stored[1][along] == -1


def scale_of_rows(left: Operand) -> Tensor:
    """The scale of each row of a plain factor, or one for all."""
    scale = group_scale(left, -1, 0)
    return scale.reshape(-1) if scale.dim() == 2 else scale.expand([*left.shape[:-1], 1]).reshape(-1)


# ---- the result


def _finish(call: Call, shape: list[int]) -> tuple[Options, list[Tensor]]:
    """Kernel options for the result, and its buffers other than codes."""
    output = call.output
    floats = not call.find(LHS).quantizer.format.is_integer
    if isinstance(output, torch.dtype):
        return {"out_dtype": output if output in REALS or (floats and output in FLOAT8) else torch.float32}, []
    codes = of_codes(output, lambda: _requantized(call, floats, shape))
    return codes or ({"out_dtype": torch.float32}, [])  # quantized afterwards


def _requantized(call: Call, floats: bool, shape: list[int]) -> tuple[Options, list[Tensor]]:
    """`_finish` for a result in codes. Raises Declined if the kernel cannot produce it."""
    q = call.quantizer
    rule = q.scale.requantization
    if rule is None or not q.format.is_integer:
        raise Declined("the result's scale is computed from the result")
    info = torch.iinfo(q.format.dtype)
    if (q.format.min, q.format.max) != (info.min, info.max) or q.layout is not None or q.format.zero:
        raise Declined(f"for results of all codes of int8 or uint8, not {q.format.name}")
    if not isinstance(rule, Division | FloatMultiplier):
        raise Declined(f"requantizes by division or a float multiplier, not {rule}")
    if floats:
        raise Declined("requantizes sums of integers")
    stored = given_buffers(call, shape)
    if any(t.numel() != t.shape[-1] for t in stored):
        raise Declined("a scale of the result for each row")
    options: Options = {
        "out_dtype": q.format.dtype,
        "out_scale": stored[0].reshape(-1),
        "requantize": "division" if isinstance(rule, Division) else "multiplier",
        "low": rule.low,
        "high": rule.high,
    }
    if len(stored) > 1:
        options["out_zero"] = stored[1].reshape(-1)
    return options, stored


# ---- plans


def _prepare(call: Call) -> Plan:
    check_device(call)
    request = asked(call)
    decline(gpu.declines(request.product))
    return direct(call, request.product) or call.plan(computed)


def computed(call: Call) -> Result:
    """Describe the call again and compute it."""
    request = asked(call)
    y = gpu.run(request.product)
    y = y.reshape([*call.find(LHS).shape[:-1], y.shape[-1]])
    return [y, *request.stored] if request.stored else finish(call, y)


def direct(call: Call, p: "Product") -> Plan | None:
    """The plan for linear and mm of factors in kernel layout: 8-bit codes with float32 scales; None for others."""
    lhs, rhs = call.find(LHS), call.find(RHS)
    if call.op not in (aten.linear.default, aten.mm.default) or call.output not in REALS or lhs.dim() != 2:
        return None
    if not (eager.is_plain_eager() and all(_lies_plainly(x) for x in (lhs, rhs))):
        return None
    sizes = [0 if scale is None else scale.numel() for scale in (p.lhs_scale, p.rhs_scale)]
    if sizes != [lhs.scale.numel(), rhs.scale.numel()]:  # one scale for several rows
        return None
    transposed, output, general = call.op is aten.linear.default, call.output, call.plan(computed)
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
    """Whether kernels can read a factor's buffers directly."""
    q = x.quantizer
    own_zero = q.format.zero != 0 and not q.scale.has_zero_point()
    is_alone = x.usages == (copies.ROWWISE,) and q.hadamard is None
    return q.per_byte() == 1 and not own_zero and is_alone and q.scale.scale_is_stored


GPU = Kernel("GPU product", _prepare)
