"""Checkpoints of quantized tensors: written by some processes with some placements, read by others with other ones, and
interrupted at every point of a save."""

import errno
import functools
import hashlib
import json
import os
import pickle
import resource
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
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import hop
import hop.checkpoint
import hop.optim
from hop import presets
from hop.compat.files import is_temporary
from tests.support import processes
from tests.support.files import InFolder

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
        return DTensor.from_local(local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())
    t = t.clone()
    for b in t.buffers().values() if isinstance(t, hop.QuantizedTensor) else [t]:
        b.view(-1).view(torch.uint8).fill_(77)
    return t


def layouts(mesh: Any) -> dict[str, tuple[Any, Any]]:
    """Meshes and placements, by name, of two and of four processes."""
    found = {"rows": (mesh, [Shard(0)]), "columns": (mesh, [Shard(1)])}
    if mesh.size() == 2:
        return found | {"replicated": (mesh, [Replicate()])}
    square = init_device_mesh("cpu", (2, 2))
    return found | {"square": (square, [Shard(0), Shard(1)]), "hybrid": (square, [Replicate(), Shard(0)])}


def state(mesh: Any, layout: str) -> dict[str, Any]:
    if layout == "plain":
        return {name: whole(name) for name in (PLAIN, *NAMES)} | {"note": [1, "x"]}
    own, placements = layouts(mesh)[layout]
    return {n: placed(whole(n), own, placements) for n in names(placements)} | {"note": [1, "x"]}


SAVED = [
    (1, "plain"),
    *((2, layout) for layout in ("rows", "columns", "replicated")),
    *((4, layout) for layout in ("rows", "columns", "square", "hybrid")),
]
STEPS = {saved: step for step, saved in enumerate(SAVED)}


def write_all(folder: Path, mesh: Any, group: Any = None) -> None:
    for (world, layout), step in STEPS.items():
        if world == (1 if mesh is None else mesh.size()):
            hop.checkpoint.save(state(mesh, layout), folder, step=step, process_group=group)


def read_all(folder: Path, mesh: Any, group: Any = None) -> None:
    """Every checkpoint with every layout that this number of processes can have."""
    for layout in ["plain"] if mesh is None else layouts(mesh):
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
    """Parts that were quantized each by itself load as they were saved. No other way will do, but for those whose
    blocks run over the flattened part: they are quantized anew."""
    columns = {n: _quantized_apart(n, mesh, Shard(1)) for n in ("INT8_ROW", "STATE8", "STATE4")}
    rows = {n: _quantized_apart(n, mesh, Shard(0)) for n in ("INT8_TENSOR", "NVFP4", "FP8_128X128", "NVFP4_16X16")}
    local = rows["INT8_TENSOR"].to_local().dequantize()
    both = hop.quantize(presets.MXFP8, local, usages=("rowwise", "columnwise"))
    held = {"tiled": hop.pack(hop.quantize(presets.INT8_ROW, local)), "both": both}
    others = {
        name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False, shape=(ROWS, COLUMNS), stride=(COLUMNS, 1))
        for name, t in held.items()
    }
    hop.checkpoint.save({**columns, **rows, **others}, folder, step=0)
    got = {name: emptied(t) for name, t in {**columns, **rows, **others}.items()}
    hop.checkpoint.load(got, folder)
    for name, t in {**columns, **rows, **others}.items():
        assert_bits(got[name], t, name)
    for name in (*columns, *rows):
        other = placed(whole(name), mesh, [Replicate()])
        kept = emptied(other)
        if name.startswith("STATE"):
            hop.checkpoint.load({name: kept}, folder)
            numbers_saved = _numbers_apart(columns[name], Shard(1))
            assert_bits(kept, hop.quantize(getattr(presets, name), numbers_saved), name)
            continue
        with pytest.raises(ValueError, match=rf"'{name}': the part .* was not saved as one piece"):
            hop.checkpoint.load({name: kept}, folder)
        assert_bits(kept, emptied(other))


def _quantized_apart(name: str, mesh: Any, placement: Any) -> Any:
    x = numbers(name)
    local = hop.quantize(getattr(presets, name), part(x, mesh, [placement]))
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())


