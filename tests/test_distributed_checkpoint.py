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
import torch.multiprocessing as mp
from parameterized import parameterized
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

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
    return [b.reshape(-1).view(torch.uint8).clone() for b in buffers]


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
        b.view(-1).view(torch.uint8).fill_(77)
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
    import time
    t=[time.process_time()]
    write_all(folder / "all", mesh)
    t.append(time.process_time())
    pair = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        write_all(folder / "all", pair, pair.get_group())
        read_all(folder / "all", pair, pair.get_group())
    t.append(time.process_time())
    torch.distributed.barrier()
    read_all(folder / "all", mesh)
    t.append(time.process_time())
    few_rows(folder / "few", mesh)
    t.append(time.process_time())
    pieces(folder / "pieces", mesh)
    t.append(time.process_time())
    refusals(folder / "refusals", mesh, rank)
    t.append(time.process_time())
    if rank==0:open("/tmp/times.txt","w").write(str(t))


# ---- a model under FSDP2, with an optimizer whose states are quantized


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, in 8 bits for matrices: blocks over the flattened part that a process has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state, local = self.state[p], p.to_local() if isinstance(p, DTensor) else p
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            if "step" not in state:
                state["step"], state["momentum"] = torch.zeros(()), self._held(p, torch.zeros_like(local))
            held = state["momentum"]
            held = held.to_local() if isinstance(held, DTensor) else held
            new = 0.9 * (held.dequantize() if isinstance(held, hop.QuantizedTensor) else held) + grad
            state["momentum"] = self._held(p, new)
            state["step"] += 1
            local -= self.param_groups[0]["lr"] * new

    def _held(self, p: Tensor, momentum: Tensor) -> Tensor:
        t = hop.quantize(presets.STATE8, momentum) if p.dim() > 1 else momentum
        if not isinstance(p, DTensor):
            return t
        return DTensor.from_local(t, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


class Run:
    """A model and its optimizer, from a seed, under FSDP2 where there is a mesh."""

    def __init__(self, mesh: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
        if mesh is not None:
            for layer in (self.model[0], self.model[2], self.model):
                fully_shard(layer, mesh=mesh)
        self.optimizer = Momentum(self.model.parameters())

    def train(self) -> None:
        """A step on the same numbers in every process, so that their mean is exact."""
        self.model(torch.linspace(-1, 1, 8 * 32).view(8, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, step: int) -> None:
        hop.checkpoint.save(self.state(), folder, step=step, keep=2)

    def resume(self, folder: Path) -> int:
        found = self.state()
        step = hop.checkpoint.load(found, folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        return step

    def assert_equal(self, other: "Run") -> None:
        """Bit for bit; `other` may be whole where this is sharded."""
        for mine, one in zip(self.model.parameters(), other.model.parameters(), strict=True):
            own, theirs = self.optimizer.state[mine], other.optimizer.state[one]
            for a, b in [(mine.detach(), one.detach()), *((own[key], theirs[key]) for key in ("step", "momentum"))]:
                b = placed(b, a.device_mesh, a.placements) if isinstance(a, DTensor) else b
                assert type(a) is type(b)
                assert_bits(a, b)


def trained(steps: int) -> Run:
    """What one process comes to without any interruption."""
    run = Run(None, seed=0)
    for _ in range(steps):
        run.train()
    return run


class Killer:
    """Kills its process before the n-th of the calls by which a save makes files last and renames them."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        os.fsync, Path.rename = self.before(os.fsync), self.before(Path.rename)

    def before(self, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return call


def killed(folder: Path, dying: int, nth: int, mesh: Any, rank: int) -> None:
    run = Run(mesh, seed=0)
    run.train()
    run.save(folder, 1)
    run.train()
    if rank == dying:
        Killer(nth)
    run.save(folder, 2)


def killed_everywhere(rank: int, folder: Path) -> None:
    """A process without others, killed before each call of a save and one after the last: forked, which is cheap."""
    for nth in range(1, LAST + 2):
        if (child := os.fork()) == 0:
            try:
                killed(folder / str(nth), 0, nth, None, 0)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == (nth <= LAST), nth


def resumed(folder: Path, mesh: Any, rank: int) -> None:
    """From step 1, in a fresh world, on to step 2."""
    run = Run(mesh, seed=1)
    assert run.resume(folder) == 1
    run.assert_equal(trained(1))
    run.train()
    run.assert_equal(trained(2))
    run.save(folder, 2)


# 1 the file of a process, 2 and 3 metadata, 4 hop.json, 5 the folder, 6 its name, 7 the folder above it
RENAMED, LAST = 6, 7


@pytest.mark.full
class TestInterruption(unittest.TestCase):
    def check(self, folder: Path, last: int) -> None:
        """The last whole checkpoint is there, equal to a run of one process, which goes on from it."""
        assert hop.checkpoint.latest(folder) == last
        assert (folder / ".step_2.tmp").exists() == (last == 1)
        run = Run(None, seed=1)
        assert run.resume(folder) == last
        run.assert_equal(trained(last))
        run.train()
        run.assert_equal(trained(last + 1))
        run.save(folder, last + 1)
        assert sorted(path.name for path in folder.iterdir()) == [f"step_{last}", f"step_{last + 1}"]

    @parameterized.expand([(1, 1), (0, RENAMED)])
    def test_one_of_two_is_killed(self, dying: int, nth: int):
        with tempfile.TemporaryDirectory() as name:
            with pytest.raises((ProcessExitedException, ProcessRaisedException)):
                processes.run(functools.partial(killed, Path(name), dying, nth), 2)
            self.check(Path(name), 1)

    @unittest.skipUnless(hasattr(os, "fork"), "needs os.fork")
    def test_killed_before_each_call(self):
        with tempfile.TemporaryDirectory() as name:
            mp.start_processes(killed_everywhere, args=(Path(name),), nprocs=1, join=True, start_method="spawn")
            for nth in range(1, LAST + 2):
                self.check(Path(name) / str(nth), 1 if nth <= RENAMED else 2)

    def test_resumed_by_more_processes(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            trained(1).save(folder, 1)
            (folder / ".step_2.tmp").mkdir()
            processes.run(functools.partial(resumed, folder), 2)
            run = Run(None, seed=1)
            assert run.resume(folder) == 2
            run.assert_equal(trained(2))


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
