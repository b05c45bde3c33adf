"""StaticScale: a scale and zero point that are found from data once, or learned.

Gradients of learned scales are multiplied by g = 1 / sqrt(N · qmax), where N elements share the scale: Esser et al.
2020, "Learned Step Size Quantization". For zero points: Bhalgat et al. 2020, "LSQ+".
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hop.compat import dtensor
from hop.numerics.quantizer import Quantizer


class Float32State(nn.Module):
    """A module whose tensors stay float32 when a model is cast to another dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(moved, recurse)


class StaticScale(Float32State):
    """The static scale, and zero point of an affine quantizer, for one role of a layer.

    They are NaN, and `ready` is False, until `set` or load_state_dict provides values.

    Args:
        quantizer: a quantizer with the rule hop.scale_rules.Static.
        shape: the shape of scale and zero point: that of the quantizer's buffers, or one that broadcasts to it.
        learn: whether they are Parameters rather than buffers. Learned scales must be positive and stay so.
        device: their device.
    """

    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, quantizer: Quantizer, shape: Sequence[int], learn: bool, device: torch.device) -> None:
        super().__init__()
        self.spelling, self.qmax, self.learn, self.ready = str(quantizer), quantizer.format.max, learn, False
        self.by_layer = quantizer.gradient is None or quantizer.gradient.by_layer
        for name in ("scale", "zero_point"):
            is_stored = name == "scale" or quantizer.scale.has_zero_point()
            value = torch.full(tuple(shape), math.nan, dtype=torch.float32, device=device) if is_stored else None
            if learn:
                self.register_parameter(name, None if value is None else nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def set(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Set new values.

        Raises:
            ValueError: the zero point is missing or superfluous, or a shape does not broadcast.
        """
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
        self.update_ready()

    def become(self, quantizer: Quantizer) -> bool:
        """Convert scale and zero point for another quantizer with the same blocks and rule, and return whether that
        worked.

        The range of representable values stays the same: its largest value, and with a zero point its smallest value
        too.
        """
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
        """The scale and zero point, with gradients scaled for `sharing` elements that share one scale."""
        if not self.learn:
            return self.scale, self.zero_point
        g = 1 / math.sqrt(max(sharing, 1) * self.qmax) if self.by_layer else 1.0
        return _scaled(self.scale, g), None if self.zero_point is None else _scaled(self.zero_point, g)

    def extra_repr(self) -> str:
        return f"{self.spelling}, shape={tuple(self.scale.shape)}, learn={self.learn}, ready={self.ready}"

    def update_ready(self) -> None:
        """Set `ready` by whether the scale has been set."""
        self.ready = not self.scale.is_meta and not bool(self.scale.isnan().any())

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.update_ready()


def _scaled(t: Tensor, g: float) -> Tensor:
    """t unchanged, with its gradient multiplied by g."""
    return t.detach() + (t - t.detach()) * g
