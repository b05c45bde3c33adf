"""Row operations quantized on a GPU in one kernel: norms, elementwise functions and gated products (quantize.py)."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.dispatch.kernel import Declined, decline
from hop.kernels.gpu.product import takes
from hop.kernels.gpu.quantize import check, described, kernels, matrix_of, request, shaped
from hop.numerics import copies, memory_format
from hop.numerics.quantizer import Quantizer

if TYPE_CHECKING:
    from cutlass_kernels.quantizing import Request

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORMS = ("rms_norm", "layer_norm")
_FUNCTIONS = ("silu", "gelu", "gelu_tanh")


class Rows(NamedTuple):
    """A row operation and its quantizer.

    `eps` is for norms; weight and bias are of the last dimension, `other` is a second factor of x's shape; scale and
    zero point are None unless given.
    """

    operation: str
    eps: float
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    other: Tensor | None
    quantizer: Quantizer
    scale: Tensor | None
    zero_point: Tensor | None


def check_rows(rows: Rows) -> None:
    """Raise Declined unless a kernel supports the operation, judged by dtypes, shapes and strides."""
    if not takes(rows.x):
        raise Declined("for tensors on GPUs, in eager mode and in programs compiled for this process")
    if rows.operation not in (*_NORMS, *_FUNCTIONS):
        raise Declined(f"for {', '.join((*_NORMS, *_FUNCTIONS))}, not {rows.operation}")
    shape = tracing.hints(rows.x.shape)
    if shape is None or 0 in shape or not shape:
        raise Declined(f"for non-empty tensors of known sizes, not of {shape}")
    if rows.other is not None and tracing.hints(rows.other.shape) != shape:
        raise Declined(f"for two factors of one shape, not {shape} and {tuple(rows.other.shape)}")
    for name, t in (("x", rows.x), ("weight", rows.weight), ("bias", rows.bias), ("other", rows.other)):
        if t is not None and (t.dtype not in _DTYPES or t.is_neg() or memory_format.is_channels_last(t)):
            raise Declined(f"{name} is not float32, bfloat16 or float16, or is channels_last or a negated view")
    if (convention := rows.quantizer.scale.requantization) is not None and (
        (convention.low, convention.high) != (None, None)
    ):
        raise Declined("the fused activation's range would have to be clamped first")
    check(request_of(rows), rows.x.device)


def request_of(rows: Rows) -> "Request":
    """The request to the kernels. Raises Declined if it cannot be expressed."""
    q, x = rows.quantizer, rows.x
    words = described(str(q), rows.scale is not None)
    if rows.scale is None:
        decline(q.scale.missing())
    size, block = matrix_of(q, x.shape)
    if rows.operation in _NORMS and size[1] != x.shape[-1]:
        raise Declined(f"for blocks of the norm's dimension, the last one, not {q.block} of {tuple(x.shape)}")
    others: dict[str, object] = {n: t for n, t in (("weight", rows.weight), ("bias", rows.bias)) if t is not None}
    if rows.other is not None:
        others["other"] = rows.other.reshape(size)
    given = (rows.scale, rows.zero_point, None)
    return request(q, x.reshape(size), block, words, given, operation=rows.operation, eps=rows.eps, **others)


def run(rows: Rows) -> list[Tensor]:
    """Compute the buffers of the quantized results."""
    return shaped(rows.quantizer, rows.x.shape, (copies.ROWWISE,), kernels().quantized(request_of(rows)))
