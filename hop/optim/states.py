"""The quantizers of an optimizer's states."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hop.impls.quantize import dequantize, quantize
from hop.numerics.presets import STATE4, STATE4_UNSIGNED, STATE8, STATE8_UNSIGNED, STATE_FP8
from hop.numerics.quantizer import Quantizer
from hop.numerics.rule import LARGEST
from hop.numerics.spelling import VERSION, shown
from hop.tensor import QuantizedTensor

SIGNED = ("exp_avg", "momentum_buffer")
UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")  # means of squares
STATES = SIGNED + UNSIGNED

States = Mapping[str, Quantizer | None]


def _of(signed: Quantizer, unsigned: Quantizer) -> dict[str, Quantizer | None]:
    return {**dict.fromkeys(SIGNED, signed), **dict.fromkeys(UNSIGNED, unsigned)}


BITS8 = _of(STATE8, STATE8_UNSIGNED)
BITS4 = _of(STATE4, STATE4_UNSIGNED)
FP8 = _of(STATE_FP8, STATE_FP8)
BITS8_FP8 = _of(STATE8, STATE_FP8)


_SPELLED = f"hop{VERSION}:"


def spelled(name: str, state: Quantizer | States | None) -> dict[str, str]:
    """The text of the quantizer of each quantized state, stored in the param group and saved with it."""
    if state is None:
        return {}
    if isinstance(state, Quantizer):
        state = dict.fromkeys(STATES, state)
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name}: state must be a Quantizer, a mapping from names of states to quantizers, or None; got "
            f"{shown(state)}; use for example hop.optim.BITS8"
        )
    result: dict[str, str] = {}
    for key, q in state.items():
        if key not in STATES:
            raise ValueError(
                f"{name}: the keys of state must be names of states, got {key!r}; use one of {', '.join(STATES)}"
            )
        if isinstance(q, str) and q.startswith(_SPELLED):  # from a saved group
            q = quantizer(q)
        if q is not None and not isinstance(q, Quantizer):
            raise TypeError(
                f"{name}: state[{key!r}] must be a Quantizer or None, got {shown(q)}; use for example "
                "hop.presets.STATE8"
            )
        if q is not None and (q.is_random() or q.scale.missing() is not None):
            raise ValueError(
                f"{name}: state[{key!r}] must compute its scale and round to the nearest value, got {q}; use for "
                "example hop.optim.BITS8"
            )
        if q is not None:
            result[key] = str(q)
    return result


@functools.cache
def quantizer(text: str) -> Quantizer:
    return Quantizer.parse(text)


@functools.cache
def least_part(text: str) -> float:
    """The smallest value above 0 that a quantizer's format represents, as a fraction of its largest.

    Returns 0.0 for blocks that are not flat, and for scale rules other than Amax.

    A mean of squares above 0 is stored as at least this fraction of its block's maximum (see `raised`). Smaller values
    would become 0, and the step, which divides by the square root, would be as large as the mean of gradients over eps.
    """
    q = quantizer(text)
    if not q.flat or q.scale.amax_floor is None:
        return 0.0
    zero = q.format.zero
    return min(n - zero for n in q.format.numbers if n > zero) / (q.format.max - zero)


def bounded(q: Quantizer, x: Tensor) -> Tensor:
    """x, in float32, with infinities as the largest floats, and 0 for NaN unless the format has one: so that neither
    becomes the scale of a block of states."""
    x = x.clamp(-LARGEST, LARGEST)
    return x if q.format.has_nan else torch.where(x == x, x, 0.0)


def raised(text: str, x: Tensor) -> Tensor:
    """Raise values of a float32 tensor above 0 to at least `least_part` of their block's maximum."""
    part, q = least_part(text), quantizer(text)
    if not part:
        return x
    (block,) = q.block
    count = x.numel()
    magnitudes = x.abs().reshape(-1)
    magnitudes = torch.where(magnitudes.isnan(), 0.0, magnitudes)
    magnitudes = torch.nn.functional.pad(magnitudes, (0, -count % block)).reshape(-1, block)
    lowest = magnitudes.amax(1).clamp(q.scale.amax_floor, LARGEST) * part
    lowest = lowest.repeat_interleave(block)[:count].reshape(x.shape)
    return torch.where((x > 0) & (x < lowest), lowest, x)


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process stores."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_placed(x: Tensor, p: Tensor) -> bool:
    """Whether this process stores the same part of x as of p."""
    if isinstance(x, DTensor) and isinstance(p, DTensor):
        return x.device_mesh == p.device_mesh and x.placements == p.placements
    return isinstance(x, DTensor) == isinstance(p, DTensor)


def _part(x: Tensor, p: Tensor) -> Tensor:
    """The part of x that corresponds to this process's part of p, dequantized.

    If x is placed differently from p, which all processes then know, its values are communicated rather than its codes:
    blocks of one part are not blocks of another.
    """
    own = local(x)
    own = dequantize(own, p.dtype) if isinstance(own, QuantizedTensor) else own.clone()
    if is_placed(x, p):
        return own
    if isinstance(x, DTensor):
        own = DTensor.from_local(own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
        own = own.full_tensor()
    if isinstance(p, DTensor):
        own = distribute_tensor(own, p.device_mesh, p.placements, src_data_rank=None).to_local()
    return own


def fresh(p: Tensor, q: Quantizer | None, like: Tensor | None = None) -> Tensor:
    """Create a state of a parameter: zeros, or the values of `like`, with the parameter's dtype and placement."""
    if like is None:
        own = torch.zeros_like(local(p), memory_format=torch.preserve_format, requires_grad=False)
    else:
        own = _part(like, p).to(dtype=p.dtype, device=p.device)
    if q is not None:
        own = quantize(q, bounded(q, own.to(torch.float32)).to(own.dtype))
    if not isinstance(p, DTensor):
        return own
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
