"""Products by what PyTorch has: `torch._int_mm`, `torch._scaled_mm`, and `torch.mm` on decoded factors.

    integers                           torch._int_mm                      as int8, zeros added where sizes want them
    float8, 8.9 and later              torch._scaled_mm                   scales and bias in it where it takes them
    float8 with scales of 128, 9.0     torch.nn.functional.scaled_mm      else the product of each block of K
    MXFP8, NVFP4, 10.0 and later       torch._scaled_mm                   on swizzled scales
    all else                           torch.mm on bfloat16, which holds each code times its scale of 8 bits exactly
    floats on AMD's GPUs               torch.mm on float32

Bits of a sum of floats differ between these; those of integers do not.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cutlass_kernels import groups, plain
from cutlass_kernels.devices import Capability, capability_of
from cutlass_kernels.layouts import columnwise, padded, rowwise, swizzled, up
from cutlass_kernels.plain import along_columns, along_rows
from cutlass_kernels.product import BLOCK, FLOAT4, GROUPS, REALS, Product
from cutlass_kernels.variants import longest

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
_LONGEST = longest(torch.int8, torch.int8) // 8 * 8
_FEWEST = 17  # rows that torch._int_mm wants on CUDA
_CUBLAS_BLOCKS = (12, 9)  # the CUDA version whose cuBLAS has scales of 1 x 128 and 128 x 128


def declines(product: Product, capability: Capability) -> str | None:
    """Why this route does not take the product, or None."""
    return None


def run(product: Product, capability: Capability | None = None) -> Tensor:
    """The product, of groups by waiting for their sizes; `capability` is that of its device, (0, 0) for no GPU."""
    p = product
    if capability is None:
        capability = capability_of(p.lhs.device) if p.lhs.is_cuda else (0, 0)
    if groups.is_stack(p):
        return groups.run(p, lambda one: run(one, capability))
    if 0 in (*p.lhs.shape, p.n):
        return plain.of_nothing(p)
    if p.is_integer:
        return plain.finish(p, plain.corrected(p, integer_sum(p)))
    if (done := fused(p, capability)) is not None:
        return done
    return plain.finish(p, _each(p.lhs, p.rhs, lambda lhs, rhs: float_sum(p, lhs, rhs, capability)))


# ---- integers


def integer_sum(p: Product) -> Tensor:
    """Σ_k lhs · rhs, ([B,] M, N) int32, modulo 2^32."""
    lhs, rhs = plain.signed(p.lhs), plain.signed(p.rhs)
    return plain.from_signed(p, lhs, _each(lhs, rhs, _int_mm))


def _each(lhs: Tensor, rhs: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The product of two matrices, or of each pair of a batch."""
    if lhs.dim() == 2:
        return multiply(lhs, rhs)
    return torch.stack([multiply(a, b) for a, b in zip(lhs.unbind(), rhs.unbind(), strict=True)])


def _int_mm(lhs: Tensor, rhs: Tensor) -> Tensor:
    """(M, K) @ (K, N) int8 -> (M, N) int32, with zeros where torch._int_mm wants more rows, or multiples of 8."""
    (m, k), n = lhs.shape, rhs.shape[1]
    if k > _LONGEST:  # matrix units saturate where the sum must wrap
        parts = zip(lhs.split(_LONGEST, 1), rhs.split(_LONGEST, 0), strict=True)
        return torch.stack([_int_mm(a, b) for a, b in parts]).sum(0, dtype=torch.int32)
    lhs = rowwise(padded(lhs, max(m, _FEWEST), up(k, 8)))
    rhs = columnwise(padded(rhs, up(k, 8), up(n, 8)))  # matrix units read 8-bit factors along K
    return torch._int_mm(lhs, rhs)[:m, :n]


# ---- floats: scales in the product, where a function takes them


