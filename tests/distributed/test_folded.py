"""Batch norms that layers compute under DistributedDataParallel and FSDP2: what one process gives."""

import copy
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hop import nn
from tests.support.processes import run
from tests.support.schemes import EVERY

SCHEMES = ("INT8_DYNAMIC", "INT8_STATIC", "FP8_DELAYED", "FP8_HYBRID")


def images(seed: int, count: int = 6) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def built(name: str) -> Any:
    """The same model in each process and each call: two layers, each with its norm in it."""
    torch.manual_seed(0)
    floats = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 4, 3),
        torch.nn.BatchNorm2d(4, momentum=None),
    )
    model: Any = nn.convert(floats, EVERY[name])
    assert nn.fold_batch_norms(model).folded == 2
    nn.calibrate(model, [images(9)], progress=False)
    return model


def backward_of(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    y = model(x)
    y.square().mean().backward()
    return y.detach()


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def assert_states_equal(one: Any, many: Any) -> None:
    ours, theirs = one.state_dict(), many.state_dict()
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert torch.equal(t, whole(theirs[name])), name


def trained(one: Any, many: Any, bare: Any, inputs: Any) -> None:
    """Steps with statistics of batches, and then with frozen ones: on equal data the bits are those of one process."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (one, many)]
    for optimizer, model in zip(optimizers, (one, bare), strict=True):
        nn.advance_after(optimizer, model)
    for step in range(4):
        if step == 2:
            nn.freeze_statistics_(one)
            nn.freeze_statistics_(bare)
        x = inputs(step)
        assert torch.equal(backward_of(one, x), backward_of(many, x)), step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_states_equal(one, bare)


def data_parallel(mesh: Any, rank: int) -> None:
    for name in SCHEMES:
        one, bare = built(name), built(name)
        trained(one, DistributedDataParallel(bare), bare, images)


def of_own_data(mesh: Any, rank: int) -> None:
    """Each process has a batch, and statistics of its own, as nn.BatchNorm2d has: gradients are the mean of theirs.
    The running statistics of process 0 are those of all."""
    bare = built("INT8_DYNAMIC")
    many = DistributedDataParallel(bare)
    alone = [copy.deepcopy(bare) for _ in range(mesh.size())]
    want = [backward_of(model, images(other)) for other, model in enumerate(alone)]
    assert torch.equal(backward_of(many, images(rank)), want[rank])
    for got, *parts in zip(bare.parameters(), *(m.parameters() for m in alone), strict=True):
        mean = torch.stack([p.grad for p in parts]).mean(0)
        torch.testing.assert_close(got.grad, mean, rtol=1e-5, atol=1e-6 * float(mean.abs().max()))
    many(images(7))  # which begins with the buffers of process 0
    alone[0](images(7))
    for got, theirs in zip(bare.buffers(), alone[0].buffers(), strict=True):
        assert torch.equal(got, theirs)


def fully_sharded(mesh: Any, rank: int) -> None:
    for name in SCHEMES:
        one, many = built(name), built(name)
        for layer in many:
            if isinstance(layer, nn.Layer):
                fully_shard(layer, mesh=mesh)
        trained(one, many, fully_shard(many, mesh=mesh), images)


@pytest.mark.full
class TestProcesses(unittest.TestCase):
    def test_data_parallel(self):
        run(data_parallel, 2)

    def test_data_parallel_on_data_of_their_own(self):
        run(of_own_data, 2)

    def test_fully_sharded(self):
        run(fully_sharded, 2)
