"""Groups of cases for benchmarks.isolated: every check of the kernels."""

import shutil
import subprocess
import sys
import unittest
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import gpu_cases as g
from benchmarks import gpu_nibbles, gpu_steps
from benchmarks.isolated import Cases
from cutlass_kernels import hopper, tiles
from cutlass_kernels.oracle import compare
from cutlass_kernels.product import Product

CHUNK = 5  # forms in a group
LARGE = (
    (8192, 1024, 1024),
    (8191, 1040, 1008),
    (4097, 333, 4095),
    (1, 28672, 4096),
    (17, 4095, 14336),
    (300, 57344, 512),
)
REPEATED = ((g.BASIC[0], (16, 4096, 4096)), (g.BASIC[1], (1000, 2048, 1024)), (g.BASIC[4], (500, 1024, 2048)))
SMALL = (
    (g.BASIC[0], (1, 1, 1)),
    (g.BASIC[0], (64, 128, 128)),
    (g.BASIC[1], (64, 128, 128)),
    (g.BASIC[1], (64, 512, 256)),
)


def names() -> list[str]:
    """The groups of checks, the most important first."""
    own = "benchmarks.gpu_checks"
    forms = [f"{own}:check:{first}" for first in range(0, len(g.FORMS), CHUNK)]
    return [forms[0], f"{own}:surroundings", f"{own}:large", *gpu_steps.names(), *forms[1:], f"{own}:nibbles"]


def nibbles() -> Cases:
    """4-bit weights with bfloat16."""
    yield from gpu_nibbles.check()


# ---- the first tiles, and the sanitizer


def first_tile() -> Cases:
    yield str(g.FIRST), g.FIRST.check_bits


TOOLS = ("memcheck", "racecheck", "synccheck")


def sanitized() -> Cases:
    """The first tile under each tool of compute-sanitizer."""
    for tool in TOOLS:
        yield tool, lambda tool=tool: under(["compute-sanitizer", "--tool", tool, "--error-exitcode", "86"])


def under(command: list[str]) -> str:
    """Run the first tile's check under a program, and fail with its output unless it exits with status 0."""
    if shutil.which(command[0]) is None:
        raise unittest.SkipTest(f"{command[0]} is not installed here")
    code = "from benchmarks.gpu_cases import FIRST; FIRST.check()"
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}: {said[-600:]}"
    return said[-200:].strip()


# ---- the kernels, tile by tile


def check(first: str) -> Cases:
    """Every tile of CHUNK forms."""
    for form in g.FORMS[int(first) : int(first) + CHUNK]:
        for case in g.cases(form):
            yield str(case), case.check


def emulated() -> Cases:
    """A few small cases on the CPU."""
    for form, own, shape, values in (
        (g.BASIC[0], tiles.TILES[1], (9, 70, 130), "extreme"),
        (g.BASIC[1], g.FIRST.tile, (70, 144, 144), "random"),
        (g.BASIC[4], g.FIRST.tile, (33, 80, 300), "whole"),
    ):
        case = g.Case(form, own, shape, values, "misaligned")
        yield str(case), lambda case=case: case.check("cpu")
    bits = g.Case(g.FIRST.form, g.FIRST.tile, (70, 80, 144))
    yield f"{bits}, bits", lambda: bits.check_bits("cpu")


# ---- the operator


def _mm(p: Product) -> Tensor:
    """The product by the operator, if our own kernel computes it."""
    if 0 not in (*p.lhs.shape, p.n) and (reason := hopper.declines(p)) is not None:
        raise unittest.SkipTest(reason)
    return _by_operator(p)


def _by_operator(p: Product) -> Tensor:
    from cutlass_kernels import operators

    fused = {name: value for name, value in vars(p).items() if name not in ("lhs", "rhs", "out")}
    return operators.mm(p.lhs, p.rhs, p.out, **fused)


def _of(form: g.Form, shape: tuple[int, int, int], strides: str = "ready") -> Product:
    return g.Case(form, None, shape, "random" if form.is_integer else "whole", strides).product("cuda")


def by_shape() -> Iterator[tuple[g.Form, tuple[int, int, int], str]]:
    """Cases with the tile chosen by shape: whole layers, and every kind of strides."""
    for form in (*g.BASIC, g.FORMS[9]):
        for m, n, k in LARGE:
            yield form, (m, n, k if form.is_integer else min(k, 2048)), "ready"
    for strides in g.STRIDES:
        for form in (g.BASIC[0], g.BASIC[2]):
            yield form, (129, 208, 272), strides


