"""Random bits from a seed: Philox4x32-10, on every route and level of instructions."""

import unittest

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop.tensor.buffers.noise import noise_operator
from tests import levels

# Counter, key and result of the reference implementation's known-answer tests (Random123, kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in exact integers."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def expected(seed: int, stream: int, count: int) -> bytes:
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = [w for block in range(-(-count // 16)) for w in philox((block, 0, stream, 0), key)]
    return b"".join(w.to_bytes(4, "little") for w in words)[:count]


class TestNoise(unittest.TestCase):
    def test_the_oracle_is_philox(self):
        for counter, key, result in KNOWN:
            assert philox(counter, key) == result

    @parameterized.expand([(0, 0), (1, 5), (2**62 + 12345, 2**32 - 1), (-1, 7), (-(2**63), 1)])
    def test_equals_philox(self, seed, stream):
        want = expected(seed, stream, 16 * 37 + 5)
        for made in (
            hop.noise(torch.tensor(seed), (16 * 37 + 5,), stream=stream, bits=8),
            noise_operator.reference(torch.tensor(seed), stream, [16 * 37 + 5]),
        ):
            assert bytes(made.tolist()) == want

    def test_24_bits_are_three_bytes_of_a_block(self):
        own = expected(5, 6, 16 * 4)
        at = [(i - i % 16, i % 16) for i in range(16 * 4 - 7)]
        want = [own[b + k] << 16 | own[b + (k + 4) % 16] << 8 | own[b + (k + 9) % 16] for b, k in at]
        assert hop.noise(torch.tensor(5), (16 * 4 - 7,), stream=6).tolist() == want

    @parameterized.expand([(level,) for level in (*levels.OWN, "off")])
    def test_levels(self, level):
        for shape in ((), (0,), (1,), (17, 31), (3, 0, 2), (40, 50, 33), (2, 100_003)):
            for bits, dtype in ((8, torch.uint8), (24, torch.int32)):
                want = noise_operator.reference(torch.tensor(99), 3, list(shape), bits)
                with levels.at(level):
                    got = hop.noise(torch.tensor(99), shape, stream=3, bits=bits)
                assert got.shape == shape and got.dtype == dtype and got.is_contiguous()
                assert torch.equal(got, want), (level, shape)

    def test_shape_does_not_matter(self):
        flat = hop.noise(torch.tensor(1), (120,))
        assert torch.equal(hop.noise(torch.tensor(1), (4, 5, 6)).flatten(), flat)
        assert torch.equal(hop.noise(torch.tensor(1), (50,)), flat[:50])

    def test_uniform_and_independent(self):
        """Every value equally often, up to 5 deviations of chi-square; streams and seeds without correlation."""
        n = 2**20
        named = ((0, 0), (0, 1), (1, 0), (2**32, 0))
        draws = [hop.noise(torch.tensor(s), (n,), stream=t, bits=8).numpy() for s, t in named]
        wide = hop.noise(torch.tensor(3), (n,))
        draws += [wide.bitwise_right_shift(shift).bitwise_and(255).numpy() for shift in (16, 8, 0)]
        for x in draws:
            chi = ((np.bincount(x, minlength=256) - n / 256) ** 2 / (n / 256)).sum()
            assert abs(chi - 255) < 5 * np.sqrt(2 * 255), chi
        for i, x in enumerate(draws):
            for y in draws[:i]:
                assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(n)

    def test_errors(self):
        good = torch.tensor(1)
        for seed, stream, message in (
            (1, 0, r"seed must be an int64 tensor of shape \(\), got 1"),
            (torch.tensor(1.0), 0, r"seed must be an int64 tensor of shape \(\), got a tensor of torch.float32"),
            (
                torch.tensor([1]),
                0,
                r"seed must be an int64 tensor of shape \(\), got a tensor of torch.int64 and shape \(1,\)",
            ),
            (good, -1, "stream must be an integer from 0"),
            (good, 2**32, "stream must be an integer from 0"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                hop.noise(seed, (3,), stream=stream)

    @pytest.mark.compiler
    @pytest.mark.full
    def test_in_a_program(self):
        def f(seed, x):
            return hop.noise(seed, x.shape, stream=2)

        x, seed = torch.zeros(5, 33), torch.tensor(77)
        want = f(seed, x)
        for backend, dynamic in (("aot_eager", None), ("inductor", None), ("inductor", True)):
            torch._dynamo.reset()
            got = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)(seed, x)
            assert torch.equal(got, want)
        program = _exported(f, seed, x)
        assert torch.equal(program.module()(seed, x), want)
        low = program.run_decompositions(hop.decompositions())
        targets = [n.target for n in low.graph.nodes if n.op == "call_function"]
        assert all(torch.Tag.core in t.tags for t in targets)
        assert torch.equal(low.module()(seed, x), want)


def _exported(f, *args):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return f(*inputs)

    return torch.export.export(Module(), args)
