"""Checkpoints of quantized tensors: written by some processes with some placements, read by others with other ones, and
interrupted at every point of a save."""

import functools
import itertools
import json
import os
import shutil
import signal
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parameterized import parameterized
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hop
import hop.checkpoint
from hop import presets
from tests import processes

ROWS, COLUMNS = 34, 512  # rows in parts of 9, 9, 9 and 7, or 17; columns in whole blocks
CUT_BY_ROWS = {"FP8_128X128"}  # a view may not cut its blocks
PLAIN = "PLAIN"
NAMES = [
    *("INT8_TENSOR", "INT8_COLUMN", "INT8_ROW_AFFINE", "UINT4_32_AFFINE", "FP8_ROW", "FP8_1X128", "FP8_128X128"),
    *("MXFP8", "MXFP4", "NVFP4", "NVFP4_ROW", "STATE8", "STATE4", "STATE_FP8"),
]


def numbers(name: str) -> Tensor:
    """The same ones in every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(ROWS, COLUMNS, generator=generator)


def whole(name: str) -> Tensor:
    return numbers(name) if name == PLAIN else hop.quantize(getattr(presets, name), numbers(name))


def part(t: Any, mesh: Any, placements: Any) -> Any:
    """What this process has of t: views of its buffers, cloned."""
    for i, p in enumerate(placements):
        if p.is_shard():
            size, n = -(-t.shape[p.dim] // mesh.size(i)), t.shape[p.dim]
            start = min(mesh.get_coordinate()[i] * size, n)
            cut = t.narrow(p.dim, start, min(size, n - start))
            assert type(cut) is type(t), "test: a view that is none"
            t = cut
    return t.clone()


def placed(t: Any, mesh: Any, placements: Any) -> Any:
    return DTensor.from_local(
        part(t, mesh, placements), mesh, placements, run_check=False, shape=t.shape, stride=t.contiguous().stride()
    )


def names(placements: Any) -> list[str]:
    """The tensors that these placements cut between blocks."""
    dims = {p.dim for p in placements if p.is_shard()}
    left = [n for n in NAMES if not (0 in dims and n in CUT_BY_ROWS) and not (1 in dims and n.startswith("STATE"))]
    return [PLAIN, *left]


def bits(t: Any) -> list[Tensor]:
    t = t.to_local() if isinstance(t, DTensor) else t
    buffers = t.buffers().values() if isinstance(t, hop.QuantizedTensor) else [t]
    return [b.contiguous().view(torch.uint8).clone() for b in buffers]


def assert_bits(a: Any, b: Any, where: Any = None) -> None:
    assert len(bits(a)) == len(bits(b)), where
    assert all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True)), where


def emptied(t: Any) -> Any:
    """A tensor placed as t, whose buffers hold something else."""
    if isinstance(t, DTensor):
        local = emptied(t.to_local())
        return DTensor.from_local(
            local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
        )
    t = t.clone()
    for b in t.buffers().values() if isinstance(t, hop.QuantizedTensor) else [t]:
        b.view(torch.uint8).fill_(77)
    return t


def layouts(mesh: Any) -> dict[str, tuple[Any, Any]]:
    """Meshes and placements, by name."""
    if mesh is None:
        return {}
    found = {"rows": (mesh, [Shard(0)]), "columns": (mesh, [Shard(1)]), "replicated": (mesh, [Replicate()])}
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        found |= {"square": (square, [Shard(0), Shard(1)]), "hybrid": (square, [Replicate(), Shard(0)])}
    return found


def state(mesh: Any, layout: str) -> dict[str, Any]:
    if layout == "plain":
        return {name: whole(name) for name in (PLAIN, *NAMES)} | {"note": [1, "x"]}
    own, placements = layouts(mesh)[layout]
    return {n: placed(whole(n), own, placements) for n in names(placements)} | {"note": [1, "x"]}


STEPS = {(world, layout): i for i, (world, layout) in enumerate(
    [(1, "plain"), *itertools.product((2, 4), ("rows", "columns", "replicated")), (4, "square"), (4, "hybrid")]
)}  # fmt: skip


def write_all(folder: Path, mesh: Any, group: Any = None) -> None:
    for (world, layout), step in STEPS.items():
        if world == (1 if mesh is None else mesh.size()):
            hop.checkpoint.save(state(mesh, layout), folder, step=step, process_group=group)


def read_all(folder: Path, mesh: Any, group: Any = None) -> None:
    """Every checkpoint with every layout that this number of processes can have."""
    for layout in ("plain", *layouts(mesh)):
        held = state(mesh, layout)
        for source, step in STEPS.items():
            metadata = dcp.FileSystemReader(folder / f"step_{step}").read_metadata()
            saved = {key.split(".")[0] for key in metadata.state_dict_metadata}
            want = {key: value for key, value in held.items() if key in saved}
            got = {key: emptied(value) if isinstance(value, Tensor) else None for key, value in want.items()}
            assert len(got) > 10
            assert hop.checkpoint.load(got, folder, step=step, process_group=group) == step
            assert got["note"] == want.pop("note")
            for name, t in want.items():
                assert_bits(got[name], t, (source, layout, name))


# ---- parts with blocks of their own, empty parts, and what is refused


def pieces(folder: Path, mesh: Any) -> None:
    """Parts that were quantized each by itself load as they were saved, and no other way."""
    columns = {n: _quantized_apart(n, mesh, Shard(1)) for n in ("INT8_ROW", "STATE8", "STATE4")}
    rows = {n: _quantized_apart(n, mesh, Shard(0)) for n in ("INT8_TENSOR", "NVFP4", "FP8_128X128", "NVFP4_16X16")}
    hop.checkpoint.save({**columns, **rows}, folder, step=0)
    got = {name: emptied(t) for name, t in {**columns, **rows}.items()}
    hop.checkpoint.load(got, folder)
    for name, t in {**columns, **rows}.items():
        assert_bits(got[name], t, name)
    for name in got:
        other = placed(whole(name), mesh, [Replicate()])
        kept = emptied(other)
        with pytest.raises(ValueError, match=rf"'{name}': the part .* was not saved as such"):
            hop.checkpoint.load({name: kept}, folder)
        assert_bits(kept, emptied(other))


def _quantized_apart(name: str, mesh: Any, placement: Any) -> Any:
    x = numbers(name)
    local = hop.quantize(getattr(presets, name), part(x, mesh, [placement]))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())


def refusals(folder: Path, mesh: Any, rank: int) -> None:
    """Every process gets the exception, and keeps what it had."""
    t = whole("MXFP8")
    hop.checkpoint.save({"w": t, "x": torch.ones(3)}, folder, step=1)
    uneven = hop.quantize(presets.MXFP8, numbers("MXFP8")[:, : 32 * 3])  # quarters of 24 columns
    hop.checkpoint.save({"w": uneven}, folder, step=2)
    kept = torch.zeros(3)
    with pytest.raises(ValueError, match="32 elements along dimension 1 share a byte or a scale, and .* cuts them"):
        x = uneven.dequantize()
        local = hop.quantize(presets.MXFP8, part(x, mesh, [Shard(1)]))
        shard = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
        hop.checkpoint.load({"w": shard, "x": kept}, folder, step=2)
    with pytest.raises(ValueError, match="partial sums"):
        hop.checkpoint.save({"w": DTensor.from_local(t, mesh, [Partial()], run_check=False)}, folder, step=3)
    mine = whole("MXFP8" if rank == 0 else "MXFP4")  # one process alone differs
    with pytest.raises(ValueError, match="'w': the checkpoint holds .*e4m3.* and the state dict .*e2m1"):
        hop.checkpoint.load({"w": mine, "x": kept}, folder, step=1)
    with pytest.raises(ValueError, match="'w' must be quantized alike in all processes"):
        hop.checkpoint.save({"w": mine}, folder, step=3)
    damaged = sorted((folder / "step_1").glob("*.distcp"))[0]
    if rank == 0:
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="not those that were saved"):
        hop.checkpoint.load({"w": emptied(t), "x": kept}, folder, step=1)
    assert torch.equal(kept, torch.zeros(3))


def few_rows(folder: Path, mesh: Any) -> None:
    """Processes without any row, whose scales mean nothing, and processes outside the mesh of a tensor."""
    for name in ("INT8_TENSOR", "MXFP4", "STATE8"):
        t = hop.quantize(getattr(presets, name), numbers(name)[:3])
        hop.checkpoint.save({"w": placed(t, mesh, [Shard(0)])}, folder / name, step=0)
        for want in (placed(t, mesh, [Shard(0)]), placed(t, mesh, [Replicate()]), t):
            got = emptied(want)
            hop.checkpoint.load({"w": got}, folder / name)
            if want.numel() and (not isinstance(want, DTensor) or want.to_local().numel()):
                assert_bits(got, want, name)
    pair = DeviceMesh("cpu", [0, 1])
    t = whole("INT8_ROW")
    placements = [Shard(0)]
    want = (
        placed(t, pair, placements)
        if pair.get_coordinate() is not None
        else DTensor.from_local(t[:0].clone(), pair, placements, run_check=False, shape=t.shape, stride=t.stride())
    )
    hop.checkpoint.save({"w": want}, folder / "pair", step=0)
    got = emptied(t)
    hop.checkpoint.load({"w": got}, folder / "pair")
    assert_bits(got, t)


def in_four(folder: Path, mesh: Any, rank: int) -> None:
    """What four processes do together, and two of them, with a group of their own."""
    write_all(folder / "all", mesh)
    pair = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        write_all(folder / "all", pair, pair.get_group())
        read_all(folder / "all", pair, pair.get_group())
    torch.distributed.barrier()
    read_all(folder / "all", mesh)
    few_rows(folder / "few", mesh)
    pieces(folder / "pieces", mesh)
    refusals(folder / "refusals", mesh, rank)


@pytest.mark.full
class TestResharding(unittest.TestCase):
    def test_any_layout_to_any_other(self):
        """Written by 1, 2 and 4 processes, read by 1, 2 and 4; the 1 without a process group."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_all(folder / "all", None)
            processes.run(functools.partial(in_four, folder), 4)
            assert hop.checkpoint.steps(folder / "all") == sorted(STEPS.values())
            read_all(folder / "all", None)
