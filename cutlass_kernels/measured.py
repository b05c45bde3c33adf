"""The tiles that were measured to be fastest, which go before the model of tiles.best.

A file of the cache folder holds the tile of one key: the GPU, the dtypes, what is fused, N, K, and M rounded up to a
power of two. Files appear whole, by renaming, so that processes need no lock. Their content is not trusted: it can only
name one of tiles.TILES.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cutlass_kernels import cache, tiles
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant

changed: list[Callable[[], object]] = []  # called once a tile was measured: those who keep what a tile was chosen for


def measured(variants: Sequence[Variant], p: Product) -> Variant | None:
    """The one of `variants` that was fastest for products like `p` on its GPU; None if that was not measured."""
    tile = _kept(key(variants[0], p)) if variants and p.lhs.is_cuda else None
    return next((v for v in variants if v.tile == tile), None)


def key(v: Variant, p: Product) -> str:
    """One line for the products that share a tile."""
    form = replace(v, tile=tiles.SMALLEST, tma=False).name
    rows = 1 << (p.m - 1).bit_length() if p.m else 0
    return f"{_device_name(p.lhs.device)} {form} N={p.n} K={p.k} M={rows} B={p.count}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _file(of: str) -> Path | None:
    folder = cache.folder()
    return folder and folder / f"{hashlib.sha256(of.encode()).hexdigest()[:32]}.tile.json"


def keep(of: str, times: Mapping[str, float]) -> None:
    """Keep the fastest of the tiles that have these microseconds."""
    path = _file(of)
    if path is None:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"key": of, "tile": min(times, key=times.__getitem__), "microseconds": dict(times)}, file)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    for forget in changed:
        forget()


def _kept(of: str) -> Tile | None:
    """The tile in the file of a key; None without one, and, with a warning, for a file that does not hold one."""
    path = _file(of)
    if path is None or not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        content = error
    if isinstance(content, dict) and content.get("key") == of:
        for tile in tiles.TILES:
            if str(tile) == content.get("tile"):
                return tile
    warnings.warn(f"{path} names no tile for {of} and is not used; remove it, or tune again", stacklevel=2)
    return None
