"""Check that a state_dict fits an optimizer, before anything changes."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.optim.states import local
from hop.tensor import QuantizedTensor

_WHOLE = "must have 'state' and 'param_groups'"
_GIVE = "pass what an optimizer's state_dict() returns"
_FRESH = "load the state of the same kind of optimizer, or start with fresh states"


def check_whole(name: str, state_dict: object) -> None:
    """Raise if `state_dict` is not the state_dict of an optimizer."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{name}: state_dict {_WHOLE}, got {shown(state_dict)}; {_GIVE}")
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"{name}: state_dict {_WHOLE}, got {list(state_dict)}; {_GIVE}")


def check_group(name: str, number: int, group: Mapping[str, object], options: Sequence[str]) -> None:
    """Raise if a saved param group lacks one of the `options` of this optimizer."""
    missing = [option for option in options if option not in group]
    if missing:
        raise ValueError(
            f"{name}: state_dict: param group {number} has no {missing[0]!r}, only {sorted(map(str, group))}: it is "
            f"from another optimizer; {_FRESH}"
        )


def check_state(
    name: str,
    number: object,
    p: Tensor,
    state: Mapping[str, object],
    quantizers: Mapping[str, Quantizer | None],
    anew: bool,
) -> None:
    """Raise unless the saved states of a parameter are those that this optimizer keeps.

    Args:
        number: the parameter's number in the state_dict.
        p: the parameter.
        quantizers: the quantizer of each state of this optimizer; None for floats.
        anew: whether states with other quantizers may be requantized.
    """
    where = f"{name}: state_dict: parameter {number}"
    given = {key: x for key, x in state.items() if x is not None}
    for key in [k for k in given if k not in (*quantizers, "step")] or [k for k in quantizers if k not in given]:
        what = f"the state {key!r}" if key in given else f"no state {key!r}"
        raise ValueError(
            f"{where} has {what}; its states must be {', '.join(map(repr, quantizers)) or 'none'}, and are "
            f"{', '.join(map(repr, given)) or 'none'}: they are from another optimizer; {_FRESH}"
        )
    for key, q in quantizers.items():
        _check_tensor(f"{where}: {key}", p, given[key], q, anew)
    step = given.get("step", 0)
    if not (isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)):
        raise ValueError(f"{where}: step must be a number, got {shown(step)}; {_FRESH}")


def _check_tensor(where: str, p: Tensor, x: object, q: Quantizer | None, anew: bool) -> None:
    if not isinstance(x, Tensor) or type(x).__module__.startswith("torchao."):
        remedy = "load_torchao_state" if isinstance(x, Tensor) else "load_state_dict with tensors"
        raise TypeError(f"{where} must be a tensor or a QuantizedTensor, got {type(x).__name__}; use {remedy}")
    held = local(x)
    if type(held).__module__.startswith("torchao."):
        raise TypeError(f"{where} must consist of tensors, got {type(held).__name__}; use load_torchao_state")
    if x.shape != p.shape or not x.is_floating_point():
        raise ValueError(
            f"{where} must be a float tensor of the parameter's shape {tuple(p.shape)}, got {x.dtype} of shape "
            f"{tuple(x.shape)}; {_FRESH}"
        )
    found = held.quantizer if isinstance(held, QuantizedTensor) else None
    if found is not None and q is not None and found != q and not anew:
        raise ValueError(
            f"{where} is quantized by {found}, and this optimizer has {q}; call load_state_dict(..., requantize=True) "
            "to requantize it, or create the optimizer with the saved state's quantizers"
        )
