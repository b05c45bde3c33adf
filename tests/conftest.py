"""Options and state shared by all tests."""

import os
import shutil
import sys

import pytest
import torch

from tests import cases


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where test_routes.py runs")


def pytest_configure(config):
    cases.DEVICE = config.getoption("--device")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are busy with other tests
        torch.set_num_threads(1)
    if cases.DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: PyTorch finds no CUDA device here", returncode=0)


def pytest_collection_modifyitems(config, items):
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    for item in items:
        if item.get_closest_marker("compiler") and not compiler:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler, which Inductor needs"))


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
