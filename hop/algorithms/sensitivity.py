"""sensitivity: measure the loss when one layer of a model computes in a scheme and the others in floats.

With y a layer's float output, and e the change that a scheme makes to it, on the data:

    SQNR      Σ|e|² / Σ|y|²                     the reciprocal of the signal-to-noise ratio
    Fisher    ½ mean of (Σ g · e)² over batches and draws of v, g = ∂(v · f)/∂y

With v of independent N(0, 1) elements, the mean of (Σ g · e)² is |J e|², where J is the Jacobian of the model's outputs
f with respect to y: the squared error of the outputs, to first order. It equals eᵀ F e with the Fisher information F of
a model whose outputs have Gaussian noise of variance 1. With a user-supplied loss, g is its gradient and F its
empirical Fisher information. The layer's whole e is used, not only its squares, so that errors can cancel.

Dong et al. 2020, "HAWQ-V2" (arXiv 1911.03852), adds such terms over layers; Kim et al. 2024, "SqueezeLLM" (arXiv
2306.07629), uses the Fisher information in place of the Hessian.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hop.algorithms.candidates import Candidates, candidates, list_batches
from hop.compat.pytree import Args, Kwargs, tree_leaves
from hop.nn.models.calibration import observed, run
from hop.nn.models.selectors import Selector
from hop.numerics.schemes import Scheme

Loss = Callable[[Any, Any], Tensor]
"""A function from the model's outputs and the batch to a loss, a tensor of one element."""


@dataclass(frozen=True)
class SQNR:
    """Noise over signal of each layer's output: cheap, but ignores the effect on later layers."""