def fused(p: Product, capability: Capability) -> Tensor | None:
    """The result by a function that scales, or None where none does."""
    if capability < ADA or p.lhs.dim() == 3 or p.lhs.dtype == p.rhs.dtype == torch.float8_e5m2:
        return None  # cuBLAS has no e5m2 by e5m2
    kind = p.scaling
    if kind == "group":
        return _by_groups(p) if capability >= BLACKWELL and _is_known(p) else None
    if kind == "1x128":
        return None
    if kind == "block":
        return _by_blocks(p) if capability[0] == HOPPER[0] and _cuda_version() >= _CUBLAS_BLOCKS else None
    if kind == "vector" and not _is_tensorwise(p):
        return _by_rows(p) if capability >= HOPPER and _takes_rows(p) else None
    one = torch.ones((), dtype=torch.float32, device=p.lhs.device)
    lhs_scale, rhs_scale = (one if s is None else s.reshape(()) for s in (p.lhs_scale, p.rhs_scale))
    lhs, rhs = _aligned(p.lhs, p.rhs, 16)
    return _scaled_mm(p, lhs, rhs, lhs_scale, rhs_scale)


def _is_tensorwise(p: Product) -> bool:
    return p.lhs_scale is not None and p.rhs_scale is not None and p.lhs_scale.numel() == p.rhs_scale.numel() == 1


def _is_known(p: Product) -> bool:
    """Whether it is MXFP8 or NVFP4; cuBLAS has no MXFP4."""
    assert p.lhs_scale is not None
    return (p.lhs.dtype == FLOAT4) == (p.lhs_scale.dtype == torch.float8_e4m3fn)


def _takes_rows(p: Product) -> bool:
    """Whether torch._scaled_mm has scales of rows and columns for it, with all else that there is to do."""
    types = {p.lhs.dtype, p.rhs.dtype, p.out}
    return types == {torch.float8_e4m3fn, torch.bfloat16} and not _is_rest(p)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def _is_rest(p: Product) -> bool:
    """Whether something is left to do after the scales, so that they must come in float32."""
    takes_bias = p.bias is None or (p.bias.dtype == p.out and p.out != torch.float32 and p.bias.numel() == p.n)
    # What is too large for float8 becomes what PyTorch's cast makes of it, and not what the functions' own does.
    return not takes_bias or p.global_scale is not None or p.out not in REALS


def _scaled_mm(p: Product, lhs: Tensor, rhs: Tensor, lhs_scale: Tensor, rhs_scale: Tensor) -> Tensor:
    """The result, by torch._scaled_mm on factors whose sizes it takes."""
    rest, bias = _is_rest(p), None
    if p.bias is not None and not rest:
        bias = torch.nn.functional.pad(p.bias.reshape(-1), (0, rhs.shape[1] - p.n))
    total = torch._scaled_mm(
        *(lhs, rhs, lhs_scale, rhs_scale),
        bias=bias,
        out_dtype=torch.float32 if rest else p.out,
        use_fast_accum=p.fast and lhs.dtype != FLOAT4,
    )
    return _rest(p, total, rest)


def _rest(p: Product, total: Tensor, rest: bool) -> Tensor:
    """The epilogue that remains after the scales."""
    total = total[: p.m, : p.n]
    return plain.finish(replace(p, lhs_scale=None, rhs_scale=None), total) if rest else total


def _aligned(lhs: Tensor, rhs: Tensor, inner: int, columns: int = 16) -> tuple[Tensor, Tensor]:
    """Factors with K and N filled up to multiples, and K innermost."""
    k, n = up(lhs.shape[1], inner), up(rhs.shape[1], columns)
    return rowwise(padded(lhs, lhs.shape[0], k)), columnwise(padded(rhs, k, n))


def _by_rows(p: Product) -> Tensor:
    lhs, rhs = _aligned(p.lhs, p.rhs, 16)
    assert p.lhs_scale is not None and p.rhs_scale is not None
    lhs_scale = along_rows(p.lhs_scale).expand(p.m, 1).contiguous()
    rhs_scale = along_columns(p.rhs_scale).expand(1, p.n).contiguous()
    return _scaled_mm(p, lhs, rhs, lhs_scale, torch.nn.functional.pad(rhs_scale, (0, rhs.shape[1] - p.n)))


