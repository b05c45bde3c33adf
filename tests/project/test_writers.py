"""Whatever the library writes is there as a whole or not at all: on a disk that is full, and beside other writers."""

import errno
import functools
import os
import re
import signal
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
import hop.checkpoint
import hop.interchange
from hop.cli.bench import _write
from hop.cli.export import ROUTES, ExportOptions
from hop.compat.files import is_temporary
from hop.export.targets.integer.model import Model
from hop.integrations import quantize_folder
from hop.report.journal import Journal
from hop.report.report import Report
from hop.report.sweep_result import Sweep
from tests.integrations.models import llama
from tests.support import forks
from tests.support.files import InFolder

ROOT = Path(__file__).parents[2]
CODE = "import sys, pathlib; from tests.project import test_writers; test_writers.{}(pathlib.Path(sys.argv[1]))"


def weight(number: int, size: int = 64) -> Any:
    """A quantized weight whose codes are all this number."""
    q = hop.interchange.gguf_quantizer("Q8_0")
    codes = torch.full((size, 1024), number, dtype=torch.int8)
    return hop.QuantizedTensor(
        {"codes": codes, "scale": torch.ones(size, 32, dtype=torch.float16)}, q, (size, 1024), torch.float32
    )


def row(number: int) -> Any:
    return hop.quantize(hop.presets.INT8_ROW, torch.full((64, 1024), float(number)))


@functools.cache
def program(number: int) -> Any:
    layer = nn.Linear(256, 64, bias=False)
    nn.init.constant_(layer.weight, number)
    return torch.export.export(layer, (torch.ones(1, 256),))


def folder_of_floats(number: int, folder: Path) -> Path:
    """A model of transformers that was saved before the disk was full."""
    path = folder / f"floats{number}"
    if not path.exists():
        llama(seed=number).save_pretrained(path)
    return path


def journal(path: Path, number: int) -> None:
    with Journal(path, str(number)) as notes:
        for _ in range(2):
            notes.add({"name": "x" * 50_000})


def sweep(number: int) -> Sweep:
    rows = hop.report.sweep(program(number), None, {"int8": hop.schemes.INT8_DYNAMIC}).rows
    return Sweep(rows, 1, "x" * 10_000)


WRITERS: dict[str, tuple[str, Callable[[Path, int], Any]]] = {
    # What is written, and how something of a number is written there.
    "gguf": ("m.gguf", lambda p, n: hop.interchange.save_gguf(p, {"w": weight(n)})),
    "gguf shards": (
        "m",
        lambda p, n: hop.interchange.save_gguf(p, {str(i): weight(n) for i in range(3)}, shard_size=1),
    ),
    "compressed": ("m", lambda p, n: hop.interchange.save_compressed_tensors(p, {"a.weight": row(n)})),
    "shards": (
        "m",
        lambda p, n: hop.interchange.save_compressed_tensors(
            p, {f"{i}.weight": row(n) for i in range(3)}, shard_size=70_000
        ),
    ),
    "safetensors": ("m.safetensors", lambda p, n: hop.storage.save_file({"w": row(n)}, p)),
    "checkpoint": ("run", lambda p, n: hop.checkpoint.save({"w": torch.full((10_000,), n)}, p, step=1)),
    "vectors": ("out", lambda p, n: hop.export.vectors(program(n), p, (torch.ones(1, 256),))),
    "model": ("m.tflite", lambda p, n: Model(bytes([n]) * 50_000, {}).save(p)),
    "target": ("t.json", lambda p, n: hop.export.targets.TFLITE.save(p)),
    "report": ("r.html", lambda p, n: Report((), n, False, 0, "x").save(p)),
    "sweep": ("s.html", lambda p, n: sweep(n).save(p)),
    "bench": ("b.json", lambda p, n: _write({"rows": [n] * 10_000}, p)),
    "aten": ("p.pt2", lambda p, n: ROUTES["aten"].write(program(n), ExportOptions(None, None, None), p)),
    "journal": ("s.jsonl", journal),
    "onnx": ("p.onnx", lambda p, n: ROUTES["onnx"].write(program(n), ExportOptions(None, None, None), p)),
}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def on_full_disks(folder: Path) -> None:
    """Each writer, on a disk with 4 KB left: what is wrong, as lines."""
    from tests.support import full_disk

    floats = folder_of_floats(1, folder)
    disk = folder / "disk"
    disk.mkdir()
    try:
        full_disk.mount(disk, 2**20)
    except OSError as error:
        print(f"no mount: {error}")
        return
    (disk / "warm").mkdir()
    for kind, (name, write) in WRITERS.items():
        write(folder / f"{kind}_{name}", 1)  # what it loads and compiles at first may need space
    filler = full_disk.fill(disk, 4096)
    for kind, (name, write) in WRITERS.items():
        before = names(disk)
        try:
            write(disk / name, 1)
        except OSError as error:
            if error.errno != errno.ENOSPC or not str(error.filename).startswith(str(disk / name)):
                print(kind, repr(error))
        else:
            print(kind, "no error")
        if names(disk) != before | ({name} if kind == "journal" else set()):  # whose whole lines stay
            print(kind, "leaves", names(disk) - before)
    try:
        quantize_folder(floats, disk / "out", "int8")
        print("quantize_folder: no error")
    except OSError as error:
        if error.errno != errno.ENOSPC or not str(error.filename).startswith(str(disk / "out")):
            print("quantize_folder", repr(error))
    if any(is_temporary(Path(n).name) or "config.json" in n or "safetensors" in n for n in names(disk)):
        print("quantize_folder leaves", names(disk))
    lines = (disk / "s.jsonl").read_text().splitlines(keepends=True)
    if [line[-1] for line in lines] != ["\n"]:
        print("journal", lines)
    filler.unlink()
    quantize_folder(floats, disk / "out", "int8")
    print("done")


