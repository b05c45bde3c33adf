"""Load and write states of the 8-bit optimizers of bitsandbytes.

    state1, state2      uint8 codes of the parameter's shape, or float32 values of small parameters
    qmap1, qmap2        the values of the 256 codes: the dynamic map, signed or not, in all current versions
    absmax1, absmax2    the amax of each block of the flat tensor: of 256 elements, formerly 2,048
    step                an integer

state_dict() of newer versions nests all of them but the step, so that FSDP does not gather them. state1 is the mean of
gradients or the momentum, state2 the mean of squares. Source: bitsandbytes 0.50, its optim.optimizer and backends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hop.compat.pytree import StateDict
from hop.impls.quantize import dequantize, quantize
from hop.numerics.presets import STATE8, STATE8_UNSIGNED
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.optim.loading import check_whole
from hop.optim.optimizer import Optimizer
from hop.optim.optimizers import Adam
from hop.optim.states import UNSIGNED, bounded
from hop.tensor import QuantizedTensor

_NESTED = "__bnb_optimizer_quant_state__"
_BLOCKS = (256, 2048)
_PARTS = ("state", "qmap", "absmax")
_OF_ADEMAMIX = ("alpha", "t_alpha", "t_beta3")  # options of all its groups with two states, None or 0 otherwise

_LOAD, _WRITE = "load_bitsandbytes_state", "bitsandbytes_state"


def load_bitsandbytes_state(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Load the states and options of an optimizer of bitsandbytes.optim with the same parameters.

    Adam, AdamW, SGD and Lion, of 8 or 32 bits, paged or not, are loaded by the optimizer of the same name. Codes and
    scales are kept bit for bit where this optimizer has the same quantizer for a state: that of hop.optim.BITS8. Other
    states are dequantized to float32 and quantized by this optimizer's quantizers: those in blocks of 2,048, which
    older versions wrote, and those with other maps. To keep blocks of 2,048, create the optimizer with `state`
    quantizers such as dataclasses.replace(hop.presets.STATE8, block=(2048,)). Nothing is shared with `state_dict`.

    bitsandbytes decouples weight decay in Adam, too, and ignores SGD's dampening and nesterov. One-state optimizers
    write equal files: RMSprop's and Adagrad's cannot be told from SGD's, and must not be loaded.

    Args:
        optimizer: an optimizer of hop.optim, such as AdamW8bit.
        state_dict: what the other optimizer's state_dict() returns, possibly loaded by torch.load.

    Raises:
        TypeError: `optimizer` is not from hop.optim, or a state is not a tensor.
        ValueError: `state_dict` is not such an optimizer's, has other param groups than `optimizer`, or states of
            another rule. Nothing has changed then.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{_LOAD}: optimizer must be one of hop.optim, got {type(optimizer).__name__}; create for example "
            "hop.optim.AdamW8bit"
        )
    check_whole(_LOAD, state_dict)
    groups: list[dict[str, object]] = []
    names: dict[object, Sequence[str]] = {}
    for number, saved in enumerate(state_dict["param_groups"]):
        own = optimizer.param_groups[min(number, len(optimizer.param_groups) - 1)]  # load_state_dict compares numbers
        groups.append(_options(optimizer, number, saved, bool(own.get("decoupled_weight_decay", True))))
        names |= dict.fromkeys(saved["params"], optimizer._names({**own, **groups[-1]}))
    states: dict[object, dict[str, object]] = {}
    for number, state in state_dict["state"].items():
        if number not in names:
            raise ValueError(
                f"{_LOAD}: state_dict: parameter {shown(number)} is in no param group; pass what state_dict() returns"
            )
        states[number] = _states(f"{_LOAD}: state_dict: parameter {number}", state, names[number])
    optimizer.load_state_dict({"state": states, "param_groups": groups}, requantize=True)


def _options(optimizer: Optimizer, number: int, saved: object, decoupled: bool) -> StateDict:
    """The options of a param group under the names of `optimizer`."""
    where = f"{_LOAD}: state_dict: param group {number}"
    if not isinstance(saved, Mapping) or not {"lr", "betas", "weight_decay", "params"} <= set(saved):
        raise ValueError(
            f"{where} must have lr, betas, weight_decay and params, got {shown(saved)}; pass the state of an optimizer "
            "of bitsandbytes"
        )
    group = {k: v for k, v in saved.items() if k not in (*_OF_ADEMAMIX, "eps", "betas")}
    betas = saved["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(
            f"{where}: betas must be two numbers, got {shown(betas)}; three are AdEMAMix's, which has no counterpart: "
            "start with fresh states"
        )
    if "momentum" in optimizer.defaults:
        return {**group, "momentum": betas[0], "dampening": 0.0, "nesterov": False}
    if isinstance(optimizer, Adam) and not decoupled and saved["weight_decay"]:
        raise ValueError(
            f"{where}: weight_decay is {shown(saved['weight_decay'])}, which bitsandbytes decouples, and this "
            "optimizer adds to gradients; create hop.optim.AdamW, or Adam(decoupled_weight_decay=True)"
        )
    return {**group, "betas": tuple(betas)} | {k: saved[k] for k in ("eps",) if k in saved}


def _states(where: str, saved: object, names: Sequence[str]) -> StateDict:
    """The states of a parameter under the names of this library."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{where}: its states must be a mapping, got {shown(saved)}; pass what state_dict() returns")
    state = dict(saved)
    nested = state.pop(_NESTED, {})
    state |= nested if isinstance(nested, Mapping) else {_NESTED: nested}
    known = {f"{part}{i}" for part in _PARTS for i in range(1, len(names) + 1)} | {"step"}
    if unknown := [key for key in state if key not in known]:
        raise ValueError(
            f"{where} has {shown(unknown[0])}, and those that are loaded are {', '.join(sorted(known))}: 'max1' is of "
            "states with a scale for the whole tensor (block_wise=False), 'unorm_vec' of LAMB or LARS, 'gnorm_vec' of "
            "percentile clipping; remove it if the rest fits this optimizer, or start with fresh states"
        )
    result: dict[str, object] = {}
    for i, name in enumerate(names, 1):
        if f"state{i}" in state:  # load_state_dict compares the names
            result[name] = _state(f"{where}: ", str(i), *(state.get(f"{part}{i}") for part in _PARTS))
    return result | {k: state[k] for k in ("step",) if k in state}


