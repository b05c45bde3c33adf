"""The frame of Hopper's product kernels: the tensor maps that load tiles, the shared memory and barriers of a block,
and the roles of its warpgroups: one loads, the others multiply.

    mA, mB, mD     the whole factors and result, (m, k, l), (n, k, l), (m, n, l)
    gA, gB, gD     cut in tiles
    sA, sB, sD     in shared memory, in stages
    tCrA, tCrB     descriptors of shared memory that wgmma reads, or tCrA in registers; tCrC the sums, in registers

Rows and columns are those of a tile; with tile.swap its rows are columns of the result (cutlass_kernels.variants).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from cutlass_kernels.results import Results
from cutlass_kernels.variants import WARPGROUP

TYPES = {
    torch.int8: cutlass.Int8,
    torch.uint8: cutlass.Uint8,
    torch.int32: cutlass.Int32,
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
}
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of each thread; together those of a multiprocessor
K = cute.nvgpu.common.OperandMajorMode.K


class Shared(NamedTuple):
    """The shared memory of a block: the barriers of the stages, tiles of the factors and parts of the result, the
    columns' vectors, the scales of two steps' columns; and what else a kernel has allocated."""

    loaded: Any
    sA: Any
    sB: Any
    sD: Any
    sV: Any
    sS: Any
    own: Any


class Fragments(NamedTuple):
    """The operands and sums of a consumer; its rows are in parts, which it multiplies one after another."""

    mma: Any
    tCrA: Any
    tCrB: Any
    tCrC: Any


class Frame(Results):
    """The parts that the kernels of one variant share."""

    @property
    def blocks(self) -> tuple[int, int]:
        """The shape of a cluster: blocks of neighbouring tiles, or of one tile."""
        return self.tile.cluster if self.tile.split == 1 else (self.tile.split, 1)

    @property
    def a_type(self) -> torch.dtype:
        return self.variant.rhs if self.tile.swap else self.variant.lhs

    @property
    def b_type(self) -> torch.dtype:
        return self.variant.lhs if self.tile.swap else self.variant.rhs

    # ---- what is launched

    def operands(self, lhs: cute.Tensor, rhs: cute.Tensor, out: cute.Tensor) -> tuple[Any, Any, Any]:
        """lhs ([l,] m, k), rhs ([l,] k, n) and out ([l,] m, n) as mA, mB and mD."""
        mL = cute.make_tensor(lhs.iterator, cute.select(with_batch(lhs).layout, [1, 2, 0]))
        mR = cute.make_tensor(rhs.iterator, cute.select(with_batch(rhs).layout, [2, 1, 0]))
        dims = [2, 1, 0] if self.tile.swap else [1, 2, 0]
        mD = cute.make_tensor(out.iterator, cute.select(with_batch(out).layout, dims))
        return (mR, mL, mD) if self.tile.swap else (mL, mR, mD)

    def factor(self, t: cute.Tensor, rows: int, depth: int, copies: int = 1) -> tuple[Any, Any, Any]:
        """How tiles of a factor are loaded: what loads them, a tensor of their places, and the layout in shared memory,
        (rows, depth, stage), k innermost, in swizzled rows of 64 or 128 bytes."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW64 if depth * t.element_type.width == 64 * 8 else kinds.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, t.element_type)
        layout = cute.tile_to_shape(atom, (rows, depth, self.variant.stages), order=(0, 1, 2))
        op = cpasync.CopyBulkTensorTileG2SOp() if copies == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        stage = cute.slice_(layout, (None, None, 0))
        return *cpasync.make_tiled_tma_atom(op, t, stage, (rows, depth), num_multicast=copies), layout

    def factors(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[Any, Any]:
        """Both, of which blocks of a cluster share what they have in common."""
        tile = self.tile
        return self.factor(mA, tile.m, tile.k, tile.cluster[1]), self.factor(mB, tile.n, tile.k, tile.cluster[0])

    def result(self, mD: cute.Tensor) -> tuple[Any, Any, Any]:
        """How parts of the result are stored, likewise, (row, column, stage); None where each thread stores its own."""
        v = self.variant
        if not v.tma:
            return None, None, None
        kinds = warpgroup.SmemLayoutAtomKind
        sizes = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}
        kind = sizes.get(v.part[1] * mD.element_type.width // 8, kinds.K_INTER)
        atom = warpgroup.make_smem_layout_atom(kind, mD.element_type)
        layout = cute.tile_to_shape(atom, (*v.part, v.part_stages * self.tile.consumers), order=(0, 1, 2))
        stage = cute.slice_(layout, (None, None, 0))
        return *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mD, stage, v.part), layout

    def products(self, a_type: torch.dtype, source: Any = warpgroup.OperandSource.SMEM) -> cute.TiledMma:
        """The instruction that multiplies."""
        types = (TYPES[a_type], TYPES[self.b_type], K, K, TYPES[self.variant.accumulates])
        return hopper_helpers.make_trivial_tiled_mma(*types, (1, 1, 1), (64, self.tile.n), source)

    # ---- how a block begins

    def begin(self, warp: Any, a: Any, b: Any, d: Any) -> Shared:
        """Its shared memory, and the barriers of its stages, before its warps meet."""
        v, tile = self.variant, self.tile
        self.prefetch(warp, a[0], b[0], d[0])
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * v.stages)
        sA, sB, sD = (
            None if layout is None else smem.allocate_tensor(TYPES[dtype], layout.outer, 1024, layout.inner)
            for dtype, (_, _, layout) in ((self.a_type, a), (self.b_type, b), (v.out, d))
        )
        sV, sS = None, None
        if v.by_column:
            sV = smem.allocate_tensor(Int32, cute.make_layout((tile.n, len(v.by_column), tile.consumers)), 16)
        if v.scales == "1x128":
            sS = smem.allocate_tensor(Float32, cute.make_layout((tile.n, 2, tile.consumers)), 16)
        own = self.allocate(smem, warp)
        copies = tile.cluster[0] + tile.cluster[1] - 1
        releasing = (1 if tile.pingpong else tile.consumers) * 4 * copies  # warps, once for each copy
        loaded = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=v.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releasing),
            tx_count=v.factor_bytes,
            cta_layout_vmnk=cute.make_layout((1, *tile.cluster, 1)),
            defer_sync=True,
        )
        return Shared(loaded, sA, sB, sD, sV, sS, own)

    @cute.jit
    def prefetch(self, warp: Any, a: Any, b: Any, d: Any):
        """Fetch the tensor maps."""
        if warp == 0:
            cpasync.prefetch_descriptor(a)
            cpasync.prefetch_descriptor(b)
            if const_expr(self.variant.tma):
                cpasync.prefetch_descriptor(d)

    def allocate(self, smem: Any, warp: Any) -> Any:
        """Allocate further shared memory of a kernel."""
        return None

    def place_in_cluster(self) -> Any:
        cluster = cute.make_layout((*self.tile.cluster, 1))
        return cluster.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))

    def meet(self) -> None:
        """The warps of a block, or of its cluster, see the barriers."""
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.blocks, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.blocks)

    def warpgroup(self) -> Any:
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)

    @cute.jit
    def divide(self, group: Any, warp: Any, work: Any, loading: Any, multiplying: Any):
        """A warp of the first warpgroup loads; the other warpgroups multiply."""
        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(work, *loading)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(work, *multiplying)

    def produce(self, work: Any, loaded: Any, a: Any, b: Any) -> None:
        """Load the tiles of both factors, as far ahead of the consumers as there are stages."""
        raise NotImplementedError

    def consume(self, work: Any, loaded: Any, factors: Any, store: Any, fused: Any) -> None:
        """Multiply the tiles that are loaded, and write their results."""
        raise NotImplementedError

    # ---- the producer's and the consumers' parts

    def masks(self, place: Any) -> tuple[Any, Any]:
        """The blocks of the cluster for which a block loads its share of each factor, as the copy engine takes them."""
        cluster, shape = cute.make_layout((*self.tile.cluster, 1)), self.tile.cluster
        of_a = cute.make_layout_image_mask(cluster, place, mode=1) if shape[1] > 1 else None
        return of_a, cute.make_layout_image_mask(cluster, place, mode=0) if shape[0] > 1 else None

    def partitioned(self, atom: Any, shared: Any, tiles: Any, place: Any = 0, copies: int = 1) -> Any:
        """A block's share of the tiles that are loaded for all blocks of its row, or column, of the cluster."""
        return cpasync.tma_partition(
            atom, place, cute.make_layout(copies), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def load(self, loaded: Any, state: Any, *copies: Any) -> None:
        """Load a stage once it is free: of each factor what loads it, from where, to where, and for which blocks."""
        loaded.producer_acquire(state)
        barrier = loaded.producer_get_barrier(state)
        for tma, tile, shared, mask in copies:
            cute.copy(tma, tile, shared[(None, state.index)], tma_bar_ptr=barrier, mcast_mask=mask)

    def who(self) -> tuple[Any, Any]:
        """The consumer of a thread, and the thread's index in it."""
        return self.warpgroup() - 1, cute.arch.thread_idx()[0] % WARPGROUP

    def fragments(self, mma: Any, sA: Any, sB: Any, own: Any) -> Fragments:
        """The fragments of row group `own` of a tile."""
        v, tile, thr_mma = self.variant, self.tile, mma.get_slice(0)
        height = 64 if v.adds_up else tile.rows  # of the rows that are multiplied at once
        shares = [
            cute.local_tile(sA, (height, tile.k, v.stages), (own * (tile.rows // height) + m, 0, 0))
            for m in range(tile.rows // height)
        ]
        tCrA = tuple(mma.make_fragment_A(thr_mma.partition_A(share)) for share in shares)
        tCrB = mma.make_fragment_B(thr_mma.partition_B(sB))
        tCrC = cute.make_rmem_tensor(mma.partition_shape_C((tile.rows, tile.n)), TYPES[v.accumulates])
        return Fragments(mma, tCrA, tCrB, tCrC)


def with_batch(t: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(t.iterator, cute.prepend(t.layout, cute.make_layout(1), up_to_rank=3))


def follow() -> None:
    """Wait for the kernel before, which so far may have run, and whose results now may be read; and let the next one
    begin, which waits for this one alone. A launch with use_pdl=True does so before it touches global memory."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
