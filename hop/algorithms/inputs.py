"""The inputs of a model's layers: call order, which layers share an input, and second moments."""

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hop.nn as hop_nn
from hop.nn.contexts import INPUT
from hop.nn.layers import reminder
from hop.nn.layers.base import Layer
from hop.nn.models.calibration import observed, run


class _StopRun(Exception):
    """Stops a run once everything that it was for has been seen."""


def input_rows(layer: Layer, x: Tensor) -> Tensor:
    """The input (..., K) of a linear layer, or the patches of a convolution's input, as rows (N, K) that match the
    flattened weight.
    """
    if isinstance(layer, hop_nn.Conv2d):
        padded, weight, _, stride, padding, dilation, _ = layer._call(x)[1]
        batched = padded if padded.dim() == 4 else padded.unsqueeze(0)
        patches = functional.unfold(batched, weight.shape[2:], dilation, padding, stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return x.reshape(-1, x.shape[-1])


class LayerCalls:
    """The calls of one layer in a first run over the batches."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.calls: list[int] = []  # the serial number of each input
        self.per_batch: list[int] = []  # number of calls
        self.reached = False  # whether any input had an element
        self.finite = True


class Survey:
    """The order in which layers are called, and which of them share inputs."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], batches: Sequence[object], caller: str) -> None:
        self.seen = {layer: LayerCalls(layer) for layer in layers}
        self._order: list[Layer] = []
        self._last: tuple[Any, int] = (None, 0)  # a reference, so that its id is not reused
        self._serial = 0
        watched = [(layer, INPUT, functools.partial(self._add, layer)) for layer in layers]
        with reminder.silent(), observed(model, watched):
            for number, batch in enumerate(batches):
                for each in self.seen.values():
                    each.per_batch.append(0)
                run(model, batch, number, caller)
        self._last = (None, 0)

    def _add(self, layer: Layer, x: Tensor) -> None:
        each = self.seen[layer]
        if not each.reached and x.numel():
            self._order.append(layer)
            each.reached = True
        if self._last[0] is not x or self._last[1] != x._version:
            self._serial += 1
            self._last = x, x._version
            self._is_finite = bool(x.isfinite().all())
        each.calls.append(self._serial)
        each.per_batch[-1] += 1
        each.finite &= self._is_finite

    @property
    def unreached(self) -> list[Layer]:
        """The layers that no element of a batch reaches."""
        return [layer for layer, each in self.seen.items() if not each.reached]

    def stages(self) -> list[list[Layer]]:
        """The reached layers in the order of their first calls, grouped by common input (query, key and value, say)."""
        stages: dict[tuple[object, ...], list[Layer]] = {}
        for layer in self._order:
            form = (
                () if isinstance(layer, hop_nn.Linear) else (id(layer),)
            )  # a convolution's patches depend on its settings
            stages.setdefault((*self.seen[layer].calls, *form), []).append(layer)
        return list(stages.values())


class Moments:
    """Σ x xᵀ (K, K) in float64 over the rows of all inputs of a layer."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, rows: Tensor) -> None:
        x = rows.to(torch.float32)
        self.sum += x.t() @ x
        self.rows += len(rows)


def moments(
    model: nn.Module, layers: Sequence[Layer], batches: Sequence[object], survey: Survey, floats: Sequence[Layer]
) -> list[Moments]:
    """The second moments of each of `layers`, in one run over the batches that stops once all their inputs have been
    seen.

    Args:
        floats: the layers that compute in floats during the run.
    """
    result = [Moments(layer.weight[0].numel(), layer.weight.device) for layer in layers]
    left = 0

    def add(layer: Layer, own: Moments, x: Tensor) -> None:
        nonlocal left
        own.add(input_rows(layer, x))
        left -= 1
        if left == 0:
            raise _StopRun

    callbacks = {layer: functools.partial(add, layer, own) for layer, own in zip(layers, result, strict=True)}
    with reminder.silent(), observed(model, [(layer, INPUT, callbacks.get(layer)) for layer in floats]):
        for number, batch in enumerate(batches):
            left = sum(survey.seen[layer].per_batch[number] for layer in layers)
            if left:
                with suppress(_StopRun):
                    run(model, batch, number)
    return result
