"""correct_bias, reestimate_batch_norms: remove the mean error of a quantized model.

    b ← b - E[ŷ - y]        over the data, per output channel of a layer; y is the float model's output

Nagel et al. 2019, "Data-Free Quantization through Weight Equalization and Bias Correction" (arXiv 1906.04721), section
4.2, with data instead of an assumption about its distribution. Sun et al. 2019, "Hybrid 8-bit Floating Point Training
and Inference" (NeurIPS), for the re-estimated batch norm statistics.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import list_batches
from hop.nn.layers import reminder
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.layers.folded import FoldedBatchNorm
from hop.nn.models.calibration import observed, run
from hop.tensor import QuantizedTensor

_NORMS = (nn.modules.batchnorm._BatchNorm, FoldedBatchNorm)


@dataclass(frozen=True)
class CorrectedLayer:
    """The correction of one layer's bias. `before` and `after` are the RMS over channels of the mean error E[ŷ - y],
    divided by that of E[y]; NaN if the layer was skipped.
    """

    name: str
    before: float
    after: float
    note: str = ""  # why the bias was not changed


def correct_bias(model: nn.Module, floats: nn.Module, batches: Iterable[object]) -> Any:
    """Subtract the mean error of each quantized layer's output, against the float model, from its bias, in place.

    Layers are corrected in call order, so that each sees the corrected layers before it. This takes one run over the
    data, up to the layer, per layer.

    Args:
        model: with quantized layers, frozen or not.
        floats: the float model, with the same layer names, such as a copy from before `hop.quantize_`.
        batches: inputs, as for hop.nn.calibrate; kept in a list meanwhile.

    Returns:
        model. Its `bias_report` has a CorrectedLayer for each quantized layer with a weight. Layers are skipped, with a
        note, if they have no bias or share it, quantize their output, have a batch norm folded in, or are not reached
        by data.

    Raises:
        TypeError: model or floats is not a module, or does not accept a batch.
        ValueError: batches is empty; model has no quantized layers; floats lacks a layer; or an output is not finite.
            No bias is changed then, except if an output of the quantized model is not finite: the layers before it are
            corrected.
    """
    for given in (model, floats):
        if not isinstance(given, nn.Module):
            raise not_a_model("correct_bias", given)
    data = list_batches("correct_bias", batches)
    layers = {name: m for name, m in modules_of(model) if isinstance(m, Layer) and hasattr(m, "weight")}
    if not layers:
        raise ValueError(
            f"correct_bias: model={type(model).__name__} has no quantized layers; call hop.quantize_ before"
        )
    others = dict(modules_of(floats, every_name=True))
    if missing := [name for name in layers if name not in others or isinstance(others[name], Layer)]:
        raise ValueError(f"correct_bias: floats has no float layer {missing[0]!r}; give a copy of the float model")
    rows = {name: CorrectedLayer(name, _NAN, _NAN, _skip_reason(layer, layers)) for name, layer in layers.items()}
    taken = [name for name, row in rows.items() if not row.note]
    wanted = _means(floats, {name: (others[name], -layers[name].example_dims) for name in taken}, data)
    for name in taken:
        if name not in wanted:
            rows[name] = CorrectedLayer(name, _NAN, _NAN, "no batch reaches it")
    for name, mean in wanted.items():  # in the order of their first calls
        rows[name] = _correct(model, name, layers[name], mean, data)
    model.bias_report = tuple(rows.values())  # type: ignore[assignment]  # a plain attribute
    return model


def reestimate_batch_norms(model: nn.Module, batches: Iterable[object]) -> Any:
    """Estimate the running statistics of batch norms again, in place, from the outputs of the quantized layers before
    them.

    The statistics are the means over batches of the batch means and unbiased variances. Everything else runs in eval
    mode.

    Args:
        model: with batch norms, including folded ones (hop.nn.fold_batch_norms).
        batches: inputs, as for hop.nn.calibrate, each with more than one example.

    Returns:
        model. Norms that no batch reaches keep their statistics.

    Raises:
        TypeError: model is not a module, or does not accept a batch.
        ValueError: batches is empty; no norm has running statistics; or a statistic is not finite. All norms keep their
            statistics then.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("reestimate_batch_norms", model)
    data = list_batches("reestimate_batch_norms", batches)
    norms: dict[str, Any] = {
        name: m for name, m in modules_of(model) if isinstance(m, _NORMS) and m.running_mean is not None
    }
    if not norms:
        raise ValueError(
            f"reestimate_batch_norms: model={type(model).__name__} has no batch norm with running statistics; leave "
            "the call out"
        )
    kept = {name: {n: t.clone() for n, t in norm.named_buffers()} for name, norm in norms.items()}
    momenta = {name: norm.momentum for name, norm in norms.items()}
    try:
        with observed(model, []), reminder.silent():
            for norm in norms.values():
                norm.train()
                norm.momentum = None  # the mean over all batches
                norm.num_batches_tracked.zero_()
            for layer in model.modules():
                if isinstance(layer, Layer) and layer.norm is not None:
                    layer.training = True
            for number, batch in enumerate(data):
                run(model, batch, number, "reestimate_batch_norms")
        for name, norm in norms.items():
            if not bool((norm.running_mean.isfinite() & norm.running_var.isfinite()).all()):
                raise ValueError(
                    f"reestimate_batch_norms: the input of {name!r} has NaN or an infinity; look at the data, and at "
                    "the weights before it"
                )
    except BaseException:
        _restore(norms, kept, list(norms))
        raise
    finally:
        for name, norm in norms.items():
            norm.momentum = momenta[name]
    _restore(norms, kept, [name for name, norm in norms.items() if not int(norm.num_batches_tracked)])
    return model