@dataclass(frozen=True)
class Fisher:
    """The error of the model's outputs, to first order, from the Fisher information.

    Args:
        draws: number of random vectors v per batch; unused if a loss is given. The relative standard deviation of the
            estimate is about √(2 / (draws · batches)).
        seed: of v.
        loss: a function of the model's outputs and the batch, whose gradient is used. Default: the squared error of all
            floating-point outputs.

    Raises:
        ValueError: draws is less than 1.
        TypeError: loss is not callable, or draws or seed is not an integer.
    """

    draws: int = 8
    seed: int = 0
    loss: Loss | None = None

    def __post_init__(self) -> None:
        for name in ("draws", "seed"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise TypeError(f"Fisher: {name} must be an integer, got {getattr(self, name)!r}; give one such as 8")
        if self.draws < 1:
            raise ValueError(f"Fisher: draws must be 1 or more, got {self.draws}; give one such as 8")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(
                f"Fisher: loss must be a function of outputs and batch, got {self.loss!r}; give one, or None"
            )


Measure = SQNR | Fisher
FISHER = Fisher()


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer in one scheme. The loss is NaN if no batch reaches the layer, and seconds are NaN if not
    measured.
    """

    name: str
    scheme: Scheme | None  # None: floats
    loss: float
    size: int  # bytes of the weight's codes and scales, without padding bits
    seconds: float = math.nan  # of its calls for the first batch


def sensitivity(
    model: nn.Module,
    schemes: Sequence[object],
    batches: Iterable[object],
    *,
    filter: Selector | None = None,
    measure: Measure = FISHER,
    timed: bool = False,
) -> tuple[LayerCost, ...]:
    """Measure the loss, size and time of each layer of a float model in each scheme, one layer at a time.

    Args:
        model: the float model; it is not changed.
        schemes: names, hop.Scheme or Quantizers of weights, as for `hop.quantize_`; None for floats.
        batches: inputs, as for hop.nn.calibrate; kept in a list meanwhile.
        filter: a selector of the layers, as for `hop.quantize_`.
        measure: `Fisher()` or `SQNR()`.
        timed: whether to time each layer in each scheme, packed for this machine.

    Returns:
        A LayerCost for each layer and each scheme that it supports, in the order of the model.

    Raises:
        TypeError, ValueError: as `choose_bits`.
    """
    data = list_batches("sensitivity", batches)
    layers = candidates("sensitivity", model, schemes, data, filter)
    return tuple(row for rows in costs("sensitivity", layers, data, measure, timed).values() for row in rows.values())


def costs(
    function: str, layers: Candidates, data: Sequence[object], measure: Measure, timed: bool
) -> dict[str, dict[int, LayerCost]]:
    """The LayerCosts by layer name and index into schemes."""
    if not isinstance(measure, SQNR | Fisher):
        raise TypeError(f"{function}: measure must be SQNR() or Fisher(), got {measure!r}; give one of them")
    seen = _Meter(function, layers, timed)
    losses = seen.by_noise(data) if isinstance(measure, SQNR) else seen.by_fisher(data, measure)
    result: dict[str, dict[int, LayerCost]] = {}
    for name in layers.layers:
        sizes, times = layers.sizes(name), seen.seconds.get(name, {})
        result[name] = {
            place: LayerCost(name, layers.schemes[place], losses[name][place], size, times.get(place, math.nan))
            for place, size in sizes.items()
        }
    return result


class _Meter:
    """Measures the layers while the float model runs."""

    def __init__(self, function: str, found: Candidates, timed: bool) -> None:
        self.function, self.found, self.timed = function, found, timed
        self.seconds: dict[str, dict[int, float]] = {}

    def by_noise(self, data: Sequence[object]) -> dict[str, dict[int, float]]:
        """The noise over signal of each layer in each scheme."""
        noise = self._zeros(math.nan)
        signal: dict[str, float] = {}

        def see(name: str, y: Tensor, changes: dict[int, Tensor]) -> None:
            if name not in signal:
                signal[name], noise[name] = 0.0, dict.fromkeys(noise[name], 0.0)
            signal[name] += float(y.double().square().sum())
            for place, e in changes.items():
                noise[name][place] += float(e.double().square().sum())

        with self._watched(see):
            for number, batch in enumerate(data):
                run(self.found.model, batch, number, self.function)

        def ratio(name: str, e: float) -> float:
            if name not in signal or not e:  # not reached, or exact
                return e
            return e / signal[name] if signal[name] else math.inf  # choose_bits rejects it

        return {name: {place: ratio(name, e) for place, e in by.items()} for name, by in noise.items()}

    def by_fisher(self, data: Sequence[object], measure: Fisher) -> dict[str, dict[int, float]]:
        """½ mean of (Σ g · e)² of each layer in each scheme."""
        sums: dict[str, Tensor] = {}
        calls: list[tuple[str, Tensor, Tensor]] = []  # name, tensor that receives the gradient, rows of e by scheme
        generator = torch.Generator().manual_seed(measure.seed)

        def see(name: str, y: Tensor, changes: dict[int, Tensor]) -> Tensor:
            zero = torch.zeros_like(y, requires_grad=True)
            calls.append((name, zero, torch.stack([e.flatten().to(torch.float32) for e in changes.values()])))
            return y + zero  # its gradient equals that of y, even if y is changed in place

        count = 0
        for number, batch in enumerate(data):
            calls.clear()
            with self._watched(see), torch.enable_grad():
                outputs = run(self.found.model, batch, number, self.function)
            for gradients in self._gradients(outputs, batch, measure, [zero for _, zero, _ in calls], generator):
                along: dict[str, Tensor] = {}  # by layer, Σ g · e for each scheme
                for (name, _, rows), g in zip(calls, gradients, strict=True):
                    here = 0.0 if g is None else rows @ g.flatten().to(rows.dtype)
                    along[name] = along.get(name, torch.zeros(len(rows), device=rows.device)) + here
                for name, values in along.items():
                    sums[name] = sums.get(name, 0.0) + values.double().square()
                count += 1
        unreached = self._zeros(math.nan)
        means = {name: (total / (2 * count)).tolist() for name, total in sums.items()}
        return unreached | {name: dict(zip(unreached[name], values, strict=True)) for name, values in means.items()}

    def _gradients(
        self, outputs: object, batch: object, measure: Fisher, by: list[Tensor], generator: torch.Generator
    ) -> Iterator[Sequence[Tensor | None]]:
        if not by:
            return
        if measure.loss is not None:
            loss = measure.loss(outputs, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"{self.function}: loss must return a tensor with one element that depends on the outputs, got "
                    f"{loss!r}; change Fisher(loss=)"
                )
            yield torch.autograd.grad(loss.sum(), by, allow_unused=True)
            return
        differentiable = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not differentiable:
            raise ValueError(
                f"{self.function}: the model returns no floating-point tensor that has a gradient, got "
                f"{type(outputs).__name__}; give SQNR()"
            )
        for _ in range(measure.draws):
            v = [torch.randn(t.shape, generator=generator).to(t) for t in differentiable]
            yield torch.autograd.grad(differentiable, by, v, retain_graph=True, allow_unused=True)

    def _zeros(self, value: float) -> dict[str, dict[int, float]]:
        return {name: dict.fromkeys(by, value) for name, by in self.found.layers.items()}

    @contextmanager
    def _watched(self, see: Callable[[str, Tensor, dict[int, Tensor]], object]) -> Iterator[None]:
        """Call `see` with each layer's output and its change in each scheme while the float model runs."""
        handles = [self._watch(name, see) for name in self.found.layers]
        try:
            with observed(self.found.model, []):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name: str, see: Callable[[str, Tensor, dict[int, Tensor]], object]) -> RemovableHandle:
        def after(module: nn.Module, args: Args, kwargs: Kwargs, y: Tensor) -> object:
            if not y.numel():  # no data reaches it
                return None
            if not bool(y.isfinite().all()):
                raise ValueError(
                    f"{self.function}: the result of layer {name!r} has NaN or an infinity; look at the data, and at "
                    "the weights up to it"
                )
            changes = {place: t.to(y.dtype) - y.detach() for place, t in self.found.results(name, args, kwargs).items()}
            if self.timed and name not in self.seconds:
                self.seconds[name] = self.found.seconds(name, args, kwargs)
            return see(name, y, changes)

        return self.found.model.get_submodule(name).register_forward_hook(after, with_kwargs=True)
