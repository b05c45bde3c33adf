"""Variants: which kernel is compiled. Values only; nothing here needs the CuTe DSL or a GPU.

A product is (M, K) @ (K, N) -> (M, N). A kernel computes tiles of the result, tile.m · tile.n at a time, by one
producer, which loads, and one or two consumer warpgroups, which multiply:

    cooperative   consumers share the rows of the tile: 64, or of a tile of 256 rows 128, each
    ping-pong     each consumer has a tile of its own; one multiplies while the other writes its results

`split` blocks of a cluster share a tile along K, and add up their sums of integers, which are exact in any order
(cutlass_kernels.split). `swap` multiplies the transposed factors, (N, K) @ (K, M) -> (N, M): the rows of a tile are
then columns of the result, so that a product of few rows fills the matrix unit with weights, and nothing is padded.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from cutlass_kernels.product import BLOCK, INTEGERS

TARGET = "sm_90a"  # the GPU that kernels are compiled for, but for steps of optimizers (cutlass_kernels.updates)
WARPGROUP = 128  # threads
SHARED_MEMORY = 227 * 1024  # bytes that a block of Hopper's may have
MOST_GROUPS = 512  # whose sizes a block keeps in shared memory
MOST_ACCUMULATORS = 192  # registers of a thread that sums may take
_LARGEST = {torch.int8: 128, torch.uint8: 255}


@dataclass(frozen=True)
class Tile:
    """The tile that one block computes at a time: sizes in elements, and the cluster in blocks along m and n."""

    k: ClassVar[int] = BLOCK

    m: int
    n: int
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False
    swap: bool = False
    split: int = 1  # blocks that share the sum along K, each of which finishes as many columns

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 2 if self.pingpong else min(self.m // 64, 2)

    @property
    def rows(self) -> int:
        """The rows of the tile that one consumer computes."""
        return self.m if self.pingpong else self.m // self.consumers

    @property
    def blocks(self) -> int:
        """The number of blocks in a cluster."""
        return self.cluster[0] * self.cluster[1] * self.split

    @property
    def threads(self) -> int:
        return (1 + self.consumers) * WARPGROUP

    def __str__(self) -> str:
        cluster = "" if self.cluster == (1, 1) else f"_c{self.cluster[0]}x{self.cluster[1]}"
        split = "" if self.split == 1 else f"_split{self.split}"
        return f"{self.m}x{self.n}x{self.k}{cluster}{split}{'_pingpong' * self.pingpong}{'_swap' * self.swap}"


@dataclass(frozen=True)
class Variant:
    """One kernel: the types of the factors and of the result, the tile, and what is fused.

    y[m, n] = (Σ_k (lhs[m, k] - lhs_zero[m]) (rhs[k, n] - rhs_zero[n]) · lhs_scale[m] · rhs_scale[n]) + bias[n]

    batched       whether there are several products, of factors in a batch
    groups        "" none, or what the device's offsets divide: "rows", whose groups have a matrix of rhs each,
                  "columns", which have one of lhs, or "k", whose groups have a result each
    group         0, or how many elements of a row of rhs share a scale, where it has codes of 4 bits, and lhs bfloat16
                  or 8 bits (cutlass_kernels.nibbles); affine, whether they share a zero point too
    scales        "" none, "vector" one for each row of lhs and column of rhs (or one for all), "block" one for 1 x 128
                  of lhs and 128 x 128 of rhs, "1x128" one for 1 x 128 of both, "rows" one for each row of lhs alone
    bias          its dtype, or None: int32 is added to the sum, a float to the scaled result
    lhs_zero      its dtype, or None; with it, the sums of rhs's columns, rhs_sum = Σ_k rhs[k, n]
    rhs_zero      likewise; with it, the sums of what is left of lhs's rows, lhs_rest = Σ_k (lhs[m, k] - lhs_zero[m])
    requantize    "" none, "division" or "multiplier": the conventions of an int8 or uint8 result, whose
                  zero point has the dtype out_zero, or is 0
    bounded       whether a requantized result is brought between two real numbers
    promoted      whether sums of 128 products of floats are added up in float32; the matrix unit alone keeps 14 bits
    tma           whether tiles are written through shared memory by the copy engine; else each thread writes its own
    """

    lhs: torch.dtype
    rhs: torch.dtype
    out: torch.dtype
    tile: Tile
    batched: bool = False
    scales: str = ""
    lhs_zero: torch.dtype | None = None
    rhs_zero: torch.dtype | None = None
    bias: torch.dtype | None = None
    requantize: str = ""
    out_zero: torch.dtype | None = None
    bounded: bool = False
    promoted: bool = False
    tma: bool = True
    groups: str = ""
    group: int = 0
    affine: bool = False

    target: ClassVar[str] = TARGET
    """The GPU that it is compiled for."""

    @property
    def is_integer(self) -> bool:
        return self.lhs in INTEGERS

    @property
    def stacked(self) -> bool:
        """Whether there are several products, so that vectors have a row for each, or one for all."""
        return self.batched or self.groups != ""

    @property
    def accumulates(self) -> torch.dtype:
        return torch.int32 if self.is_integer else torch.float32

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vector arguments after the factors, in a kernel's order."""
        wanted = {
            "lhs_scale": self.scales != "",
            "rhs_scale": self.scales not in ("", "rows"),
            "lhs_zero": self.lhs_zero is not None,
            "rhs_sum": self.lhs_zero is not None and not self.group,
            "rhs_zero": self.rhs_zero is not None,
            "lhs_rest": self.rhs_zero is not None,
            "bias": self.bias is not None,
            "out_scale": self.requantize != "",
            "out_zero": self.out_zero is not None,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def along_rows(self, vector: str) -> bool:
        """Whether a vector runs along the rows of a tile."""
        return vector.startswith("lhs") != self.tile.swap

    def dtype_of(self, vector: str) -> torch.dtype:
        """The dtype of one of `vectors`."""
        if vector.endswith("scale"):
            return torch.float32
        return getattr(self, vector, None) or torch.int32

    def in_blocks(self, vector: str) -> bool:
        """Whether it is no vector, but the matrix of the scales of blocks."""
        return self.scales in ("block", "1x128") and vector in ("lhs_scale", "rhs_scale")

    @property
    def by_row(self) -> tuple[str, ...]:
        """The vectors that run along the rows of a tile; each thread keeps those of its rows."""
        return tuple(name for name in self.vectors if self.along_rows(name) and not self.in_blocks(name))

    @property
    def by_column(self) -> tuple[str, ...]:
        """The vectors that run along the columns of a tile; they are kept in shared memory."""
        return tuple(name for name in self.vectors if not (self.along_rows(name) or self.in_blocks(name)))

    @property
    def accumulators(self) -> int:
        """Registers of a thread for sums: of its rows, and of the products of 64 of them where those are added up in
        float32."""
        of_64_rows = 64 * self.tile.n // WARPGROUP
        return self.tile.rows // 64 * of_64_rows + (of_64_rows if self.adds_up else 0)

    @property
    def held(self) -> torch.dtype:
        """The dtype that 4-bit codes are decoded to in registers."""
        return torch.int8 if self.is_integer else torch.bfloat16 if self.lhs == torch.bfloat16 else torch.float8_e4m3fn

    @property
    def depth(self) -> int:
        """Elements along K that one instruction multiplies: 32 bytes."""
        return 32 // self.lhs.itemsize

    @property
    def adds_up(self) -> bool:
        """Whether the products of each step are added up outside of the matrix unit."""
        return self.promoted or self.scales in ("block", "1x128")

    @property
    def piece(self) -> int:
        """Columns of a tile that always share the scale of a block of rhs."""
        return math.gcd(self.tile.n, BLOCK)

    # ---- shared memory, in bytes

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the result that pass through shared memory at a time: 4 KiB."""
        return 64, math.gcd(self.tile.n // self.tile.split, 64 // self.out.itemsize)

    @property
    def part_stages(self) -> int:
        return 2 if self.tma else 0

    @property
    def column_bytes(self) -> int:
        return len(self.by_column) * self.tile.n * 4 * self.tile.consumers

    @property
    def step_bytes(self) -> int:
        """Scales of 1 x 128 of the columns of two steps."""
        return 2 * self.tile.n * 4 * self.tile.consumers if self.scales == "1x128" else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of group ends and tiles."""
        return 2 * 4 * (MOST_GROUPS + 1) if self.groups else 0

    @property
    def split_bytes(self) -> int:
        """Sums that other blocks of the cluster send."""
        return (self.tile.split - 1) * self.tile.m * self.tile.n // self.tile.split * 4

    @property
    def stages(self) -> int:
        """Pairs of tiles of the factors that are in shared memory at once."""
        rows, columns = self.part
        results = rows * columns * self.out.itemsize * self.part_stages * self.tile.consumers
        vectors = self.column_bytes + self.step_bytes + self.table_bytes + self.split_bytes
        free = SHARED_MEMORY - 2048 - results - vectors  # 2048: barriers, and the tiles' alignment
        return min(12, free // self.factor_bytes)

    @property
    def factor_bytes(self) -> int:
        """Tiles of both factors, of one step."""
        if self.group:
            return self.tile.k * (self.tile.m // 2 + self.tile.n * self.lhs.itemsize)
        return (self.tile.m + self.tile.n) * self.tile.k

    # ---- which tiles it has

    def declines(self) -> str | None:
        """Why a form has no kernel with this tile of tiles.TILES or NIBBLE_TILES, or None."""
        t = self.tile
        if self.group:
            return f"{t}: too many sums of integers for the registers" if self.is_integer and t.n > 64 else None
        if self.accumulators > MOST_ACCUMULATORS:
            return f"{t}: too many accumulators for the registers"
        if self.adds_up and t.pingpong and t.rows > 64:
            return f"{t}: sums in float32 of 128 rows are hidden by nothing while consumers take turns"
        if t.m > 128 and not self.adds_up and self.groups not in ("rows", "columns"):
            return f"{t}: 128 rows and 256 columns read less shared memory"
        if self.groups and t.split > 1:
            return f"groups have no parts of K that blocks share; got {t}"
        if self.groups in ("rows", "columns") and t.cluster[(self.groups == "columns") != t.swap] > 1:
            return f"blocks of a cluster are beside each other where groups do not divide the result; got {t}"
        if t.split > 1 and not self.is_integer:
            return f"blocks share sums of integers; got {t}"
        if self.requantize and t.split > 1 and t.m * t.n >= 128 * 256:
            return f"{t}: the sums and requantization take more registers than there are, where blocks share sums"
        return None

    @property
    def name(self) -> str:
        """One word for it, by which it is found in the cache."""
        parts = [f"{short(self.lhs)}_{short(self.rhs)}_{short(self.out)}", str(self.tile)]
        for f in fields(self)[4:]:
            value = getattr(self, f.name)
            if value != f.default:
                shown = short(value) if isinstance(value, torch.dtype) else str(value).lower()
                parts.append(f.name if value is True else f"{f.name}-{shown}")
        return "_".join(parts)


def short(dtype: torch.dtype) -> str:
    """e4m3, s8, bf16, ...: what the dtype is called in an instruction."""
    return _SHORT[dtype]


_SHORT = {
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.int32: "s32",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float4_e2m1fn_x2: "e2m1",
}


def longest(lhs: torch.dtype, rhs: torch.dtype) -> int:
    """The largest K at which the sum of products of integers cannot leave int32; the matrix unit saturates there, where
    PyTorch wraps."""
    return (2**31 - 1) // (_LARGEST[lhs] * _LARGEST[rhs])
