"""Row operations between products on the CPU in C++: computed, and cast or quantized, in one pass (native/rows/)."""

import struct
from dataclasses import dataclass

import torch

from hop.dispatch.kernel import Declined
from hop.kernels.cpu.quantizers import check_shape, describe
from hop.numerics import blocks
from hop.numerics.quantizer import Quantizer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operation:
    """The computation on each row.

    Args:
        name: function, gated, layer_norm, rms_norm, softmax, log_softmax or hadamard.
        function: the function, for function and gated.
        number: eps, a slope, or a block size.
        sums: how many trailing dimensions form one row of an operation that sums rows.
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
    """Describe the call for native code; `check_output` must have accepted the output.

    With `floats`, results in this dtype precede the codes, which are computed from them.
    """
    if isinstance(output, torch.dtype):
        return f"{operation.words} result={str(output).removeprefix('torch.')}"
    also = "" if floats is None else f" floats={str(floats).removeprefix('torch.')}"
    return f"{operation.words}{also} quantizer {describe(str(output)).words.removeprefix('1 ')}"


def check_output(operation: Operation, output: torch.dtype | Quantizer, shape: tuple[int, ...], given: bool) -> None:
    """Raise Declined unless native code supports this output for rows of a tensor of `shape`.

    `given` says whether the output's scale is given.
    """
    if isinstance(output, torch.dtype):
        if output not in FLOATS:
            raise Declined(f"returns float32, bfloat16 and float16, not {output}")
        return
    describe(str(output))
    if output.flat:
        raise Declined("for blocks of dimensions, not flat ones")
    convention = output.scale.requantization
    if convention is not None and (convention.low, convention.high) != (None, None):
        raise Declined("the fused activation's range would have to be clamped first")
    check_shape(str(output), shape, shape[-1] if operation.sums and shape else 0)
    sizes = blocks.per_dimension(output.block, len(shape))
    in_rows = all(b == 1 or n == 1 for b, n in zip(sizes[:-1], shape[:-1], strict=True))
    if not (in_rows or output.scale.is_static):
        raise Declined(f"for given scales, or scales of a row or less, not of blocks of {output.block}")
    outer = output.scale.outer_block
    if outer is not None and all(b == -1 for b in outer) and not given:
        raise Declined("the amax of the whole tensor is needed before its codes")
