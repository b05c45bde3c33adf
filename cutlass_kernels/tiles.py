"""Choose the tile of a product: the fastest one measured, or predicted by a model of the GPU.

A multiprocessor multiplies, loads and finishes at once, so a step of a tile takes as long as the longest of these; the
blocks of a wave share the GPU's memory. Measured times, if there are any (cutlass_kernels.tune), go before the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant

SMALLEST = Tile(64, 8, swap=True)
TILES = (
    SMALLEST,
    Tile(64, 16, swap=True),
    Tile(64, 32, swap=True),
    Tile(64, 64, swap=True),
    Tile(64, 16, swap=True, split=2),
    Tile(64, 128, split=4),
    Tile(64, 128, pingpong=True),
    Tile(64, 256, pingpong=True),
    Tile(128, 64),
    Tile(128, 128),
    Tile(128, 128, split=2),
    Tile(128, 128, split=4),
    Tile(128, 128, cluster=(2, 1)),
    Tile(128, 128, cluster=(1, 2)),
    Tile(128, 128, pingpong=True),
    Tile(128, 128, cluster=(2, 1), pingpong=True),
    Tile(128, 160),
    Tile(128, 192),
    Tile(128, 192, cluster=(2, 1)),
    Tile(128, 192, cluster=(2, 1), pingpong=True),
    Tile(128, 256),
    Tile(128, 256, split=2),
    Tile(128, 256, cluster=(2, 1)),
    Tile(256, 128, cluster=(1, 2)),
)
"""Each is the fastest for some form and shape, by the model below; a test asks for all of them."""

# Those that are best for few shapes: compiled ahead of time for the forms that are asked for most.
RARE = (
    Tile(64, 16, swap=True, split=2),
    Tile(64, 128, split=4),
    Tile(128, 160),
    Tile(128, 192),
    Tile(128, 256, split=2),
)


NIBBLE_TILES = tuple(Tile(m, n, swap=True) for m in (128, 64) for n in (8, 16, 32, 64, 128))
"""The tiles for 4-bit weights."""


class Model(NamedTuple):
    """A GPU, by cycle and multiprocessor. The first is of the data sheet; the others are assumed, and named so that
    measurements can correct them."""

    products: float = 4096.0  # multiply-adds of 8-bit numbers that the matrix unit does in a cycle
    shared: float = 128.0  # bytes of shared memory that it reads, and that copies write
    loads: float = 48.0  # bytes that come from the L2 cache
    memory: float = 2400.0  # bytes that come from memory to the whole GPU
    cache: float = 5500.0  # bytes that come from the L2 cache to the whole GPU
    start: float = 1500.0  # cycles before the first products, and after the last
    wait: float = 100.0  # cycles between the end of a consumer's products and what it does next
    issue: float = 40.0  # instructions of a consumer's warp in a step, beside products and sums
    sent: float = 32.0  # bytes that a block sends to others of its cluster


HOPPER = Model()


def sizes(p: Product) -> tuple[int, int, int, int]:
    """M, N and K of each product, and the number of products. Groups are assumed to have equal sizes."""
    found = {"rows": p.m, "columns": p.n, "k": p.k}
    of_each = {name: -(-size // p.count) if name == p.groups else size for name, size in found.items()}
    return (*of_each.values(), p.count)  # type: ignore[return-value]


class Step(NamedTuple):
    """Cycles of a tile's step along K in each unit alone; the longest counts."""

    multiply: float  # the matrix unit
    shared: float  # shared memory
    load: float  # the L2 cache
    slots: float  # the schedulers
    chain: float  # one consumer's products, the wait for them, and their sums in float32, one after another

    @property
    def limit(self) -> str:
        return max(self._fields, key=lambda name: getattr(self, name))