def large() -> Cases:
    """Products with the tile chosen by shape, and empty ones."""
    for form, shape, strides in by_shape():
        yield (
            f"{form.name}, {shape}, {strides}",
            lambda form=form, shape=shape, s=strides: _compared(_of(form, shape, s)),
        )
    for shape in ((0, 64, 64), (64, 0, 64), (64, 64, 0), (1, 1, 1)):
        yield f"s8, {shape}", lambda shape=shape: _compared(_of(g.BASIC[0], shape))


def _compared(p: Product) -> float:
    return compare(_mm(p), p, exact=True)


def surroundings() -> Cases:
    """Streams, graphs, torch.compile and devices."""
    for form, shape in REPEATED:
        for name, run in (("repeated", repeated), ("two streams", two_streams), ("CUDA graph", cuda_graph)):
            yield f"{name}: {form.name}", lambda run=run, form=form, shape=shape: run(_of(form, shape))
    yield "torch.compile, reduce-overhead", compiled
    yield "current device", current_device
    yield "after a wrong call", after_a_wrong_call


def repeated(p: Product, times: int = 50) -> None:
    """Check that repeated products have the same bits."""
    first = _mm(p)
    compare(first, p, exact=True)
    for i in range(times):
        assert torch.equal(_mm(p).view(torch.uint8), first.view(torch.uint8)), f"run {i + 1} gives other bits"


def two_streams(p: Product) -> None:
    """Two products at once, each after a long kernel on its own stream that computes its factor."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for i in range(20):
        for stream, own in zip(streams, results, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
                own.append(_mm(_with(p, _rolled(p.lhs, i))))
    torch.cuda.synchronize()
    for i in range(20):
        wanted = _mm(_with(p, _rolled(p.lhs, i)))
        for own in results:
            assert torch.equal(own[i].view(torch.uint8), wanted.view(torch.uint8)), f"product {i} differs"


def _rolled(x: Tensor, i: int) -> Tensor:
    """Codes with rows rolled; as bytes, because torch.roll does not support 8-bit floats."""
    return x.view(torch.uint8).roll(i, 0).view(x.dtype)


def _with(p: Product, lhs: Tensor) -> Product:
    return replace(p, lhs=lhs)


def cuda_graph(p: Product) -> None:
    """Capture once, replay with other values."""
    lhs = p.lhs.clone()
    _mm(_with(p, lhs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _mm(_with(p, lhs))
    for i in range(3):
        lhs.copy_(_rolled(p.lhs, i))
        graph.replay()
        torch.cuda.synchronize()
        compare(result, _with(p, lhs), exact=True)


def compiled() -> None:
    p = _of(g.BASIC[1], (64, 512, 256))

    def f(lhs: Tensor, rhs: Tensor, lhs_scale: Tensor, rhs_scale: Tensor) -> Tensor:
        y = torch.ops.cutlass_kernels.mm(lhs, rhs, p.out, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
        return y * 2

    _mm(p)
    assert p.lhs_scale is not None and p.rhs_scale is not None
    run = torch.compile(f, mode="reduce-overhead", fullgraph=True)
    for i in range(5):
        lhs = _rolled(p.lhs, i)
        result = run(lhs, p.rhs, p.lhs_scale, p.rhs_scale).clone()
        assert torch.equal(result, _mm(_with(p, lhs)) * 2), f"call {i} differs"


def current_device() -> str:
    """The current device is unchanged, and a product runs on the device of its factors."""
    before = torch.cuda.current_device()
    p = _of(g.BASIC[0], (64, 128, 128))
    _mm(p)
    assert torch.cuda.current_device() == before
    if torch.cuda.device_count() < 2:
        return "one GPU only"
    other = Product(p.lhs.to("cuda:1"), p.rhs.to("cuda:1"), p.out)
    result = _mm(other)
    assert result.device.index == 1 and torch.cuda.current_device() == before
    compare(result, other, exact=True)
    return "two GPUs"


def after_a_wrong_call() -> None:
    """An error names the argument, and the next call is right."""
    p = _of(g.BASIC[1], (64, 128, 128))
    try:
        _by_operator(Product(p.lhs, p.rhs, p.out, lhs_scale=p.lhs_scale))
    except ValueError as error:
        assert "rhs_scale" in str(error), error
    else:
        raise AssertionError("one scale alone was taken")
    compare(_mm(p), p, exact=True)
