"""Groups of timings for benchmarks.isolated: ours against PyTorch's products, over the layers of Llama 3, on one GPU.

Times are GPU times of graphs of many calls, replayed in turns. Calls cycle through more copies of the weights than fit
the L2 cache, so that weights come from memory. The host's time is measured separately. A case returns a row:

    {"group", "m", "n", "k", "bytes": read and written, "us": {name: microseconds}, "failed": {name: why}}
"""

import contextlib
import statistics
import time
import unittest
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases as g
from benchmarks import gpu_nibbles
from benchmarks.isolated import Cases
from cutlass_kernels import hopper, tiles, transposing, tune
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Variant

SMALL = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (N, K) of Llama 3 with 8 billion parameters
BIG = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))  # with 70 billion
ROWS = (4096, 16, 1, 64, 1024, 256, 32, 128, 8192)  # M, the most important first in case time runs out
SHAPES = [(m, n, k) for m in ROWS for n, k in (*SMALL, *BIG)]
FIRST = ((4096, 4096, 4096), (8192, 8192, 8192), (16, 28672, 4096))  # those of the first stage
LITTLE = (16, 128, 128)  # a product that takes less time on the GPU than on the host
FEWEST = 17  # smallest number of rows that torch._int_mm supports
_MOST_RESERVED = 2**36  # limit of bytes that graphs of earlier rows may keep
FORMS = {
    "int8": g.BASIC[0],
    "int8 to bf16": g.BASIC[1],
    "fp8": g.BASIC[2],
    "fp8 fast": g.BASIC[3],
    "fp8 blocks": g.BASIC[4],
}
BY_TILE = ("int8 to bf16", "fp8", "fp8 blocks")  # forms to time with every tile
Call = Callable[[Tensor, Tensor], Tensor]  # a function of both factors


def names() -> list[str]:
    groups = ("limits", "host", "int8", "int8_to_bf16", "fp8", "fp8_blocks", "groups", "nibbles", "by_tile")
    return [*(f"benchmarks.gpu_times:{group}" for group in groups), "benchmarks.gpu_steps:step_times"]


# ---- limits of the GPU


def limits() -> Cases:
    yield "copy", lambda: {"name": "copy", "per_s": copied()}
    yield "bf16 product", lambda: {"name": "bf16", "per_s": multiplied(torch.bfloat16, torch.mm)}
    yield "int8 product", lambda: {"name": "int8", "per_s": multiplied(torch.int8, torch._int_mm)}
    yield "transposed bytes", lambda: {"name": "transposed", "per_s": transposed()}


