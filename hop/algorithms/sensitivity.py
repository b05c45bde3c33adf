"""sensitivity: how much is lost where one layer of a model computes in a scheme, and the others in floats.

With y a layer's result in floats, and e what a scheme changes of it, on the data:

    SQNR      Σ|e|² / Σ|y|²                     the reciprocal of the ratio of signal to noise
    Fisher    ½ mean of (Σ g · e)² over batches and draws of v, g = ∂(v · f)/∂y

With v of independent numbers N(0, 1), the mean of (Σ g · e)² is |J e|², J the Jacobian of the model's outputs f by y:
the squared error of the outputs in first order. It is eᵀ F e with the Fisher information F of a model whose outputs
have Gaussian noise of variance 1. With a loss of the caller's g is its gradient, and F the empirical Fisher information
of that. The whole layer's e is taken, not its squares alone, so that errors which cancel count as such.

Dong et al. 2020, "HAWQ-V2" (arXiv 1911.03852), adds such terms over layers; Kim et al. 2024, "SqueezeLLM" (arXiv
2306.07629), takes the Fisher information in the place of the Hessian.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import Candidates, batches_of, candidates
from hop.compat.pytree import tree_leaves
from hop.nn.calibration import observed, run
from hop.nn.selectors import Selector
from hop.numerics.schemes import Scheme

Loss = Callable[[Any, Any], Tensor]
"""From the model's outputs and the batch to a loss, a tensor of one element."""


@dataclass(frozen=True)
class SQNR:
    """Noise over signal of each layer's result: cheap, and blind to what the layers behind make of it."""


@dataclass(frozen=True)
class Fisher:
    """What the outputs of the model lose, in first order, by the Fisher information.

    Args:
        draws: how many random vectors v are drawn for each batch; without effect where a loss is given. The relative
            standard deviation of what is found is near √(2 / (draws · batches)).
        seed: of v.
        loss: a function of the model's outputs and the batch, whose gradient is taken; None for the squared error of
            all floating-point outputs.

    Raises:
        ValueError: draws is less than 1.
        TypeError: loss is no function, or draws or seed is no integer.
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
    """What one layer costs in one scheme; loss is NaN where no batch reaches it, seconds where none are measured."""

    name: str
    scheme: Scheme | None  # None: floats
    loss: float
    size: int  # bytes of the weight's codes and scales, without bits to spare
    seconds: float = math.nan  # of its calls for the first batch


def sensitivity(
    model: nn.Module,
    schemes: Sequence[Any],
    batches: Iterable[Any],
    *,
    filter: Selector | None = None,
    measure: Measure = FISHER,
    timed: bool = False,
) -> tuple[LayerCost, ...]:
    """What each layer of a float model loses in each scheme, by itself, and what it takes. The model is not changed.

    Args:
        schemes: as `hop.quantize_` takes one: names, hop.Scheme, Quantizers of weights; None for floats.
        batches: inputs, as hop.nn.calibrate takes them; kept in a list meanwhile.
        filter: a selector of the layers, as `hop.quantize_` takes it.
        measure: `Fisher()` or `SQNR()`.
        timed: whether each layer is timed in each scheme, as the machine runs it once it is packed.

    Returns:
        A LayerCost for each layer and each scheme that it takes, in the order of the model.

    Raises:
        TypeError, ValueError: as `choose_bits`.
    """
    data = batches_of("sensitivity", batches)
    layers = candidates("sensitivity", model, schemes, data, filter)
    return tuple(row for rows in costs("sensitivity", layers, data, measure, timed).values() for row in rows.values())


def costs(
    function: str, layers: Candidates, data: Sequence[Any], measure: Measure, timed: bool
) -> dict[str, dict[int, LayerCost]]:
    """A LayerCost by the name of the layer and the place of the scheme."""
    if not isinstance(measure, SQNR | Fisher):
        raise TypeError(f"{function}: measure must be SQNR() or Fisher(), got {measure!r}; give one of them")
    seen = _Seen(function, layers, timed)
    losses = seen.by_noise(data) if isinstance(measure, SQNR) else seen.by_fisher(data, measure)
    result: dict[str, dict[int, LayerCost]] = {}
    for name in layers.layers:
        sizes, times = layers.sizes(name), seen.seconds.get(name, {})
        result[name] = {
            place: LayerCost(name, layers.schemes[place], losses[name][place], size, times.get(place, math.nan))
            for place, size in sizes.items()
        }
    return result


class _Seen:
    """What is seen of the layers while the float model runs."""

    def __init__(self, function: str, found: Candidates, timed: bool) -> None:
        self.function, self.found, self.timed = function, found, timed
        self.seconds: dict[str, dict[int, float]] = {}

    def by_noise(self, data: Sequence[Any]) -> dict[str, dict[int, float]]:
        """Noise over signal."""
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
            return e / signal[name] if signal[name] else math.inf  # which is refused later

        return {name: {place: ratio(name, e) for place, e in by.items()} for name, by in noise.items()}

    def by_fisher(self, data: Sequence[Any], measure: Fisher) -> dict[str, dict[int, float]]:
        """½ mean of (Σ g · e)²."""
        sums: dict[str, Any] = {}
        calls: list[tuple[str, Tensor, Tensor]] = []  # a layer, where its gradient is taken, e of each scheme as a row
        generator = torch.Generator().manual_seed(measure.seed)

        def see(name: str, y: Tensor, changes: dict[int, Tensor]) -> Tensor:
            zero = torch.zeros_like(y, requires_grad=True)
            calls.append((name, zero, torch.stack([e.flatten().to(torch.float32) for e in changes.values()])))
            return y + zero  # whose gradient is that by y, whatever is done to y in place

        count = 0
        for number, batch in enumerate(data):
            calls.clear()
            with self._watched(see), torch.enable_grad():
                outputs = run(self.found.model, batch, number, self.function)
            for gradients in self._gradients(outputs, batch, measure, [zero for _, zero, _ in calls], generator):
                along: dict[str, Any] = {}  # by layer, Σ g · e for each scheme
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
        self, outputs: Any, batch: Any, measure: Fisher, by: list[Tensor], generator: torch.Generator
    ) -> Iterator[Any]:
        if not by:
            return
        if measure.loss is not None:
            loss = measure.loss(outputs, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"{self.function}: loss must give one number that depends on the outputs, a tensor; got {loss!r}; "
                    "look at Fisher(loss=)"
                )
            yield torch.autograd.grad(loss.sum(), by, allow_unused=True)
            return
        differentiable = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if not differentiable:
            raise ValueError(
                f"{self.function}: the model gives no floating-point tensor that has a gradient, got "
                f"{type(outputs).__name__}; give SQNR()"
            )
        for _ in range(measure.draws):
            v = [torch.randn(t.shape, generator=generator).to(t) for t in differentiable]
            yield torch.autograd.grad(differentiable, by, v, retain_graph=True, allow_unused=True)

    def _zeros(self, value: float) -> dict[str, dict[int, float]]:
        return {name: dict.fromkeys(by, value) for name, by in self.found.layers.items()}

    @contextmanager
    def _watched(self, see: Callable[[str, Tensor, dict[int, Tensor]], Any]) -> Iterator[None]:
        """While the float model runs, each layer's result, and what the schemes change of it."""
        handles = [self._watch(name, see) for name in self.found.layers]
        try:
            with observed(self.found.model, []):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name: str, see: Callable[[str, Tensor, dict[int, Tensor]], Any]) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> Any:
            if not y.numel():  # nothing reaches it
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
