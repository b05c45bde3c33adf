"""Rows that are computed and quantized on a GPU in one kernel: norms of the last dimension, functions of elements and
gated products, by the operator that quantizes (quantize.py)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import tracing
from hop.kernels.gpu.product import takes
from hop.kernels.gpu.quantize import described, kernels, matrix_of, request, shaped
from hop.numerics import copies, memory_format
from hop.numerics.quantizer import Quantizer

if TYPE_CHECKING:
    from cutlass_kernels.quantizing import Request

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORMS = ("rms_norm", "layer_norm")
_FUNCTIONS = ("silu", "gelu", "gelu_tanh")


class Rows(NamedTuple):
    """What is computed and quantized: the name of the operation, the eps of norms, x, the weight and the bias of the
    last dimension, another factor of x's shape, and by which quantizer, with the scale and zero point if given."""

    operation: str
    eps: float
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    other: Tensor | None
    quantizer: Quantizer
    scale: Tensor | None
    zero_point: Tensor | None


def declines(rows: Rows) -> str | None:
    """Why no kernel takes them, by dtypes, shapes and strides alone; or None."""
    if not takes(rows.x):
        return "for tensors on GPUs, in eager mode and in programs that are compiled for this process"
    if rows.operation not in (*_NORMS, *_FUNCTIONS):
        return f"for {', '.join((*_NORMS, *_FUNCTIONS))}, not {rows.operation}"
    shape = tracing.hints(rows.x.shape)
    if shape is None or 0 in shape or not shape:
        return f"for tensors of known sizes that are not empty, not of {shape}"
    if rows.other is not None and tracing.hints(rows.other.shape) != shape:
        return f"for two factors of one shape, not {shape} and {tuple(rows.other.shape)}"
    for name, t in (("x", rows.x), ("weight", rows.weight), ("bias", rows.bias), ("other", rows.other)):
        if t is not None and (t.dtype not in _DTYPES or t.is_neg() or memory_format.is_channels_last(t)):
            return f"{name} is not float32, bfloat16 or float16, or lies channels last or negated"
    if (convention := rows.quantizer.scale.requantization) is not None and (
        (convention.low, convention.high) != (None, None)
    ):
        return "a range of an activation is clamped before"
    asked = _asked(rows)
    if isinstance(asked, str):
        return asked
    if not torch.cuda.is_available():
        return "there is no GPU"
    return kernels().declines(asked, torch.cuda.get_device_capability(rows.x.device))


def _asked(rows: Rows) -> "Request | str":
    q, x = rows.quantizer, rows.x
    words = described(str(q), rows.scale is not None)
    if isinstance(words, str):
        return words
    if rows.scale is None and (missing := q.scale.missing()) is not None:
        return missing
    found = matrix_of(q, x.shape)
    if isinstance(found, str):
        return found
    size, block = found
    if rows.operation in _NORMS and size[1] != x.shape[-1]:
        return f"for blocks of the last dimension, which is that of the norm, not {q.block} of {tuple(x.shape)}"
    others: dict[str, Any] = {n: t for n, t in (("weight", rows.weight), ("bias", rows.bias)) if t is not None}
    if rows.other is not None:
        others["other"] = rows.other.reshape(size)
    given = (rows.scale, rows.zero_point, None)
    return request(q, x.reshape(size), block, words, given, operation=rows.operation, eps=rows.eps, **others)


def run(rows: Rows) -> list[Tensor]:
    """The buffers of the quantized results."""
    asked = _asked(rows)
    assert not isinstance(asked, str)
    usages: Sequence[str] = (copies.ROWWISE,)
    return shaped(rows.quantizer, rows.x.shape, usages, kernels().quantized(asked))