_NAN = float("nan")


def _restore(norms: Mapping[str, nn.Module], kept: dict[str, dict[str, Tensor]], names: Sequence[str]) -> None:
    for name in names:
        for own, value in kept[name].items():
            norms[name].get_buffer(own).copy_(value)


class _StopRun(Exception):
    """Stops a run once everything that it was for has been seen."""


class _Mean:
    """The mean over all dimensions but the channels, in float64."""

    def __init__(self, dim: int) -> None:
        self.dim, self.count = dim, 0
        self.sum: Tensor | float = 0.0
        self.per_batch: list[int] = []  # number of calls

    def add(self, y: Tensor) -> None:
        x = (y.numbers() if isinstance(y, QuantizedTensor) else y).detach().to(torch.float64)
        channels = x.movedim(self.dim, -1).flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        self.sum = self.sum + channels.sum(0)
        self.count += len(channels)

    def mean(self) -> Tensor:
        assert isinstance(self.sum, Tensor)
        return self.sum / self.count


@contextmanager
def _output_hooks(pairs: Sequence[tuple[nn.Module, Callable[[Tensor], None]]]) -> Iterator[None]:
    """Call a function with each output of the given modules."""
    handles = [m.register_forward_hook(lambda module, args, y, see=see: see(y)) for m, see in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _means(model: nn.Module, layers: dict[str, tuple[nn.Module, int]], data: Sequence[object]) -> dict[str, _Mean]:
    """The mean outputs of layers of the float model, in the order of their first calls."""
    every = {name: _Mean(dim) for name, (_, dim) in layers.items()}
    called: dict[str, _Mean] = {}

    def see(name: str, y: Tensor) -> None:
        called.setdefault(name, every[name]).add(y)
        every[name].per_batch[-1] += 1

    pairs = [(module, lambda y, name=name: see(name, y)) for name, (module, _) in layers.items()]
    with observed(model, []), reminder.silent(), _output_hooks(pairs):
        for number, batch in enumerate(data):
            for mean in every.values():
                mean.per_batch.append(0)
            run(model, batch, number, "correct_bias")
    called = {name: mean for name, mean in called.items() if mean.count}
    for name, mean in called.items():
        _check(name, mean.mean(), "float")
    return called


def _correct(model: nn.Module, name: str, layer: Layer, wanted: _Mean, data: Sequence[object]) -> CorrectedLayer:
    """Correct the bias of a layer and return its row of the report."""
    mean, left = _Mean(wanted.dim), 0

    def see(y: Tensor) -> None:
        nonlocal left
        mean.add(y)
        left -= 1
        if left == 0:
            raise _StopRun

    with observed(model, []), reminder.silent(), _output_hooks([(layer, see)]):
        for number, batch in enumerate(data):
            left = wanted.per_batch[number]
            if left:
                with suppress(_StopRun):
                    run(model, batch, number)
    if not mean.count:
        return CorrectedLayer(name, _NAN, _NAN, "the quantized model does not call it")
    error = mean.mean() - wanted.mean()
    _check(name, error, "quantized")
    before = layer.bias.detach().to(torch.float64)
    with torch.no_grad():
        layer.bias.copy_((before - error).to(layer.bias.dtype))
    remaining = error + (layer.bias.detach().to(torch.float64) - before)
    unit = float(wanted.mean().square().mean().sqrt()) or 1.0
    before_rms, after_rms = (float(e.square().mean().sqrt()) / unit for e in (error, remaining))
    return CorrectedLayer(name, before_rms, after_rms)


def _check(name: str, mean: Tensor, what: str) -> None:
    if not bool(mean.isfinite().all()):
        raise ValueError(
            f"correct_bias: the result of layer {name!r} of the {what} model has NaN or an infinity; look at the data, "
            "and at the weights up to it"
        )


def _skip_reason(layer: Layer, layers: dict[str, Layer]) -> str:
    """The reason to skip a layer's bias; "" if there is none."""
    bias = getattr(layer, "bias", None)
    if layer.norm is not None:
        return "a batch norm is folded into it: call reestimate_batch_norms"
    if bias is None:
        return "it has no bias"
    if sum(getattr(other, "bias", None) is bias for other in layers.values()) > 1:
        return "layers share its bias"
    scheme = layer.plan().scheme
    return "it quantizes its results" if scheme is not None and scheme.output is not None else ""
