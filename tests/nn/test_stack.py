"""The checksums of native/tests/stack.cpp, which runs on other CPUs: those of the reference in plain ATen."""

import re
from pathlib import Path

import torch
from torch import Tensor

import hop
from tests import levels

aten = torch.ops.aten
F32 = torch.float32
SOURCE = Path(__file__).parents[2] / "native/tests/stack.cpp"
ROWS, WIDTH, INNER, HEADS = 7, 64, 160, 4


def numbers(count: int, state: list[int]) -> Tensor:
    made = []
    for _ in range(count):
        state[0] = (state[0] * 6364136223846793005 + 1442695040888963407) % 2**64
        made.append(((state[0] >> 40) - 2**23) / 2**22)
    return torch.tensor(made)


def checksum(x: Tensor) -> int:
    """FNV-1a."""
    found = 14695981039346656037
    for byte in x.contiguous().numpy().tobytes():
        found = (found ^ byte) * 1099511628211 % 2**64
    return found


def stack() -> list[int]:
    state = [2024]
    x = numbers(ROWS * WIDTH, state).view(ROWS, WIDTH)
    first = hop.quantize(hop.presets.INT8_ROW, numbers(INNER * WIDTH, state).view(INNER, WIDTH))
    second = hop.quantize(hop.presets.INT8_ROW, numbers(WIDTH * INNER, state).view(WIDTH, INNER))
    bias, gain, shift = numbers(INNER, state), numbers(WIDTH, state), numbers(WIDTH, state)
    codes = hop.quantize(hop.presets.INT8_ROW, x)
    found = [checksum(codes.buffers()["codes"]) ^ checksum(codes.buffers()["scale"])]
    y = hop.scaled(aten.linear.default, F32, codes, first, bias) / 4
    found.append(checksum(y))
    y = hop.scaled(aten.gelu.default, F32, y)
    found.append(checksum(y))
    y = hop.scaled(aten.linear.default, F32, hop.quantize(hop.presets.INT8_ROW, y), second, shift) + x
    found.append(checksum(y))
    y = hop.scaled(aten.layer_norm.default, F32, y, [WIDTH], gain, shift, 1e-5)
    found.append(checksum(y))
    heads = hop.quantize(hop.presets.INT8_ROW, y.view(1, ROWS, HEADS, -1).transpose(1, 2).contiguous())
    attention = aten.scaled_dot_product_attention.default
    y = hop.scaled(attention, F32, heads, heads, heads, None, 0.0, True, scale=0.25).reshape(ROWS, WIDTH)
    found.append(checksum(y))
    return [*found, *(checksum(hop.scaled(op, F32, y, -1)) for op in (aten.softmax.int, aten.log_softmax.int))]


def test_checksums() -> None:
    (text,) = re.findall(r"kWanted\[\] = \{(.*?)\};", SOURCE.read_text(), re.DOTALL)
    wanted = [int(word) for word in re.findall(r"\d+", text)]
    with levels.at("off"):
        assert stack() == wanted
    assert stack() == wanted