def step_of(v: Variant, gpu: Model = HOPPER) -> Step:
    """An estimate of the parts of a step of K in a tile."""
    if v.group:
        return _step_of_nibbles(v, gpu)
    t = v.tile
    multiply = t.m * t.n * t.k / gpu.products
    shared = (t.m // 64 * (64 + t.n) + t.m + t.n) * t.k / gpu.shared
    load = (t.m / t.cluster[1] + t.n / t.cluster[0]) * t.k / gpu.loads
    added = t.rows * t.n / 128 if v.adds_up else 0  # additions in float32, each an instruction
    scales = 14 * (t.rows // 32 + t.n // v.piece) if v.scales == "block" else 0
    if v.scales == "1x128":  # a multiplication for each sum, and the columns' from shared memory
        scales = t.rows * t.n / 128 + 14 * (t.rows // 32 + 2) + t.rows // 64 * t.n / 4
    instructions = added + scales + gpu.issue
    together = 1 if t.pingpong else t.consumers  # consumers that are in their steps at once
    own = multiply / together
    chain = own + t.rows // 64 * gpu.wait + added + scales if v.adds_up else 0.0
    return Step(multiply, shared, load, together * instructions, chain)


_FETCHED = 30.0  # instructions for the scales of a step of codes of 4 bits, counted by benchmarks.gpu_instructions
# By what such codes become, how many make a register, and the instructions for it, the load among them.
_DECODES = {torch.bfloat16: (2, 4), torch.int8: (4, 7), torch.float8_e4m3fn: (4, 7)}


def _step_of_nibbles(v: Variant, gpu: Model) -> Step:
    """The step for 4-bit weights: a consumer multiplies each group, waits for it, and adds it up."""
    t, groups = v.tile, v.tile.k // v.group
    multiply = t.m * t.n * t.k * v.lhs.itemsize / gpu.products
    shared = (t.m * t.k + (1 + t.m // 64) * t.n * t.k * v.lhs.itemsize) / gpu.shared
    codes, instructions = _DECODES[v.held]
    instructions += 3 * (v.affine and v.held == torch.float8_e4m3fn)  # signed codes become e4m3 by tables
    decoded = 64 * t.k / 128 / codes * (instructions + (v.lhs_zero is not None))
    of_each = 1 if not v.is_integer else 4 + (v.lhs_zero is not None)  # for the sum of a group: integers are converted
    added = groups * t.n / 2 * of_each + _FETCHED
    chain = multiply / t.consumers + groups * gpu.wait + decoded + added
    return Step(multiply, shared, v.factor_bytes / gpu.loads, t.consumers * (decoded + added + gpu.issue), chain)


def bytes_of(v: Variant) -> tuple[float, float]:
    """Bytes per element of both factors, as a tile's rows and columns; including the scales of groups."""
    return (0.5 + (4 + v.affine) / v.group, v.lhs.itemsize) if v.group else (1, 1)


def cycles(v: Variant, m: int, n: int, k: int, multiprocessors: int, batch: int = 1, gpu: Model = HOPPER) -> float:
    """An estimate of the time of so many products, in cycles of the GPU."""
    t = v.tile
    rows, columns = (n, m) if t.swap else (m, n)
    blocks = batch * -(-rows // (t.m * t.cluster[0])) * -(-columns // (t.n * t.cluster[1])) * t.blocks
    waves = -(-blocks // (multiprocessors // t.blocks * t.blocks))
    steps = -(-k // (t.k * t.split))
    products = steps * max(step_of(v, gpu))
    instructions = 7 if not v.requantize else 40 if v.requantize == "division" else 60  # for an element of the result
    write = t.m * t.n / t.split * (v.out.itemsize / 32 + instructions / 128)
    if t.split > 1:  # sums go to the others of the cluster, and theirs come
        write += t.m * t.n * 4 * (t.split - 1) / t.split / gpu.sent + 2 * gpu.start / 3
    if t.pingpong and waves > 1:
        tile = max(products, (products + write + gpu.wait) / 2)
    else:
        tile = products + write + gpu.wait
    of_rows, of_columns = bytes_of(v)
    traffic = batch * (rows * k * of_rows + columns * k * of_columns + rows * columns * v.out.itemsize) / gpu.memory
    loaded = t.m / t.cluster[1] * of_rows + t.n / t.cluster[0] * of_columns  # by some blocks anew
    again = blocks * steps * loaded * t.k / gpu.cache
    return max(waves * tile, traffic, again) + again / 8 + gpu.start


def best(variants: Sequence[Variant], m: int, n: int, k: int, multiprocessors: int, batch: int = 1) -> Variant:
    """The one of least time; of equals the first."""
    return min(variants, key=lambda v: cycles(v, m, n, k, multiprocessors, batch))
