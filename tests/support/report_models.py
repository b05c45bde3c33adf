"""Small models for tests of reports, float and quantized, and their inputs."""

import copy
import functools

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

import hop
import hop.nn
import hop.report
from hop.report.report import Report


class Block(nn.Module):
    """One layer of an encoder, as BERT has them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.norms[0](x + self.dense(found))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """A model with as many nodes as MiniLM and few parameters."""

    def __init__(self, layers: int = 6, size: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(100, size)
        self.layers = nn.ModuleList([Block(size) for _ in range(layers)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Small(nn.Module):
    """Two linear layers and the operators between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


IDS = (torch.arange(24).reshape(2, 12),)


@functools.cache
def small() -> tuple[ExportedProgram, tuple[torch.Tensor]]:
    """The program of Small, and inputs."""
    model = Small().eval()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    return torch.export.export(model, (x,)), (x,)


def quantized(model: nn.Module, rules: object = hop.schemes.INT8_DYNAMIC) -> nn.Module:
    """A copy with quantized layers and frozen weights."""
    model = copy.deepcopy(model)
    hop.nn.convert(model, rules)
    hop.nn.freeze(model)
    return model


@functools.cache
def encoders() -> tuple[ExportedProgram, ExportedProgram]:
    """The float encoder, and the one with int8 layers, each exported on its own."""
    model = Encoder().eval()
    with torch.no_grad():
        return torch.export.export(model, IDS), torch.export.export(quantized(model), IDS)


@functools.cache
def report() -> Report:
    """The report on the quantized encoder against the float one."""
    model, int8 = encoders()
    return hop.report.compare(int8, model, IDS, runs=1, name="encoder <b>&amp;")