def _state(where: str, i: str, codes: Any, book: Any, absmax: Any) -> Tensor:
    """One state: codes as a QuantizedTensor if this library has their map, otherwise values in float32."""
    tensors = {"state": codes, "qmap": book, "absmax": absmax}
    for part, x in tensors.items():
        if (x is not None or part == "state") and type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{where}{part}{i} must be a plain tensor, got {type(x).__name__}; gather it first if it is a DTensor"
            )
    if codes.dtype != torch.uint8:
        return codes  # load_state_dict checks it
    for part, x in tensors.items():
        if x is None:
            raise ValueError(f"{where}state{i} has codes, which need its {part}{i}; save the whole state")
    count = codes.numel()
    blocks = [b for b in _BLOCKS if absmax.shape == (-(-count // b),)]
    if absmax.dtype != torch.float32 or not blocks:
        raise ValueError(
            f"{where}absmax{i} must be float32, one for each block of {' or '.join(map(str, _BLOCKS))} of "
            f"{count} elements, got {absmax.dtype} of shape {tuple(absmax.shape)}; save the state again"
        )
    if not bool(((absmax >= 0) & absmax.isfinite()).all()):
        raise ValueError(
            f"{where}absmax{i} must be finite and at least 0, got values from {float(absmax.min())} to "
            f"{float(absmax.max())}; start with fresh states"
        )
    if book.dtype != torch.float32 or book.shape != (256,) or not bool(book.isfinite().all()):
        raise ValueError(
            f"{where}qmap{i} must be 256 finite values in float32, got {book.dtype} of shape {tuple(book.shape)}; save "
            "the state again"
        )
    for q in (STATE8, STATE8_UNSIGNED):
        if torch.equal(book.detach().cpu(), torch.tensor(q.format.numbers, dtype=torch.float32)):
            q = replace(q, block=blocks[:1])
            return QuantizedTensor({"codes": codes, "scale": absmax}, q, tuple(codes.shape), torch.float32)
    scales = absmax.repeat_interleave(blocks[0])[:count].reshape(codes.shape)
    return book[codes.to(torch.int64)] * scales


# ---- writing


def bitsandbytes_state(optimizer: Optimizer) -> StateDict:
    """The states and options of an optimizer as a state_dict that the optimizer of the same name of bitsandbytes loads.

        bnb.optim.AdamW8bit(model.parameters()).load_state_dict(hop.optim.bitsandbytes_state(optimizer))

    Codes and scales of hop.optim.BITS8 are kept bit for bit; states of other quantizers are dequantized to float32 and
    quantized by BITS8, floats become float32. Tensors are copies.

    Args:
        optimizer: AdamW, SGD or Lion of hop.optim, or Adam if its weight decay is decoupled or 0.

    Raises:
        TypeError: `optimizer` is not from hop.optim, or its states are DTensors.
        ValueError: an option has no equivalent: amsgrad, maximize, dampening, nesterov, coupled weight decay of Adam.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{_WRITE}: optimizer must be one of hop.optim, got {type(optimizer).__name__}; create for example "
            "hop.optim.AdamW8bit"
        )
    groups: list[StateDict] = []
    for number, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize", "dampening", "nesterov"):
            if group.get(option):
                raise ValueError(
                    f"{_WRITE}: param group {number}: {option} must be off, as bitsandbytes has none, got "
                    f"{shown(group[option])}; start its optimizer with fresh states"
                )
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            raise ValueError(
                f"{_WRITE}: param group {number}: weight_decay must be decoupled or 0, as in bitsandbytes, got "
                f"{shown(group['weight_decay'])} added to gradients; start its optimizer with fresh states"
            )
        betas = group["betas"] if "betas" in group else (group["momentum"], 0.0)
        options = {key: float(group[key]) if key in group else 0.0 for key in ("lr", "eps", "weight_decay")}
        groups.append(options | {"betas": tuple(map(float, betas)), "alpha": 0.0, "t_alpha": None, "t_beta3": None})
    saved = optimizer.state_dict()
    for group, own in zip(groups, saved["param_groups"], strict=True):
        group["params"] = own["params"]
    return {
        "state": {number: _written(number, state) for number, state in saved["state"].items()},
        "param_groups": groups,
    }


def _written(number: int, state: StateDict) -> StateDict:
    """The states of a parameter under the names of bitsandbytes."""
    result: StateDict = {"step": int(state["step"])}
    for i, (name, x) in enumerate(((k, v) for k, v in state.items() if k != "step"), 1):
        if type(x) not in (Tensor, QuantizedTensor):
            raise TypeError(
                f"{_WRITE}: parameter {number}: {name} must not be distributed, got {type(x).__name__}; gather it"
            )
        if not isinstance(x, QuantizedTensor):
            result[f"state{i}"] = x.detach().to(torch.float32, copy=True)
            continue
        q: Quantizer = STATE8_UNSIGNED if name in UNSIGNED else STATE8
        held = x if x.quantizer == q else quantize(q, bounded(q, dequantize(x, torch.float32)))
        buffers = held.buffers()
        result |= {
            f"state{i}": buffers["codes"].reshape(x.shape).clone(),
            f"qmap{i}": torch.tensor(q.format.numbers, dtype=torch.float32, device=x.device),
            f"absmax{i}": buffers["scale"].reshape(-1).clone(),
        }
    return result
