"""gptq, adaround: quantize a model with codes chosen for the least error of the layers' outputs on data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hop.algorithms.adarounding import adaround_codes
from hop.algorithms.candidates import list_batches
from hop.algorithms.grid import Grid
from hop.algorithms.inputs import Moments, Survey, moments
from hop.algorithms.solving import Solved, error, solve
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.layers.convolutions import Conv2d
from hop.nn.layers.linear import Linear
from hop.nn.models.calibration import calibrate
from hop.nn.models.conversion import Rules, convert, has_static_scale, rules_of, settle_weights
from hop.nn.models.freezing import freeze, quantized_weight
from hop.nn.models.selectors import Selector
from hop.tensor import QuantizedTensor


@dataclass(frozen=True)
class GPTQ:
    """The settings of `gptq`.

    Args:
        damping: added to the diagonal of each Hessian, as a fraction of the diagonal's mean.
        order: whether to round columns in order of decreasing input magnitude. Scales are fixed before, so that groups
            stay those of the quantizer ("static groups").
        block: number of columns to round before the remaining ones are updated; the result does not depend on it.
        sequential: whether the inputs of a layer come from the already quantized layers before it. This takes one run
            over the data, up to that layer, for each set of layers with a common input. Otherwise one run of the float
            model serves all layers, and all Hessians are in memory at once.
        search: whether scales have least squared error, as hop.quantize_weight finds them, and not the rule's.

    Raises:
        ValueError: damping is negative or not finite, or block is less than 1.
        TypeError: order, sequential or search is not a bool.
    """

    damping: float = 0.01
    order: bool = True
    block: int = 128
    sequential: bool = True
    search: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.damping, int | float) or not 0 <= self.damping < float("inf"):
            raise ValueError(f"GPTQ: damping must be a finite number of 0 or more, got {self.damping!r}; give 0.01")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"GPTQ: block must be an integer of 1 or more, got {self.block!r}; give 128")
        for name in ("order", "sequential", "search"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"GPTQ: {name} must be True or False, got {getattr(self, name)!r}; give one of them")

    def solve(self, weight: Tensor, grid: Grid, hessian: Tensor) -> Solved:
        """The codes of a weight (M, K) on `grid`, for the second moments (K, K) of its inputs."""
        return solve(weight, grid, hessian, self.damping, self.order, self.block)


@dataclass(frozen=True)
class AdaRound:
    """The settings of `adaround`.

    Args:
        steps: number of steps of Adam per weight.
        rate: the learning rate.
        weighting: λ, the weight of the term that pushes elements to one of the two values.
        sequential: as for GPTQ.

    Raises:
        ValueError: steps is less than 1, or a number is not above 0 and finite.
        TypeError: sequential is not a bool.
    """

    steps: int = 500
    rate: float = 0.02
    weighting: float = 10.0
    sequential: bool = True
    damping: ClassVar[float] = 0.0
    search: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"AdaRound: steps must be an integer of 1 or more, got {self.steps!r}; give 500")
        for name in ("rate", "weighting"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
                raise ValueError(f"AdaRound: {name} must be above 0 and finite, got {given!r}; give one such as 0.01")
        if not isinstance(self.sequential, bool):
            raise TypeError(f"AdaRound: sequential must be True or False, got {self.sequential!r}; give one of them")

    def solve(self, weight: Tensor, grid: Grid, hessian: Tensor) -> Solved:
        """The codes of a weight (M, K) on `grid`, for the second moments (K, K) of its inputs."""
        return Solved(adaround_codes(weight, grid, hessian, self.steps, self.rate, self.weighting), 0.0)


Settings = GPTQ | AdaRound


@dataclass(frozen=True)
class LayerError:
    """The error of one quantized layer. Errors are those of its output on the data, Σ|(W - Ŵ) x|² / Σ|W x|²; NaN if the
    layer was skipped.
    """

    name: str
    rows: int  # number of inputs in its Hessian
    nearest: float  # the error with weights rounded to nearest
    error: float  # the error with the chosen codes
    damping: float  # the damping that was used
    note: str = ""  # why it is rounded to nearest, or another remark


def gptq(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    settings: GPTQ = GPTQ(),
    pack: bool = True,
) -> Any:
    """Quantize a model in place, as `hop.quantize_` does, with the codes of Linear and Conv2d weights chosen by GPTQ.

    Any quantizer works; scales are computed from the float weight. Static scales of activations that are not set are
    calibrated first, by amax.

    Args:
        model: the float model.
        rules, filter: as for `hop.quantize_`.
        batches: inputs, as for hop.nn.calibrate; kept in a list meanwhile.
        settings: of the algorithm.
        pack: as for hop.nn.freeze.

    Returns:
        The model. Its `gptq_report` has a LayerError for each layer with a quantized weight. Layers are rounded to
        nearest, with a note, if they are of another type, share their weight, are not reached by a batch, have a weight
        that is not finite, or a Hessian that stays singular.

    Raises:
        TypeError: as `hop.quantize_` and hop.nn.calibrate.
        ValueError: as `hop.quantize_`; batches is empty; or an input of a layer has NaN or an infinity. The layers are
            converted then, but no weight is changed.

    Frantar et al. 2022, arXiv 2210.17323.
    """
    if not isinstance(settings, GPTQ):
        raise TypeError(f"gptq: settings must be a hop.algorithms.GPTQ, got {settings!r}; give GPTQ()")
    model, report = _quantize("gptq", model, (rules, filter), batches, settings, pack)
    model.gptq_report = report  # type: ignore[assignment]  # a plain attribute
    return model


def adaround(
    model: nn.Module,
    rules: Rules,
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    settings: AdaRound = AdaRound(),
    pack: bool = True,
) -> Any:
    """Quantize a model as `gptq` does, with codes chosen by AdaRound, which rounds each element up or down.

    Arguments, skipped layers and errors are those of `gptq`; the report, a LayerError per layer, is the model's
    `adaround_report`.

    Nagel et al. 2020, arXiv 2004.10568.
    """
    if not isinstance(settings, AdaRound):
        raise TypeError(f"adaround: settings must be a hop.algorithms.AdaRound, got {settings!r}; give AdaRound()")
    model, report = _quantize("adaround", model, (rules, filter), batches, settings, pack)
    model.adaround_report = report  # type: ignore[assignment]  # a plain attribute
    return model


def _quantize(
    function: str, model: Any, which: tuple[Rules, Selector | None], batches: Any, settings: Settings, pack: bool
) -> tuple[Any, tuple[LayerError, ...]]:
    """Quantize the model, freeze it, and return it with a row per layer."""
    if not isinstance(model, nn.Module):
        raise not_a_model(function, model)
    data = list_batches(function, batches)
    rules = rules_of(model, *which)
    is_static = any(scheme is not None and has_static_scale(scheme) for _, scheme in rules)
    settle_weights(model, rules)
    model = convert(model, rules)
    if is_static:
        calibrate(model, data, progress=False)
    with torch.no_grad():
        report = _choose_codes(function, model, data, settings, pack)
    if report:
        freeze(model, pack, trained=() if settings.search else None)
    return model, report


@torch.no_grad()
def freeze_by_data(model: nn.Module, batches: Iterable[object], pack: bool) -> tuple[LayerError, ...]:
    """Freeze the Linear and Conv2d layers of a converted model with searched scales and codes chosen by GPTQ, for
    `hop.quantize_`. Returns a row per layer.
    """
    return _choose_codes("quantize_", model, list_batches("quantize_", batches), GPTQ(search=True), pack)


def _choose_codes(
    function: str, model: nn.Module, data: Sequence[object], settings: Settings, pack: bool
) -> tuple[LayerError, ...]:
    """Freeze the layers whose codes the algorithm chooses. Returns a row per layer."""
    names = {module: name for name, module in modules_of(model) if isinstance(module, Layer)}
    rows = {layer: _row(name) for layer, name in names.items() if layer.plan().quantizes_weight and not layer.frozen}
    for layer in rows:
        layer.prepare()
    counts: dict[int, int] = {}
    for layer in names:
        counts[id(layer.weight)] = counts.get(id(layer.weight), 0) + 1
    for layer in rows:
        rows[layer] = replace(rows[layer], note=_skip_reason(layer, counts[id(layer.weight)]))
    taken = [layer for layer, row in rows.items() if not row.note]
    survey = Survey(model, taken, data, function)
    for layer in survey.unreached:
        rows[layer] = replace(rows[layer], note="rounded to the nearest: no batch reaches it")
    for layer, seen in survey.seen.items():
        if not seen.finite:
            raise ValueError(
                f"{function}: the input of layer {names[layer]!r} has NaN or an infinity; look at the data, and at the "
                "weights before it"
            )
    stages = survey.stages()
    known: dict[Layer, Moments] = {}
    if not settings.sequential:
        every = [stage[0] for stage in stages]
        known = dict(zip(every, moments(model, every, data, survey, taken), strict=True))
    left = list(taken)
    for stage in stages:
        observed = known.pop(stage[0], None) or moments(model, stage[:1], data, survey, left)[0]
        for layer in stage:
            rows[layer] = _freeze_layer(layer, rows[layer], observed, settings, pack)
            left.remove(layer)
    return tuple(rows.values())


def _row(name: str) -> LayerError:
    return LayerError(name, 0, float("nan"), float("nan"), 0.0)


def _skip_reason(layer: Layer, uses: int) -> str:
    """The reason to round a layer to nearest; "" if there is none."""
    reason = ""
    if not isinstance(layer, Linear | Conv2d):
        reason = f"{type(layer).__name__} is neither Linear nor Conv2d"
    elif isinstance(layer, Conv2d) and layer.groups != 1:
        reason = f"its inputs are cut into {layer.groups} groups"
    elif uses > 1:
        reason = f"{uses} layers share its weight"
    elif not bool(layer.folded_weight().isfinite().all()):
        reason = "its weight has NaN or an infinity"
    return reason and f"rounded to the nearest: {reason}"


def _freeze_layer(layer: Layer, row: LayerError, observed: Moments, settings: Settings, pack: bool) -> LayerError:
    """Freeze a layer with the chosen codes, unless they are no better than the nearest ones."""
    if not bool(observed.sum.isfinite().all()):
        return replace(row, note="rounded to the nearest: its input is not finite once the layers before are quantized")
    rounded = quantized_weight(layer, settings.search, layer.signed_scales())
    q, shape = rounded.quantizer, rounded.shape
    weight = layer.folded_weight().detach().to(torch.float32)
    flat = weight.flatten(1)
    whole = error(flat, observed.sum) or 1.0
    nearest = error(flat - rounded.dequantize().flatten(1), observed.sum) / whole
    row = replace(row, rows=observed.rows, nearest=nearest, error=nearest, damping=settings.damping)
    grid = Grid.of(q, rounded.buffers(), shape).map(lambda t: t.flatten(1))
    codes, damping = settings.solve(flat, grid, observed.sum)
    row = replace(row, damping=damping)
    if codes is None:
        return replace(row, note=f"rounded to the nearest: its Hessian is singular, with a damping of {damping:g} too")
    after = error(flat - grid.decode(codes), observed.sum) / whole
    if not after < nearest:
        return replace(row, note="rounded to the nearest, which is as good or better")
    buffers = q.with_codes(rounded.buffers(), codes.reshape(shape))
    new = QuantizedTensor(buffers, q, tuple(shape), rounded.dtype)
    layer.take_frozen(nn.Parameter(layer.laid_out(new, pack), requires_grad=False), pack)
    note = "" if damping == settings.damping else f"its Hessian is singular: the damping was raised to {damping:g}"
    return replace(row, error=after, note=note)