def _numbers_apart(t: Any, placement: Any) -> Tensor:
    local = t.to_local().dequantize()
    return DTensor.from_local(
        local, t.device_mesh, [placement], run_check=False, shape=t.shape, stride=t.stride()
    ).full_tensor()


def refusals(folder: Path, mesh: Any, rank: int) -> None:
    """Every process gets the exception, and keeps what it had."""
    t = whole("MXFP8")
    hop.checkpoint.save({"w": t, "x": torch.ones(3)}, folder, step=1)
    uneven = hop.quantize(presets.MXFP8, numbers("MXFP8")[:, : 32 * 3])  # quarters of 24 columns
    hop.checkpoint.save({"w": uneven}, folder, step=2)
    kept = torch.zeros(3)
    with pytest.raises(ValueError, match=r"32 elements along dimension 1 share a byte or a scale, and .* cuts them"):
        x = uneven.dequantize()
        local = hop.quantize(presets.MXFP8, part(x, mesh, [Shard(1)]))
        shard = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
        hop.checkpoint.load({"w": shard, "x": kept}, folder, step=2)
    with pytest.raises(ValueError, match="partial sums"):
        hop.checkpoint.save({"w": DTensor.from_local(t, mesh, [Partial()], run_check=False)}, folder, step=3)
    mine = whole("MXFP8" if rank == 0 else "MXFP4")  # one process alone differs
    with pytest.raises(ValueError, match=r"'w': the checkpoint holds .*e4m3.* but the state dict .*e2m1"):
        hop.checkpoint.load({"w": mine, "x": kept}, folder, step=1)
    with pytest.raises(ValueError, match="'w' must be quantized alike in all processes"):
        hop.checkpoint.save({"w": mine}, folder, step=3)
    damaged = sorted((folder / "step_1").glob("*.distcp"))[0]
    if rank == 0:
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="differs from that of the saved file"):
        hop.checkpoint.load({"w": emptied(t), "x": kept}, folder, step=1)
    assert torch.equal(kept, torch.zeros(3))


def few_rows(folder: Path, mesh: Any) -> None:
    """Processes without any row, whose scales mean nothing."""
    for name in ("INT8_TENSOR", "MXFP4", "STATE8"):
        t = hop.quantize(getattr(presets, name), numbers(name)[:3])
        hop.checkpoint.save({"w": placed(t, mesh, [Shard(0)])}, folder / name, step=0)
        for want in (placed(t, mesh, [Shard(0)]), placed(t, mesh, [Replicate()]), t):
            got = emptied(want)
            hop.checkpoint.load({"w": got}, folder / name)
            if want.numel() and (not isinstance(want, DTensor) or want.to_local().numel()):
                assert_bits(got, want, name)


def part_of_the_mesh(folder: Path, mesh: Any) -> None:
    """Two of four processes have the tensor, quantized and plain."""
    pair = DeviceMesh("cpu", [0, 1])
    for name in ("INT8_ROW", PLAIN):
        t, placements = whole(name), [Shard(0)]
        if pair.get_coordinate() is not None:
            want = placed(t, pair, placements)
        else:
            nothing = t[:0].clone()
            want = DTensor.from_local(nothing, pair, placements, run_check=False, shape=t.shape, stride=t.stride())
        hop.checkpoint.save({"w": want}, folder / name, step=0)
        for wanted in (want, t):
            got = emptied(wanted)
            hop.checkpoint.load({"w": got}, folder / name)
            if wanted is t or pair.get_coordinate() is not None:
                assert_bits(got, wanted)


def strided(folder: Path, mesh: Any) -> None:
    """What FSDP2 makes of what tensor parallelism has sharded along the same dimension; and parts that are no range."""
    square = init_device_mesh("cpu", (2, 2))
    t = hop.quantize(presets.MXFP8, numbers("MXFP8")[:8])
    i, j = divmod(torch.distributed.get_rank(), 2)
    local = t[(i + 2 * j) * 2 :][:2].clone()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    want = DTensor.from_local(local, square, placements, run_check=False, shape=t.shape, stride=t.stride())
    hop.checkpoint.save({"w": want}, folder, step=0)
    for wanted in (want, t, placed(t, square, [Shard(0), Shard(1)])):
        got = emptied(wanted)
        hop.checkpoint.load({"w": got}, folder)
        assert_bits(got, wanted)
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    want = DTensor.from_local(local, square, placements, run_check=False, shape=t.shape, stride=t.stride())
    with pytest.raises(ValueError, match=r"'w': the part of a DTensor of placements .* is no range along dimension 0"):
        hop.checkpoint.save({"w": want}, folder, step=1)


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
    part_of_the_mesh(folder / "part", mesh)
    strided(folder / "strided", mesh)
    pieces(folder / "pieces", mesh)
    refusals(folder / "refusals", mesh, rank)
    resumed(folder / "run", mesh)


