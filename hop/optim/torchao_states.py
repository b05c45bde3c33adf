"""Load states of the optimizers of torchao.optim, which contain the same codes and scales.

    OptimState8bit   codes of the parameter's shape       scale, one for each block     qmap, the codebook
    OptimState4bit   two codes a byte, the first high     the same                      the same
    OptimStateFp8    codes in e4m3                        the same                      -

torchao itself is not imported: whoever holds its states has imported it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hop.compat.pytree import StateDict
from hop.numerics.presets import STATE4, STATE4_UNSIGNED, STATE8, STATE8_UNSIGNED, STATE_FP8
from hop.numerics.quantizer import Quantizer
from hop.optim.optimizer import Optimizer
from hop.tensor import QuantizedTensor

_QUANTIZERS: dict[str, dict[bool, Quantizer]] = {
    "OptimState8bit": {True: STATE8, False: STATE8_UNSIGNED},
    "OptimState4bit": {True: STATE4, False: STATE4_UNSIGNED},
    "OptimStateFp8": {True: STATE_FP8},
}


def load_torchao_state(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Load the states and options of an optimizer of torchao.optim with the same parameters.

    Codes and scales are kept bit for bit where this optimizer has the same quantizer for a state: AdamW8bit of either
    library, AdamW4bit, AdamWFp8. Other states, such as those with another block size, are requantized. To keep them,
    create the optimizer with `state` quantizers of that block size, such as dataclasses.replace(hop.presets.STATE4,
    block=(256,)). Nothing is shared with `state_dict`.

    Args:
        optimizer: an optimizer of hop.optim, such as AdamW8bit.
        state_dict: what the other optimizer's state_dict() returns, possibly loaded by torch.load.

    Raises:
        TypeError: `optimizer` is not from hop.optim, or a state has an unknown type.
        ValueError: `state_dict` is not an optimizer's, or has other param groups than `optimizer`; or a codebook
            differs from torchao's.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"load_torchao_state: optimizer must be one of hop.optim, got {type(optimizer).__name__}; create "
            "for example hop.optim.AdamW8bit"
        )
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"load_torchao_state: state_dict must be an optimizer's, with 'state' and 'param_groups'; got {keys}; "
            "pass what an optimizer's state_dict() returns"
        )
    states = {
        number: {name: _converted(f"state {name!r} of parameter {number}", x) for name, x in state.items()}
        for number, state in state_dict["state"].items()
    }
    given = [dict(group) for group in state_dict["param_groups"]]
    # load_state_dict compares the numbers of groups
    for group, own in zip(given, optimizer.param_groups, strict=False):
        if not isinstance(own["lr"], Tensor):  # torchao converts any lr to a tensor
            group |= {key: float(group[key]) for key in ("lr", "initial_lr") if key in group}
    optimizer.load_state_dict({"state": states, "param_groups": given}, requantize=True)


def _converted(where: str, x: object) -> object:
    if isinstance(x, DTensor):
        local = _converted(where, x.to_local())
        assert isinstance(local, Tensor)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    if not isinstance(x, Tensor) or type(x) is Tensor:
        return x
    name = type(x).__name__
    if name not in _QUANTIZERS:
        raise TypeError(f"{where} must be a tensor, or one of {', '.join(_QUANTIZERS)}; got {name}")
    return _quantized(where, x, _QUANTIZERS[name][getattr(x, "signed", True)])


def _quantized(where: str, x: Any, quantizer: Quantizer) -> Tensor:
    quantizer, codes = dataclasses.replace(quantizer, block=(x.block_size,)), x.codes
    if quantizer.format.is_codebook:
        numbers = torch.tensor(quantizer.format.numbers, dtype=torch.float32)
        if not torch.equal(x.qmap.cpu(), numbers):
            raise ValueError(
                f"{where}: its codebook is not that of {quantizer.format.name}; dequantize it, and load the values "
                "with load_state_dict"
            )
    if quantizer.per_byte() == 2:  # in this library the first code is in the low half
        codes = (codes >> 4) | (codes << 4)
    return QuantizedTensor({"codes": codes, "scale": x.scale}, quantizer, x.shape, x.dtype)
