"""What passes into layers of a model: in which order they are called, which share an input, and its second moments."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hop.nn as hop_nn
from hop.nn import reminder
from hop.nn.calibration import observed, run
from hop.nn.contexts import INPUT
from hop.nn.layer import Layer


class _Enough(Exception):
    """All that a batch was run for has been seen."""


def matrix_of(layer: Layer, x: Tensor) -> Tensor:
    """The input (..., K) of a linear layer, or the patches of that of a convolution, as rows (N, K) in the order of its
    flattened weight."""
    if isinstance(layer, hop_nn.Conv2d):
        padded, weight, _, stride, padding, dilation, _ = layer._call(x)[1]
        batched = padded if padded.dim() == 4 else padded.unsqueeze(0)
        patches = functional.unfold(batched, weight.shape[2:], dilation, padding, stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return x.reshape(-1, x.shape[-1])


class Seen:
    """What a first run over the batches learns of one layer."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.calls: list[int] = []  # the serial number of each input
        self.per_batch: list[int] = []  # how many calls
        self.reached = False  # whether any had an element
        self.finite = True


class Survey:
    """Which layers are called, in which order, and with which inputs in common."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], batches: Sequence[Any], caller: str) -> None:
        self.seen = {layer: Seen(layer) for layer in layers}
        self._order: list[Layer] = []
        self._last: tuple[Any, int] = (None, 0)  # kept alive, so that no other tensor takes its place
        self._serial = 0
        watched = [(layer, INPUT, Teller(lambda x, layer=layer: self._add(layer, x))) for layer in layers]
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
        """The others in the order of their first calls; at once those with the same inputs, as query, key and value."""
        stages: dict[tuple[Any, ...], list[Layer]] = {}
        for layer in self._order:
            form = () if isinstance(layer, hop_nn.Linear) else (id(layer),)  # patches are the layer's own
            stages.setdefault((*self.seen[layer].calls, *form), []).append(layer)
        return list(stages.values())


class Teller:
    """Hands on what a hook is shown."""

    def __init__(self, add: Callable[[Tensor], None]) -> None:
        self.add = add


class Moments:
    """Σ x xᵀ in float64 over the rows of all inputs of a layer, (K, K)."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, columns, dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, rows: Tensor) -> None:
        wide = rows.to(torch.float32)
        self.sum += wide.t() @ wide
        self.rows += len(rows)


def moments(
    model: nn.Module, layers: Sequence[Layer], batches: Sequence[Any], survey: Survey, floats: Sequence[Layer]
) -> list[Moments]:
    """Those of each of `layers`, in one run over the batches that stops where all of them have had their inputs.

    Args:
        floats: the layers that compute in floats meanwhile."""
    result = [Moments(layer.weight[0].numel(), layer.weight.device) for layer in layers]
    left = 0

    def add(layer: Layer, own: Moments, x: Tensor) -> None:
        nonlocal left
        own.add(matrix_of(layer, x))
        left -= 1
        if left == 0:
            raise _Enough

    tellers = {
        layer: Teller(lambda x, layer=layer, own=own: add(layer, own, x))
        for layer, own in zip(layers, result, strict=True)
    }
    nothing = Teller(lambda x: None)
    with reminder.silent(), observed(model, [(layer, INPUT, tellers.get(layer, nothing)) for layer in floats]):
        for number, batch in enumerate(batches):
            left = sum(survey.seen[layer].per_batch[number] for layer in layers)
            if left:
                with suppress(_Enough):
                    run(model, batch, number)
    return result