# ---- a model under FSDP2, with an optimizer whose states are quantized


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, in 8 bits for matrices: blocks over the flattened part that a process has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in (p for group in self.param_groups for p in group["params"]):
            state, local = self.state[p], p.to_local() if isinstance(p, DTensor) else p
            grad: Any = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
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
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
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
        os.fsync, os.replace, Path.rename = map(self.before, (os.fsync, os.replace, Path.rename))

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


def without_space(folder: Path, mesh: Any, rank: int) -> None:
    """The second of two processes can write no large files: both are told which file it is."""
    saved = {"w": placed(torch.ones(200_000, 2), mesh, [Shard(0)])}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"nothing was written: .*/step_3/__1_0.distcp'$") as caught:
        hop.checkpoint.save(saved, folder, step=3)
    assert caught.value.errno == errno.EFBIG


def resumed(folder: Path, mesh: Any) -> None:
    """From the step 1 of one process, under FSDP2, on to step 2."""
    run = Run(mesh, seed=1)
    assert run.resume(folder) == 1
    run.assert_equal(trained(1))
    run.train()
    run.assert_equal(trained(2))
    run.save(folder, 2)


# To 4 the file of a process, to 9 metadata, to 12 hop.json; 13 the folder, 14 its name, 15 the folder above it
RENAMED, LAST = 14, 15


@pytest.mark.full
class TestInterruption(unittest.TestCase):
    def check(self, folder: Path, last: int) -> None:
        """The last whole checkpoint is there, equal to a run of one process, which goes on from it."""
        assert hop.checkpoint.steps(folder)[-1] == last
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
            left = any(map(is_temporary, os.listdir(name)))  # not if the first process lived long enough to clean up
            assert left or dying == 1
            self.check(Path(name), 1)

    def test_no_space_for_one_of_two(self):
        with tempfile.TemporaryDirectory() as name:
            processes.run(functools.partial(without_space, Path(name)), 2)
            assert not os.listdir(name)

    @unittest.skipUnless(hasattr(os, "fork"), "needs os.fork")
    def test_killed_before_each_call(self):
        with tempfile.TemporaryDirectory() as name:
            processes.start(killed_everywhere, (Path(name),), 1)
            for nth in range(1, LAST + 2):
                folder = Path(name) / str(nth)
                assert any(map(is_temporary, os.listdir(folder))) == (nth <= RENAMED)
                self.check(folder, 1 if nth <= RENAMED else 2)


