"""Batches of quantized tensors by PyTorch's DataLoader, and stacks into a tensor that is given."""

import unittest

import torch
from parameterized import parameterized
from torch.utils.data import DataLoader, Dataset

import hop

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))


class Rows(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> torch.Tensor:
        return hop.quantize(hop.presets.INT8_ROW, X[i : i + 1])


class TestCollation(unittest.TestCase):
    @parameterized.expand([(0,), (1,)])
    def test_workers(self, workers):
        """A worker's batches have the codes and scales that this process's have."""
        for k, batch in enumerate(DataLoader(Rows(), batch_size=2, num_workers=workers)):
            assert isinstance(batch, hop.QuantizedTensor)
            want = torch.stack([hop.quantize(hop.presets.INT8_ROW, X[i : i + 1]) for i in (2 * k, 2 * k + 1)])
            assert torch.equal(batch.codes, want.codes) and torch.equal(batch.scale, want.scale)
            assert batch.quantizer == want.quantizer

    def test_given_result(self):
        """The numbers are written to a plain tensor, and quantized into a quantized one."""
        a, b = (hop.quantize(hop.presets.INT8_ROW, x) for x in (X, -X))
        for function, shape in ((torch.stack, (2, 6, 32)), (torch.cat, (12, 32))):
            out = torch.empty(shape)
            assert function([a, b], out=out) is out
            assert torch.equal(out, function([hop.dequantize(a), hop.dequantize(b)]))
        out = hop.quantize(hop.presets.INT8_ROW, torch.zeros(12, 32))
        torch.cat([a, b], out=out)
        assert torch.equal(out.codes, torch.cat([a.codes, b.codes]))
