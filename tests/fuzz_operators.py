"""Random calls of the native operators themselves, with damaged arguments: each raises, or returns tensors; one
whose arguments are whole returns what plain ATen makes of them. In this process: one line for each that does not.

    python -m tests.fuzz_operators --first 0 --count 1000 [--report FILE]

Tensors end where a page begins that must not be touched, as in tests/fuzz.py.
"""

import argparse
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hop
from hop import presets as P
from hop.kernels import native, native_noise
from hop.kernels.native_quantizers import Plan, plan
from tests.fuzz import SANE, guarded

Rng = random.Random
Call = tuple[str, list[Any], Callable[[], Any]]  # the operator, its arguments, and what it is to give

QUANTIZERS = (
    *(P.INT8_ROW, P.INT8_ROW_AFFINE, P.UINT8_TENSOR_AFFINE, P.INT4_32, P.UINT4_32_AFFINE, P.FP8_ROW, P.MXFP8, P.NVFP4),
    *(P.STATE4, P.STATE8, P.FP8_128X128, P.TERNARY_TENSOR),
)


def codes(rng: Rng, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def numbers(rng: Rng, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def size(rng: Rng, most: int = 70) -> int:
    return rng.choice((1, 2, 3, 16, 31, 32, 33, 64, rng.randrange(1, most)))


def product(rng: Rng) -> Call:
    m, n, k = size(rng), size(rng), size(rng)
    a, b, left, right = codes(rng, m, k), codes(rng, n, k), numbers(rng, m, 1).abs(), numbers(rng, n, 1).abs()
    words = "1 lhs int8 scale=1,-1 rhs int8{} scale=1,-1 output float32"
    tiles = rng.random() < 0.5
    rhs = torch.ops.hop_native.pack(b, "1 lhs int8 rhs int8") if tiles else b
    bias = numbers(rng, n) if rng.random() < 0.5 else None
    args = [a, left, None, None, rhs, right, None, None, bias, None, None, n, words.format(" tiled" if tiles else "")]

    def want() -> Tensor:
        y = (a.double() @ b.double().t()).float() * left * right.t()
        return y if bias is None else y + bias

    return "product", args, want


def convolution(rng: Rng) -> Call:
    groups = rng.choice((1, 1, 2))
    n, c, o, h, w, k = size(rng, 3), groups * size(rng, 5), groups * size(rng, 5), 5, 7, rng.choice((1, 3))
    x, weight = codes(rng, n, c, h, w), codes(rng, o, c // groups, k, k)
    s, t = numbers(rng, 1, 1, 1, 1).abs(), numbers(rng, o, 1, 1, 1).abs()
    words = (
        f"1 x int8 zero=0 weight int8 kernel={k},{k} stride=1,1 before=1,1 after=1,1 dilation=1,1 groups={groups} "
        "output float32"
    )

    def want() -> Tensor:
        sums = torch.nn.functional.conv2d(x.double(), weight.double(), None, 1, 1, 1, groups).float()
        return sums * s * t.view(1, -1, 1, 1)

    return "convolution", [x, s, None, weight, t, None, None, None, o, words], want


def quantize(rng: Rng) -> Call:
    q, x = rng.choice(QUANTIZERS), numbers(rng, size(rng), 2 * size(rng))
    found = plan(str(q))
    assert isinstance(found, Plan)

    def want() -> list[Tensor]:
        with native.use("off"):
            return list(hop.quantize(q, x).buffers().values())

    return "quantize", [x, None, None, None, found.words], want


def quantize_product(rng: Rng) -> Call:
    q, x = rng.choice((P.INT8_ROW, P.FP8_ROW, P.MXFP8)), numbers(rng, size(rng), 2 * size(rng))
    factor, found = numbers(rng, 1, x.shape[1]), plan(str(q))
    assert isinstance(found, Plan)

    def want() -> list[Tensor]:
        with native.use("off"):
            return list(hop.quantize(q, x * factor).buffers().values())

    return "quantize_product", [x, factor, None, -1, found.words], want


def dequantize(rng: Rng) -> Call:
    q, x = rng.choice(QUANTIZERS), numbers(rng, size(rng), 2 * size(rng))
    t, found = hop.quantize(q, x), plan(str(q))
    assert isinstance(found, Plan)

    def want() -> Tensor:
        with native.use("off"):
            return hop.dequantize(t)

    own = [*t.buffers().values(), None][:3]
    return "dequantize", [*own, list(x.shape), found.back(torch.float32)], want


def pack(rng: Rng) -> Call:
    b = codes(rng, size(rng), size(rng))

    def want() -> Tensor:
        rows, k = b.shape
        whole = torch.nn.functional.pad(b, (0, -k % 64, 0, -rows % 32))
        tiles = whole.reshape(-(-rows // 32), 2, 16, -(-k // 64), 16, 4).permute(0, 3, 1, 4, 2, 5)
        return tiles.reshape(-(-rows // 32), -(-k // 64), 2, 16, 64)

    return "pack", [b, "1 lhs int8 rhs int8"], want


def noise(rng: Rng) -> Call:
    seed, shape, stream = torch.tensor(rng.randrange(2**60)), [size(rng), size(rng)], rng.randrange(9)

    def want() -> Any:
        return native_noise.NOISE.run((seed, stream, shape))

    return "noise", [seed, shape, stream], want


def step(rng: Rng) -> Call:
    count = 64 * size(rng)
    p, grad, momentum = numbers(rng, count), numbers(rng, count), numbers(rng, count)
    want = [p.clone(), momentum.clone()]

    def after() -> None:
        assert all(torch.isfinite(x).all() for x in (p, momentum)) and not torch.equal(want[1], momentum)

    args = [p, grad, [momentum], [0.1, 0.9, 0.99, 0.0, *[0.1] * 5], 0, 0, "1 lion least=0;"]
    return "step_", args, after


CALLS = (product, product, convolution, quantize, quantize_product, dequantize, pack, noise, step)


# ---- damage


def damaged_tensor(rng: Rng, x: Tensor) -> Any:
    kind = rng.randrange(10)
    if kind == 0:
        return x.to(rng.choice((torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8, torch.complex64)))
    if kind == 1 and x.dim():
        return x[..., :-1]
    if kind == 2:
        return x.unsqueeze(rng.randrange(x.dim() + 1))
    if kind == 3:
        return x.to("meta")
    if kind == 4 and x.numel():
        x = x.clone()
        x.untyped_storage().resize_(rng.randrange(x.untyped_storage().nbytes()))
        return x
    if kind == 5:
        return x.new_empty(rng.choice(((0,), (), (0, 3), (2, 0), (1, 1, 1, 1, 1, 1, 1))))
    if kind == 6 and x.dim():
        return torch.cat([x, x], rng.randrange(x.dim()))
    if kind == 7:
        return x.mT if x.dim() > 1 else x
    if kind == 8:
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x
    return x.expand(2, *x.shape)


def damaged_text(rng: Rng, text: str) -> str:
    kind, words = rng.randrange(7), text.split(" ")
    at = rng.randrange(len(words))
    if kind == 0:
        return text[: rng.randrange(len(text))]
    if kind == 1:
        return " ".join(words[:at] + words[at + 1 :])
    if kind == 2:
        name = words[at].partition("=")[0]
        big = rng.choice(
            ("0", "-1", "-7", "1", "2", "3", "255", "65536", "2147483648", "9223372036854775807", "9" * 30, "", "x")
        )
        return " ".join([*words[:at], f"{name}={big}", *words[at + 1 :]])
    if kind == 3:
        i = rng.randrange(len(text))
        return text[:i] + chr(rng.randrange(1, 256)) + text[i + 1 :]
    if kind == 4:
        other = rng.choice(
            ("tiled", "columns", "zero=stored", "zero=5", "scale=1,32", "block_scale=e8m0:1,32", "affine=1", "flat")
        )
        return " ".join([*words[:at], other, *words[at:]])
    if kind == 5:
        formats = ("int8", "uint8", "int4", "uint4", "e2m1", "e4m3", "e5m2", "float32", "bfloat16", "float16", "int32")
        named = [i for i, word in enumerate(words) if word in formats]
        if named:
            words[rng.choice(named)] = rng.choice(formats)
        return " ".join(words)
    return text + rng.choice((" ", ";", " ;1", " output", " output int8 scale=-1 low=-128 high=127 zero=0"))


def damaged(rng: Rng, x: Any) -> Any:
    if isinstance(x, Tensor):
        return damaged_tensor(rng, x) if rng.random() < 0.9 else None
    if isinstance(x, str):
        return damaged_text(rng, x)
    if isinstance(x, bool | int):
        return rng.choice((x + 1, x - 1, 0, -1, 2**31, 2**62, -(2**62), 2 * x))
    if isinstance(x, list):
        if not x:
            return x
        at = rng.randrange(len(x))
        return rng.choice(([*x[:at], damaged(rng, x[at]), *x[at + 1 :]], x[:at], [*x, x[at]]))
    if isinstance(x, float):
        return rng.choice((float("inf"), float("nan"), -x, 1e300))
    return numbers(rng, rng.randrange(1, 5)) if x is None else x


def broken(seed: int) -> str | None:
    """How the call with this seed breaks the rule, or None."""
    rng = Rng(seed)
    name, args, want = rng.choice(CALLS)(rng)
    damages = rng.choice((0, 1, 1, 1, 2, 3))
    for _ in range(damages):
        at = rng.randrange(len(args))
        args[at] = damaged(rng, args[at])
    if rng.random() < 0.5 and name != "step_":
        args = [guarded(x) if is_plain(x) else x for x in args]
    try:
        got = getattr(torch.ops.hop_native, name).default(*args)
    except SANE as e:
        return None if damages else f"seed {seed}: {name}{words(args)} raises {type(e).__name__}: {e}"
    if damages:
        return None
    expected = want()
    pairs = zip(got, expected, strict=True) if isinstance(got, list) else [(got, expected)]
    if all(x is y is None or (x.dtype == y.dtype and near(x, y)) for x, y in pairs):
        return None
    return f"seed {seed}: {name}{words(args)} gives {got}, not {expected}"


def near(x: Tensor, y: Tensor) -> bool:
    """Equal, but for the rounding of a bias that is added to scaled sums."""
    if x.dtype != torch.float32:
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    return x.shape == y.shape and torch.allclose(
        x, y, rtol=2**-21, atol=1e-6 * float(y.abs().amax()) if y.numel() else 0
    )


def is_plain(x: Any) -> bool:
    whole = isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() > 0 and x.is_contiguous()
    return whole and x.untyped_storage().nbytes() >= x.nbytes


def words(args: list[Any]) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in args]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    native.library()
    for seed in range(given.first, given.first + given.count):
        if given.report:
            given.report.write_text(str(seed))
        if (found := broken(seed)) is not None:
            print(found, flush=True)
    print(f"{given.count} calls from seed {given.first}")


if __name__ == "__main__":
    main()
