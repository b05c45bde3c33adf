"""StaticScale: a scale and zero point that are found from data and then stay, or are learned.

Gradients of learned ones are scaled by g = 1 / sqrt(N · qmax), with N elements that share the scale: Esser et al. 2020,
"Learned Step Size Quantization"; for zero points Bhalgat et al. 2020, "LSQ+".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hop.compat import dtensor
from hop.numerics.quantizer import Quantizer


class Float32State(nn.Module):
    """A module whose tensors stay float32 where a model is cast to another dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(moved, recurse)


class StaticScale(Float32State):
    """The scale, and for an affine quantizer the zero point, of one role of a layer.

    Args:
        quantizer: whose rule is hop.scale_rules.Static.
        shape: of both: that of the quantizer's buffers, or one that broadcasts to it.
        learn: whether they are Parameters, which must be positive and stay so, and not buffers.
        device: where they lie.

    They are NaN, and `ready` is False, until `set` or load_state_dict gives them.
    """

    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, quantizer: Quantizer, shape: Sequence[int], learn: bool, device: torch.device) -> None:
        super().__init__()
        self.spelling, self.qmax, self.learn, self.ready = str(quantizer), quantizer.format.max, learn, False
        self.by_layer = quantizer.gradient is None or quantizer.gradient.by_layer
        for name in ("scale", "zero_point"):
            is_stored = name == "scale" or quantizer.scale.has_zero_point()
            value = torch.full(tuple(shape), math.nan, device=device) if is_stored else None
            if learn:
                self.register_parameter(name, None if value is None else nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def set(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take other values. Raises ValueError if there is a zero point too many or too few, or a shape that does not
        broadcast."""
        if (zero_point is None) != (self.zero_point is None):
            raise ValueError(
                f"StaticScale.set: {self.spelling} "
                + ("has no zero point; leave zero_point out" if self.zero_point is None else "needs zero_point= too")
            )
        for name, own, given in (("scale", self.scale, scale), ("zero_point", self.zero_point, zero_point)):
            if own is None or given is None:
                continue
            try:
                given = given.expand(own.shape)
            except RuntimeError as error:
                raise ValueError(
                    f"StaticScale.set: {name} must broadcast to {tuple(own.shape)}, got {tuple(given.shape)}"
                ) from error
            with torch.no_grad():
                own.copy_(dtensor.alike(given, own))
        self._look()

    def become(self, quantizer: Quantizer) -> bool:
        """Serve another quantizer with the same tensors, if it has the same blocks and rule: numbers keep their range.
        Without a zero point the largest numbers of the two formats stand for one value, with one the least ones too.
        Returns whether."""
        old = Quantizer.parse(self.spelling)
        if (old.block, old.scale, old.flat) != (quantizer.block, quantizer.scale, quantizer.flat):
            return False
        before, after = old.format, quantizer.format
        with torch.no_grad():
            if self.zero_point is None:
                self.scale.mul_(before.max / after.max)
            else:
                by = (after.max - after.min) / (before.max - before.min)
                self.scale.div_(by)
                self.zero_point.sub_(before.min).mul_(by).add_(after.min)
        self.spelling, self.qmax = str(quantizer), after.max
        self.by_layer = quantizer.gradient is None or quantizer.gradient.by_layer
        return True

    def forward(self, sharing: float) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point; their gradients are scaled for `sharing` elements that share one."""
        if not self.learn:
            return self.scale, self.zero_point
        g = 1 / math.sqrt(max(sharing, 1) * self.qmax) if self.by_layer else 1.0
        return _scaled(self.scale, g), None if self.zero_point is None else _scaled(self.zero_point, g)

    def extra_repr(self) -> str:
        return f"{self.spelling}, shape={tuple(self.scale.shape)}, learn={self.learn}, ready={self.ready}"

    def _look(self) -> None:
        self.ready = not self.scale.is_meta and not bool(self.scale.isnan().any())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._look()


def _scaled(t: Tensor, g: float) -> Tensor:
    """t, to the bit, with g times its gradient."""
    return t.detach() + (t - t.detach()) * g
