"""Stages: linear layers grouped by input, statistics of these inputs, and the error of products in a scheme.

smoothing.py and rotating.py, which change both operands of products, subclass it and decide what to do with each group.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hop.algorithms.flow import Flow, FoldTarget, NotFoldable
from hop.algorithms.inputs import Survey
from hop.nn.contexts import INPUT
from hop.nn.layers import reminder
from hop.nn.layers.base import Layer, modules_of
from hop.nn.layers.linear import Linear
from hop.nn.models.calibration import observed, run
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST

ROWS = 1024
"""The most rows of an input that a search uses, evenly spread over all; ranges and means use all rows."""

LEAST = 1e-5
"""The lower bound of magnitudes, so that a channel without inputs or weights still gets a factor."""


def trace_flow(model: nn.Module, batch: object) -> Flow | str:
    """The exported graph of a float model, or the reason why there is none."""
    given: tuple[object, ...] = (batch,)
    named: dict[str, object] = {}
    if isinstance(batch, dict):
        given, named = (), batch
    elif isinstance(batch, tuple | list):
        given = tuple(batch)
    if any(isinstance(module, Layer) for module in model.modules()):
        return "the model already has quantized layers, so its graph is not traced"
    with observed(model, []):
        try:
            return Flow(model, given, named)
        except NotFoldable as reason:
            return str(reason)


class InputStatistics:
    """Statistics of an input: ranges and means by channel, and a sample of rows."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.low = torch.full((columns,), LARGEST, device=device)
        self.high = -self.low
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)
        self._count, self._step, self._parts = 0, 1, list[Tensor]()

    def add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        if not len(rows):
            return
        self.low, self.high = torch.minimum(self.low, rows.amin(0)), torch.maximum(self.high, rows.amax(0))
        self._sum += rows.abs().sum(0)
        self._parts.append(rows[-self._count % self._step :: self._step].clone())
        self._count += len(rows)
        while sum(map(len, self._parts)) > ROWS:
            self._parts = [torch.cat(self._parts)[::3].clone()]
            self._step *= 3

    @property
    def rows(self) -> Tensor:
        return torch.cat(self._parts)

    @property
    def most(self) -> Tensor:
        return torch.maximum(self.high, -self.low).clamp(min=LEAST)

    @property
    def mean(self) -> Tensor:
        return (self._sum / max(self._count, 1)).to(torch.float32).clamp(min=LEAST)


