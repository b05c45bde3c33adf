"""InputTransform: a transform of a linear layer's input before quantization, which the weight inverts.

x W^T = (x · diag(f) · R) (W · diag(1 / f) · R)^T      f: a factor per channel, R: orthogonal, a block Hadamard matrix
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hop.nn.scales.static import Float32State
from hop.numerics.hadamard import Hadamard

FACTOR, SIGNS = "factor", "signs"


class InputTransform(Float32State):
    """A factor for each input channel, followed by a Hadamard transform of blocks of channels.

    A state_dict contains its buffers `factor`, (K,) float32, and `signs`, (n,) int8.

    Args:
        factor: (K,), positive and finite; None for no factors.
        hadamard: None for no Hadamard transform.

    Raises:
        ValueError: both are None, or factor has another shape or a value that is not positive and finite.
    """

    factor: Tensor | None
    signs: Tensor | None
    matrix: Tensor | None  # diag(signs) · H / √n, not in the state_dict

    def __init__(self, factor: Tensor | None = None, hadamard: Hadamard | None = None) -> None:
        super().__init__()
        if factor is None and hadamard is None:
            raise ValueError("InputTransform: factor and hadamard are both None; give at least one of them")
        if factor is not None:
            factor = factor.detach().to(torch.float32)
            if factor.dim() != 1 or not bool(((factor > 0) & factor.isfinite()).all()):
                raise ValueError(
                    f"InputTransform: factor must be a vector of positive, finite numbers, one per channel, got "
                    f"{tuple(factor.shape)}, from {float(factor.min())} to {float(factor.max())}; look at the data"
                )
        device = None if factor is None else factor.device
        signs = None if hadamard is None else torch.tensor(hadamard.signs, dtype=torch.int8, device=device)
        self.hadamard = hadamard
        self.register_buffer(FACTOR, factor)
        self.register_buffer(SIGNS, signs)
        matrix = None if hadamard is None else hadamard.matrix.to(device)
        self.register_buffer("matrix", matrix, persistent=False)

    @staticmethod
    def loaded(state: Mapping[str, Tensor]) -> "InputTransform | None":
        """Create a transform from the buffers of a state_dict; None if it has none."""
        factor, signs = state.get(FACTOR), state.get(SIGNS)
        if factor is None and signs is None:
            return None
        hadamard = None if signs is None else Hadamard(tuple(int(s) for s in signs.tolist()))
        return InputTransform(factor, hadamard)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x, (..., K), in float32. The result has the dtype of x."""
        if self.factor is not None:
            x = (x * self.factor).to(x.dtype)
        if self.matrix is None:
            return x
        return (x.to(torch.float32).unflatten(-1, (-1, len(self.matrix))) @ self.matrix).flatten(-2).to(x.dtype)

    def of_weight(self, weight: Tensor) -> Tensor:
        """The weight (M, K) that gives for transformed inputs the result of `weight` for plain ones."""
        wide = weight.to(torch.float32)
        wide = wide if self.factor is None else wide / self.factor
        return (wide if self.hadamard is None else self.hadamard.apply(wide)).to(weight.dtype)

    def undone(self, weight: Tensor) -> Tensor:
        """The inverse of `of_weight`, except for rounding."""
        wide = weight.to(torch.float32)
        wide = wide if self.hadamard is None else self.hadamard.invert(wide)
        return (wide if self.factor is None else wide * self.factor).to(weight.dtype)

    def after(self, before: "InputTransform | None") -> "InputTransform":
        """The transform that applies `before`, then this one.

        Raises:
            ValueError: the composition is not a factor followed by a Hadamard transform.
        """
        if before is None:
            return self
        if before.hadamard is not None:
            raise ValueError(
                "InputTransform: the layer has a Hadamard transform, which must come last; apply factors before it"
            )
        factors = [f for f in (before.factor, self.factor) if f is not None]
        return InputTransform(factors[0] if len(factors) == 1 else factors[0] * factors[1], self.hadamard)

    def extra_repr(self) -> str:
        blocks = "" if self.hadamard is None else f"Hadamard transform of {len(self.hadamard.signs)}"
        return ", ".join(["a factor for each channel"] * (self.factor is not None) + [blocks] * bool(blocks))