def _by_groups(p: Product) -> Tensor:
    """Scales of 32 or 16 along K, swizzled; fp4 has two elements a byte."""
    assert p.lhs_scale is not None and p.rhs_scale is not None
    lhs, rhs = _aligned(p.lhs, p.rhs, 16 if p.lhs.dtype == FLOAT4 else 32)
    blocks = up(p.depth, 32) // GROUPS[p.lhs_scale.dtype]
    lhs_scale = swizzled(padded(p.lhs_scale, p.m, blocks))
    return _scaled_mm(p, lhs, rhs, lhs_scale, swizzled(padded(p.rhs_scale.mT, rhs.shape[1], blocks)))


def _by_blocks(p: Product) -> Tensor:
    """Scales of 1 x 128 and 128 x 128, columns first: the left's rows and the right's blocks of K by fours."""
    assert p.lhs_scale is not None and p.rhs_scale is not None
    rest = _is_rest(p) or p.bias is not None or p.out == torch.float16
    lhs, rhs = _aligned(p.lhs, p.rhs, BLOCK, BLOCK)
    pad = torch.nn.functional.pad
    lhs_scale = pad(p.lhs_scale, (0, 0, 0, -p.m % 4)).mT.contiguous().mT
    rhs_scale = pad(p.rhs_scale, (0, 0, 0, -p.rhs_scale.shape[0] % 4)).mT.contiguous().mT
    scaling = torch.nn.functional.ScalingType
    total = torch.nn.functional.scaled_mm(
        *(padded(lhs, up(p.m, 4), lhs.shape[1]), rhs),
        *(lhs_scale, scaling.BlockWise1x128, rhs_scale, scaling.BlockWise128x128),
        output_dtype=torch.float32 if rest else p.out,
        use_fast_accum=p.fast,
    )
    return _rest(p, total, rest)


# ---- floats: sums to scale afterwards


def float_sum(p: Product, lhs: Tensor, rhs: Tensor, capability: Capability) -> Tensor:
    """The sum of products of two matrices, (M, N) float32; the scales of blocks and groups are in it."""
    kind = p.scaling
    if kind == "group":
        return _mm(*plain.dequantized(p, _exact_in(lhs)))
    if kind not in ("block", "1x128"):
        return _code_sum(lhs, rhs, p.fast, capability)
    assert p.lhs_scale is not None and p.rhs_scale is not None
    total = torch.zeros((p.m, p.n), dtype=torch.float32, device=lhs.device)
    for i, start in enumerate(range(0, p.k, BLOCK)):
        part = _code_sum(lhs[:, start : start + BLOCK], rhs[start : start + BLOCK], p.fast, capability)
        by_column = p.rhs_scale[i] if kind == "1x128" else p.rhs_scale[i].repeat_interleave(BLOCK)[: p.n]
        total += part * (p.lhs_scale[:, i : i + 1] * by_column)
    return total


def _code_sum(lhs: Tensor, rhs: Tensor, fast: bool, capability: Capability) -> Tensor:
    """The sum of products of two matrices of float8 codes, (M, N) float32."""
    if capability < ADA or lhs.dtype == rhs.dtype == torch.float8_e5m2:
        return _mm(lhs.to(_exact_in(lhs)), rhs.to(_exact_in(lhs)))
    return fused(Product(lhs, rhs, torch.float32, fast=fast), capability)  # type: ignore[return-value]


def _exact_in(x: Tensor) -> torch.dtype:
    """A dtype that holds the decoded factors, and in which the device multiplies fast."""
    return torch.bfloat16 if x.is_cuda and not torch.version.hip else torch.float32


def _mm(lhs: Tensor, rhs: Tensor) -> Tensor:
    """(M, K) @ (K, N), summed in float32."""
    return torch.mm(lhs, rhs, out_dtype=torch.float32) if lhs.dtype == torch.bfloat16 else torch.mm(lhs, rhs)
