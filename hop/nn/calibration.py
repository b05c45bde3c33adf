"""calibrate: static scales of activations, from what passes through the layers of a model."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from hop.nn import reminder
from hop.nn.contexts import INPUT, OUTPUT
from hop.nn.layer import Layer, modules_of, not_a_model
from hop.nn.static import StaticScale
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST

KEPT = 2**20
"""The most elements of an activation that are kept for a method other than amax."""

Method = Callable[..., dict[str, Tensor]]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    method: Method = calibration.amax,
    steps: int | None = None,
    progress: bool = True,
) -> Any:
    """Run `model` over `batches`, in eval mode and without gradients, and set the static scales of the inputs and
    outputs of its layers from what they see, in the scheme that is active.

    While it runs, layers that have such scales compute in floats, and the others as always. Static scales of weights
    are found from the weights, where they are not set. A layer that no batch reaches stays as it is.

    Args:
        batches: inputs: a tensor is model(x), a tuple or list model(*x), a mapping model(**x).
        method: of hop.calibration, or your own with the same arguments. amax needs the range alone, and moving_average
            those of the calls; for any other, at most KEPT = 2^20 elements of each activation are kept, evenly spread
            over all that was seen.
        steps: how many batches to take, None for all.
        progress: whether to show a bar, on a terminal, if tqdm is installed: pip install 'torch-hop[progress]'.

    Returns:
        model.

    Raises:
        TypeError: batches is one tensor, or a batch is none that the model takes.
        ValueError: there is no batch, or no quantized layer; a layer has seen no finite number. No scale of an
            activation is set then.

    Warns:
        UserWarning: a layer has seen NaN or an infinity, which codes by a static scale do not keep.
    """
    layers = _checked(model, batches, method, steps)
    for layer in layers:
        layer.prepare()
    watched = [(layer, role, state) for layer in layers for role, state in _static(layer)]
    function = getattr(method, "func", method)  # of a functools.partial
    collector = {calibration.amax: _Range, calibration.moving_average: _Ranges}.get(function, _Sample)
    collected = [collector() for _ in watched]
    count = 0
    with (
        reminder.silent(),
        observed(model, [(layer, role, seen) for (layer, role, _), seen in zip(watched, collected, strict=True)]),
    ):
        for batch in _shown(islice(batches, steps), batches, steps, progress):
            run(model, batch, count)
            count += 1
    odd: list[str] = []
    if not count:
        raise ValueError("calibrate: batches is empty, and must hold an input; give one input of the model or more")
    for (layer, role, _), seen in zip(watched, collected, strict=True):
        if not seen.has_others():
            continue
        name = next(name for name, module in modules_of(model) if module is layer)
        odd.append(f"the {role} of layer {name!r}")
        if seen.has_only_others():
            raise ValueError(
                f"calibrate: the {role} of layer {name!r} has no finite number in {count} batches; look at the data, "
                "and at the weights"
            )
    for (_, _, state), seen in zip(watched, collected, strict=True):
        values = seen.values()
        if values is not None:
            given = values if isinstance(values, tuple) else (values,)
            state.set(**method(Quantizer.parse(state.spelling), *given))
    if odd:
        what = ", ".join(odd[:3]) + (f", and {len(odd) - 3} others" if len(odd) > 3 else "")
        warnings.warn(
            f"calibrate: {what} has NaN or an infinity, which codes by a static scale do not keep: NaN becomes 0, "
            "and an infinity the largest number; look at the data, and at the weights",
            stacklevel=2,
        )
    return model


def _checked(model: Any, batches: Any, method: Any, steps: Any) -> list[Layer]:
    """The quantized layers of the model. Raises for arguments that `calibrate` does not take."""
    if not isinstance(model, nn.Module):
        raise not_a_model("calibrate", model)
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        got = f"a tensor of {tuple(batches.shape)}" if isinstance(batches, Tensor) else repr(batches)
        raise TypeError(f"calibrate: batches must be an iterable of batches, got {got}; give [x], or a DataLoader")
    if not callable(method):
        raise TypeError(f"calibrate: method must be a function, got {method!r}; take one of hop.calibration")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        error = ValueError if isinstance(steps, int) else TypeError
        raise error(f"calibrate: steps must be 1 or more, an int, got {steps}; give None for all batches")
    layers = [m for m in model.modules() if isinstance(m, Layer)]
    if not layers:
        raise ValueError(
            f"calibrate: model has no quantized layers, and is a {type(model).__name__}; call hop.nn.convert before"
        )
    return layers


@contextmanager
def observed(model: nn.Module, watched: Sequence[tuple[Layer, str, Any]]) -> Iterator[None]:
    """The model in eval mode and without gradients, while its layers compute in floats and are seen."""
    training = {module: module.training for module in model.modules()}
    floats = {layer: layer.in_floats for layer, _, _ in watched}
    handles = [_observe(layer, role, seen) for layer, role, seen in watched]
    try:
        for layer, _, _ in watched:
            layer.in_floats = True
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, before in floats.items():
            layer.in_floats = before
        for module, flag in training.items():
            module.training = flag


def _static(layer: Layer) -> Iterator[tuple[str, StaticScale]]:
    """The static scales of activations that the active scheme uses."""
    for role, _ in layer.plan().needs:
        state = layer.scales[role] if role in (INPUT, OUTPUT) and role in layer.roles else None
        if isinstance(state, StaticScale):
            yield role, state


def _observe(layer: Layer, role: str, seen: Any) -> Any:
    """A handle of the hook that shows `seen` the activation."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.add(layer.transformed(args[0] if args else kwargs["input"]))

    if role == INPUT:
        return layer.register_forward_pre_hook(before, with_kwargs=True)
    return layer.register_forward_hook(lambda module, args, y: seen.add(y))


