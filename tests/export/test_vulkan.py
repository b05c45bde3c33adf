"""How ExecuTorch's Vulkan partitioner cuts programs, which needs no device: casts cost no delegates, and the size
constraints of a cache stay with its slices."""

import copy
import unittest

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

from hop.export import follow_dtype, to_executorch
from tests.support.executorch_support import MARKS
from tests.support.vulkan_models import decoder, partitions, quantized

pytestmark = MARKS


class TestCasts(unittest.TestCase):
    @parameterized.expand([("4w",), ("8da4w",)])
    @pytest.mark.full
    @pytest.mark.sampled(2)
    def test_cast_afterwards_as_never_cast(self, config):
        x = torch.randn(4, 64)
        model = decoder()
        after = quantized(copy.deepcopy(model).bfloat16(), config).float()
        never = partitions(torch.export.export(quantized(model, config), (x,)))
        program = torch.export.export(after, (x,))
        with pytest.raises(Exception, match="mismatched dtypes"):
            partitions(program)
        count, outside = partitions(follow_dtype(program))
        assert count <= never[0] and not [name for name in outside if "dequantize" in name]
        assert outside == never[1]


class Cache(nn.Module):
    """Keys that a step writes at a position, which is an input, and reads up to it."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64, bias=False)
        self.keys = nn.Buffer(torch.zeros(1, 16, 64))
        self.reads = reads

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        start, n = position.item(), x.shape[1]
        torch._check(start >= 0)
        torch._check(start + n <= 16)
        y = self.project(x)
        self.keys.narrow(1, start, n).copy_(y)
        length = 16 if self.reads == "all" else start + n
        keys = self.keys.narrow(1, 0, length)
        return torch.softmax(y @ keys.transpose(1, 2), -1) @ keys


class TestCache(unittest.TestCase):
    @parameterized.expand([(f"{c}_{r}", c, r) for c in ("float", "4w", "8da4w") for r in ("all", "written")])
    @pytest.mark.full
    @pytest.mark.sampled(6)
    def test_partitions(self, _name, config, reads):
        """Cut, traced again by each of ExecuTorch's passes, and written."""
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

        model = Cache(reads).eval()
        model = model if config == "float" else quantized(model, config)
        program = torch.export.export(model, (torch.randn(1, 3, 64), torch.tensor(2)))
        made = to_executorch(program, partitioners=[VulkanPartitioner()])
        nodes = [n for n in made.exported_program().graph.nodes if n.op == "call_function"]
        assert any("executorch_call_delegate" in str(n.target) for n in nodes)
        assert len(made.buffer) > 1000