def copied() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.randint(-128, 128, (2**31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    (us,) = tune.microseconds([lambda i: target.copy_(source)], rounds=15, least_ms=10.0)
    return 2 * source.numel() / us * 1e6


def transposed() -> float:
    """Bytes per second that our kernel reads and writes when transposing a large matrix."""
    x = torch.randint(-128, 128, (2**15, 2**15), dtype=torch.int8, device="cuda").mT
    if (reason := transposing.declines(x)) is not None:
        raise unittest.SkipTest(reason)
    (us,) = tune.microseconds([lambda i: transposing.run(x)], rounds=15, least_ms=10.0)
    return 2 * x.numel() / us * 1e6


def multiplied(dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor], size: int = 8192) -> float:
    """Operations per second of a large square product of random values."""
    lhs, rhs = (torch.randint(-128, 128, (size, size), device="cuda").to(dtype) for _ in range(2))
    (us,) = tune.microseconds([lambda i: multiply(lhs, rhs.T)], least_ms=20.0)
    return 2 * size**3 / us * 1e6


# ---- rows


def row(group: str, shape: tuple[int, int, int], calls: Mapping[str, Call], lhs: Tensor, rhs: Tensor, out: int) -> Any:
    """Times of several calls with the same factors; a peer that rejects them is listed with the reason."""
    (m, n, k), weights = shape, tune.in_turns(rhs)
    taken, failed = {}, {}
    for name, call in calls.items():
        try:
            call(lhs, rhs)
            torch.cuda.synchronize()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if name.startswith("ours"):
                raise
            failed[name] = str(error).split("\n")[0][:200]
        else:
            taken[name] = lambda i, call=call: call(lhs, weights[i % len(weights)])
    us = tune.microseconds(list(taken.values()), rounds=7)
    times = {name: round(t, 3) for name, t in zip(taken, us, strict=True)}
    if torch.cuda.memory_reserved() > _MOST_RESERVED:
        torch.cuda.empty_cache()
    size = m * k + k * n + m * n * out
    return {"group": group, "m": m, "n": n, "k": k, "bytes": size, "us": times, "failed": failed}


def ours(p: Product) -> Call:
    """The operator, if our own kernel computes it."""
    from cutlass_kernels import operators

    if (reason := hopper.declines(p)) is not None:
        raise unittest.SkipTest(reason)
    fused = {name: value for name, value in vars(p).items() if isinstance(value, Tensor)}
    del fused["lhs"], fused["rhs"]
    return lambda lhs, rhs: operators.mm(lhs, rhs, p.out, fast=p.fast, **fused)


def _product(group: str, shape: tuple[int, int, int]) -> Product:
    return g.Case(FORMS[group], None, shape).product("cuda")


def _padded(call: Call, m: int) -> Call:
    """The call with rows padded to the minimum of torch._int_mm."""
    if m >= FEWEST:
        return call
    return lambda lhs, rhs: call(torch.nn.functional.pad(lhs, (0, 0, 0, 32 - m)), rhs)[:m]


def int8(which: str = "all") -> Cases:
    """Products to int32; few for `which` = "first"."""

    def timed(shape: tuple[int, int, int]) -> Any:
        p = _product("int8", shape)
        # bfloat16 needs its own weights; one copy is enough if it is as large as the cache.
        decoded = tune.in_turns(p.rhs.to(torch.bfloat16))
        turn, rows = iter(range(10**9)), p.lhs.to(torch.bfloat16)
        calls = {
            "ours": ours(p),
            "_int_mm": _padded(torch._int_mm, p.m),
            "bf16 mm": lambda lhs, rhs: torch.mm(rows, decoded[next(turn) % len(decoded)]),
        }
        return row("int8", shape, calls, p.lhs, p.rhs, 4)

    for shape in FIRST if which == "first" else SHAPES:
        yield str(shape), lambda shape=shape: timed(shape)


def int8_to_bf16() -> Cases:
    """Products with row and column scales, against torch._int_mm with an epilogue by Inductor."""

    def fused(lhs: Tensor, rhs: Tensor, lhs_scale: Tensor, rhs_scale: Tensor) -> Tensor:
        return (torch._int_mm(lhs, rhs).to(torch.float32) * lhs_scale * rhs_scale).to(torch.bfloat16)

    inductor = torch.compile(fused, dynamic=True)

    def timed(shape: tuple[int, int, int]) -> Any:
        p = _product("int8 to bf16", shape)
        by_row, by_column = p.lhs_scale, p.rhs_scale
        assert by_row is not None and by_column is not None
        if p.m < FEWEST:
            by_row = torch.nn.functional.pad(by_row, (0, 0, 0, 32 - p.m))
        calls = {
            "ours": ours(p),
            "_int_mm + Inductor": _padded(lambda lhs, rhs: inductor(lhs, rhs, by_row, by_column), p.m),
        }
        return row("int8 to bf16", shape, calls, p.lhs, p.rhs, 2)

    for shape in SHAPES:
        yield str(shape), lambda shape=shape: timed(shape)


def fp8(which: str = "all") -> Cases:
    """e4m3 to bf16 with row and column scales, with sums in float32 or the matrix unit; few for `which` = "first"."""

    def timed(shape: tuple[int, int, int]) -> Any:
        p, fast = _product("fp8", shape), _product("fp8 fast", shape)
        scales = {"scale_a": p.lhs_scale, "scale_b": p.rhs_scale, "out_dtype": p.out}
        calls = {"ours": ours(p), "ours fast": ours(fast)}
        for name, is_fast in (("_scaled_mm", False), ("_scaled_mm fast", True)):
            calls[name] = lambda lhs, rhs, is_fast=is_fast: torch._scaled_mm(lhs, rhs, **scales, use_fast_accum=is_fast)
        return row("fp8", shape, calls, p.lhs, p.rhs, 2)

    for shape in FIRST if which == "first" else SHAPES:
        yield str(shape), lambda shape=shape: timed(shape)


def fp8_blocks() -> Cases:
    """e4m3 to bf16 with scales of 1 x 128 and 128 x 128."""

    def timed(shape: tuple[int, int, int]) -> Any:
        p = _product("fp8 blocks", shape)
        assert p.lhs_scale is not None and p.rhs_scale is not None
        by_row, by_block = (
            s.mT.contiguous().mT for s in (p.lhs_scale, p.rhs_scale)
        )  # rows innermost, as cuBLAS requires

        def theirs(lhs: Tensor, rhs: Tensor) -> Tensor:
            kind = torch.nn.functional.ScalingType
            return torch.nn.functional.scaled_mm(
                *(lhs, rhs, by_row, kind.BlockWise1x128, by_block, kind.BlockWise128x128), output_dtype=p.out
            )

        return row("fp8 blocks", shape, {"ours": ours(p), "scaled_mm": theirs}, p.lhs, p.rhs, 2)

    for shape in SHAPES:
        yield str(shape), lambda shape=shape: timed(shape)


# Number of experts, total rows, (N, K) of each product: DeepSeek-V2-Lite and Mixtral 8x7B.
LAYERS = ((64, 2816, 2048), (64, 2048, 1408), (8, 28672, 4096))
EXPERTS = tuple((count, m, n, k) for m in (16384, 2048) for count, n, k in LAYERS)
GROUPED = {"fp8": "fp8", "int8": "int8 to bf16"}  # forms of the corresponding products with one matrix


def experts(name: str, count: int, shape: tuple[int, int, int], device: str = "cuda") -> tuple[Product, Product]:
    """A product of rows in groups of random sizes, and the product of all rows with one matrix."""
    dense = g.Case(FORMS[GROUPED[name]], None, shape).product(device)
    assert dense.rhs_scale is not None
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
    ends = torch.randint(0, shape[0] + 1, (count - 1,), generator=generator, device=device).sort().values
    offs = torch.nn.functional.pad(ends, (0, 1), value=shape[0]).to(torch.int32)
    weights = dense.rhs.mT.expand(count, *dense.rhs.mT.shape).clone().mT
    return replace(dense, rhs=weights, rhs_scale=dense.rhs_scale.expand(count, -1).contiguous(), offs=offs), dense


def groups() -> Cases:
    """Products of experts, with group sizes on the device, against the dense product of the same number of rows."""

    def timed(name: str, count: int, shape: tuple[int, int, int]) -> Any:
        p, dense = experts(name, count, shape)
        run, alone = ours(p), ours(dense)
        copies = tune.in_turns(dense.rhs)
        turn = iter(range(10**9))
        calls = {"ours": run, "one product": lambda lhs, rhs: alone(lhs, copies[next(turn) % len(copies)])}
        if name == "fp8":
            assert p.lhs_scale is not None and p.rhs_scale is not None
            scales = (p.lhs_scale.reshape(-1), p.rhs_scale)
            calls["_scaled_grouped_mm"] = lambda lhs, rhs: torch._scaled_grouped_mm(
                lhs, rhs, *scales, offs=p.offs, out_dtype=p.out
            )
        found = row(f"{count} groups, {name}", shape, calls, p.lhs, p.rhs, 2)
        return found | {"bytes": found["bytes"] + (count - 1) * shape[1] * shape[2]}

    for name in GROUPED:
        for count, m, n, k in EXPERTS:
            yield f"{name}, {count} x {m, n, k}", lambda name=name, c=count, s=(m, n, k): timed(name, c, s)


def nibbles() -> Cases:
    """4-bit weights with bfloat16."""
    yield from gpu_nibbles.times()


def by_tile() -> Cases:
    """Every tile, to compare with the choice of cutlass_kernels.tiles, which is "ours"."""

    def timed(form: str, shape: tuple[int, int, int]) -> Any:
        p = _product(form, shape)
        chosen = hopper.variant_of(p)
        if isinstance(chosen, str):
            raise unittest.SkipTest(chosen)
        fused = {name: value for name, value in vars(p).items() if name not in ("lhs", "rhs", "out")}
        found = [v for t in tiles.TILES if isinstance(v := hopper.variant_of(p, t), Variant)]
        runs = {f"ours {v.tile}": hopper.plan(p, v.tile) for v in hopper.available(found)}
        calls = {name: lambda lhs, rhs, run=run: run(lhs, rhs, p.out, **fused) for name, run in runs.items()}
        found = row("by tile", shape, calls, p.lhs, p.rhs, p.out.itemsize)
        return found | {"form": form, "chosen": f"ours {chosen.tile}"}

    for form in BY_TILE:
        for shape in SHAPES:
            if shape[1:] in SMALL:
                yield f"{form}, {shape}", lambda form=form, shape=shape: timed(form, shape)


# ---- the host


def host() -> Cases:
    """Host microseconds per call, with many queued, for products that take less time on the GPU."""
    p = g.Case(g.BASIC[1], None, LITTLE).product("cuda")
    plain = g.Case(g.BASIC[0], None, LITTLE).product("cuda")
    fp8 = g.Case(g.BASIC[3], None, LITTLE).product("cuda")
    if (reason := hopper.declines(plain) or hopper.declines(p)) is not None:
        yield "ours", lambda: skip(reason)
        return
    rows = torch.zeros(32, 128, dtype=torch.int8, device="cuda")
    scales = {"scale_a": fp8.lhs_scale, "scale_b": fp8.rhs_scale, "out_dtype": fp8.out}
    for name, call in (
        *host_calls(plain, p).items(),
        ("_int_mm", lambda: torch._int_mm(rows, plain.rhs)),
        ("_scaled_mm", lambda: torch._scaled_mm(fp8.lhs, fp8.rhs, **scales)),
        ("torch.empty", lambda: torch.empty((16, 128), dtype=torch.bfloat16, device="cuda")),
    ):
        yield name, lambda name=name, call=call: {"name": name, **per_call(call, torch.cuda.synchronize)}


def skip(reason: str) -> None:
    raise unittest.SkipTest(reason)


def host_stubbed() -> Cases:
    """Host microseconds without a GPU: tensors are on the CPU, and nothing is launched."""
    p = g.Case(g.BASIC[1], None, LITTLE).product("cpu")
    plain = g.Case(g.BASIC[0], None, LITTLE).product("cpu")
    hopper.compiled = lambda variant: lambda *args: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu").index
    torch.set_num_threads(1)
    from cutlass_kernels import operators

    library = torch.library.Library("cutlass_kernels", "IMPL")
    library.impl("mm", operators._mm, "CPU")
    for name, call in host_calls(plain, p).items():
        yield name, lambda name=name, call=call: {"name": name, **per_call(call, lambda: library)}
    empty = lambda: torch.empty((16, 128), dtype=torch.bfloat16)  # noqa: E731
    yield "torch.empty", lambda: {"name": "torch.empty", **per_call(empty, lambda: library)}


def host_calls(plain: Product, scaled: Product) -> dict[str, Callable[[], Any]]:
    """The operator, plain and with scales, and the plan of a product that it contains."""
    from cutlass_kernels import operators  # noqa: F401 - which defines the operator

    mm = torch.ops.cutlass_kernels.mm.default
    scales = {"lhs_scale": scaled.lhs_scale, "rhs_scale": scaled.rhs_scale}
    plan, plan_scaled = hopper.plan(plain), hopper.plan(scaled)
    return {
        "ours": lambda: mm(plain.lhs, plain.rhs, plain.out),
        "ours, scaled": lambda: mm(scaled.lhs, scaled.rhs, scaled.out, **scales),
        "our plan": lambda: plan(plain.lhs, plain.rhs, plain.out),
        "our plan, scaled": lambda: plan_scaled(scaled.lhs, scaled.rhs, scaled.out, **scales),
    }


def per_call(call: Callable[[], Any], synchronize: Callable[[], Any], calls: int = 300, rounds: int = 25) -> Any:
    """Microseconds per call, the median and the minimum over rounds of queued calls, fewer than a queue holds."""
    times = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    synchronize()
    return {"us": round(statistics.median(times[2:]), 3), "least_us": round(min(times), 3)}
