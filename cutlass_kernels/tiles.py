"""Which tile a product is computed with: the one that was measured best, or whose time is least by a model of the GPU.

A block multiplies and loads at once, so a step of a tile takes as long as the longer of the two; the blocks of a wave
share the GPU's memory. Measured times, if there are any (cutlass_kernels.tune), go before the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant

SMALLEST = Tile(64, 8, swap=True)
TILES = (
    SMALLEST,
    Tile(64, 16, swap=True),
    Tile(64, 32, swap=True),
    Tile(64, 64, swap=True),
    Tile(64, 64),
    Tile(64, 128),
    Tile(64, 128, pingpong=True),
    Tile(64, 256, pingpong=True),
    Tile(128, 64),
    Tile(128, 128),
    Tile(128, 128, cluster=(2, 1)),
    Tile(128, 128, cluster=(1, 2)),
    Tile(128, 128, pingpong=True),
    Tile(128, 128, cluster=(2, 1), pingpong=True),
    Tile(128, 256),
    Tile(128, 256, cluster=(2, 1)),
)


class Model(NamedTuple):
    """A GPU, by cycle and multiprocessor."""

    products: float = 4096.0  # multiply-adds of 8-bit numbers that the matrix unit does in a cycle
    shared: float = 128.0  # bytes that it reads from shared memory
    loads: float = 48.0  # bytes that come from the L2 cache
    memory: float = 2400.0  # bytes that come from memory to the whole GPU
    cache: float = 5500.0  # bytes that come from the L2 cache to the whole GPU
    start: float = 1500.0  # cycles before the first products, and after the last


HOPPER = Model()


def sizes(p: Product) -> tuple[int, int, int, int]:
    """M, N and K of each product, and their count. Groups are taken to be of one size."""
    found = {"rows": p.m, "columns": p.n, "k": p.k}
    of_each = {name: -(-size // p.count) if name == p.groups else size for name, size in found.items()}
    return (*of_each.values(), p.count)  # type: ignore[return-value]


def cycles(v: Variant, m: int, n: int, k: int, multiprocessors: int, batch: int = 1, gpu: Model = HOPPER) -> float:
    """An estimate of the time of so many products, in cycles of the GPU."""
    t = v.tile
    rows, columns = (n, m) if t.swap else (m, n)
    blocks = (
        -(-rows // (t.m * t.cluster[0])) * -(-columns // (t.n * t.cluster[1])) * t.cluster[0] * t.cluster[1] * batch
    )
    waves = -(-blocks // multiprocessors)
    steps = -(-k // t.k)
    multiply = max(t.m * t.n * t.k / gpu.products, (t.m // 64) * (64 + t.n) * t.k / gpu.shared)
    if v.summed:  # additions in float32, 128 a cycle, beside the products of another consumer
        added = 1.1 * t.m * t.n / 128
        multiply = multiply + added if t.pingpong or t.consumers == 1 else max(multiply, added)
    load = (t.m / t.cluster[1] + t.n / t.cluster[0]) * t.k / gpu.loads
    instructions = 8 if not v.requantize else 40 if v.requantize == "division" else 60  # for an element of the result
    write = t.m * t.n * v.out.itemsize / 32 + t.m * t.n * instructions / 128
    products = steps * max(multiply, load)
    tile = max(products, (products + write) / 2) if t.pingpong and waves > 1 else products + write
    traffic = batch * (rows * k + columns * k + rows * columns * v.out.itemsize) / gpu.memory
    again = blocks * steps * (t.m / t.cluster[1] + t.n / t.cluster[0]) * t.k / gpu.cache  # by some blocks anew
    return max(waves * tile, traffic, again) + again / 8 + gpu.start


def best(variants: Sequence[Variant], m: int, n: int, k: int, multiprocessors: int, batch: int = 1) -> Variant:
    """The one of least time; of equals the first."""
    return min(variants, key=lambda v: cycles(v, m, n, k, multiprocessors, batch))
