"""A decoder's blocks, quantized by torchao, and how ExecuTorch's Vulkan partitioner cuts their programs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """SwiGLU behind a norm, and a residual."""

    def __init__(self, size: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.norm = RMSNorm(size)
        self.gate, self.up = (nn.Linear(size, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder() -> nn.Module:
    """Two blocks and a head: seven linear layers."""
    return nn.Sequential(Block(), Block(), nn.Linear(64, 32, bias=False)).eval()


def quantized(model: nn.Module, config: str) -> nn.Module:
    """By torchao, "4w" or "8da4w", in the dtype that it is in."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    if config == "4w":
        quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    else:
        own = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
        quantize_(model, own)
    return model


def partitions(program: Any) -> tuple[int, list[str]]:
    """How many delegates its program has, and what is left outside of them."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(program, partitioner=[VulkanPartitioner()])
    names = [str(n.target) for n in edge.exported_program().graph.nodes if n.op == "call_function"]
    delegates = [n for n in names if "executorch_call_delegate" in n]
    return len(delegates), [n for n in names if n not in delegates and "getitem" not in n]
