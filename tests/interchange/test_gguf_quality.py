"""The error of GGUF's quantizers: at most that of the package gguf, and of llama.cpp for types that it alone writes."""

import unittest
from typing import Any

import numpy as np
import torch
from parameterized import parameterized

import hop
from hop.interchange import gguf_quantizer
from hop.interchange.gguf_types import TYPES
from tests.interchange.test_gguf import WRITTEN, gguf

# The rms error of llama.cpp's quantizers, without weights of importance, on `numbers()` "normal" and "heavy": from
# ggml_quantize_chunk of the library in llama-cpp-python 0.3.36.
LLAMA = {
    "Q2_K": (0.29656, 0.48513),
    "Q3_K": (0.14988, 0.26042),
    "Q4_K": (0.070959, 0.12254),
    "Q5_K": (0.035887, 0.062023),
    "Q6_K": (0.017575, 0.03236),
    "IQ4_NL": (0.075577, 0.13167),
    "IQ4_XS": (0.076155, 0.1329),
    "NVFP4": (0.095312, 0.12935),
}


def numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((64, 1024), np.float32)
    heavy = rng.standard_t(4, (64, 1024)).astype(np.float32)
    return {"normal": normal, "heavy": heavy, "positive": np.abs(normal) + 5, "negative": -np.abs(heavy) - 1}


def rms(y: Any, x: np.ndarray) -> float:
    return float(np.sqrt(np.square(np.asarray(y, np.float64) - x).mean()))


def own_error(name: str, x: np.ndarray) -> float:
    return rms(hop.fake_quantize(gguf_quantizer(name), torch.from_numpy(x)).numpy(), x)


class TestQuality(unittest.TestCase):
    def test_every_type(self):
        assert {*WRITTEN, *LLAMA} == {t.name for t in TYPES.values()}

    @parameterized.expand(WRITTEN)
    def test_as_gguf(self, name):
        """On numbers around 0, with heavy tails, and on either side of 0."""
        package = gguf()
        kind = package.GGMLQuantizationType[name]
        for what, x in numbers().items():
            other = rms(package.quants.dequantize(package.quants.quantize(x, kind), kind), x)
            assert own_error(name, x) <= other, (what, own_error(name, x), other)

    @parameterized.expand([(name, *errors) for name, errors in LLAMA.items()])
    def test_as_llama(self, name, normal, heavy):
        tried = numbers()
        assert own_error(name, tried["normal"]) < normal and own_error(name, tried["heavy"]) < heavy

    @parameterized.expand(["Q4_1", "Q5_1"])
    def test_offsets(self, name):
        """The minimum of a block away from 0 is its own: the error does not depend on where the block is."""
        x = torch.rand(16, 512, generator=torch.Generator().manual_seed(0))
        near, far = (own_error(name, (x + at).numpy()) for at in (0, 5))
        assert far < 1.1 * near

    @parameterized.expand(["TQ1_0", "TQ2_0"])
    def test_ternary_weights_stay(self, name):
        """Weights that were trained with three values, by one scale per tensor."""
        codes = torch.randint(-1, 2, (8, 512), generator=torch.Generator().manual_seed(0))
        for scale in (2.0**-6, 0.5, 1.0):
            assert own_error(name, (codes * scale).numpy()) == 0

    @parameterized.expand([(t.name,) for t in TYPES.values()])
    def test_zeros(self, name):
        assert own_error(name, np.zeros((2, 512), np.float32)) == 0
