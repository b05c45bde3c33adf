"""calibrate: find static activation scales by running a model over data."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hop.nn.contexts import INPUT, OUTPUT
from hop.nn.layers import reminder
from hop.nn.layers.base import Layer, modules_of, not_a_model
from hop.nn.scales.static import StaticScale
from hop.numerics import calibration
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import LARGEST

KEPT = 2**20
"""Upper bound on the elements of an activation that are kept for methods other than amax."""

Method = Callable[..., dict[str, Tensor]]
See = Callable[[Tensor], object]
"""A function that is called with each activation."""


def calibrate(
    model: nn.Module,
    batches: Iterable[object],
    method: Method = calibration.amax,
    steps: int | None = None,
    progress: bool = True,
) -> Any:
    """Run `model` over `batches`, and set the static scales of the inputs and outputs of its layers.

    The model runs in eval mode and without gradients. Scales are those of the active scheme. Meanwhile layers with such
    scales compute in floats, and the others as usual. Static scales of weights that are not set are found from the
    weights. A layer that no batch reaches is left unchanged.

    Args:
        batches: an iterable of inputs. A tensor is passed as model(x), a tuple or list as model(*x), a mapping as
            model(**x).
        method: a function of hop.calibration, or your own with the same arguments. amax needs only the range, and
            moving_average the range of each call; for any other, at most KEPT = 2^20 elements of each activation are
            kept, evenly spread over all calls.
        steps: the number of batches to read; None for all.
        progress: whether to show a progress bar on a terminal; needs tqdm: pip install 'torch-hop[progress]'.

    Returns:
        model.

    Raises:
        TypeError: batches is a single tensor, or the model does not accept a batch.
        ValueError: there is no batch or no quantized layer, or a layer saw no finite value. No activation scale is set.

    Warns:
        UserWarning: a layer saw NaN or an infinity, which codes with a static scale cannot represent.
    """
    layers = _checked(model, batches, method, steps)
    for layer in layers:
        layer.prepare()
    watched = [(layer, role, state) for layer in layers for role, state in _static(layer)]
    function = getattr(method, "func", method)  # unwrap functools.partial
    collector = {calibration.amax: _Range, calibration.moving_average: _Ranges}.get(function, _Sample)
    collected = [collector() for _ in watched]
    count = 0
    with (
        reminder.silent(),
        observed(model, [(layer, role, seen.add) for (layer, role, _), seen in zip(watched, collected, strict=True)]),
    ):
        for batch in _shown(islice(batches, steps), batches, steps, progress):
            run(model, batch, count)
            count += 1
    odd: list[str] = []
    if not count:
        raise ValueError("calibrate: batches is empty, and must contain an input; give at least one")
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


def _checked(model: object, batches: object, method: object, steps: object) -> list[Layer]:
    """The quantized layers of the model. Raises for invalid arguments of `calibrate`."""
    if not isinstance(model, nn.Module):
        raise not_a_model("calibrate", model)
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        got = f"a tensor of shape {tuple(batches.shape)}" if isinstance(batches, Tensor) else repr(batches)
        raise TypeError(f"calibrate: batches must be an iterable of batches, got {got}; give [x], or a DataLoader")
    if not callable(method):
        raise TypeError(f"calibrate: method must be a function, got {method!r}; use one of hop.calibration")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        error = ValueError if isinstance(steps, int) else TypeError
        raise error(f"calibrate: steps must be 1 or more, an int, got {steps}; give None for all batches")
    layers = [m for m in model.modules() if isinstance(m, Layer)]
    if not layers:
        raise ValueError(
            f"calibrate: model ({type(model).__name__}) has no quantized layers; call hop.nn.convert first"
        )
    return layers


@contextmanager
def observed(model: nn.Module, watched: Sequence[tuple[Layer, str, See | None]]) -> Iterator[None]:
    """Run a block with the model in eval mode, without gradients, while layers compute in floats, and call
    functions, if there are any, with their activations."""
    training = {module: module.training for module in model.modules()}
    floats = {layer: layer.in_floats for layer, _, _ in watched}
    handles = [_observe(layer, role, see) for layer, role, see in watched if see is not None]
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
    """The static activation scales that the active scheme uses."""
    for role, _ in layer.plan().needs:
        state = layer.scales[role] if role in (INPUT, OUTPUT) and role in layer.roles else None
        if isinstance(state, StaticScale):
            yield role, state


def _observe(layer: Layer, role: str, see: See) -> RemovableHandle:
    """Register a hook that passes the activation to `see`, and return its handle."""

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = layer.transformed(args[0] if args else kwargs["input"])
        see(x if layer.weight.numel() else x.new_zeros(1))  # without weights any scale will do

    def after(module: nn.Module, args: tuple[object, ...], y: Tensor) -> None:
        see(y)

    if role == INPUT:
        return layer.register_forward_pre_hook(before, with_kwargs=True)
    return layer.register_forward_hook(after)


def run(model: nn.Module, batch: object, number: int, caller: str = "calibrate") -> Any:
    """Call the model with a batch. Raises TypeError, naming `caller` and `number`, if forward does not accept it."""
    given, how = (batch,), "model(batch)"
    named: Mapping[str, object] = {}
    if isinstance(batch, Mapping):
        given, named, how = (), cast(Mapping[str, object], batch), f"model(**batch), of {list(batch)}"
    elif isinstance(batch, tuple | list):
        given = tuple(batch)
        how = f"model(*batch), of {len(given)}"
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except TypeError as error:
        raise TypeError(
            f"{caller}: batch {number} is passed as {how}, which {type(model).__name__}.forward does not accept: "
            f"{error}; leave out everything that is not an input, as in (x for x, y in loader)"
        ) from error
    return model(*given, **named)


def _shown(taken: Iterable[object], batches: Iterable[object], steps: int | None, progress: bool) -> Iterable[object]:
    """Wrap `taken` in a progress bar if stderr is a terminal and tqdm is installed."""
    if not progress or not sys.stderr.isatty():
        return taken
    try:
        from tqdm import tqdm
    except ImportError:
        return taken
    sizes = [n for n in (steps, len(batches) if hasattr(batches, "__len__") else None) if n is not None]  # type: ignore[arg-type]
    return tqdm(taken, total=min(sizes, default=None), desc="calibrate")


class _Range:
    """Collects the minimum and maximum of all calls."""

    def __init__(self) -> None:
        self._ends: Tensor | None = None
        # whether any element was finite, and whether any was not; a tensor, so that no step waits for the device
        self._finite: Tensor | None = None

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
        """Whether there was data, and all of it NaN or infinite."""
        return self._finite is not None and not bool(self._finite[0])

    def has_others(self) -> bool:
        """Whether an element was NaN or infinite."""
        return self._finite is not None and bool(self._finite[1])

    def values(self) -> Tensor | None:
        """The minimum and the maximum as a tensor of two elements; None without data."""
        return self._ends


class _Ranges:
    """Collects the minimum and maximum of each call."""

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
        """Minimum and maximum of each call, each a tensor of two elements; None without data."""
        return tuple(ends for call in self._calls if (ends := call.values()) is not None) or None


class _Sample:
    """Keeps every n-th element of all calls, at most KEPT elements.

    n is a power of 3: it shares no factor with sizes that are powers of 2, which would restrict the sample to some
    channels.
    """

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
        """Whether there was data, and all of the sample is NaN or infinite."""
        return self._seen > 0 and not any(bool(part.isfinite().any()) for part in self._parts)

    def has_others(self) -> bool:
        """Whether an element that was seen is NaN or infinite."""
        return self._others is not None and bool(self._others)

    def values(self) -> Tensor | None:
        """The sample; None without data."""
        return torch.cat(self._parts) if self._seen else None
