"""Whatever conversion accepts runs: layer types, schemes, input ranks and forms of weights, crossed.

Conversion either raises an error with a remedy and leaves the model as it was, or gives a model that runs in each case
in which the float model runs, with results of the same shape and dtype. Layers that it leaves in floats have a reason
in the report.
"""

import copy
import itertools
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import hop
from hop.numerics.recipes import RECIPES
from hop.numerics.schemes import SCHEMES
from tests.support.layers import randn

Make = Callable[..., nn.Module]


class Attention(nn.Module):
    """Self-attention whose result is a tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def convolution(cls: type[nn.Module], channels: tuple[int, int] = (32, 64)) -> Make:
    return lambda **options: cls(*channels, 3, padding=1, **options)  # type: ignore[call-arg]


LAYERS: dict[str, Make] = {
    "Linear": lambda **options: nn.Linear(64, 32, **options),
    "Linear of odd sizes": lambda **options: nn.Linear(33, 7, **options),
    "Embedding": lambda **_: nn.Embedding(40, 64),
    "Embedding with padding": lambda **_: nn.Embedding(40, 64, padding_idx=3),
    **{cls.__name__: convolution(cls) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    "Conv2d in groups": lambda **options: nn.Conv2d(32, 32, 3, groups=32, padding=1, **options),
    **{cls.__name__: convolution(cls) for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)},
    "MultiheadAttention": Attention,
}
WITHOUT_BIAS = [name for name in LAYERS if not name.startswith("Embedding")]
EMPTY: dict[str, tuple[Make, Any]] = {
    "no outputs": (lambda: nn.Linear(64, 0), (3, 64)),
    "no inputs": (lambda: nn.Linear(0, 32), (3, 0)),
    "no rows": (lambda: nn.Embedding(0, 64), (0,)),
    "no columns": (lambda: nn.Embedding(40, 0), (3,)),
}


def inputs(name: str) -> dict[str, Tensor]:
    """Inputs by rank, and empty ones."""
    kind = name.split()[0]
    if kind == "Linear":
        sizes, last = [(), (3,), (2, 3), (2, 1, 3), (0,)], (33 if "odd" in name else 64,)
        shapes = [(*size, *last) for size in sizes]
    elif kind == "Embedding":
        shapes = [(), (3,), (2, 3), (0,)]
    elif kind == "MultiheadAttention":
        shapes = [(3, 32), (2, 3, 32), (0, 3, 32)]
    else:
        space = (4,) * int(kind[-2])
        shapes = [(32, *space), (2, 32, *space), (0, 32, *space)]
    return {str(shape): given(kind, shape) for shape in shapes}


def given(kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "Embedding":
        return torch.arange(torch.Size(shape).numel()).reshape(shape) % 40
    return randn(*shape)


def own(model: nn.Module) -> Any:
    """The module with the weight."""
    return model.inner.out_proj if isinstance(model, Attention) else model


class Twice(nn.Module):
    """A module that is called twice, by two names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.one, self.other = layer, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.one, self.other = layer, copy.deepcopy(layer)
        own(self.other).weight = own(self.one).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def changed_result(_module: nn.Module, _args: Any, result: Any) -> Any:
    return result * 1


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, args: args)
    layer.register_forward_hook(changed_result)
    layer.register_full_backward_hook(lambda module, grads, results: None)
    return layer


def changed(function: Callable[[Any], Any]) -> Callable[[nn.Module], nn.Module]:
    def of_layer(layer: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older functions are deprecated
            function(own(layer))
        return layer

    return of_layer


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda layer: layer,
    "hooks": hooked,
    "prune": changed(lambda m: prune.l1_unstructured(m, "weight", 0.3)),
    "weight_norm, old": changed(lambda m: nn.utils.weight_norm(m)),
    "spectral_norm, old": changed(lambda m: nn.utils.spectral_norm(m)),
    "weight_norm": changed(lambda m: parametrizations.weight_norm(m)),
    "spectral_norm": changed(lambda m: parametrizations.spectral_norm(m)),
    "parametrized": changed(lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Doubled())),
    "shared": Twice,
    "tied": Tied,
    "frozen": lambda layer: layer.requires_grad_(False),
    "in a model": lambda layer: nn.Sequential(layer, nn.Identity()),
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "channels_last": lambda layer: (
        layer.to(memory_format=torch.channels_last) if isinstance(layer, nn.Conv2d) else layer
    ),
}
ALL_SCHEMES = {**SCHEMES, **RECIPES}


def quantized(model: nn.Module, scheme: Any, batches: list[Any]) -> Any:
    return hop.quantize_(model, scheme, calibrate=batches)


