"""explain: which implementation computes a call."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hop.compat.eager import OpOverload, OpOverloadPacket
from hop.dispatch import plan
from hop.dispatch.hop import Hop
from hop.impls.out_dtype import explain as explain_out_dtype
from hop.impls.quantize import dequantize, fake_quantize, fake_quantize_operator, quantize, quantize_operator
from hop.impls.scaled import explain as explain_scaled
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.operators import dequantize_operator


def _of_quantize(
    q: Quantizer,
    x: Tensor,
    /,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    noise: Tensor | None = None,
    usages: str | Sequence[str] = (copies.ROWWISE,),
    gradient: str = "clipped",
) -> str:
    return quantize_operator.explain(str(q), x, scale, zero_point, noise, usages, gradient)


def _of_fake_quantize(
    q: Quantizer,
    x: Tensor,
    /,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    noise: Tensor | None = None,
    gradient: str = "clipped",
) -> str:
    return fake_quantize_operator.explain(str(q), x, scale, zero_point, noise, gradient)


EXPLAINED: dict[object, Callable[..., str]] = {
    quantize: _of_quantize,
    fake_quantize: _of_fake_quantize,
    dequantize: dequantize_operator.explain,
}
"""Further functions and operators of ours, with the function that explains a call of each."""


def explain(op: Any, output: Any, /, *args: object, **kwargs: object) -> str:
    """Explain which implementation computes a call, and why those before it declined.

    Args:
        op, output, args, kwargs: the arguments of `hop.scaled` if there is a QuantizedTensor among them or output is a
            Quantizer, else those of `hop.out_dtype`. Alternatively op is `hop.quantize`, `hop.fake_quantize`,
            `hop.dequantize`, `torch.ops.hop.stacked.default` (experts in compiled programs) or an operator of your own,
            an instance of `hop.dispatch.hop.Hop`, and the others are its arguments.

    Returns:
        One line for each kernel that was considered.

    Raises:
        The errors of the operator for these arguments.
    """
    if callable(op) and (other := EXPLAINED.get(op)) is not None:
        return other(output, *args, **kwargs)
    if isinstance(op, Hop):
        return op.explain(output, *args, **kwargs)
    if callable(op) and not isinstance(op, OpOverload | OpOverloadPacket):
        raise TypeError(
            f"explain: op must be an operator of ATen, one of hop's functions or an instance of Hop, got {shown(op)}; "
            "give the operator that it calls, such as torch.ops.aten.mm.default"
        )
    is_scaled = isinstance(output, Quantizer) or any(isinstance(x, QuantizedTensor) for x in plan.tensors(args, kwargs))
    explained: Callable[..., str] = explain_scaled if is_scaled else explain_out_dtype
    return explained(op, output, *args, **kwargs)
