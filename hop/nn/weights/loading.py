"""Check that a state_dict's weights have the quantizer of the layer.

hop.nn.load_state_dict(..., requantize=True) also accepts floats, and codes of other quantizers.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from hop.compat import dtensor
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_requantizes: ContextVar[bool] = ContextVar("requantizes", default=False)


def check_loaded(key: str, frozen: bool, q: Quantizer | None, new: object, assigns: bool) -> None:
    """Raise RuntimeError for a state_dict's weight that is quantized differently from the layer's.

    Args:
        key: the weight's key in the state_dict.
        frozen: whether the layer's weight is quantized.
        q: the quantizer that it has, or would get; None for floats.
        new: the state_dict's weight.
        assigns: whether it replaces the layer's weight rather than being copied into it.
    """
    part = dtensor.own_part(new)
    found = part.quantizer.plain if isinstance(part, QuantizedTensor) else None
    if _requantizes.get() or found == q or (not frozen and (found is None or not assigns)):
        return
    what = f"floats of {part.dtype}" if found is None else f"codes of {found}"
    own = "floats" if q is None else f"{'frozen ' * frozen}codes of {q}"
    raise RuntimeError(
        f"load_state_dict: {key!r} holds {what}, and the layer has {own}; load the state of a model quantized "
        "in the same way, or call hop.nn.load_state_dict(model, state_dict, requantize=True) to quantize it anew"
    )


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, object],
    *,
    requantize: bool = False,
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """Call model.load_state_dict for a model with quantized layers.

    Args:
        requantize: whether frozen layers quantize float weights, and requantize codes of other quantizers, which rounds
            those a second time. If False such weights raise RuntimeError, as in model.load_state_dict.
        strict, assign: as for model.load_state_dict.

    Returns:
        The result of model.load_state_dict.

    Raises:
        RuntimeError: as model.load_state_dict.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_state_dict: model must be a torch.nn.Module, got {model!r}; give the model first")
    if not isinstance(requantize, bool):
        raise TypeError(f"load_state_dict: requantize must be True or False, got {requantize!r}; give one of them")
    token = _requantizes.set(requantize)
    try:
        return model.load_state_dict(state_dict, strict=strict, assign=assign)
    finally:
        _requantizes.reset(token)
