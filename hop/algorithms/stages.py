"""Stages: linear layers by the inputs that they read, what is seen of these, and what products lose in a scheme.

What changes both operands of products, as factors and rotations do, is made of it: a subclass decides for each stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.flow import Cannot, Flow, Source
from hop.algorithms.inputs import Survey, Teller
from hop.nn import reminder
from hop.nn.calibration import observed, run
from hop.nn.contexts import INPUT
from hop.nn.layer import Layer, modules_of
from hop.nn.layers import Linear
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST

ROWS = 1024
"""The most rows of an input that a search looks at, evenly spread over all; ranges and means are of all."""

LEAST = 1e-5
"""What a magnitude counts at least, so that a channel without inputs or weights keeps a factor."""


def flow_of(model: nn.Module, batch: Any) -> Flow | str:
    """The exported graph of a float model, or why there is none."""
    given: tuple[Any, ...] = (batch,)
    named: dict[str, Any] = {}
    if isinstance(batch, dict):
        given, named = (), batch
    elif isinstance(batch, tuple | list):
        given = tuple(batch)
    if any(isinstance(module, Layer) for module in model.modules()):
        return "the model has quantized layers already, and its graph is not looked at"
    with observed(model, []):
        try:
            return Flow(model, given, named)
        except Cannot as reason:
            return str(reason)


class Inputs:
    """What is seen of an input: its ranges by channels, and some rows."""

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
    """Linear layers of a model that was converted.

    Args:
        function: who asks, in messages.
        what: what layers are given, in notes.
        flow: the exported graph of the float model, or why there is none.
    """

    def __init__(self, function: str, what: str, model: nn.Module, data: Sequence[Any], flow: Flow | str) -> None:
        self.function, self.what, self.model, self.data, self.flow = function, what, model, data, flow
        self.names = {module: name for name, module in modules_of(model) if isinstance(module, Layer)}

    def note(self, layer: Layer, note: str, **fields: Any) -> None:
        """Take down what became of a layer."""
        raise NotImplementedError

    def stage(self, layers: list[Linear], inputs: Inputs) -> None:
        """Do something with layers that read one input."""
        raise NotImplementedError

    def run(self) -> None:
        """Survey the model, and take its stages in their order."""
        uses: dict[int, int] = {}
        for layer in self.names:
            layer.prepare()
            uses[id(layer.weight)] = uses.get(id(layer.weight), 0) + 1
        taken: list[Layer] = []
        for layer, name in self.names.items():
            if layer.frozen:
                raise ValueError(f"{self.function}: layer {name!r} is frozen; give the float model")
            if why := _declined(layer, uses[id(layer.weight)]):
                self.note(layer, f"no {self.what}: {why}")
            else:
                taken.append(layer)
        survey = Survey(self.model, list(self.names), self.data, self.function)  # all: their scales are not set yet
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

    def source(self, layers: list[Linear]) -> tuple[Source | None, str]:
        """What stands before layers that read one input, and takes what they are given; or why there is none."""
        if isinstance(self.flow, str):
            return None, self.flow
        names = {self.names[layer] for layer in layers}
        try:
            source = self.flow.source(self.names[layers[0]])
        except Cannot as reason:
            return None, str(reason)
        if source.readers != names:
            others = ", ".join(repr(name) for name in sorted(source.readers ^ names))
            return None, f"{others} would take the {self.what}, too"
        return source, ""

    def _inputs(self, layers: Sequence[Layer]) -> list[Inputs]:
        seen = {layer: Inputs(layer.weight.shape[1], layer.weight.device) for layer in layers}
        nothing = Teller(lambda x: None)
        watched = [(layer, INPUT, Teller(seen[layer].add) if layer in seen else nothing) for layer in self.names]
        with reminder.silent(), observed(self.model, watched):
            for number, batch in enumerate(self.data):
                run(self.model, batch, number, self.function)
        return list(seen.values())


def lost_by(layers: list[Linear], inputs: Inputs) -> Callable[..., float]:
    """A function from changed rows of an input, a change of weights and, for static scales, the range of the changed
    input: Σ|y - ŷ|² / Σ|y|² of layers that read it, both operands quantized as their schemes say."""
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


def _declined(layer: Layer, uses: int) -> str:
    """Why a layer is given nothing; "" where it is."""
    if type(layer) is not Linear:
        return f"{type(layer).__name__} is no hop.nn.Linear"
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
        x = _rounded(scheme.lhs, x, range_of)
    if scheme.rhs is not None:
        weight = _rounded(layer.weight_quantizer(scheme.rhs), weight, weight)
    return x @ weight.t()


def _rounded(q: Quantizer, x: Tensor, range_of: Tensor) -> Tensor:
    """The numbers that x becomes; by the range of another tensor where the quantizer finds no scale."""
    scales = {} if q.scale.missing() is None else calibration.amax(q, range_of)
    return q.fake_quantize(x, **scales)
