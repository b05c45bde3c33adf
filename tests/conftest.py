"""Options and state shared by all tests."""

import collections
import functools
import gc
import os
import re
import shutil
import sys
import time
import zlib

import pytest
import torch

from hop.compat.imports import when_imported
from hop.compat.versions import LACKS
from tests.support import case

LEFT = "left to another day"
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # half the time to compile a package
os.environ.setdefault("HOP_GPU_KERNELS", "all")  # their tests are the trial of kernels; test_trust.py sets others


def look_up_once():
    """Each run_decompositions looks up all composite operators once for each namespace, which takes 0.1 seconds."""
    utils, name = sys.modules["torch._export.utils"], "_materialize_cpp_cia_ops"
    if hasattr(utils, name):  # it is private: another version may lack it
        setattr(utils, name, functools.cache(getattr(utils, name)))


when_imported("torch._export.utils", look_up_once)


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", choices=["cpu", "cuda"], help="where test_routes.py and test_device.py of impls run"
    )
    parser.addoption("--part", metavar="K/N", help="the tests of part K of N (K from 0), by a hash of their names")
    parser.addoption(
        "--until",
        type=int,
        metavar="SECONDS",
        help="skip tests that have not started by this time (seconds since 1970); the first file depends on the date",
    )


def pytest_configure(config):
    case.DEVICE = config.getoption("--device")
    gc.disable()  # until all is imported, of which nothing is garbage
    if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are busy with other tests
        torch.set_num_threads(1)
    if case.DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: PyTorch finds no CUDA device here", returncode=pytest.ExitCode.NO_TESTS_COLLECTED)


def left_out(items, mark):
    """The tests with the mark that are not the one in n."""
    families = {}
    for item in items:
        if found := item.get_closest_marker(mark):
            name = re.sub(r"_\d.*", "", getattr(item, "originalname", item.name))
            families.setdefault((item.parent.nodeid, name, *found.args), []).append(item)
    for (*_, n), family in families.items():
        # By a hash of the names, since every n-th of a product may leave out a whole row of it.
        family.sort(key=lambda item: zlib.crc32(item.name.encode()))
        yield from family[-(-len(family) // n) :]


def by_date(items, day):
    """The tests, beginning at another file each day, so that runs that are cut short skip different ones."""
    files = {item.location[0]: [] for item in items}
    for item in items:
        files[item.location[0]].append(item)
    order = sorted(files, key=lambda file: zlib.crc32(file.encode()))
    first = int(day * 0.618034 % 1 * len(order))  # multiples of the golden ratio spread evenly over the files
    return [item for file in order[first:] + order[:first] for item in files[file]]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
    for mark, longer in (("quick", pytest.mark.full), ("sampled", pytest.mark.exhaustive)):
        for item in left_out(items, mark):
            item.add_marker(longer)
    if part := config.getoption("--part"):
        chosen, parts = map(int, part.split("/"))
        left = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != chosen]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == chosen]
    if config.getoption("--until"):
        items[:] = by_date(items, int(time.time()) // 86400)
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    for item in items:
        if item.get_closest_marker("compiler") and not compiler:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler, which Inductor needs"))
        for mark in item.iter_markers("works"):
            if (lack := LACKS[mark.args[0]]).shows():
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} lacks it: {lack.what}"))


def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until and time.time() > until:
        pytest.skip(LEFT)


def pytest_terminal_summary(terminalreporter):
    """List the files of which --until skipped tests."""
    left = collections.Counter(
        report.location[0] for report in terminalreporter.stats.get("skipped", ()) if LEFT in str(report.longrepr)
    )
    if left:
        terminalreporter.write_line(f"out of time: {left.total()} tests left to another day, in {len(left)} files:")
        for file, count in sorted(left.items()):
            terminalreporter.write_line(f"  {file}: {count}")


def pytest_collection_finish():
    gc.freeze()  # what was imported stays, and is not looked at again
    gc.enable()


def pytest_collectstart(collector):
    torch.manual_seed(0)  # what a module draws when it is imported does not depend on the modules before it


# torch.manual_seed stores a traceback for each kind of device that may start later, which takes a millisecond.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def reproducible():
    seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