def run(model: nn.Module, batch: Any, number: int, caller: str = "calibrate") -> Any:
    """What the model makes of the `number`-th batch that `caller` is given. Raises TypeError where it takes none."""
    given, how = (batch,), "model(batch)"
    named: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        given, named, how = (), cast(Mapping[str, Any], batch), f"model(**batch), of {list(cast(Any, batch))}"
    elif isinstance(batch, tuple | list):
        given = tuple(cast(Iterable[Any], batch))
        how = f"model(*batch), of {len(given)}"
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except TypeError as error:
        raise TypeError(
            f"{caller}: batch {number} is given as {how}, which {type(model).__name__}.forward does not take: "
            f"{error}; leave out what is no input, as in (x for x, y in loader)"
        ) from error
    return model(*given, **named)


def _shown(taken: Iterable[Any], batches: Iterable[Any], steps: int | None, progress: bool) -> Iterable[Any]:
    """`taken`, with a bar where one can be seen."""
    if not progress or not sys.stderr.isatty():
        return taken
    try:
        from tqdm import tqdm
    except ImportError:
        return taken
    sizes = [n for n in (steps, len(batches) if hasattr(batches, "__len__") else None) if n is not None]  # type: ignore[arg-type]
    return tqdm(taken, total=min(sizes, default=None), desc="calibrate")


class _Range:
    """The least and the largest number."""

    def __init__(self) -> None:
        self._ends: Tensor | None = None
        self._finite: Tensor | None = None  # whether any was, and all were; on its device, not to wait for it

    def add(self, x: Tensor) -> None:
        if x.numel():
            elements = x.detach().isfinite()
            finite = torch.stack([elements.any(), ~elements.all()])
            self._finite = finite if self._finite is None else self._finite | finite
            known = x.detach().to(torch.float32).nan_to_num(0.0, LARGEST, -LARGEST)
            value_range = torch.stack([known.amin(), known.amax()])
            both = value_range if self._ends is None else torch.cat([self._ends, value_range])
            self._ends = torch.stack([both.amin(), both.amax()])

    def has_only_others(self) -> bool:
        """Whether all that was seen is NaN or infinite."""
        return self._finite is not None and not bool(self._finite[0])

    def has_others(self) -> bool:
        """Whether an element that was seen is NaN or infinite."""
        return self._finite is not None and bool(self._finite[1])

    def values(self) -> Tensor | None:
        """Numbers with that range; None if nothing was seen."""
        return self._ends


class _Ranges:
    """The least and the largest number of each call."""

    def __init__(self) -> None:
        self._calls: list[_Range] = []

    def add(self, x: Tensor) -> None:
        if x.numel():
            self._calls.append(_Range())
            self._calls[-1].add(x)

    def has_only_others(self) -> bool:
        return bool(self._calls) and all(call.has_only_others() for call in self._calls)

    def has_others(self) -> bool:
        return any(call.has_others() for call in self._calls)

    def values(self) -> tuple[Tensor, ...] | None:
        """Numbers with these ranges; None if nothing was seen."""
        return tuple(ends for call in self._calls if (ends := call.values()) is not None) or None


class _Sample:
    """Every n-th element of all that was seen, at most KEPT. n is a power of 3, which shares no factor with sizes that
    are powers of 2, or else the sample would hold some channels alone."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._step, self._seen = 1, 0
        self._others: Tensor | None = None

    def add(self, x: Tensor) -> None:
        flat = x.detach().flatten()
        others = ~flat.isfinite().all()
        self._others = others if self._others is None else self._others | others
        self._parts.append(flat[-self._seen % self._step :: self._step].to(torch.float32, copy=True))
        self._seen += flat.numel()
        while sum(part.numel() for part in self._parts) > KEPT:
            self._parts = [torch.cat(self._parts)[::3].clone()]
            self._step *= 3

    def has_only_others(self) -> bool:
        """Whether all of the sample is NaN or infinite."""
        return self._seen > 0 and not any(bool(part.isfinite().any()) for part in self._parts)

    def has_others(self) -> bool:
        """Whether an element that was seen is NaN or infinite."""
        return self._others is not None and bool(self._others)

    def values(self) -> Tensor | None:
        """The sample; None if nothing was seen."""
        return torch.cat(self._parts) if self._seen else None
