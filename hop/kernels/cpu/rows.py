"""Rows between products on the CPU, in C++: computed, and cast or quantized, in one pass (native/rows/)."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hop.kernels.cpu.quantizers import declines_shape, describe
from hop.numerics import blocks
from hop.numerics.quantizer import Quantizer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operation:
    """What is computed of each row.

    name: function, gated, layer_norm, rms_norm, softmax, log_softmax or hadamard.
    function: of function and gated.
    number: eps, a slope, or the size of blocks.
    sums: the last dimensions that are one row of what sums rows.
    """

    name: str
    function: str | None = None
    number: float | None = None
    sums: int = 0

    @property
    def words(self) -> str:
        bits = None if self.number is None else struct.unpack("q", struct.pack("d", self.number))[0]
        named = {"function": self.function, "number": bits, "sums": self.sums or None}
        return " ".join(["1", self.name, *(f"{name}={value}" for name, value in named.items() if value is not None)])


def description(operation: Operation, output: torch.dtype | Quantizer, floats: torch.dtype | None = None) -> str:
    """What the kernels are told; `declines_output` has let the output through. With `floats`, results in this dtype
    come before the codes, which are theirs."""
    if isinstance(output, torch.dtype):
        return f"{operation.words} result={str(output).removeprefix('torch.')}"
    known = describe(str(output))
    assert not isinstance(known, str)
    also = "" if floats is None else f" floats={str(floats).removeprefix('torch.')}"
    return f"{operation.words}{also} quantizer {known.words.removeprefix('1 ')}"


def declines_output(
    operation: Operation, output: torch.dtype | Quantizer, shape: Sequence[int], given: bool
) -> str | None:
    """Why the kernels do not give such an output for rows of a tensor of `shape`; `given` says whether it has a
    scale."""
    if isinstance(output, torch.dtype):
        return None if output in FLOATS else f"gives float32, bfloat16 and float16, not {output}"
    known = describe(str(output))
    if isinstance(known, str):
        return known
    if output.flat:
        return "for blocks of dimensions, not flat ones"
    convention = output.scale.requantization
    if convention is not None and (convention.low, convention.high) != (None, None):
        return "a range of an activation is clamped before"
    last = shape[-1] if operation.sums and shape else 0
    if (reason := declines_shape(str(output), tuple(shape), last)) is not None:
        return reason
    sizes = blocks.per_dimension(output.block, len(shape))
    in_rows = all(b == 1 or n == 1 for b, n in zip(sizes[:-1], shape[:-1], strict=True))
    if not (in_rows or output.scale.is_static):
        return f"a scale is that of a row or of less, or given, not that of a block of {output.block}"
    outer = output.scale.outer_block
    if outer is not None and all(b == -1 for b in outer) and not given:
        return "the amax of the whole tensor comes before its codes"
    return None
