"""Which states of an optimizer are quantized, and by what."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hop.impls.quantize import quantize
from hop.leaves import dequantize
from hop.presets import STATE4, STATE4_UNSIGNED, STATE8, STATE8_UNSIGNED, STATE_FP8
from hop.quantizer import Quantizer
from hop.tensor import QuantizedTensor

SIGNED = ("exp_avg", "momentum_buffer")
UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")  # of squares
STATES = SIGNED + UNSIGNED

States = Mapping[str, Quantizer | None]


def _of(signed: Quantizer, unsigned: Quantizer) -> dict[str, Quantizer | None]:
    return {**dict.fromkeys(SIGNED, signed), **dict.fromkeys(UNSIGNED, unsigned)}


BITS8 = _of(STATE8, STATE8_UNSIGNED)
BITS4 = _of(STATE4, STATE4_UNSIGNED)
FP8 = _of(STATE_FP8, STATE_FP8)
BITS8_FP8 = _of(STATE8, STATE_FP8)


def spelled(name: str, state: Quantizer | States | None) -> dict[str, str]:
    """The spelling of the quantizer of each state that has one: what a param group holds, which is saved with it."""
    if state is None:
        return {}
    if isinstance(state, Quantizer):
        state = dict.fromkeys(STATES, state)
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name}: state must be a hop.Quantizer, a mapping from names of states to quantizers, such as "
            f"hop.optim.BITS8, or None; got {type(state).__name__}"
        )
    found = {}
    for key, q in state.items():
        if key not in STATES:
            raise ValueError(f"{name}: state has the key {key!r}; the names of states are {', '.join(STATES)}")
        if isinstance(q, str):  # of a group that was saved
            q = quantizer(q)
        if q is not None and not isinstance(q, Quantizer):
            raise TypeError(f"{name}: state[{key!r}] must be a hop.Quantizer or None, got {type(q).__name__}")
        if q is not None:
            found[key] = str(q)
    return found


@functools.cache
def quantizer(text: str) -> Quantizer:
    return Quantizer.parse(text)


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return x.to_local() if isinstance(x, DTensor) else x


def fresh(p: Tensor, q: Quantizer | None, like: Tensor | None = None) -> Tensor:
    """A state of a parameter: zeros, or the numbers of `like`, in the dtype and the placement of the parameter."""
    if like is None:
        own = torch.zeros_like(local(p), memory_format=torch.preserve_format, requires_grad=False)
    else:
        own = local(like)
        own = dequantize(own, p.dtype) if isinstance(own, QuantizedTensor) else own.clone()
        own = own.to(dtype=p.dtype, device=p.device)
    if q is not None:
        own = quantize(q, own)
    if not isinstance(p, DTensor):
        return own
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
