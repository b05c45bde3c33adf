"""The kernels that GPU checks and timings need, by group, and the times to build and load them.

`hop kernels build --only GROUP` packs a group, with all kernels that its part of benchmarks.gpu needs.
"""

import fnmatch
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks import gpu_cases as g
from benchmarks import gpu_checks, gpu_first, gpu_nibbles, gpu_quantize, gpu_steps, gpu_times
from benchmarks.isolated import Cases
from cutlass_kernels import ahead, hopper, prebuilt, tiles, transposing
from cutlass_kernels.variants import Variant

Shape = tuple[int, int, int]
_SHAPE = (200, 256, 256)  # an arbitrary shape


def _unique(found: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(v for v in found if not isinstance(v, str)))


def _with_tiles(form: g.Form) -> list[Variant]:
    return _unique(g.Case(form, tile, _SHAPE).variant() for tile in tiles.TILES)


def _by_shape(pairs: Iterable[tuple[g.Form, Shape]]) -> list[Variant]:
    """Kernels with the tile that the model chooses."""
    return _unique(g.Case(form, None, shape).variant() for form, shape in pairs)


def first_tile() -> list[Variant]:
    return _unique([g.FIRST.variant()])


def checks() -> list[Any]:
    """Every checked form with every tile, and with the tile chosen by shape, including transposed factors."""
    cases = [case.variant() for form in g.FORMS for case in g.cases(form)]
    shapes = [(form, shape) for form, shape, _ in gpu_checks.by_shape()]
    return _unique((*cases, *_by_shape((*shapes, *gpu_checks.REPEATED, *gpu_checks.SMALL)), transposing.KERNEL))


def by_tile() -> list[Variant]:
    return _unique(v for name in gpu_times.BY_TILE for v in _with_tiles(gpu_times.FORMS[name]))


def host() -> list[Variant]:
    return _by_shape((form, gpu_times.LITTLE) for form in g.BASIC[:2])


def _timed(*forms: str) -> Callable[[], list[Variant]]:
    return lambda: _by_shape((gpu_times.FORMS[form], shape) for form in forms for shape in gpu_times.SHAPES)


def grouped() -> list[Variant]:
    asked = [(name, count, (m, n, k)) for name in gpu_times.GROUPED for count, m, n, k in gpu_times.EXPERTS]
    return _unique(hopper.variant_of(p) for each in asked for p in gpu_times.experts(*each, device="meta"))


GROUPS: dict[str, Callable[[], list[Any]]] = {
    "first-tile": first_tile,
    "first": gpu_first.variants,
    "host": host,
    "int8": _timed("int8"),
    "int8_to_bf16": _timed("int8 to bf16"),
    "fp8": _timed("fp8", "fp8 fast"),
    "fp8_blocks": _timed("fp8 blocks"),
    "groups": grouped,
    "nibbles": lambda: _unique(gpu_nibbles.variants()),
    "transpose": lambda: [transposing.KERNEL],
    "quantize": gpu_quantize.variants,
    "by_tile": by_tile,
    "steps": lambda: [*gpu_steps.updates()],
    "checks": checks,
}


def variants() -> list[Any]:
    """The kernels of all groups without duplicates, the most important first."""
    return _unique(v for group in GROUPS.values() for v in group())


def chosen(patterns: Sequence[str]) -> list[Any]:
    """The kernels of the groups that match shell patterns; a pattern that matches no group selects kernels by name.

    Raises:
        LookupError: a pattern matches neither a group nor a kernel.
    """
    found: list[Any] = []
    for pattern in patterns:
        own = [v for name, group in GROUPS.items() if fnmatch.fnmatch(name, pattern) for v in group()]
        own = own or [v for v in variants() if fnmatch.fnmatch(v.name, pattern)]
        if not own:
            raise LookupError(f"no group and no kernel is named {pattern!r}; the groups are {', '.join(GROUPS)}")
        found += own
    return _unique(found)


# ---- building and loading


def build(part: str, parts: str) -> Cases:
    """Compile every `parts`-th kernel to disk; yields seconds for each, or nothing if it was compiled already."""
    torch.set_num_threads(1)
    for variant in variants()[int(part) :: int(parts)]:
        yield variant.name, lambda variant=variant: _built(variant)


def _built(variant: Any) -> float | None:
    if ahead.is_built(variant):
        return None
    begin = time.perf_counter()
    ahead.compiled(variant)
    return round(time.perf_counter() - begin, 3)


def load() -> Cases:
    """Load kernels from disk; yields milliseconds for each."""
    for variant in variants()[:8]:
        yield variant.name, lambda variant=variant: _loaded(variant)


def _loaded(variant: Any) -> float | None:
    pack = prebuilt.pack()
    if not (ahead.is_built(variant) or (pack and pack.has(variant.name, variant.target))):
        return None
    begin = time.perf_counter()
    ahead.compiled(variant)
    return round((time.perf_counter() - begin) * 1e3, 2)
