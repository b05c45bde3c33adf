"""Which weights of a state_dict quantized layers take: codes of their own quantizer. Floats, and codes of other
quantizers, they take from hop.nn.load_state_dict(..., requantize=True) alone."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from hop.compat import dtensor
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_requantizes: ContextVar[bool] = ContextVar("requantizes", default=False)


def check_loaded(key: str, frozen: bool, q: Quantizer | None, new: Any, assigns: bool) -> None:
    """Raise RuntimeError for a weight of a state_dict that means something else than the layer's own.

    Args:
        key: of the weight in the state_dict.
        frozen: whether the layer's own is codes.
        q: by which it is, or would be, quantized; None for floats.
        new: the weight of the state_dict.
        assigns: whether it takes the place of the layer's own."""
    part = dtensor.own_part(new)
    found = part.quantizer.plain if isinstance(part, QuantizedTensor) else None
    if _requantizes.get() or found == q or (not frozen and (found is None or not assigns)):
        return
    what = f"floats of {part.dtype}" if found is None else f"codes of {found}"
    own = "floats" if q is None else f"{'frozen ' * frozen}codes of {q}"
    raise RuntimeError(
        f"load_state_dict: {key!r} holds {what}, and the layer has {own}; load the state of a model that was quantized "
        "alike, or call hop.nn.load_state_dict(model, state_dict, requantize=True) to quantize it anew"
    )


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    requantize: bool = False,
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """As model.load_state_dict, for models with quantized layers.

    Args:
        requantize: whether frozen layers quantize floats, and codes of other quantizers, by their own: for codes a
            second rounding. Otherwise such weights are refused, as model.load_state_dict refuses them.
        strict, assign: as model.load_state_dict has them.

    Returns:
        What model.load_state_dict returns.

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
