"""The forms of products that kernels are compiled for ahead of time: dtypes, and what is fused, with their tiles.

Other combinations are compiled when they are first asked for.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from cutlass_kernels.tiles import NIBBLE_TILES, RARE, TILES
from cutlass_kernels.variants import Variant

S8, U8, E4M3, E5M2 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
S32, F32, BF16, F16 = torch.int32, torch.float32, torch.bfloat16, torch.float16


def _form(lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, **fused: object) -> Variant:
    return Variant(lhs, rhs, out, TILES[0], **fused)  # type: ignore[arg-type]


FORMS: tuple[Variant, ...] = (
    # sums alone
    *(_form(lhs, rhs, S32) for lhs in (S8, U8) for rhs in (S8, U8)),
    _form(S8, S8, S32, batched=True),
    # rows by columns
    *(_form(S8, S8, out, scales="vector") for out in (BF16, F16, F32)),
    *(_form(S8, S8, out, scales="vector", bias=out) for out in (BF16, F32)),
    _form(S8, S8, BF16, scales="vector", bias=S32),
    # zero points
    _form(S8, S8, BF16, scales="vector", lhs_zero=S8),
    _form(U8, S8, BF16, scales="vector", lhs_zero=U8, bias=BF16),
    _form(S8, S8, BF16, scales="vector", rhs_zero=S8),
    _form(U8, U8, F32, scales="vector", lhs_zero=U8, rhs_zero=U8, bias=F32),
    # codes
    _form(S8, S8, S8, scales="vector", requantize="division"),
    _form(S8, S8, S8, scales="vector", requantize="multiplier", out_zero=S32),
    _form(S8, S8, S8, scales="vector", lhs_zero=S8, bias=F32, requantize="division", out_zero=S8, bounded=True),
    _form(U8, S8, U8, scales="vector", lhs_zero=U8, bias=S32, requantize="multiplier", out_zero=U8, bounded=True),
    # floats
    *(_form(lhs, rhs, F32, promoted=True) for lhs in (E4M3, E5M2) for rhs in (E4M3, E5M2)),
    *(_form(E4M3, E4M3, out, scales="vector", promoted=True) for out in (BF16, F16, F32, E4M3, E5M2)),
    _form(E4M3, E4M3, BF16, scales="vector", promoted=True, bias=BF16),
    _form(E5M2, E4M3, BF16, scales="vector", promoted=True),
    _form(E4M3, E4M3, BF16, scales="vector"),
    _form(E4M3, E4M3, F32),
    # batches
    _form(S8, S8, BF16, scales="vector", batched=True),
    _form(E4M3, E4M3, BF16, scales="vector", promoted=True, batched=True),
    _form(E4M3, E4M3, BF16, scales="block", batched=True),
    # groups, as of experts: of rows forward and of columns or rows back, of K for the gradient of weights
    _form(S8, S8, BF16, scales="vector", groups="rows"),
    _form(S8, S8, BF16, scales="vector", bias=BF16, groups="rows"),
    _form(S8, S8, F32, scales="vector", groups="k"),
    *(_form(E4M3, E4M3, BF16, scales="vector", promoted=True, groups=groups) for groups in ("rows", "columns", "k")),
    _form(E5M2, E4M3, BF16, scales="vector", promoted=True, groups="rows"),
    _form(E4M3, E4M3, BF16, scales="block", groups="rows"),
    _form(E4M3, E4M3, F32, scales="1x128", groups="k"),
    # blocks of 1 x 128 on both sides
    _form(E4M3, E4M3, F32, scales="1x128"),
    # codes of 4 bits beside bfloat16, and beside 8 bits
    *(_form(BF16, U8, BF16, group=group, affine=affine) for group in (32, 128) for affine in (False, True)),
    *(
        _form(E4M3, U8, BF16, scales="rows", group=group, affine=affine)
        for group in (32, 128)
        for affine in (False, True)
    ),
    *(_form(S8, U8, BF16, scales="rows", lhs_zero=zero, group=group) for group in (32, 128) for zero in (None, S32)),
    # blocks of 128
    _form(E4M3, E4M3, BF16, scales="block"),
    _form(E4M3, E4M3, F32, scales="block", bias=F32),
    _form(E5M2, E4M3, BF16, scales="block"),
)

# Those that are asked for most.
MAIN = (
    _form(S8, S8, S32),
    _form(S8, S8, BF16, scales="vector"),
    _form(E4M3, E4M3, BF16, scales="vector", promoted=True),
    _form(E4M3, E4M3, BF16, scales="vector"),
    _form(E4M3, E4M3, BF16, scales="block"),
)


def variants() -> Iterator[Variant]:
    """Every form with the tiles that it can have, the rare ones for MAIN alone."""
    for form in FORMS:
        for tile in NIBBLE_TILES if form.group else TILES:
            v = replace(form, tile=tile, tma=not tile.swap)
            if v.declines() is None and (tile not in RARE or form in MAIN):
                yield v
