"""4-bit weights with bfloat16 and 8-bit activations on a GPU: checks of the operator, and times against bfloat16
weights.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.isolated import Cases
from cutlass_kernels import hopper, nibbles, tune
from cutlass_kernels.product import INTEGERS
from cutlass_kernels.variants import Variant, short

CHECKED = ((1, 4096, 4096), (17, 4096, 14336), (129, 333, 640), (1000, 1024, 2048))
TIMED = tuple((m, n, k) for m in (1, 16, 64, 256) for n, k in ((28672, 4096), (4096, 14336), (6144, 4096)))
KINDS = {
    torch.bfloat16: False,
    torch.float8_e4m3fn: False,
    torch.int8: True,
}  # dtypes of x, and whether it has zero points
BF16, F32 = torch.bfloat16, torch.float32


def given(
    shape: tuple[int, int, int], group: int, affine: bool, x: torch.dtype, out: torch.dtype, device: str = "cuda"
) -> nibbles.Asked:
    """Operands with small integer values, so that sums are exact; integers use their full range."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)

    def drawn(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator, device=device)

    rows = drawn(-128, 128, m, k) if x in INTEGERS else drawn(-1, 2, m, k)
    return nibbles.Asked(
        rows.to(x),
        drawn(0, 256, n, k // 2).to(torch.uint8),
        drawn(-2, 3, n, k // group).to(F32).exp2(),
        drawn(0, 16, n, k // group).to(torch.uint8) if affine else None,
        None,
        None if x == BF16 else drawn(-2, 3, m).to(F32).exp2(),
        drawn(-128, 128, m).to(torch.int32) if KINDS[x] else None,
        group,
        out,
    )


def variants() -> Iterator[Variant]:
    """The kernels of the checks and timings."""
    count = hopper.multiprocessors(torch.device("meta"))
    for out, shapes, groups, affines in (
        (F32, CHECKED, nibbles.GROUPS, (False, True)),
        (BF16, TIMED, (128,), (False,)),
    ):
        for x in KINDS:
            tiles = {nibbles.tile_for(m, n, count, x) for m, n, _ in shapes}
            for tile in sorted(tiles, key=str):
                for group in groups:
                    for affine in affines:
                        yield nibbles.variant(given((1, 8, 128), group, affine, x, out, "cpu"), tile)


def check() -> Cases:
    """Sums of integers times powers of two are exact."""
    for shape in CHECKED:
        for group in nibbles.GROUPS:
            for affine in (False, True):
                for x in KINDS:
                    if shape[2] % group == 0:
                        name = f"{short(x)}, {shape}, groups of {group}{', affine' * affine}"
                        yield name, lambda a=(shape, group, affine, x): checked(*a)


def checked(shape: tuple[int, int, int], group: int, affine: bool, x: torch.dtype, device: str = "cuda") -> None:
    a = given(shape, group, affine, x, F32, device)
    wrong = multiplied(a) != nibbles.reference(a)
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"


def multiplied(a: nibbles.Asked) -> Tensor:
    return nibbles.mm(*a[:-2], group=a.group, out_dtype=a.out)


def times() -> Cases:
    """Microseconds of ours and of torch.mm with a bfloat16 weight, cycling through copies larger than the cache."""
    for x in KINDS:
        for shape in TIMED:
            yield f"{short(x)}, {shape}", lambda shape=shape, x=x: timed(shape, x)


def timed(shape: tuple[int, int, int], x: torch.dtype) -> Any:
    a = given(shape, 128, False, x, BF16)
    weights, rows = tune.in_turns(a.codes), a.x.to(BF16)
    wide = tune.in_turns(torch.zeros(shape[1], shape[2], dtype=BF16, device="cuda"))
    us = tune.microseconds(
        [
            lambda i: multiplied(a._replace(codes=weights[i % len(weights)])),
            lambda i: torch.mm(rows, wide[i % len(wide)].mT),
        ],
        rounds=7,
    )
    m, n, k = shape
    size = a.x.itemsize * m * k + n * k // 2 + 4 * a.scale.numel() + 2 * m * n
    names = dict(zip(("ours", "bf16 mm"), (round(t, 3) for t in us), strict=True))
    return {"group": f"int4 by {short(x)}", "m": m, "n": n, "k": k, "bytes": size, "us": names, "failed": {}}
