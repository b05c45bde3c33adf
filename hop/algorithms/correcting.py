"""correct_bias, reestimate_batch_norms: what the errors of a quantized model are on average, taken out again.

    b ← b - E[ŷ - y]        over the data, for each channel of a layer's results; y those of the float model

Nagel et al. 2019, "Data-Free Quantization through Weight Equalization and Bias Correction" (arXiv 1906.04721), section
4.2, with data in the place of an assumption on it. Sun et al. 2019, "Hybrid 8-bit Floating Point Training and
Inference" (NeurIPS), for statistics of batch norms that are found anew.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hop.algorithms.candidates import batches_of
from hop.nn import reminder
from hop.nn.calibration import observed, run
from hop.nn.folded import FoldedBatchNorm
from hop.nn.layer import Layer, modules_of, not_a_model
from hop.tensor import QuantizedTensor

_NORMS = (nn.modules.batchnorm._BatchNorm, FoldedBatchNorm)


@dataclass(frozen=True)
class CorrectedLayer:
    """What became of the bias of one layer; the mean error is the root of the mean square of E[ŷ - y] over channels, by
    that of E[y]; NaN where no data was looked at."""

    name: str
    before: float
    after: float
    note: str = ""  # why it is as it was


def correct_bias(model: nn.Module, floats: nn.Module, batches: Iterable[Any]) -> Any:
    """Take what the results of quantized layers differ by on average from those of the float model out of their biases,
    in place, one layer after another: each is given what the corrected ones before it leave.

    It takes one run over the data, up to the layer, for each.

    Args:
        model: with quantized layers, frozen or not.
        floats: the float model, with layers of the same names, such as a copy from before `hop.quantize_`.
        batches: inputs, as hop.nn.calibrate takes them; kept in a list meanwhile.

    Returns:
        model. Its `bias_report` has a CorrectedLayer for each quantized layer with a weight. Layers without a bias,
        with a bias that others share, that quantize their results, have a batch norm folded in, or are not reached by
        data are left as they are, and their notes say so.

    Raises:
        TypeError: model or floats is no module; a batch is none that they take.
        ValueError: batches is empty; model has no quantized layers; floats has no layer of a name; a result is not
            finite. No bias is changed then, but for a result of the quantized model that is not finite, where those of
            the layers before are.
    """
    for given in (model, floats):
        if not isinstance(given, nn.Module):
            raise not_a_model("correct_bias", given)
    data = batches_of("correct_bias", batches)
    layers = {name: m for name, m in modules_of(model) if isinstance(m, Layer) and hasattr(m, "weight")}
    if not layers:
        raise ValueError(
            f"correct_bias: model={type(model).__name__} has no quantized layers; call hop.quantize_ before"
        )
    others = dict(modules_of(floats, every_name=True))
    if missing := [name for name in layers if name not in others or isinstance(others[name], Layer)]:
        raise ValueError(f"correct_bias: floats has no float layer {missing[0]!r}; give a copy of the float model")
    rows = {name: CorrectedLayer(name, _NAN, _NAN, _declined(layer, layers)) for name, layer in layers.items()}
    taken = [name for name, row in rows.items() if not row.note]
    wanted = _means(floats, {name: (others[name], _channel(layers[name])) for name in taken}, data)
    for name in taken:
        if name not in wanted:
            rows[name] = CorrectedLayer(name, _NAN, _NAN, "no batch reaches it")
    for name, mean in wanted.items():  # in the order of their first calls
        rows[name] = _corrected(model, name, layers[name], mean, data)
    model.bias_report = tuple(rows.values())  # type: ignore[assignment]  # a plain attribute
    return model


def reestimate_batch_norms(model: nn.Module, batches: Iterable[Any]) -> Any:
    """Find the running statistics of batch norms anew, in place, from what the quantized layers before them give: the
    means over batches of their means, and of their unbiased variances. Everything else runs in eval mode.

    Args:
        model: with batch norms, folded ones (hop.nn.fold_batch_norms) too.
        batches: inputs, as hop.nn.calibrate takes them: each of more than one example.

    Returns:
        model. Norms that no batch reaches keep what they had.

    Raises:
        TypeError: model is no module; a batch is none that it takes.
        ValueError: batches is empty; no norm has running statistics; one gets a number that is not finite, and all keep
            what they had.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model("reestimate_batch_norms", model)
    data = batches_of("reestimate_batch_norms", batches)
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


