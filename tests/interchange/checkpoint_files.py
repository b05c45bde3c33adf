"""Checkpoints that tests write, and read again."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import hop
from hop.interchange import open_checkpoint
from tests.support.files import InFolder

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is missing")


def assert_bits(got: Any, want: torch.Tensor) -> None:
    numbers = hop.dequantize(got)
    assert isinstance(got, hop.QuantizedTensor)
    assert numbers.shape == want.shape and numbers.dtype == want.dtype, (numbers, want)
    assert torch.equal(numbers, want) and torch.equal(numbers.signbit(), want.signbit())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).exp()


class InCheckpoint(InFolder):
    def written(self, config: Any, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> Any:
        held = {} if config is None else {"quantization_config": config}
        (self.folder / "config.json").write_text(json.dumps(held))
        safetensors.save_file({name: t.contiguous() for name, t in tensors.items()}, self.folder / file)
        return open_checkpoint(self.folder)

    def fails(self, config: Any, tensors: dict[str, torch.Tensor], message: str) -> None:
        with self.assertRaises(ValueError) as caught:
            dict(self.written(config, tensors))
        assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """(n, size) integers -> (n, words) int32, dense from the lowest bit: one integer of Python for each row."""
    rows = []
    for row in codes.tolist():
        total = sum(code << (bits * i) for i, code in enumerate(row))
        rows.append([(total >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return np.array(rows, dtype=np.uint32).view(np.int32)


def unpack_words(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The inverse, int64."""
    rows = []
    for row in np.ascontiguousarray(words).view(np.uint32).tolist():
        total = sum(word << (32 * i) for i, word in enumerate(row))
        rows.append([(total >> (bits * i)) & (2**bits - 1) for i in range(size)])
    return np.array(rows, dtype=np.int64)


def tensors_of(start: str, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {start + name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
