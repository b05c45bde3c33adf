"""Weights of 4 bits beside bfloat16, on one GPU: what the operator gives, and its times beside a weight in bfloat16."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.isolated import Cases
from cutlass_kernels import nibbles, tune

CHECKED = ((1, 4096, 4096), (17, 4096, 14336), (129, 333, 640), (1000, 1024, 2048))
TIMED = tuple((m, n, k) for m in (1, 16, 64, 256) for n, k in ((28672, 4096), (4096, 14336), (6144, 4096)))


def given(shape: tuple[int, int, int], group: int, affine: bool, device: str = "cuda") -> tuple[Any, ...]:
    """x, codes, scale, zero, no bias, and the group; x of small whole numbers, so that sums are exact."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)

    def drawn(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator, device=device)

    scale = drawn(-2, 3, n, k // group).to(torch.float32).exp2()
    zero = drawn(0, 16, n, k // group).to(torch.uint8) if affine else None
    return drawn(-2, 3, m, k).to(torch.bfloat16), drawn(0, 256, n, k // 2).to(torch.uint8), scale, zero, None, group


def check() -> Cases:
    """Sums of whole numbers by powers of two are exact."""
    for shape in CHECKED:
        for group in nibbles.GROUPS:
            for affine in (False, True):
                if shape[2] % group == 0:
                    yield (
                        f"{shape}, groups of {group}{', affine' * affine}",
                        lambda a=(shape, group, affine): checked(*a),
                    )


def checked(shape: tuple[int, int, int], group: int, affine: bool, device: str = "cuda") -> None:
    args = given(shape, group, affine, device)
    x, codes, scale, zero, bias, _ = args
    got = nibbles.mm(x, codes, scale, zero, bias, group=group, out_dtype=torch.float32)
    wrong = got != nibbles.reference(*args, torch.float32)
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"


def times() -> Cases:
    """Microseconds of ours and of torch.mm on a bfloat16 weight, each out of more copies than the cache holds."""
    for shape in TIMED:
        yield str(shape), lambda shape=shape: timed(shape)


def timed(shape: tuple[int, int, int]) -> Any:
    x, codes, scale, zero, _, group = given(shape, 128, False)
    weights = tune.in_turns(codes)
    wide = tune.in_turns(torch.zeros(shape[1], shape[2], dtype=torch.bfloat16, device="cuda"))
    us = tune.microseconds(
        [
            lambda i: nibbles.mm(x, weights[i % len(weights)], scale, zero, group=group),
            lambda i: torch.mm(x, wide[i % len(wide)].mT),
        ],
        rounds=7,
    )
    m, n, k = shape
    size = 2 * m * k + n * k // 2 + 4 * scale.numel() + 2 * m * n
    names = dict(zip(("ours", "bf16 mm"), (round(t, 3) for t in us), strict=True))
    return {"group": "int4 by bf16", "m": m, "n": n, "k": k, "bytes": size, "us": names, "failed": {}}