ALIKE = (
    "gguf",
    "gguf shards",
    "compressed",
    "shards",
    "safetensors",
    "vectors",
    "model",
    "report",
    "bench",
)  # in every run


def two_at_once(folder: Path) -> None:
    """Two processes begin to write to one place in the same moment: what is there then is all of one of them."""
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    for kind in ALIKE:
        name, write = WRITERS[kind]
        alone: list[Any] = []
        for number in (1, 2):
            (folder / f"{kind}{number}").mkdir()
            write(folder / f"{kind}{number}" / name, number)
            alone.append(content(folder / f"{kind}{number}"))
        assert alone[0] != alone[1], kind
        for turn in range(3):
            here = folder / f"{kind} {turn}"
            here.mkdir()
            told = raced(lambda n, write=write, place=here / name: write(place, n))
            winner = [n for n in (1, 2) if content(here) == alone[n - 1]]
            if len(winner) != 1 or told[winner[0] - 1] != "" or "another end" in told:
                print(kind, winner, told, sorted(names(here)))
    print("done")


_ENDS = {0: "", 1: "FileExistsError"}


def raced(write: Callable[[int], None]) -> list[str]:
    """What 1 and 2, which write at once, are told: nothing, or that something is there."""
    start, pids = os.pipe(), list[int]()
    for number in (1, 2):
        if not (pid := os.fork()):
            signal.alarm(60)
            os.close(start[1])
            os.read(start[0], 1)
            status = 2
            try:
                write(number)
                status = 0
            except FileExistsError:
                status = 1
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(start[0])
    os.close(start[1])
    return [_ENDS.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "another end") for pid in pids]


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(names(folder))}


class TestFullDisk(InFolder):
    @pytest.mark.full
    def test_every_writer(self):
        done = forks.run(CODE.format("on_full_disks"), str(self.folder))
        if "no mount" in done.stdout:
            self.skipTest(done.stdout)
        assert done.stdout == "done\n", done.stdout + done.stderr[-1000:]


@unittest.skipUnless(hasattr(os, "fork"), "needs os.fork")
class TestTwoWriters(InFolder):
    @pytest.mark.full
    def test_every_writer(self):
        done = forks.run(CODE.format("two_at_once"), str(self.folder))
        assert done.stdout == "done\n", done.stdout + done.stderr[-1000:]

    def test_steps(self):
        """Two runs save one step: one has it, and the other is told."""
        for turn in range(3):
            folder = self.folder / str(turn)
            told = raced(lambda n, folder=folder: WRITERS["checkpoint"][1](folder, n))
            assert sorted(told) == ["", "FileExistsError"] and os.listdir(folder) == ["step_1"]
            w = torch.zeros(10_000, dtype=torch.int64)
            hop.checkpoint.load({"w": w}, folder)
            assert (w == told.index("") + 1).all()


class TestNoOtherWriters(unittest.TestCase):
    writes = re.compile(
        r"""write_text|write_bytes|\.tofile|open\([^)\n]*["'][wax]\+?b?\+?["']"""
        r"""|(np|torch|export)\.savez?\((?!opened|program, file)|save_file\("""
    )
    known = frozenset(
        {
            "hop/compat/files.py",
            "hop/report/journal.py",  # lines are added to it
            "hop/tensor/storage.py",  # in a temporary folder, as the next two
            "hop/export/targets/tosa/reference_model.py",
            "hop/export/targets/tosa/file.py",
        }
    )

    @parameterized.expand([('Path(x).write_text("a")',), ('open(path, "wb")',), ('path.open("a", encoding=x)',)])
    def test_finds(self, line):
        assert self.writes.search(line)

    def test_every_file(self):
        found = {str(p.relative_to(ROOT)) for p in ROOT.glob("hop/**/*.py") if self.writes.search(p.read_text())}
        assert found <= self.known, f"{found - self.known}: write by hop.compat.files"
