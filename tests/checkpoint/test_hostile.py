"""Checkpoints of somebody who wants to run code, read other files or exhaust memory: nothing of theirs is run."""

import contextlib
import hashlib
import json
import os
import pickle
import random
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
from parameterized import parameterized

import hop
import hop.checkpoint
from hop.checkpoint.metadata import read_metadata
from tests.corpus.contents import FOLDER
from tests.support.files import InFolder

MODULE = "torch.distributed.checkpoint.metadata"


def text(x: str) -> bytes:
    return b"\x8c" + bytes([len(x)]) + x.encode()  # SHORT_BINUNICODE


def name(module: str, what: str) -> bytes:
    return text(module) + text(what) + b"\x93"  # STACK_GLOBAL


def called(function: bytes, *arguments: bytes) -> bytes:
    return b"\x80\x04" + function + b"(" + b"".join(arguments) + b"tR."  # REDUCE


def signed(step: Path, **changed: bytes) -> None:
    """A manifest that fits files which were changed."""
    manifest = json.loads((step / "hop.json").read_text())
    for file, data in changed.items():
        path = step / {"metadata": ".metadata", "data": "__0_0.distcp"}[file]
        path.write_bytes(data)
        manifest["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / "hop.json").write_text(json.dumps(manifest))


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


DOTTED = "torch._strobelight.cli_function_profiler.subprocess.Popen"
CODE = {
    "dotted": lambda p: called(name(MODULE, DOTTED), b"](" + text("/bin/sh") + text("-c") + text(f"id > {p}") + b"e"),
    "os": lambda p: pickle.dumps(Calls(os.system, f"id > {p}")),
    "old protocol": lambda p: pickle.dumps(Calls(os.system, f"id > {p}"), protocol=0),
    "eval": lambda p: called(name("builtins", "eval"), text(f"open({str(p)!r}, 'w')")),
    "getattr": lambda p: (
        called(name("builtins", "getattr"), name("torch", "Size"), text("__init__"))[:-1] + b"(" + text(f"{p}") + b"tR."
    ),
    "a path that opens": lambda p: called(name("pathlib", "PosixPath.touch"), text(str(p))),
    "a module": lambda p: called(name("antigravity", "webbrowser")),
    "a torch module": lambda p: called(name("torch.utils.collect_env", "run"), text(f"id > {p}")),
    "a class's own state": lambda p: b"\x80\x04" + name(MODULE, "Metadata") + b"N}" + text("version") + b"K\x01s\x86b.",
    "another reduction": lambda p: b"\x80\x04" + name("torch.serialization", "_get_layout") + b"K\x01\x82.",
}


class TestCode(InFolder):
    @parameterized.expand(CODE.items())
    def test_is_not_run(self, _name, attack):
        hop.checkpoint.save({"x": torch.zeros(3)}, self.folder / "run", step=0)
        mark = self.folder / "ran"
        signed(self.folder / "run" / "step_0", metadata=attack(mark))
        before, version = set(sys.modules), getattr(dcp_metadata.Metadata, "version", None)
        with pytest.raises(pickle.UnpicklingError, match="metadata of a checkpoint"):
            hop.checkpoint.load({"x": torch.zeros(3)}, self.folder / "run")
        assert not mark.exists() and "antigravity" not in set(sys.modules) - before
        assert getattr(dcp_metadata.Metadata, "version", None) == version

    def test_what_is_no_tensor(self):
        """DCP's planner would unpickle it."""
        hop.checkpoint.save({"note": [1]}, self.folder, step=0)
        step, mark = self.folder / "step_0", self.folder / "ran"
        torch.save(Calls(os.system, f"id > {mark}"), self.folder / "evil")
        data = (self.folder / "evil").read_bytes()
        metadata = pickle.loads((step / ".metadata").read_bytes())
        for where in metadata.storage_data.values():
            where.length = len(data)
        signed(step, data=data, metadata=pickle.dumps(metadata))
        with pytest.raises(pickle.UnpicklingError):
            hop.checkpoint.load({"note": None}, self.folder)
        assert not mark.exists()


class TestFiles(InFolder):
    """Files of the checkpoint alone are read."""

    def setUp(self):
        super().setUp()
        self.step = self.folder / "run" / "step_0"
        hop.checkpoint.save({"x": torch.ones(3)}, self.folder / "run", step=0)
        hop.checkpoint.save({"x": torch.ones(3) * 2}, self.folder / "other", step=0)

    def refused(self, error: Any, match: str) -> None:
        x = torch.zeros(3)
        with pytest.raises(error, match=match):
            hop.checkpoint.load({"x": x}, self.folder / "run")
        assert x.count_nonzero() == 0

    @parameterized.expand(
        [
            ("above", {"relative_path": "../../other/step_0/__0_0.distcp"}, "in the file '../../other/step_0/"),
            ("absolute", {"relative_path": "/etc/passwd"}, "in the file '/etc/passwd'"),
            ("unlisted", {"relative_path": "hop.json"}, "in the file 'hop.json', which the checkpoint"),
            ("number", {"relative_path": 3}, "a int in place of a str"),
            ("beyond", {"offset": 2**40}, "ends beyond the end"),
            ("before", {"offset": -1}, "a size outside 0 to 2"),
            ("extension", {"transform_descriptors": ["stream.zstd"]}, "is transformed"),
        ]
    )
    def test_ranges(self, _name, changed, match):
        metadata = pickle.loads((self.step / ".metadata").read_bytes())
        for where in metadata.storage_data.values():
            vars(where).update(changed)
        signed(self.step, metadata=pickle.dumps(metadata))
        self.refused((ValueError, pickle.UnpicklingError), match)

    def test_unlisted(self):
        manifest = json.loads((self.step / "hop.json").read_text())
        del manifest["files"]["__0_0.distcp"]
        (self.step / "hop.json").write_text(json.dumps(manifest))
        self.refused(ValueError, "in the file '__0_0.distcp', which the checkpoint's manifest does not list")

    @parameterized.expand(
        [("../step_0/__0_0.distcp",), ("/etc/passwd",), ("..",), ("",), ("a/b",), ("a\0b",), ("a\\b",)]
    )
    def test_names_in_the_manifest(self, other):
        manifest = json.loads((self.step / "hop.json").read_text())
        manifest["files"][other] = manifest["files"]["__0_0.distcp"]
        (self.step / "hop.json").write_text(json.dumps(manifest))
        self.refused(ValueError, "files must have plain names, such as '__0_0.distcp', got .*; load another step")

    @parameterized.expand(
        [
            ("[" * 100_000,),
            ('{"version": 1, "files": []}',),
            ('{"version": 1, "files": {".metadata": 3}}',),
            ('{"version": 1, "files": {".metadata": {"bytes": "3", "sha256": "x"}}}',),
            ('{"version": true}',),
            ("\xff",),
        ]
    )
    def test_manifests(self, content):
        (self.step / "hop.json").write_bytes(content.encode("latin-1"))
        self.refused(ValueError, "load another step")

    @parameterized.expand([("__0_0.distcp",), (".metadata",), ("hop.json",)])
    @unittest.skipUnless(os.name == "posix", "links and pipes are those of POSIX")
    def test_links_and_pipes(self, file):
        path = self.step / file
        path.rename(self.folder / "elsewhere")
        path.symlink_to(self.folder / "elsewhere")
        self.refused(ValueError, f"{file} must be a regular file, not a link")
        path.unlink()
        os.mkfifo(path)
        self.refused(ValueError, f"{file} must be a regular file, not a link or anything else")


class TestMetadata(unittest.TestCase):
    @parameterized.expand([(str(path.parent), path) for path in sorted(FOLDER.glob("*/checkpoint/*/.metadata"))])
    def test_equal_what_pickle_reads(self, _name, path):
        data, files = path.read_bytes(), json.loads((path.parent / "hop.json").read_text())["files"]
        got, want = read_metadata(data, files), pickle.loads(data)
        assert got.state_dict_metadata == want.state_dict_metadata
        assert got.planner_data == want.planner_data and got.version == want.version
        assert got.storage_data.keys() == want.storage_data.keys()
        for index, where in want.storage_data.items():
            found = got.storage_data[index]
            assert (found.relative_path, found.offset, found.length) == (
                where.relative_path,
                where.offset,
                where.length,
            )

    @parameterized.expand(
        [
            ("memo", b"\x80\x04Nr\xff\xff\xff\x7f."),  # LONG_BINPUT, for which an unpickler makes room for 2^31 entries
            ("deep key", b"\x80\x04}" + b")" + b"\x85" * 100_000 + b"Ns."),
            ("deep", b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."),
            ("deep name", b"\x80\x04" + b")" + b"\x85" * 100_000 + text("x") + b"\x93."),
            ("long text", b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."),
            ("long number", b"\x80\x04\x8b\xff\xff\xff\x7f."),
            ("itself", b"\x80\x04]\x94h\x00a."),
            ("empty", b""),
            ("no stack", b"\x80\x040."),
            ("no mark", b"\x80\x04t."),
        ]
    )
    def test_exhausts_nothing(self, _name, data):
        with pytest.raises(pickle.UnpicklingError, match="metadata of a checkpoint"):
            read_metadata(data, {})

    def test_takes_time_in_proportion(self):
        """20,000 entries that are one object, with a list of 20,000 chunks that are one object."""
        n, size = 20_000, torch.Size([4])
        chunk = dcp_metadata.ChunkStorageMetadata(size, size)
        entry = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(torch.int8), size, [chunk] * n)
        metadata = dcp_metadata.Metadata({str(i): entry for i in range(n)}, {}, {})
        got = read_metadata(pickle.dumps(metadata), {})
        assert len(got.state_dict_metadata) == n and got.state_dict_metadata["7"] == entry

    def test_mutations(self):
        """Some bytes changed, and the rest cut off: it raises what it says, or gives DCP's objects."""
        path = sorted(FOLDER.glob("*/checkpoint/*/.metadata"))[0]
        data, files = path.read_bytes()[:3000], json.loads((path.parent / "hop.json").read_text())["files"]
        whole, draw = path.read_bytes(), random.Random(0)
        for i in draw.sample(range(len(data)), 60):
            for mutated in (whole[:i] + bytes([draw.randrange(256)]) + whole[i + 1 :], whole[:i]):
                with contextlib.suppress(pickle.UnpicklingError, ValueError):
                    assert isinstance(read_metadata(mutated, files), dcp_metadata.Metadata)
