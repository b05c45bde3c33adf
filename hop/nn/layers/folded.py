"""FoldedBatchNorm: a batch norm that the layer before it computes, so that both train as one layer.

    m = gamma / sqrt(var + eps)         w_fold = w · m         b_fold = (b - mean) · m + beta

Each operation is rounded to float32, the dtype of the statistics. Quotients and roots are used instead of rsqrt because
they are correctly rounded everywhere.

With frozen statistics, and in eval mode, a layer multiplies the quantized w_fold and adds b_fold: bit for bit what the
frozen and exported layer computes. Before that, it trains with the mean and variance of the batch, taken from the float
product. The running statistics are updated first, then

    y = op(x, w · (gamma / sigma_running)) · (sigma_running / sigma_batch) + shift
    shift = (b - mean_batch) · (gamma / sigma_batch) + beta

where the product is computed in the scheme. The quantized weight thus changes only with the running statistics.

Sources: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference"; Krishnamoorthi 2018, section 3.2.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, StateDict
from hop.impls.quantize import dequantize, quantize
from hop.impls.quantized import Scales, quantized
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

FROZEN = "statistics_frozen"
FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FoldedBatchNorm(nn.Module):
    """Replaces a batch norm that is computed by the layer before it.

    It has the parameters and statistics under the same names, and its forward returns the input unchanged. Created by
    `hop.nn.fold_batch_norms`.

    Args:
        norm: a BatchNorm1d, 2d or 3d, whose Parameters and buffers it takes over.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if norm.running_mean is None:
            raise ValueError(
                "a folded batch norm: norm must have running statistics, got track_running_stats=False; leave it out"
            )
        self.num_features, self.eps, self.momentum = norm.num_features, norm.eps, norm.momentum
        self.statistics_frozen, self.ended = False, False
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        for kept in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            self.__dict__[kept] = norm.__dict__[kept].copy()
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        return input

    def freeze_statistics_(self) -> "FoldedBatchNorm":
        """Keep the running statistics from now on, and train with them."""
        self.statistics_frozen = True
        return self

    def takes_batch(self) -> bool:
        """Whether a call in training uses the statistics of its batch."""
        return self.training and not self.statistics_frozen and not self.ended

    def end(self) -> None:
        """Drop all tensors: the frozen layer's weight and bias include them."""
        self.ended = True
        for name in ("weight", "bias"):
            self.register_parameter(name, None)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, None)

    def extra_repr(self) -> str:
        phase = "frozen with the layer" if self.ended else "frozen" if self.statistics_frozen else "from batches"
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, statistics={phase}"

    # ---- the arithmetic

    def weight_of(self, weight: Tensor, dim: int) -> Tensor:
        """The layer's weight multiplied by this norm, for output channels along `dim`. Keeps its dtype."""
        m = self._multiplier(self._running_sigma())
        return (weight.to(m.dtype) * _along(m, weight.dim(), dim, weight)).to(weight.dtype)

    def bias_of(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The layer's bias with this norm applied."""
        return self._shift(bias, self.running_mean, self._multiplier(self._running_sigma())).to(dtype)

    def of_batch(self, y: Tensor, features: int) -> Tensor:
        """Batch-normalize the result of a float layer with the statistics of the batch, and update the running ones."""
        mean, sigma = self._observed(y, features)
        m = self._multiplier(sigma)
        at = y.dim() - features
        result = (y.to(m.dtype) - _spread(mean, y.dim(), at)) * _spread(m, y.dim(), at)
        if self.bias is not None:
            result = result + _spread(self.bias.to(m.dtype), y.dim(), at)
        return result.to(y.dtype)

    def product_of_batch(
        self,
        op: OpOverload,
        scheme: Scheme,
        args: Args,
        scales: Scales | None,
        dim: int,
        features: int,
        watched: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The result of a layer with its own weight and bias, normalized with the statistics of the batch.

        Args:
            dim: the weight's dimension of output channels.
            features: the number of dimensions of one example of the result, of which the first is the channels.
            watched: called with the result of the product, which it returns.
        """
        x, weight, bias, *options = args
        seen = dequantize(x) if isinstance(x, QuantizedTensor) else x
        mean, sigma = self._observed(op(seen, weight, bias, *options), features)
        running = self._running_sigma()
        multiplier = self._multiplier(running)
        folded = (weight.to(multiplier.dtype) * _along(multiplier, weight.dim(), dim, weight)).to(weight.dtype)
        given = None if scales is None else scales._replace(output=None, output_zero_point=None)
        z = watched(quantized(op, replace(scheme, output=None), x, folded, None, *options, scales=given))
        at = z.dim() - features
        shift = self._shift(bias, mean, self._multiplier(sigma))
        y = z.to(multiplier.dtype) * _spread(running / sigma, z.dim(), at) + _spread(shift, z.dim(), at)
        y = y.to(z.dtype)
        if scheme.output is None:
            return y
        scale, zero_point = (None, None) if scales is None else (scales.output, scales.output_zero_point)
        return quantize(scheme.output, y, scale=scale, zero_point=zero_point)

    def _running_sigma(self) -> Tensor:
        return torch.sqrt(self.running_var + self.eps)

    def _multiplier(self, sigma: Tensor) -> Tensor:
        """The multiplier of each channel, gamma / sigma."""
        return 1 / sigma if self.weight is None else self.weight.to(sigma.dtype) / sigma

    def _shift(self, bias: Tensor | None, mean: Tensor, m: Tensor) -> Tensor:
        """The shift of each channel, (b - mean) · m + beta."""
        result = (-mean if bias is None else bias.to(m.dtype) - mean) * m
        return result if self.bias is None else result + self.bias.to(m.dtype)

    def _observed(self, y: Tensor, features: int) -> tuple[Tensor, Tensor]:
        """The batch's mean and sqrt(variance + eps). Updates the running statistics."""
        at = y.dim() - features
        if at != 1:
            raise ValueError(
                f"a folded batch norm: with batch statistics an input must have exactly one batch dimension, "
                f"got {at}; give a batch, or freeze_statistics_() before"
            )
        count = y.numel() // max(y.shape[at], 1)
        if count < 2:
            raise ValueError(
                "a folded batch norm: batch statistics need at least two values per channel, got "
                f"{count} in a result of {tuple(y.shape)}; give a larger batch, or freeze_statistics_() before"
            )
        dims = [d for d in range(y.dim()) if d != at]
        var, mean = torch.var_mean(y.to(self.running_var.dtype), dims, correction=0)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            step = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
            unbiased = var.detach() * (count / (count - 1))
            self.running_mean.copy_(self.running_mean * (1 - step) + mean.detach() * step)
            self.running_var.copy_(self.running_var * (1 - step) + unbiased * step)
        return mean, torch.sqrt(var + self.eps)

    # ---- files

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.statistics_frozen and not self.ended:  # otherwise the keys are those of the batch norm
            destination[f"{prefix}{FROZEN}"] = torch.tensor(True)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        if (frozen := state_dict.pop(f"{prefix}{FROZEN}", None)) is not None:
            self.statistics_frozen = bool(frozen)
        count = f"{prefix}num_batches_tracked"
        # from a version of PyTorch that did not count batches
        if self.num_batches_tracked is not None and count not in state_dict:
            state_dict[count] = self.num_batches_tracked
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _spread(t: Tensor, ndim: int, dim: int) -> Tensor:
    """Reshape a vector over channels so that it broadcasts to a tensor whose channels are dimension `dim`."""
    return t.reshape([-1 if d == dim else 1 for d in range(ndim)])


def _along(m: Tensor, ndim: int, dim: int, weight: Tensor) -> Tensor:
    """Reshape a vector over channels so that it broadcasts to a weight.

    The weight of a transposed convolution, (I, O / groups, *kernel), has the channels of its groups one after another
    along its inputs.
    """
    if m.numel() == weight.shape[dim]:
        return _spread(m, ndim, dim)
    groups = m.numel() // weight.shape[1]
    rows = m.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1).reshape(weight.shape[:2])
    return rows.reshape(*weight.shape[:2], *[1] * (ndim - 2))