def _restore(norms: dict[str, Any], kept: dict[str, dict[str, Tensor]], names: Sequence[str]) -> None:
    for name in names:
        for own, value in kept[name].items():
            norms[name].get_buffer(own).copy_(value)


class _Enough(Exception):
    """All that a batch was run for has been seen."""


class _Mean:
    """The mean over all but the channels, in float64."""

    def __init__(self, dim: int) -> None:
        self.dim, self.count = dim, 0
        self.sum: Any = 0.0
        self.per_batch: list[int] = []  # how many calls

    def add(self, y: Any) -> None:
        wide = (y.numbers() if isinstance(y, QuantizedTensor) else y).detach().to(torch.float64)
        channels = wide.movedim(self.dim, -1).flatten(0, -2) if wide.dim() > 1 else wide.unsqueeze(0)
        self.sum = self.sum + channels.sum(0)
        self.count += len(channels)

    def mean(self) -> Tensor:
        return self.sum / self.count


@contextmanager
def _seen(pairs: Sequence[tuple[nn.Module, Callable[[Any], None]]]) -> Iterator[None]:
    """While results of modules are seen."""
    handles = [m.register_forward_hook(lambda module, args, y, see=see: see(y)) for m, see in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _means(model: nn.Module, layers: dict[str, tuple[nn.Module, int]], data: Sequence[Any]) -> dict[str, _Mean]:
    """Those of the layers' results in the float model, in the order of their first calls."""
    every = {name: _Mean(dim) for name, (_, dim) in layers.items()}
    called: dict[str, _Mean] = {}

    def see(name: str, y: Any) -> None:
        called.setdefault(name, every[name]).add(y)
        every[name].per_batch[-1] += 1

    pairs = [(module, lambda y, name=name: see(name, y)) for name, (module, _) in layers.items()]
    with observed(model, []), reminder.silent(), _seen(pairs):
        for number, batch in enumerate(data):
            for mean in every.values():
                mean.per_batch.append(0)
            run(model, batch, number, "correct_bias")
    called = {name: mean for name, mean in called.items() if mean.count}
    for name, mean in called.items():
        _check(name, mean.mean(), "float")
    return called


def _corrected(model: nn.Module, name: str, layer: Any, wanted: _Mean, data: Sequence[Any]) -> CorrectedLayer:
    """A layer whose bias has been corrected."""
    mean, left = _Mean(wanted.dim), 0

    def see(y: Any) -> None:
        nonlocal left
        mean.add(y)
        left -= 1
        if left == 0:
            raise _Enough

    with observed(model, []), reminder.silent(), _seen([(layer, see)]):
        for number, batch in enumerate(data):
            left = wanted.per_batch[number]
            if left:
                with suppress(_Enough):
                    run(model, batch, number)
    if not mean.count:
        return CorrectedLayer(name, _NAN, _NAN, "the quantized model does not call it")
    error = mean.mean() - wanted.mean()
    _check(name, error, "quantized")
    before = layer.bias.detach().to(torch.float64)
    with torch.no_grad():
        layer.bias.copy_((before - error).to(layer.bias.dtype))
    rest = error + (layer.bias.detach().to(torch.float64) - before)
    unit = float(wanted.mean().square().mean().sqrt()) or 1.0
    was, now = (float(e.square().mean().sqrt()) / unit for e in (error, rest))
    return CorrectedLayer(name, was, now)


def _check(name: str, mean: Tensor, what: str) -> None:
    if not bool(mean.isfinite().all()):
        raise ValueError(
            f"correct_bias: the result of layer {name!r} of the {what} model has NaN or an infinity; look at the data, "
            "and at the weights up to it"
        )


def _channel(layer: Any) -> int:
    """The dimension of the results, from the last one, that its channels lie along."""
    return -layer.example_dims


def _declined(layer: Any, layers: dict[str, Any]) -> str:
    """Why the bias of a layer is left; "" where it is not."""
    bias = getattr(layer, "bias", None)
    if layer.norm is not None:
        return "a batch norm is folded into it: call reestimate_batch_norms"
    if bias is None:
        return "it has no bias"
    if sum(getattr(other, "bias", None) is bias for other in layers.values()) > 1:
        return "layers share its bias"
    scheme = layer.plan().scheme
    return "it quantizes its results" if scheme is not None and scheme.output is not None else ""