@pytest.mark.full
class TestResharding(unittest.TestCase):
    def test_any_layout_to_any_other(self):
        """Written by 1, 2 and 4 processes, read by 1, 2 and 4; the 1 without a process group."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_all(folder / "all", None)
            trained(1).save(folder / "run", 1)
            processes.run(functools.partial(in_four, folder), 4)
            assert hop.checkpoint.steps(folder / "all") == sorted(STEPS.values())
            read_all(folder / "all", None)
            run = Run(None, seed=1)
            assert run.resume(folder / "run") == 2
            run.assert_equal(trained(2))


class TestFolders(InFolder):
    """One process, without a process group."""

    def save(self, step: int = 0, **kwargs: Any) -> dict[str, Any]:
        saved = {"w": whole("MXFP4"), "x": torch.arange(3.0), "epoch": step, "nested": {7: [torch.ones(2), "a"]}}
        hop.checkpoint.save(saved, self.folder, step=step, **kwargs)
        return saved

    def refused(self, error: Any, match: str, step: int | None = None, **changed: Any) -> None:
        """Loading raises, and leaves every tensor as it was."""
        held = {"w": emptied(whole("MXFP4")), "x": torch.zeros(3), **changed}
        before = [bits(t) for t in held.values()]
        with pytest.raises(error, match=match):
            hop.checkpoint.load(held, self.folder, step=step)
        for old, t in zip(before, held.values(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old, bits(t), strict=True))

    def test_every_preset(self):
        """Codes and scales bit for bit, copies and packed forms included."""
        x = numbers(PLAIN)[:32]
        noise = torch.randint(0, 256, x.shape, dtype=torch.uint8)
        dynamic = {n: q for n, q in presets.PRESETS.items() if "STATIC" not in n and n != "INT8_CONV"}
        saved = {n: hop.quantize(q, x, noise=noise if q.stochastic else None) for n, q in dynamic.items()}
        saved["both"] = hop.quantize(presets.MXFP8, x, usages=("rowwise", "columnwise"))
        saved["tiled"] = hop.pack(hop.quantize(presets.INT8_ROW, x))
        saved["number"] = hop.quantize(presets.INT8_TENSOR, torch.tensor(2.0))
        saved["none"] = hop.quantize(presets.INT8_ROW, x[:0])
        hop.checkpoint.save(saved, self.folder, step=0)
        got = {name: emptied(t) for name, t in saved.items()}
        assert hop.checkpoint.load(got, self.folder) == 0
        for name, t in saved.items():
            assert_bits(got[name], t, name)

    def test_what_is_no_tensor(self):
        saved = self.save(3)
        got = {"w": emptied(saved["w"]), "epoch": 0, "nested": {7: [torch.zeros(2), ""]}}
        assert hop.checkpoint.load(got, self.folder) == 3
        assert got["epoch"] == 3 and got["nested"][7][1] == "a" and list(got["nested"]) == [7]
        assert torch.equal(got["nested"][7][0], torch.ones(2))

    def test_states_that_an_optimizer_has_not_yet(self):
        """They are not left out: a fresh optimizer is refused, and one that get_state_dict has filled takes them."""
        model, fresh = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        optimizer = hop.optim.AdamW8bit(model.parameters(), min_numel=0)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        hop.checkpoint.save({"optim": optimizer.state_dict()}, self.folder, step=1)
        other = hop.optim.AdamW8bit(fresh.parameters(), min_numel=0)
        wanted = "'optim.state' is empty, and the checkpoint has .* such as 'optim.state.0.*; fill it first"
        with pytest.raises(ValueError, match=wanted):
            hop.checkpoint.load({"optim": other.state_dict()}, self.folder)
        with pytest.raises(ValueError, match="'state_dict' is empty"):
            hop.checkpoint.load({}, self.folder)
        hop.checkpoint.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), self.folder, step=2)
        found = dict(zip("mo", get_state_dict(fresh, other), strict=True))
        assert hop.checkpoint.load(found, self.folder) == 2
        set_state_dict(fresh, other, model_state_dict=found["m"], optim_state_dict=found["o"])
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            assert_bits(other.state[q]["exp_avg"], optimizer.state[p]["exp_avg"], "exp_avg")

    def test_steps(self):
        assert hop.checkpoint.steps(self.folder / "none") == []
        for step in (2, 5, 10):
            self.save(step)
        assert hop.checkpoint.steps(self.folder) == [2, 5, 10]
        self.save(7, keep=2)  # after going back to 5
        assert hop.checkpoint.steps(self.folder) == [7, 10]
        with pytest.raises(FileExistsError, match=r"step 7: .* has a checkpoint of it"):
            self.save(7)
        self.refused(FileNotFoundError, "has no checkpoint of step 3; it has those of steps", step=3)
        with pytest.raises(FileNotFoundError, match="none has no checkpoint; save one first, or pass another folder"):
            hop.checkpoint.load({}, self.folder / "none")
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="step must be an integer of 0 or more"):
                self.save(wrong)

    def test_what_does_not_fit_is_refused(self):
        self.save()
        x = numbers("MXFP4")
        self.refused(
            ValueError, "'w': the checkpoint holds it quantized by .*e2m1.* but it is plain in the state dict", w=x
        )
        self.refused(
            ValueError, "'x': the checkpoint holds it plain, but", x=hop.quantize(presets.INT8_TENSOR, x[0, :3])
        )
        self.refused(ValueError, "'w': the checkpoint holds .*e2m1.* but the state dict .*e4m3", w=whole("MXFP8"))
        self.refused(ValueError, "'w': .*'shape'", w=hop.quantize(presets.MXFP4, x[:2]))
        self.refused(ValueError, "'w': .*'dtype'", w=hop.quantize(presets.MXFP4, x.half()))
        self.refused(ValueError, "'w': .*'usages'", w=hop.quantize(presets.MXFP4, x, usages=("rowwise", "columnwise")))
        self.refused(
            ValueError, "'x': the checkpoint holds torch.float32, but the state dict torch.float64", x=x.double()
        )
        self.refused(ValueError, "Size mismatch", x=torch.zeros(4))
        self.refused(RuntimeError, "'y' is missing", y=whole("MXFP8"))
        self.refused(RuntimeError, "Missing key", y=torch.zeros(3))
        self.refused(ValueError, "'epoch': the checkpoint holds no tensor", epoch=torch.zeros(3))

    def test_what_cannot_be_loaded_again_is_not_saved(self):
        with pytest.raises(ValueError, match="'run' holds TestFolders, which could not be loaded again"):
            hop.checkpoint.save({"run": TestFolders()}, self.folder, step=0)
        with pytest.raises(ValueError, match=r"'w\.codes' is a buffer of 'w' and another entry"):
            hop.checkpoint.save({"w": whole("MXFP4"), "w.codes": torch.zeros(2)}, self.folder, step=0)
        with pytest.raises(ValueError, match=r"the name 'hop.quantized' is reserved"):
            hop.checkpoint.save({"hop": {"quantized": 1}}, self.folder, step=0)
        assert hop.checkpoint.steps(self.folder) == []

    def test_damage(self):
        self.save()
        folder = self.folder / "step_0"
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            spots = range(0, len(data), 29 if path.name == "hop.json" else len(data) // 2)
            flipped = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in spots]
            for damaged in (data[:-1], data + b"x", b"", *flipped, None):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                self.refused(ValueError, "load another step")
            path.write_bytes(data)
        got = {"w": emptied(whole("MXFP4"))}
        hop.checkpoint.load(got, self.folder)
        assert_bits(got["w"], whole("MXFP4"))

    def test_metadata_run_nothing(self):
        """Metadata of somebody else, with a manifest that fits them."""
        self.save()
        path = self.folder / "step_0" / ".metadata"
        path.write_bytes(pickle.dumps(_Calls()))
        manifest = self.folder / "step_0" / "hop.json"
        described = json.loads(manifest.read_text())
        described["files"][".metadata"] = {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        manifest.write_text(json.dumps(described))
        with pytest.raises(pickle.UnpicklingError, match=r"hold no .*system"):
            hop.checkpoint.load({"x": torch.zeros(3)}, self.folder)

    def test_planners_of_their_own(self):
        """With DCP's own functions, and from a checkpoint of DCP's own planner."""
        t, x = whole("NVFP4"), torch.arange(3.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save({"m": {"w": t, "x": x}}, checkpoint_id=self.folder / "a", planner=hop.checkpoint.SavePlanner())
            got = {"m": {"w": emptied(t), "x": torch.zeros(3), "new": torch.ones(1)}}
            dcp.load(got, checkpoint_id=self.folder / "a", planner=hop.checkpoint.LoadPlanner(allow_partial_load=True))
            assert_bits(got["m"]["w"], t)
            assert torch.equal(got["m"]["x"], x) and got["m"]["new"] == 1
            dcp.save({"x": x}, checkpoint_id=self.folder / "b")
            plain = {"x": torch.zeros(3)}
            dcp.load(plain, checkpoint_id=self.folder / "b", planner=hop.checkpoint.LoadPlanner())
            assert torch.equal(plain["x"], x)
        dcp_to_torch_save(self.folder / "a", self.folder / "a.pt")
        read = torch.load(self.folder / "a.pt", weights_only=True)
        assert torch.equal(read["m"]["w"]["codes"], t.codes)


class _Calls:
    def __reduce__(self) -> Any:
        return os.system, ("true",)
