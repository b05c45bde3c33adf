"""The order in which the tiles of a result are computed: arithmetic on integers, Python's or a kernel's.

`counts` are the rows, columns and batches of tiles, each as large as a cluster.
"""

from typing import Any

GROUP = 8  # rows of tiles whose columns are taken together, so that both factors' tiles are found in the L2 cache


def total(counts: tuple[Any, Any, Any]) -> Any:
    rows, columns, batches = counts
    return rows * columns * batches


def at(counts: tuple[Any, Any, Any], index: Any) -> tuple[Any, Any, Any]:
    """Row, column and batch of a tile: batch by batch, GROUP rows at a time, and within those column by column."""
    rows, columns, _ = counts
    batch, place = index // (rows * columns), index % (rows * columns)
    group, within = place // (GROUP * columns), place % (GROUP * columns)
    height = least(rows - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height, batch


def least(a: Any, b: Any) -> Any:
    """The smaller of two integers."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)
