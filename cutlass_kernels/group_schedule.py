"""The order of the tiles of groups whose sizes lie on the device: found by each block, and kept in shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cutlass_kernels import epilogue, schedule
from cutlass_kernels.variants import Tile, Variant

WARP = 32


class Groups(NamedTuple):
    """The groups as a block sees them: the end of each, and the number of tiles up to it along the rows or columns that
    they divide; their count; the size of the divided dimension; rows, columns and results in tiles of a cluster; steps
    along K; the position of the block in its cluster."""

    ends: Any
    tiles: Any
    count: Any
    extent: Any
    counts: Any
    steps: Any
    place: Any


class Where(NamedTuple):
    """A tile: its group, its place among the group's tiles, where the group begins and ends, its first step along K and
    how many it has."""

    group: Any
    row: Any
    column: Any
    start: Any
    end: Any
    first: Any
    steps: Any


class GroupSchedule:
    """The schedule of groups in the kernel of one variant."""

    variant: Variant
    tile: Tile

    @property
    def along(self) -> int:
        """The dimension of a tile that groups divide: 0 rows, 1 columns, 2 neither."""
        if self.variant.groups == "k":
            return 2
        return int((self.variant.groups == "columns") != self.tile.swap)

    def most(self, mA: cute.Tensor, mB: cute.Tensor, offs: cute.Tensor) -> Any:
        """How many tiles there are at most: a group may end within one."""
        (rows, columns), groups = self.in_tiles(mA, mB), cute.size(offs)
        if self.along == 2:
            return rows * columns * groups
        return (rows + groups) * columns if self.along == 0 else rows * (columns + groups)

    def in_tiles(self, a: cute.Tensor, b: cute.Tensor) -> tuple[Any, Any]:
        """Rows and columns in tiles of a cluster."""
        sizes = (self.tile.m * self.tile.cluster[0], self.tile.n * self.tile.cluster[1])
        rows, columns = (cute.ceil_div(cute.size(t, mode=[0]), size) for t, size in zip((a, b), sizes, strict=True))
        return rows, columns

    @cute.jit
    def count_groups(self, offs: cute.Tensor, extent: Int32, ends: cute.Tensor, tiles: cute.Tensor):
        """Scan the groups with one warp, one per lane: the largest end and the sum of tiles up to each."""
        lane = cute.arch.lane_idx()
        count, size = cute.size(offs), (self.tile.m, self.tile.n, 1)[self.along]
        last, before = Int32(0), Int32(0)
        for first in range(0, count, WARP):
            group = first + lane
            end = cutlass.min(cutlass.max(offs[cutlass.min(group, count - 1)], 0), extent)
            end = cutlass.max(end, last)
            for i in cutlass.range_constexpr(5):  # lanes without lower neighbours get their own
                end = cutlass.max(end, cute.arch.shuffle_sync_up(end, 1 << i))
            start = cute.arch.shuffle_sync_up(end, 1)
            start = last if lane == 0 else start
            total = cute.ceil_div(end - start, size)
            for i in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(total, 1 << i)
                total = total + other if lane >= 1 << i else total
            total = total + before
            if group < count:
                ends[group], tiles[group] = end, total
            last, before = cute.arch.shuffle_sync(end, WARP - 1), cute.arch.shuffle_sync(total, WARP - 1)
        if lane == 0:  # what is in no group
            ends[count], tiles[count] = extent, before + cute.ceil_div(extent - last, size)

    @cute.jit
    def total(self, groups: Any) -> Int32:
        """The tiles of all groups."""
        rows, columns, count = groups.counts
        found = rows * columns * count
        if const_expr(self.along != 2):
            found = groups.tiles[groups.count] * (columns if const_expr(self.along == 0) else rows)
        return found

    @cute.jit
    def group_of(self, groups: Any, index: Int32, group: Int32) -> Int32:
        """The group of a tile, which is not before `group`."""
        rows, columns, _ = groups.counts
        if const_expr(self.along == 2):
            group = index // (rows * columns)
        else:
            place = index // (columns if const_expr(self.along == 0) else rows)
            while groups.tiles[group] <= place:
                group = group + 1
        return group

    @cute.jit
    def before(self, table: Any, group: Int32) -> Int32:
        """The entry of a table before a group's, 0 for the first."""
        found = Int32(0)
        if group > 0:
            found = table[group - 1]
        return found

    def where(self, groups: Any, index: Any, group: Any) -> Where:
        """A tile of a group."""
        rows, columns, _ = groups.counts
        start, end = self.before(groups.ends, group), groups.ends[group]
        if self.along == 2:
            row, column = self.in_cluster(groups, schedule.at((rows, columns, 1), index % (rows * columns)))
            first = start // self.tile.k
            steps = epilogue.select(end > start, cute.ceil_div(end, self.tile.k) - first, Int32(0))
            return Where(group, row, column, start, end, first, steps)
        before = self.before(groups.tiles, group)
        own = groups.tiles[group] - before
        counts, others = ((own, columns, 1), columns) if self.along == 0 else ((rows, own, 1), rows)
        row, column = self.in_cluster(groups, schedule.at(counts, index - before * others))
        steps = epilogue.select(group < groups.count, groups.steps, Int32(0))
        return Where(group, row, column, start, end, Int32(0), steps)

    def in_cluster(self, groups: Any, at: Any) -> tuple[Any, Any]:
        """The row and column of a block's tile, of the cluster's."""
        return tuple(at[i] * self.tile.cluster[i] + groups.place[i] for i in range(2))  # type: ignore[return-value]
