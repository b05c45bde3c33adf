"""Norms, activations and softmax, computed by hop.scaled.

Functions are correctly rounded and sums do not depend on the order (docs/numerics.md), so results have the same bits on
every route. They are quantized if the scheme quantizes outputs. After hop.quantize_(fuse=True), they also quantize
their float results in the same pass, for the layers that read them (sharing.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.impls.scaled import scaled
from hop.impls.scaled.native_rows import rounded_and_quantized
from hop.nn.contexts import OUTPUT, SchemeNeeds, active
from hop.nn.layers.base import Layer
from hop.nn.layers.sources import Source
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme

aten = torch.ops.aten


class Function(Layer):
    """Base class of modules without products. It reads one field of a scheme, `output`: the quantizer of its result, or
    None for floats in the input's dtype.
    """

    roles = (OUTPUT,)
    is_packable = False
    example_dims = 1
    added: ClassVar[tuple[str, ...]] = (*Layer.added, "source")

    def _begin(self, scheme: Scheme, learn_scales: bool) -> None:
        self.source: Source | None = None
        super()._begin(scheme, learn_scales)

    def fuse(self) -> None:
        """Also emit quantized results once a consuming layer has requested them."""
        self.source = Source()

    def plan(self) -> SchemeNeeds:
        return replace(active(self._own), quantizes_weight=False)

    def frozen_quantizer(self) -> Quantizer | None:
        return None

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        """The operator, its arguments after the input, and its keyword arguments."""
        raise NotImplementedError

    def _compute(self, x: Tensor, *options: object) -> Tensor:
        op, args, kwargs = self._function()
        plan = active(self._own)
        if plan.scheme is None or self.in_floats:
            if self.scales and not torch.compiler.is_compiling():
                self.scales.to(x.device)  # a module without parameters has no device until its first call
            return op(x, *args, **kwargs)
        q = plan.scheme.output
        if q is not None:
            if plan.needs and self._unbuilt(plan):
                self._build(plan)
            given = self._given(plan, x)
            scales = {"output_scale": given.output, "output_zero_point": given.output_zero_point}
            return scaled(op, q, x, *args, **kwargs, **scales)
        source = self.source
        if source is None or torch.compiler.is_compiling():
            return scaled(op, x.dtype, x, *args, **kwargs)
        if (wanted := source.wanted()) is not None:
            both = rounded_and_quantized(op, wanted, (x, *args), kwargs)
            if both is not None:
                return source.leave(wanted, *both)
        return source.offer(scaled(op, x.dtype, x, *args, **kwargs))

    def _output_shape(self, one: Sequence[int]) -> Sequence[int]:
        return one

    def _check(self, scheme: Scheme) -> None:
        pass  # every function supports every output quantizer of a Scheme

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.parameters(recurse=False)), torch.get_default_device())


class LayerNorm(Function, nn.LayerNorm):
    """torch.nn.LayerNorm in low precision. Other arguments are those of torch.nn.LayerNorm.

    Args:
        scheme: its `output` quantizes the result.
        learn_scales: whether a static output scale is a Parameter.
    """

    float_type = nn.LayerNorm

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return aten.layer_norm.default, (list(self.normalized_shape), self.weight, self.bias, self.eps), {}


class RMSNorm(Function, nn.RMSNorm):  # type: ignore[misc]
    """torch.nn.RMSNorm. Arguments as for LayerNorm."""

    float_type = nn.RMSNorm

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return aten.rms_norm.default, (list(self.normalized_shape), self.weight, self.eps), {}


class _Unweighted(Function):
    weight: Any = None


class GELU(_Unweighted, nn.GELU):
    """torch.nn.GELU. Arguments as for LayerNorm."""

    float_type = nn.GELU

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return aten.gelu.default, (), {} if self.approximate == "none" else {"approximate": self.approximate}


class LeakyReLU(_Unweighted, nn.LeakyReLU):
    """torch.nn.LeakyReLU. Arguments as for LayerNorm; `inplace` is ignored: the result is a new tensor."""

    float_type = nn.LeakyReLU

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return aten.leaky_relu.default, (self.negative_slope,), {}


class Softmax(_Unweighted, nn.Softmax):
    """torch.nn.Softmax with an explicit dim. Arguments as for LayerNorm."""

    float_type = nn.Softmax

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return aten.softmax.int, (self.dim,), {}

    def _check(self, scheme: Scheme) -> None:
        if self.dim is None:
            raise ValueError("hop.nn.Softmax: dim must be the dimension to normalize over, got None; pass dim=")


class _OfElements(_Unweighted):
    op: ClassVar[OpOverload]

    def _function(self) -> tuple[OpOverload, Args, Kwargs]:
        return self.op, (), {}


class SiLU(_OfElements, nn.SiLU):
    """torch.nn.SiLU. Arguments as for LayerNorm; `inplace` is ignored: the result is a new tensor."""

    float_type, op = nn.SiLU, aten.silu.default


class Sigmoid(_OfElements, nn.Sigmoid):
    """torch.nn.Sigmoid. Arguments as for LayerNorm."""

    float_type, op = nn.Sigmoid, aten.sigmoid.default


class Tanh(_OfElements, nn.Tanh):
    """torch.nn.Tanh. Arguments as for LayerNorm."""

    float_type, op = nn.Tanh, aten.tanh.default


class Hardswish(_OfElements, nn.Hardswish):
    """torch.nn.Hardswish. Arguments as for LayerNorm; `inplace` is ignored: the result is a new tensor."""

    float_type, op = nn.Hardswish, aten.hardswish.default


class Hardsigmoid(_OfElements, nn.Hardsigmoid):
    """torch.nn.Hardsigmoid. Arguments as for LayerNorm; `inplace` is ignored: the result is a new tensor."""

    float_type, op = nn.Hardsigmoid, aten.hardsigmoid.default


FUNCTIONS: tuple[type[Function], ...] = (
    *(LayerNorm, RMSNorm, GELU, SiLU, Sigmoid, Tanh),
    *(Hardswish, Hardsigmoid, LeakyReLU, Softmax),
)
