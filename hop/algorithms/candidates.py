"""The layers of a model in several schemes: their outputs, their sizes and their times.

The float model is not changed: each scheme is tried on a copy of its modules that shares its Parameters and buffers.
"""

import copy
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from hop.compat.pytree import Args, Kwargs
from hop.nn.attention.multihead import OutputProjection
from hop.nn.layers import reminder
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.models.calibration import calibrate
from hop.nn.models.conversion import checked, convert, has_static_scale
from hop.nn.models.freezing import freeze
from hop.nn.models.kinds import LAYERS
from hop.nn.models.selectors import Selector, check_selector, matches
from hop.nn.weights.recomputed import check_plain
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

ROUNDS = 7
"""Number of timed calls of each layer in each scheme, the schemes in turns."""

_KNOWN = {old: new for old, new in LAYERS.items() if issubclass(new, Layer) and new is not OutputProjection}


@dataclass(eq=False)
class Candidates:
    """The layers of a model, by name, converted to each scheme."""

    model: nn.Module  # the unchanged float model
    schemes: tuple[Scheme | None, ...]
    layers: dict[str, dict[int, nn.Module]] = field(
        default_factory=dict
    )  # frozen layers by name and index into schemes
    left: dict[str, str] = field(default_factory=dict)  # reasons by the name of an unsupported layer

    def results(self, name: str, args: Args, kwargs: Kwargs) -> dict[int, Tensor]:
        """The outputs of a layer in each scheme, as floats."""
        with torch.no_grad(), reminder.silent():
            outputs = {place: layer.forward(*args, **kwargs) for place, layer in self.layers[name].items()}
        return {place: y.numbers() if isinstance(y, QuantizedTensor) else y for place, y in outputs.items()}

    def sizes(self, name: str) -> dict[int, int]:
        """The bytes of a layer's weight in each scheme."""
        return {place: _bytes(layer.weight) for place, layer in self.layers[name].items()}

    def seconds(self, name: str, args: Args, kwargs: Kwargs) -> dict[int, float]:
        """The time of one call in each scheme: the median of ROUNDS calls after a warm-up."""
        times: dict[int, list[float]] = {place: [] for place in self.layers[name]}
        with torch.no_grad(), reminder.silent():
            for _ in range(1 + ROUNDS):
                for place, layer in self.layers[name].items():
                    start = time.perf_counter()
                    layer.forward(*args, **kwargs)
                    if layer.weight.is_cuda:
                        torch.cuda.synchronize()
                    times[place].append(time.perf_counter() - start)
        return {place: statistics.median(each[1:]) for place, each in times.items()}

    def sharing(self) -> list[list[str]]:
        """The names of layers, grouped by shared weight."""
        groups: dict[int, list[str]] = {}
        for name in self.layers:
            groups.setdefault(id(self.model.get_submodule(name).weight), []).append(name)
        return list(groups.values())


def candidates(
    function: str, model: object, schemes: object, data: Sequence[object], filter: Selector | None
) -> Candidates:
    """The layers of `model` that `filter` selects, in each of `schemes`; None stands for floats.

    Static scales of activations are calibrated on `data`.

    Raises:
        TypeError: `model` is not a module, or `schemes` is not a list of schemes.
        ValueError: no layer supports any of the schemes.
    """
    if not isinstance(model, nn.Module):
        raise not_a_model(function, model)
    if filter is not None:
        check_selector("filter", filter)
    result = Candidates(model, _checked_schemes(function, schemes))
    known = {
        name: module
        for name, module in modules_of(model)
        if type_before_parametrizations(module) in _KNOWN and (filter is None or matches(filter, name, module))
    }
    check_plain(function, known.items())  # copies of the model would share parametrizations and hooks
    by_place: dict[str, dict[int, nn.Module]] = {name: {} for name in known}
    for place, scheme in enumerate(result.schemes):
        tried: Any = model if scheme is None else _quantized(model, scheme, filter, data)
        for row in () if scheme is None else tried.hop_report.rows:
            if row.name in known and row.reason:
                result.left.setdefault(row.name, row.reason)
            elif row.name not in known and row.scheme is not None:
                result.left[row.name] = f"{row.type} has several weights; give it a rule of its own"
        for name in known:
            layer = tried.get_submodule(name)
            if scheme is None or isinstance(layer, Layer):
                by_place[name][place] = layer
    result.layers = {n: by for n, by in by_place.items() if any(result.schemes[place] is not None for place in by)}
    result.left = {name: why for name, why in result.left.items() if name not in result.layers}
    if not result.layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in result.left.items()) or "it has no layer that hop knows"
        raise ValueError(
            f"{function}: no layer of model={type(model).__name__} takes one of these schemes ({reasons}); give a "
            "float model, and schemes that fit its layers"
        )
    return result


def list_batches(function: str, batches: object) -> list[object]:
    """The batches as a list. Raises TypeError or ValueError unless there is at least one."""
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        got = f"a tensor of {tuple(batches.shape)}" if isinstance(batches, Tensor) else repr(batches)
        raise TypeError(f"{function}: batches must be an iterable of batches, got {got}; give [x], or a DataLoader")
    data = list(batches)
    if not data:
        raise ValueError(f"{function}: batches is empty, and must hold an input; give one input of the model or more")
    return data


def dense_bytes(q: Quantizer, shape: Sequence[int]) -> int:
    """The bytes of the codes and scales of a tensor of `shape`, without padding bits: codes of 3, 5 and 6 bits take as
    much as in hop.layouts.Planes.
    """
    has_planes = q.format.bits in (3, 5, 6) and not q.format.dtype.is_floating_point
    buffers = replace(q, layout=Planes() if has_planes else None).buffers(shape)
    return sum(math.prod(size) * dtype.itemsize for size, dtype in buffers.values())


def _bytes(weight: object) -> int:
    assert isinstance(weight, Tensor)
    return dense_bytes(weight.quantizer, weight.shape) if isinstance(weight, QuantizedTensor) else weight.nbytes


def _checked_schemes(function: str, schemes: object) -> tuple[Scheme | None, ...]:
    """Check the schemes and return them as a tuple. Raises TypeError or ValueError."""
    if isinstance(schemes, str | Scheme | Quantizer) or not isinstance(schemes, Sequence) or not schemes:
        raise TypeError(
            f"{function}: schemes must be a list of schemes, got {schemes!r}; give one such as ['int4', 'int8']"
        )
    checked_schemes = tuple(None if each is None else checked(each)[0][1] for each in schemes)
    if len(set(checked_schemes)) < len(checked_schemes):
        raise ValueError(f"{function}: schemes has a duplicate: {schemes!r}; give each once")
    return checked_schemes


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares the Parameters and buffers."""
    memo: dict[int, object] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def _quantized(model: nn.Module, scheme: Scheme, filter: Selector | None, data: Sequence[object]) -> Any:
    """A frozen copy of the model in a scheme."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="convert: no layer was converted")  # checked later, over all schemes
        result = convert(_shared_copy(model), scheme, filter=filter)
    if any(isinstance(m, Layer) for m in result.modules()):
        if has_static_scale(scheme):
            calibrate(result, data, progress=False)
        freeze(result, pack=True)
    return result.eval()
