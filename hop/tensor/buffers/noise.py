"""Random bits for stochastic rounding, as a function of a seed: the same in eager mode, compiled, and on every device.

    hop_noise(seed, stream, shape, bits=8) -> uint8, or int32 for bits = 24

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): block number b of 16 bytes is

    philox(counter = (b mod 2^32, b div 2^32, stream, 0), key = (seed mod 2^32, seed div 2^32 mod 2^32))

with its four words in order, each from its lowest byte up. For 8 bits, element i of the tensor, in row-major order, is
byte k = i mod 16 of block i div 16. For 24 bits it is that byte, then bytes k + 4 and k + 9 (mod 16) of the same block,
from the highest: three different bytes, so each element is uniform. Elements share bytes, but the correlation of two
rounded values is below 1/256, because lower bytes matter only if the first one leaves a tie.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hop.compat import dynamo
from hop.compat.export import is_lowering
from hop.compat.pytree import Args, ArgsKwargs
from hop.dispatch.hop import Hop
from hop.dispatch.kernel import Kernel, decline
from hop.dispatch.plan import Plan
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.numerics import blocks
from hop.numerics.format import NOISE_BITS
from hop.numerics.spelling import shown

_MAKE = "make one with torch.tensor"
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key between rounds
_WORD = 2**32 - 1
_BLOCK = 16
_LOWER = (4, 9)  # distance of a number's lower bytes from its first


def _prepare(call: Args) -> Plan:
    """In C++, native/quantize/noise.cpp."""
    seed, _, shape, *_ = call
    decline(native.declines_here() or native.declines_tensor("seed", seed))
    native.sizes(shape)
    return lambda seed, stream, shape, *bits: native_operators.noise(seed, list(shape), stream, *bits)


_NATIVE = Kernel("native", _prepare, native=True)


class Noise(Hop[Tensor]):
    """The operator hop_noise."""

    def check(self, seed: Tensor, stream: int, shape: Sequence[int], bits: int = 8, /) -> ArgsKwargs:
        if not isinstance(seed, Tensor):
            raise TypeError(f"noise: seed must be an int64 tensor of shape (), got {shown(seed)}; {_MAKE}")
        if seed.dtype != torch.int64 or seed.dim():
            raise ValueError(f"noise: seed must be an int64 tensor of shape (), got {shown(seed)}; {_MAKE}")
        if isinstance(stream, bool) or not isinstance(stream, int | torch.SymInt) or not 0 <= stream <= _WORD:
            raise ValueError(f"noise: stream must be an integer from 0 to 2^32 - 1, got {stream!r}; give one such as 0")
        if bits not in (8, 24) or isinstance(bits, bool):
            raise ValueError(f"noise: bits must be 8 or 24, got {shown(bits)}; give one of them")
        # Programs have three operands for 8 bits.
        return (seed, stream, list(blocks.checked_shape("noise", shape)), *([bits] if bits != 8 else [])), {}

    def reference(self, seed: Tensor, stream: int, shape: Sequence[int], bits: int = 8, /) -> Tensor:
        count = 1
        for n in shape:
            count = count * n
        block = torch.arange((count + _BLOCK - 1) // _BLOCK, dtype=torch.int64, device=seed.device)
        words = [_low(block), _shifted(block, 32), torch.full_like(block, stream), torch.zeros_like(block)]
        key = [_low(seed), _low(_shifted(seed, 32))]
        for _ in range(_ROUNDS):
            (high0, low0), (high1, low1) = (_product(w, m) for w, m in zip(words[::2], _MULTIPLIERS, strict=True))
            words = [_xor(high1, words[1], key[0]), low1, _xor(high0, words[3], key[1]), low0]
            key = [_low(k + w) for k, w in zip(key, _WEYL, strict=True)]
        values = [_low(_shifted(word, 8 * i), 255) for word in words for i in range(4)]
        if bits == 24:
            second, third = (values[n:] + values[:n] for n in _LOWER)
            values = [a * 2**16 + b * 2**8 + c for a, b, c in zip(values, second, third, strict=True)]
        dtype = torch.uint8 if bits == 8 else torch.int32
        return torch.stack(values, -1).to(dtype).flatten()[:count].reshape(list(shape))

    def kernels(self, /, *args: object) -> Iterable[tuple[Kernel, Args]]:
        return ((_NATIVE, args),)


def _product(x: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of x · y, both below 2^32, computed in steps that fit 63 bits."""
    low = x * (y & 0xFFFF)
    middle = x * (y >> 16) + _shifted(low, 16)
    return _shifted(middle, 16), _low(middle, 0xFFFF) * 2**16 + _low(low, 0xFFFF)


def _low(x: Tensor, mask: int = _WORD) -> Tensor:
    return torch.bitwise_and(x, mask)  # a function, because DTensor's & does nothing inside a rule (torch 2.13)


def _xor(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.bitwise_xor(torch.bitwise_xor(x, y), z)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x div 2^bits, rounded down."""
    if is_lowering():  # core ATen has no shifts
        return torch.div(x, 2**bits, rounding_mode="floor")
    return x >> bits


noise_operator = Noise("hop_noise")


def noise(seed: Tensor, shape: Sequence[int], /, *, stream: int = 0, bits: int = NOISE_BITS) -> Tensor:
    """The random integers for rounding a tensor stochastically, as a function of a seed.

    Args:
        seed: int64 of shape ().
        shape: the shape of the tensor to be rounded.
        stream: 0 to 2^32 - 1: the streams of a seed are independent.
        bits: 24; or 8, which takes a quarter of the memory, but biases rounding by up to 1/256 of a gap
            (docs/numerics.md).

    Returns:
        int32, or uint8 for 8 bits, of `shape`, contiguous, on the seed's device: uniform from 0 to 2^bits - 1, the same
        for the same arguments on every device and route.
    """
    return noise_operator(seed, stream, shape, bits)


def drawn_noise(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`noise` of x's shape on its device, with a seed drawn from a generator, by default PyTorch's own."""
    seed = torch.randint(-(2**63), 2**63 - 1, (), device=x.device, generator=generator)
    return noise(seed, x.shape)


dynamo.allow_in_graph(noise)
