"""Groups of cases for the first 90 seconds on a GPU: a kernel of each family, and a few times."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import gpu_cases as g
from benchmarks import gpu_quantize, gpu_steps, gpu_times
from benchmarks.isolated import Cases
from cutlass_kernels import forms, tiles, transposing, trials, trust
from cutlass_kernels.variants import Variant
from hop.kernels.gpu import step as gpu_step

QUANTIZING = (
    gpu_quantize.Case("INT8_ROW", torch.bfloat16, (384, 4096)),
    gpu_quantize.Case("MXFP8", torch.bfloat16, (384, 4096), "both"),
    gpu_quantize.Case("FP8_128X128", torch.bfloat16, (384, 4096)),
    gpu_quantize.Case("FP8_TENSOR", torch.bfloat16, (384, 4096)),
    gpu_quantize.Case("FP8_COLUMN", torch.bfloat16, (384, 4096)),
    gpu_quantize.Computed("INT8_ROW", torch.bfloat16, (384, 4096)),
    gpu_quantize.Gated("INT8_ROW", torch.bfloat16, (384, 4096)),
)


@functools.cache
def subject() -> gpu_step.Subject:
    """The kernel description of a step of AdamW8bit."""
    return gpu_steps.subject_of("adamw8", torch.bfloat16, "sm_90a")


def names() -> list[str]:
    own = "benchmarks.gpu_first"
    return ["benchmarks.gpu_checks:first_tile", f"{own}:every_tile", f"{own}:families"]


def timings() -> list[str]:
    return [f"benchmarks.gpu_times:{form}:first" for form in ("int8", "fp8")]


def every_tile() -> Cases:
    """One form with every tile, in one process as long as none ends it."""
    for tile in tiles.TILES:
        case = g.Case(g.FIRST.form, tile, g.FIRST.shape)
        yield str(case), case.check_bits


def kernels() -> list[Any]:
    """One kernel of each family."""
    return list(dict.fromkeys((*_products(), transposing.KERNEL, *_quantizing(), gpu_step.kernel_of(subject()).update)))


def _products() -> Iterator[Variant]:
    """The forms that are asked for most, with the tiles of few and of many rows; and one of each other kind."""
    for form in gpu_times.FORMS.values():
        for m in (16, 4096):
            found = g.Case(form, None, (m, 4096, 4096)).variant()
            if isinstance(found, Variant):
                yield found
    seen = set()
    for v in forms.variants():
        kind = v.groups, v.batched, bool(v.group), v.is_integer, v.requantize, v.lhs_zero is not None
        if kind not in seen and v.tile in (g.FIRST.tile, tiles.NIBBLE_TILES[5]):
            seen.add(kind)
            yield v


def _quantizing() -> list[Any]:
    return [v for case in QUANTIZING for v in case.variants()]


def families() -> Cases:
    """One kernel of each family, tried as before its first use, but in this process."""
    update = gpu_step.kernel_of(subject()).update
    for kernel in kernels():
        trial = trust.trial_of(kernel, subject() if kernel == update else None)
        yield kernel.name, lambda trial=trial: tried(trial)


def tried(trial: trials.Trial, device: str = "cuda:0") -> None:
    state, reason = trials.tried(trial, torch.device(device), lambda **_: None)
    assert state == "right", f"{state}: {reason}"


def variants() -> list[Any]:
    """The kernels of the first stage."""
    shapes = [(gpu_times.FORMS[form], shape) for form in ("int8", "fp8", "fp8 fast") for shape in gpu_times.FIRST]
    timed = [g.Case(form, None, shape).variant() for form, shape in shapes]
    every = [g.Case(g.FIRST.form, tile, g.FIRST.shape).variant() for tile in tiles.TILES]
    found = (v for v in (*every, *timed) if isinstance(v, Variant))
    return list(dict.fromkeys((*found, *kernels())))