class Stages:
    """The linear layers of a converted model, grouped by input.

    Args:
        function: the caller's name, for messages.
        what: what layers get, for notes.
        flow: the exported graph of the float model, or the reason why there is none.
    """

    def __init__(self, function: str, what: str, model: nn.Module, data: Sequence[object], flow: Flow | str) -> None:
        self.function, self.what, self.model, self.data, self.flow = function, what, model, data, flow
        self.names = {module: name for name, module in modules_of(model) if isinstance(module, Layer)}

    def note(self, layer: Layer, note: str, **fields: object) -> None:
        """Record the outcome for a layer."""
        raise NotImplementedError

    def stage(self, layers: list[Linear], inputs: InputStatistics) -> None:
        """Process layers that share an input."""
        raise NotImplementedError

    def run(self) -> None:
        """Survey the model and process its stages in order."""
        uses: dict[int, int] = {}
        for layer in self.names:
            layer.prepare()
            uses[id(layer.weight)] = uses.get(id(layer.weight), 0) + 1
        taken: list[Layer] = []
        for layer, name in self.names.items():
            if layer.frozen:
                raise ValueError(f"{self.function}: layer {name!r} is frozen; give the float model")
            if why := _skip_reason(layer, uses[id(layer.weight)]):
                self.note(layer, f"no {self.what}: {why}")
            else:
                taken.append(layer)
        survey = Survey(
            self.model, list(self.names), self.data, self.function
        )  # all layers: their scales are not set yet
        for layer in taken:
            if not survey.seen[layer].finite:
                raise ValueError(
                    f"{self.function}: the input of layer {self.names[layer]!r} has NaN or an infinity; look at the "
                    "data, and at the weights before it"
                )
        for layer in survey.unreached:
            if layer in taken:
                self.note(layer, f"no {self.what}: no batch reaches it")
        stages = [own for stage in survey.stages() if (own := [layer for layer in stage if layer in taken])]
        for stage, inputs in zip(stages, self._inputs([stage[0] for stage in stages]), strict=True):
            self.stage([layer for layer in stage if isinstance(layer, Linear)], inputs)

    def source(self, layers: list[Linear]) -> tuple[FoldTarget | None, str]:
        """The module before layers with a common input that can absorb a factor or rotation; or the reason why there is
        none.
        """
        if isinstance(self.flow, str):
            return None, self.flow
        names = {self.names[layer] for layer in layers}
        try:
            source = self.flow.source(self.names[layers[0]])
        except NotFoldable as reason:
            return None, str(reason)
        if source.readers != names:
            others = ", ".join(repr(name) for name in sorted(source.readers ^ names))
            return None, f"{others} would take the {self.what}, too"
        return source, ""

    def _inputs(self, layers: Sequence[Layer]) -> list[InputStatistics]:
        seen = {layer: InputStatistics(layer.weight.shape[1], layer.weight.device) for layer in layers}
        watched = [(layer, INPUT, seen[layer].add if layer in seen else None) for layer in self.names]
        with reminder.silent(), observed(self.model, watched):
            for number, batch in enumerate(self.data):
                run(self.model, batch, number, self.function)
        return list(seen.values())


def error_function(layers: list[Linear], inputs: InputStatistics) -> Callable[..., float]:
    """A function for the relative error Σ|y - ŷ|² / Σ|y|² of layers with a common input, both operands quantized by
    their schemes.

    Its arguments are the changed rows of the input, the change of weights and, for static scales, the range of the
    changed input.
    """
    x = inputs.rows
    wanted = [x @ layer.weight.detach().to(torch.float32).t() for layer in layers]
    signal = sum(float(y.double().square().sum()) for y in wanted) or 1.0

    def lost(changed: Tensor, change: Callable[[Tensor], Tensor], range_of: Tensor) -> float:
        total = 0.0
        for layer, y in zip(layers, wanted, strict=True):
            got = _product(layer, changed, change(layer.weight.detach().to(torch.float32)), range_of)
            total += float((got - y).double().square().sum())
        return total / signal

    return lost


def _skip_reason(layer: Layer, uses: int) -> str:
    """The reason to skip a layer; "" if there is none."""
    if type(layer) is not Linear:
        return f"{type(layer).__name__} is not a hop.nn.Linear"
    if uses > 1:
        return f"{uses} layers share its weight"
    if layer.input_transform is not None and layer.input_transform.hadamard is not None:
        return "it has a Hadamard transform"
    if layer.norm is not None:
        return "a batch norm is folded into it"
    return "" if bool(layer.weight.isfinite().all()) else "its weight has NaN or an infinity"


def _product(layer: Linear, x: Tensor, weight: Tensor, range_of: Tensor) -> Tensor:
    """The product of both operands as the layer's scheme quantizes them, in float32."""
    scheme = layer.plan().settled
    if scheme is None:
        return x @ weight.t()
    if scheme.lhs is not None:
        x = _fake_quantize(scheme.lhs, x, range_of)
    if scheme.rhs is not None:
        weight = _fake_quantize(layer.weight_quantizer(scheme.rhs), weight, weight)
    return x @ weight.t()


def _fake_quantize(q: Quantizer, x: Tensor, range_of: Tensor) -> Tensor:
    """The values of x after quantization; static scales are computed from `range_of`."""
    scales = {} if q.scale.missing() is None else calibration.amax(q, range_of)
    return q.fake_quantize(x, **scales)