def plain_codes(model: nn.Module, scheme: Any, batches: list[Any]) -> Any:
    return hop.quantize_(model, scheme, calibrate=batches, pack=False)


def trained(model: nn.Module, scheme: Any, batches: list[Any]) -> Any:
    """In training mode, with a backward where the float model has one."""
    model = hop.nn.convert(model, scheme)
    hop.nn.calibrate(model, batches, progress=False)
    model = model.train()
    y = model(batches[0])
    if y.requires_grad:
        y.float().square().sum().backward()
    return model.eval()


ROUTES = {"quantize_": quantized, "pack=False": plain_codes, "convert": trained}


def check(layer: nn.Module, form: str, scheme: str, route: str, batches: dict[str, Tensor]) -> None:
    model = FORMS[form](layer.eval())
    dtype = next(p.dtype for p in model.parameters())
    batches = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batches.items()}
    expected = {k: y for k, x in batches.items() if (y := result(model, x)) is not None}
    assert expected
    before = structure(model)
    usable = [batches[k] for k, y in expected.items() if y.numel()] or [batches[k] for k in expected]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was converted, which the report says
        try:
            model = ROUTES[route](model, ALL_SCHEMES[scheme], usable)
        except (TypeError, ValueError) as error:
            assert "; " in str(error) and structure(model) == before, error
            return
    for row in model.hop_report.rows:
        assert row.scheme is not None or row.reason, row
    sound = all(bool(y.isfinite().all()) for y in expected.values())  # weight_norm turns a padding row into NaN
    for k, y in expected.items():
        z = model(batches[k])
        assert z.shape == y.shape and z.dtype == y.dtype, (k, z.shape, z.dtype)
        assert not sound or bool(z.isfinite().all()), k


def structure(model: nn.Module) -> list[Any]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [*((n, type(m)) for n, m in model.named_modules()), *((n, type(p), id(p)) for n, p in named)]


def result(model: nn.Module, x: Tensor) -> Any:
    """The float model's result; None if it does not take this input."""
    try:
        with torch.no_grad():
            return model(x)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


def every() -> Iterator[tuple[str, bool, str, str, str]]:
    """Each layer in each form with each scheme; bias and route take turns."""
    turns = itertools.cycle(itertools.product((True, False), ROUTES))
    for (name, form, scheme), (bias, route) in zip(itertools.product(LAYERS, FORMS, ALL_SCHEMES), turns, strict=False):
        yield name, bias or name not in WITHOUT_BIAS, form, scheme, route


def sample() -> list[tuple[str, bool, str, str, str]]:
    """Each pair of a layer and a form, and of a scheme and a route, in few combinations."""
    seen, found = set[Any](), []
    for least in (3, 2, 1):
        for case in sorted(every(), key=hash_of):
            name, bias, form, scheme, route = case
            pairs = {(name, form), (scheme, route), (name, bias, route), (form, route)}
            if len(pairs - seen) >= least:
                seen |= pairs
                found.append(case)
    return found


def hash_of(case: Any) -> int:
    """A fixed order without pattern."""
    return int.from_bytes(repr(case).encode()[::-1], "little") * 2654435761 % 2**32


class TestFirstCall(unittest.TestCase):
    @parameterized.expand(EMPTY)
    @pytest.mark.quick(4)
    def test_empty(self, name: str):
        make, shape = EMPTY[name]
        for scheme, route in itertools.product(ALL_SCHEMES, ROUTES):
            with warnings.catch_warnings(), self.subTest(scheme=scheme, route=route):
                warnings.simplefilter("ignore")  # of initializing nothing
                layer = make()
                kind = "Embedding" if isinstance(layer, nn.Embedding) else ""
                check(layer, "plain", scheme, route, {str(shape): given(kind, shape)})

    @parameterized.expand([(third,) for third in range(3)])
    @pytest.mark.quick(3)
    def test_pairs(self, third: int):
        self.checked(sample()[third::3])

    @pytest.mark.full
    def test_one_in_five(self):
        self.checked(itertools.islice(every(), 0, None, 5))

    @pytest.mark.exhaustive
    def test_all(self):
        self.checked(every())

    def checked(self, cases: Any) -> None:
        for name, bias, form, scheme, route in cases:
            with self.subTest(layer=name, bias=bias, form=form, scheme=scheme, route=route):
                torch.manual_seed(0)
                options = {} if bias or name not in WITHOUT_BIAS else {"bias": False}
                check(LAYERS[name](**options), form, scheme, route, inputs(name))
