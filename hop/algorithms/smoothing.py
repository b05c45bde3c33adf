"""smoothquant, awq: move a factor per channel between the two operands of a product, chosen on data.

    x W^T = (x / s) (W · s)^T

The factors shrink large channels of x before x is quantized, and enlarge the weights that they multiply, so that these
are rounded more finely. Each method derives s from one number α and takes the α with the least Σ|y - ŷ|² of the layers
that read x, with both operands quantized by their schemes:

    SmoothQuant     s_j = max|x_j|^α / max|W_j|^(1 - α)                    Xiao et al. 2022, arXiv 2211.10438
    AWQ             s_j = mean|x_j|^α, divided by √(max s · min s)         Lin et al. 2023, arXiv 2306.00978
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import list_batches
from hop.algorithms.flow import Flow, FoldTarget
from hop.algorithms.stages import LEAST, InputStatistics, Stages, error_function, trace_flow
from hop.nn.contexts import INPUT, WEIGHT
from hop.nn.layers.base import Layer, not_a_model
from hop.nn.layers.linear import Linear
from hop.nn.models.conversion import Rules, convert, settle_weights
from hop.nn.models.selectors import Selector
from hop.nn.scales.transforms import InputTransform


class _Factors:
    """A family of channel factors with one parameter α."""

    alphas: tuple[float, ...]

    def __post_init__(self) -> None:
        alphas = self.alphas if isinstance(self.alphas, tuple) else ()
        if not alphas or not all(isinstance(a, int | float) and 0 <= a <= 1 for a in alphas):
            name = type(self).__name__
            raise ValueError(f"{name}: alphas must be numbers from 0 to 1 in a tuple, got {self.alphas!r}; give (0.5,)")

    def factor(self, alpha: float, most: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
        """s (K,), from max|x_j|, mean|x_j| and max|W_j|."""
        raise NotImplementedError


@dataclass(frozen=True)
class SmoothQuant(_Factors):
    """The settings of `smoothquant`.

    Args:
        alphas: the exponents α to try, from 0 to 1.

    Raises:
        ValueError: there is none, or one is not from 0 to 1.
    """

    alphas: tuple[float, ...] = tuple(i / 20 for i in range(21))

    def factor(self, alpha: float, most: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
        return most**alpha / weights ** (1 - alpha)


@dataclass(frozen=True)
class AWQ(_Factors):
    """The settings of `awq`. Arguments and errors as for SmoothQuant."""

    alphas: tuple[float, ...] = tuple(i / 20 for i in range(20))

    def factor(self, alpha: float, most: Tensor, mean: Tensor, weights: Tensor) -> Tensor:
        s = mean**alpha
        return s / (s.max() * s.min()).sqrt()


@dataclass(frozen=True)
class SmoothedLayer:
    """The factor of one layer. Errors are those of the outputs on the sampled data, Σ|y - ŷ|² / Σ|y|², over all layers
    with the same input; NaN if the layer was skipped.
    """

    name: str
    alpha: float | None  # None if it has no factor
    before: float  # the error without factors
    after: float
    folded_into: str = ""  # the module whose Parameters were divided; "" if the layer multiplies by the factor itself
    note: str = ""  # why it has no factor, or why the factor is not folded


def smoothquant(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    settings: SmoothQuant = SmoothQuant(),
    explicit: bool = True,
) -> Any:
    """Move outliers from the inputs of Linear layers into their weights, in place, for schemes that quantize both.

    Layers are converted as by hop.nn.convert, and compute the same in floats up to rounding. Finish the model with
    `hop.quantize_` or `gptq` and the same rules.

        smoothquant(model, "int8_static", batches)
        hop.quantize_(model, "int8_static", calibrate=batches)

    A factor folds into the preceding module, which torch.export finds: a norm, a linear layer, the value projection of
    an attention, one side of a gated MLP. If it cannot fold, for example because a residual reads the same tensor, the
    layer gets an explicit factor (`hop.nn.Linear.input_transform`) and multiplies its input by it before quantization.

    Args:
        model: the float model.
        rules, filter: as for `hop.quantize_`.
        batches: inputs, as for hop.nn.calibrate; kept in a list meanwhile.
        settings: the factors to try.
        explicit: whether layers may get explicit factors. If not, layers whose factor does not fold are left unchanged.

    Returns:
        The model. Its `smoothing_report` has a SmoothedLayer for each layer with a scheme, with a note if a layer has
        no factor because none is better, or because no batch reaches it, it shares its weight or it is not a Linear.

    Raises:
        TypeError: as `hop.quantize_` and hop.nn.calibrate.
        ValueError: as `hop.quantize_`; batches is empty; an input of a layer has NaN or an infinity; or a layer is
            frozen. No weight is changed then.
    """
    return _smooth("smoothquant", model, rules, batches, _SmoothingArguments(filter, settings, explicit, SmoothQuant))


def awq(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    settings: AWQ = AWQ(),
    explicit: bool = True,
) -> Any:
    """Enlarge weights that large inputs multiply, in place, so that they are rounded more finely.

    For schemes that quantize weights, above all in groups of few bits. Otherwise as `smoothquant`.
    """
    return _smooth("awq", model, rules, batches, _SmoothingArguments(filter, settings, explicit, AWQ))


@dataclass(frozen=True)
class _SmoothingArguments:
    filter: Selector | None
    settings: Any
    explicit: bool
    kind: type


def _smooth(function: str, model: nn.Module, rules: Rules, batches: object, options: _SmoothingArguments) -> Any:
    if not isinstance(model, nn.Module):
        raise not_a_model(function, model)
    if type(options.settings) is not options.kind:
        name = options.kind.__name__
        raise TypeError(f"{function}: settings must be a {name}, got {options.settings!r}; give {name}()")
    if not isinstance(options.explicit, bool):
        raise TypeError(f"{function}: explicit must be True or False, got {options.explicit!r}; give one of them")
    data = list_batches(function, batches)
    settle_weights(model, rules, options.filter)
    flow = trace_flow(model, data[0])
    model = convert(model, rules, filter=options.filter)
    with torch.no_grad():
        smoothing = _Smoothing(function, model, data, flow, options)
        smoothing.run()
    model.smoothing_report = tuple(smoothing.rows.values())  # type: ignore[assignment]  # a plain attribute
    return model


class _Smoothing(Stages):
    """Searches a factor for each group of layers, and folds it or makes it explicit."""

    def __init__(
        self, function: str, model: nn.Module, data: Sequence[object], flow: Flow | str, options: _SmoothingArguments
    ) -> None:
        super().__init__(function, "factor", model, data, flow)
        self.options = options
        self.rows = {layer: SmoothedLayer(name, None, _NAN, _NAN) for layer, name in self.names.items()}

    def note(self, layer: Layer, note: str, **fields: object) -> None:
        self.rows[layer] = replace(self.rows[layer], note=note, **fields)

    def stage(self, layers: list[Linear], inputs: InputStatistics) -> None:
        """Search one factor for layers that share an input."""
        source, why = self.source(layers)
        if source is None and not self.options.explicit:
            for layer in layers:
                self.note(layer, f"no factor: {why}")
            return
        alpha, factor, before, after = self._search(layers, inputs)
        for layer in layers:
            if factor is None:
                self.note(layer, "no factor: none is better", before=before, after=before)
                continue
            into, note = ("", f"not folded: {why}") if source is None else (source.name, "")
            self.note(layer, note, before=before, after=after, alpha=alpha, folded_into=into)
            if source is None:
                layer.transform_input(InputTransform(1 / factor))
            else:
                layer.weight.mul_(factor.to(layer.weight.dtype))
                layer.forget_scales((INPUT, WEIGHT))
        if source is not None and factor is not None:
            self._fold(source, factor)

    def _search(self, layers: list[Linear], inputs: InputStatistics) -> tuple[float, Tensor | None, float, float]:
        """The best α, its s, and the errors without and with it; s is None if no factor is better."""
        weights = torch.stack([layer.weight.detach().to(torch.float32).abs().amax(0) for layer in layers]).amax(0)
        lost, x = error_function(layers, inputs), inputs.rows

        def error(s: Tensor) -> float:
            value_range = torch.stack([(inputs.low / s).amin(), (inputs.high / s).amax()])
            return lost(x / s, lambda weight: weight * s, value_range)

        before = best = error(torch.ones_like(weights))
        alpha, factor = 0.0, None
        for each in self.options.settings.alphas:
            s = self.options.settings.factor(each, inputs.most, inputs.mean, weights.clamp(min=LEAST))
            s = s.to(layers[0].weight.dtype).to(torch.float32)  # rounded as when the weight is multiplied
            if bool(((s > 0) & s.isfinite()).all()) and (loss := error(s)) < best:
                alpha, factor, best = each, s, loss
        return alpha, factor, before, best

    def _fold(self, source: FoldTarget, factor: Tensor) -> None:
        """Divide the output channels of the preceding module by the factor."""
        for name in source.parameters:
            parameter = self.model.get_parameter(name)
            parameter.div_(factor.to(parameter.dtype).view(-1, *[1] * (parameter.dim() - 1)))
        owner = self.model.get_submodule(source.name)
        if isinstance(owner, Layer):
            owner.forget_scales((WEIGHT,))


_NAN = float("nan")
