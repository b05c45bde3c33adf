"""Files and folders that are there whole or not at all: with writers at once, killed, and on systems of other kinds."""

import errno
import multiprocessing
import os
import resource
import signal
import stat
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from parameterized import parameterized

from hop.compat import files
from hop.compat.files import is_temporary, temporary_folder, whole_file, whole_folder, write_whole
from tests.support.files import InFolder

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
OTHER = ".hop-00000000-0123456789abcdef"  # of another system


pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads


class Stop(Exception):
    pass


@contextmanager
def files_of(size: int) -> Iterator[None]:
    """While files of this process cannot be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def children(*functions: Callable[[], None]) -> list[int]:
    """Run each in a fork, all at once. Returns how they ended."""
    assert FORK is not None
    started = [FORK.Process(target=function) for function in functions]
    for child in started:
        child.start()
    for child in started:
        child.join(60)
        child.kill()
    return [child.exitcode or 0 for child in started]


def die_within(context: Any) -> Callable[[], None]:
    """A process that is killed within a block, before which it has written something."""

    def run() -> None:
        with context as opened:
            if isinstance(opened, Path):
                (opened / "part").write_text("part")
            else:
                opened.write(b"part")
            os.kill(os.getpid(), signal.SIGKILL)

    return run


class TestOneWriter(InFolder):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "file"

    def names(self) -> set[str]:
        return set(os.listdir(self.folder))

    def test_takes_all_at_once(self):
        with whole_file(self.path) as file:
            assert file.write(b"") == 0 and file.write(memoryview(b"abcdef").cast("B", (2, 3))) == 6
            assert not self.path.exists()
            file.seek(1)
            file.write(b"x")
            file.truncate(4)
        assert self.path.read_bytes() == b"axcd" and self.names() == {"file"}

    @parameterized.expand([(Stop,), (KeyboardInterrupt,), (SystemExit,)])
    def test_exceptions(self, kind):
        self.path.write_text("old")
        with pytest.raises(kind), whole_file(self.path) as file:
            file.write(b"new")
            raise kind
        with pytest.raises(kind), whole_folder(self.folder / "folder") as staged:
            write_whole(staged / "x", "new")
            raise kind
        assert self.path.read_text() == "old" and self.names() == {"file", "folder"}
        assert not os.listdir(self.folder / "folder")

    def test_long_names(self):
        path = self.folder / ("é" * 127)
        write_whole(path, "x")
        assert path.read_text() == "x"

    def test_permissions_stay(self):
        write_whole(self.path, "x")
        umask = os.umask(0o777)
        os.umask(umask)
        assert stat.S_IMODE(self.path.stat().st_mode) == 0o666 & ~umask
        self.path.chmod(0o600)
        write_whole(self.path, "y")
        assert stat.S_IMODE(self.path.stat().st_mode) == 0o600

    @unittest.skipUnless(os.name == "posix", "links and pipes are those of POSIX")
    def test_links(self):
        """A link is replaced, and what it leads to stays; a pipe and a device are written."""
        other = self.folder / "other"
        other.write_text("other")
        self.path.symlink_to(other)
        write_whole(self.path, "new")
        assert other.read_text() == "other" and self.path.read_text() == "new" and not self.path.is_symlink()
        write_whole("/dev/null", "x")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        os.mkfifo(self.folder / "pipe")
        reader = os.open(self.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        write_whole(self.folder / "pipe", "through")
        assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(os.stat(self.folder / "pipe").st_mode)
        os.close(reader)
        with pytest.raises(FileExistsError, match="choose another path"):
            files.move(self.path, self.folder / "pipe")

    @unittest.skipUnless(Path("/dev/full").exists(), "needs /dev/full")
    def test_full_device(self):
        with pytest.raises(OSError, match=r"No space left on device; nothing was written: .*'/dev/full'") as caught:
            write_whole("/dev/full", "x")
        assert caught.value.errno == errno.ENOSPC

    def test_errors_name_the_path(self):
        missing = self.folder / "none" / "file"
        with pytest.raises(FileNotFoundError, match="none/file"):
            write_whole(missing, "x")
        (self.folder / "taken").mkdir()
        with pytest.raises(OSError, match=r"'[^']*/taken'$"):
            write_whole(self.folder / "taken", "x")
        assert self.names() == {"taken"}

    def test_swallowed_errors(self):
        """A package that goes on after an error, or raises another one, does not leave a file that lacks something."""
        for raised in (None, RuntimeError("unexpected pos")):
            wanted = r"too large; nothing was written: .*/file'$"
            with pytest.raises(OSError, match=wanted) as caught, files_of(1000), whole_file(self.path) as file:
                try:
                    file.write(b"x" * 2000)
                except OSError:
                    if raised is not None:
                        raise raised from None
            assert caught.value.errno == errno.EFBIG and not self.names()

    def test_in_place_of_nothing(self):
        with whole_file(self.path, replace=False) as file:
            file.write(b"first")
        with pytest.raises(FileExistsError, match="file"), whole_file(self.path, replace=False) as file:
            file.write(b"second")
        assert self.path.read_text() == "first" and self.names() == {"file"}

    def test_without_hard_links(self):
        with mock.patch("os.link", side_effect=OSError(errno.EPERM, "no links")):
            self.test_in_place_of_nothing()


@unittest.skipUnless(FORK, "needs os.fork")
class TestLeftovers(InFolder):
    def left(self) -> set[str]:
        return {name for name in os.listdir(self.folder) if is_temporary(name)}

    def killed(self) -> set[str]:
        """What killed writers leave."""
        contexts = (whole_file(self.folder / "a"), temporary_folder(self.folder), whole_folder(self.folder))
        found: set[str] = set()
        for context in contexts:
            (done,) = children(die_within(context))
            assert done == -signal.SIGKILL
            found |= self.left()
        return found

    def test_of_killed_writers(self):
        assert len(self.killed()) == 3 and len(self.left()) == 1  # each removes what the one before has left
        write_whole(self.folder / "b", "x")
        assert os.listdir(self.folder) == ["b"]

    def test_of_living_writers(self):
        """In this process, and in another one."""
        started, end = os.pipe(), os.pipe()

        def other() -> None:
            with whole_file(self.folder / "other") as file, temporary_folder(self.folder):
                file.write(b"other")
                os.write(started[1], b"x")
                os.read(end[0], 1)

        assert FORK is not None
        child = FORK.Process(target=other)
        child.start()
        os.read(started[0], 1)
        with whole_file(self.folder / "own") as file, temporary_folder(self.folder) as folder:
            file.write(b"own")
            (folder / "x").write_text("x")
            assert len(self.left()) == 4
            write_whole(self.folder / "b", "x")
            assert len(self.left()) == 4 and (folder / "x").exists()
        os.write(end[1], b"x")
        child.join(60)
        assert child.exitcode == 0
        assert {path.name: path.read_text() for path in self.folder.iterdir()} == {
            "own": "own",
            "other": "other",
            "b": "x",
        }
        for descriptor in (*started, *end):
            os.close(descriptor)

    def other(self, seconds: float, folder: bool = False) -> Path:
        """What a writer on another system has changed some time ago."""
        path = self.folder / OTHER
        if folder:
            path.mkdir()
            (path / "x").write_text("x")
        else:
            path.write_text("x")
        for own in (path / "x", path) if folder else (path,):
            os.utime(own, (time.time() - seconds,) * 2)
        return path

    @parameterized.expand([(False,), (True,)])
    def test_of_other_systems(self, folder):
        """Their locks may not be seen here: what they changed within a day stays."""
        path = self.other(3600, folder)
        write_whole(self.folder / "a", "x")
        assert path.exists()
        old = time.time() - 2 * 86400
        os.utime(path, (old, old))
        if folder:  # a file in it that is new
            write_whole(self.folder / "a", "x")
            assert path.exists()
            os.utime(path / "x", (old, old))
        write_whole(self.folder / "a", "x")
        assert not path.exists()

    def test_where_there_are_no_locks(self):
        with mock.patch.object(files.fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
            self.killed()
            left = self.left()
            assert len(left) == 3
            write_whole(self.folder / "a", "x")
            assert self.left() == left
            for path in [self.folder / name for name in left]:
                for own in (*path.rglob("*"), path):
                    os.utime(own, (0, 0))
            with whole_folder(self.folder) as staged:
                write_whole(staged / "b", "x")
        assert set(os.listdir(self.folder)) == {"a", "b"}

    def test_of_nobody(self):
        """Other names, links and pipes stay."""
        (self.folder / "x").write_text("x")
        (self.folder / ".hop-x").write_text("x")
        (self.folder / OTHER).symlink_to(self.folder / "x")
        os.mkfifo(self.folder / OTHER.replace("0", "1"))
        write_whole(self.folder / "a", "x")
        assert len(os.listdir(self.folder)) == 5

    def test_the_lock_of_a_folder(self):
        """Of a process that was killed while it moved files."""

        def move() -> None:
            with files._alone(self.folder):
                os.kill(os.getpid(), signal.SIGKILL)

        assert children(move) == [-signal.SIGKILL] and self.left() == {".hop-lock"}
        with whole_folder(self.folder) as staged:
            write_whole(staged / "a", "x")
        assert os.listdir(self.folder) == ["a"]


@unittest.skipUnless(FORK, "needs os.fork")
class TestSeveralWriters(InFolder):
    def test_one_file(self):
        """Each reads whole files while the others write theirs; nothing is left."""
        path = self.folder / "file"

        def write(own: int) -> None:
            for _ in range(20):
                with whole_file(path) as file:
                    for _ in range(4):
                        file.write(bytes([own]) * 1000)
                content = path.read_bytes()
                assert len(content) == 4000 and len(set(content)) == 1

        assert children(*[lambda own=own: write(own) for own in range(4)]) == [0] * 4
        assert os.listdir(self.folder) == ["file"]

    def test_one_new_file(self):
        def write(own: int) -> None:
            with whole_file(self.folder / "file", replace=False) as file:
                file.write(bytes([own]))
                time.sleep(0.1)

        ends = children(*[lambda own=own: write(own) for own in range(4)])
        assert sorted(ends) == [0, 1, 1, 1]
        assert (self.folder / "file").read_bytes() == bytes([ends.index(0)]) and len(os.listdir(self.folder)) == 1

    def test_one_folder(self):
        """All files are of one writer, and the others are told."""
        out = self.folder / "out"

        def check() -> None:
            if out.exists() and not all(map(is_temporary, os.listdir(out))):
                raise FileExistsError("it has files")

        def write(own: int) -> None:
            with whole_folder(out, check) as staged:
                for name in "abcdefgh":
                    write_whole(staged / name, str(own))
                time.sleep(0.1)

        ends = children(*[lambda own=own: write(own) for own in range(4)])
        assert sorted(ends) == [0, 1, 1, 1]
        assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys("abcdefgh", str(ends.index(0)))
