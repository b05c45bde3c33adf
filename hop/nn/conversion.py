"""convert: quantized layers in the place of a model's float ones, and a report of it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from hop.impls.quantize import dequantize
from hop.nn.layer import Layer, modules_of, spelled
from hop.nn.layers import LAYERS
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

_OPAQUE = (nn.RNNBase, nn.MultiheadAttention)  # whose own parameters are weights of products

Selector = type[nn.Module] | str | Callable[[str, nn.Module], bool]
Rule = tuple[Selector, Scheme | None]


@dataclass(frozen=True)
class Conversion:
    """What became of one layer."""

    name: str
    type: str  # that it had
    scheme: Scheme | None  # None: it was left alone
    reason: str = ""  # why


@dataclass(frozen=True)
class Report:
    """What `convert` did; str() is a table."""

    model: nn.Module  # the converted model
    rows: tuple[Conversion, ...]
    unused: tuple[str, ...]  # selectors of which earlier rules took every layer

    def __str__(self) -> str:
        table = [("layer", "type", "scheme"), *((r.name or "(model)", r.type, _said(r)) for r in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(2)]
        lines = [f"{name:{widths[0]}}  {kind:{widths[1]}}  {said}" for name, kind, said in table]
        converted = sum(row.scheme is not None for row in self.rows)
        lines.append(f"{converted} of {len(self.rows)} layers converted")
        lines += [f"earlier rules take every layer that {selector} matches" for selector in self.unused]
        return "\n".join(lines)


def convert(model: nn.Module, rules: Scheme | Sequence[Rule], learn_scales: bool = False) -> Report:
    """Put quantized layers in the place of the Linear, Conv1d, Conv2d and Embedding of `model`, in place.

    They keep the Parameters, so that optimizers stay valid and tied weights tied; a module that stands in several
    places is converted once. A quantized layer gets the new scheme, and keeps its learn_scales. Subclasses are left
    alone, for they may compute something else; so are the projections of torch.nn.MultiheadAttention, which never calls
    them.

    Args:
        model: its root may be such a layer itself: the report has what takes its place.
        rules: a Scheme for all; or pairs of a selector and a Scheme, or None to leave a layer alone, of which the first
            that matches counts. A selector is a module type, a pattern for the name such as "decoder.*.proj", or a
            function (name, module) -> bool. Layers that none matches are left alone.
        learn_scales: whether static scales are Parameters.

    Returns:
        A Report: its `model`, and a row for each layer with its scheme or why it has none.

    Raises:
        TypeError: rules, a selector or a scheme is none, or model is no module.
        ValueError: a selector matches no layer; the model is then as it was.

    Warns if no layer was converted though rules have a scheme, or if learn_scales finds none to learn.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be a torch.nn.Module, got {model!r}")
    pairs = _checked(rules)
    if not isinstance(rules, Scheme):
        _check_matches(model, pairs)
    model, rows, matched = _walked(model, pairs, learn_scales)
    _unfuse(model)
    unused = tuple(repr(selector) for i, (selector, _) in enumerate(pairs) if rows and i not in matched)
    report = Report(model, tuple(rows), unused)
    if not any(row.scheme is not None for row in rows) and any(scheme is not None for _, scheme in pairs):
        warnings.warn(f"convert: no layer was converted\n{report}", stacklevel=2)
    elif learn_scales and not any(_has_static_scale(row.scheme) for row in rows):
        warnings.warn(
            "convert: learn_scales=True makes static scales Parameters, and no scheme has one: take one with "
            "hop.scale_rules.Static, such as hop.schemes.INT8_STATIC",
            stacklevel=2,
        )
    return report


def _walked(
    model: nn.Module, pairs: Sequence[Rule], learn_scales: bool
) -> tuple[nn.Module, list[Conversion], set[int]]:
    """The model with quantized layers, a row for each layer, and the places of the pairs that matched one."""
    done: dict[int, tuple[nn.Module, Conversion]] = {}
    rows: list[Conversion] = []
    matched: set[int] = set()
    for name, module in modules_of(model, every_name=True):
        if isinstance(module, _OPAQUE):
            rows.append(Conversion(name, type(module).__name__, None, "its products are no layers, and stay in floats"))
        if not isinstance(module, (*LAYERS, Layer)):
            continue
        if id(module) in done:
            new, first = done[id(module)]
            rows.append(Conversion(name, first.type, first.scheme, f"the same module as {first.name!r}"))
        else:
            scheme, reason = _choice(pairs, name, module, matched)
            new, row = module, Conversion(name, type(module).__name__, scheme, reason)
            if scheme is not None:
                try:
                    new = _converted(module, scheme, learn_scales)
                except (TypeError, ValueError) as error:
                    row = Conversion(name, row.type, None, str(error))
            done[id(module)] = new, row
            rows.append(row)
        if new is not module:
            model = _put(model, name, new)
    return model, rows, matched


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the float model: without the state of scales, and with frozen weights as the numbers that they
    stand for."""
    own = tuple(
        f"{name}.scales." if name else "scales."
        for name, module in modules_of(model, every_name=True)
        if isinstance(module, Layer)
    )
    return {
        key: dequantize(value) if isinstance(value, QuantizedTensor) else value
        for key, value in model.state_dict().items()
        if not key.startswith(own)
    }


def _checked(rules: Any) -> list[Rule]:
    if isinstance(rules, Scheme):
        return [("*", rules)]
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(f"convert: rules must be a hop.Scheme, or pairs (selector, Scheme or None); got {rules!r}")
    pairs = cast(Sequence[Any], rules)
    for rule in pairs:
        if not isinstance(rule, tuple) or len(cast(tuple[Any, ...], rule)) != 2:
            raise TypeError(f"convert: a rule must be a pair (selector, Scheme or None), got {rule!r}")
        selector, scheme = cast(tuple[Any, Any], rule)
        if not isinstance(selector, str) and not callable(selector):
            raise TypeError(
                f"convert: a selector must be a module type, a name pattern or a function (name, module) -> bool; got "
                f"{selector!r}"
            )
        if scheme is not None and not isinstance(scheme, Scheme):
            raise TypeError(f"convert: the scheme for {selector!r} must be a hop.Scheme or None, got {scheme!r}")
    return list(pairs)


def _check_matches(model: nn.Module, rules: Sequence[Rule]) -> None:
    """Raise for selectors that match no layer, of which there are names misspelled and types that the model has not."""
    layers = [(n, m) for n, m in modules_of(model, every_name=True) if isinstance(m, (*LAYERS, Layer, *_OPAQUE))]
    asked, matched = set[int](), set[int]()
    for name, module in layers:
        for i, (selector, _) in enumerate(rules):  # functions are asked what earlier rules leave, and of layers alone
            is_plain = isinstance(selector, str | type)
            if not is_plain and isinstance(module, _OPAQUE):
                continue
            asked.add(i)
            if _matches(selector, name, module):
                matched.add(i)
                break
    idle = [
        selector
        for i, (selector, _) in enumerate(rules)
        if i not in matched
        and (
            not any(_matches(selector, *layer) for layer in layers)
            if isinstance(selector, str | type)
            else i in asked or not layers
        )
    ]
    if idle:
        known = ", ".join(f"{name or '(model)'} ({type(module).__name__})" for name, module in layers) or "none"
        raise ValueError(
            f"convert: rules: no layer matches {', '.join(map(repr, idle))}; the layers of the model are {known}. "
            "Leave the rule out, or mend its selector"
        )


def _choice(rules: Sequence[Rule], name: str, module: nn.Module, matched: set[int]) -> tuple[Scheme | None, str]:
    """The scheme of the first rule that matches, or why there is none."""
    for i, (selector, scheme) in enumerate(rules):
        if _matches(selector, name, module):
            matched.add(i)
            return scheme, "" if scheme is not None else f"the rule for {selector!r} leaves it alone"
    return None, "no rule matches"


def _matches(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    return isinstance(module, selector) if isinstance(selector, type) else bool(selector(name, module))


def _converted(module: nn.Module, scheme: Scheme, learn_scales: bool) -> nn.Module:
    if isinstance(module, Layer):
        module.scheme = scheme
        return module
    if type(module) not in LAYERS:
        raise TypeError(f"{type(module).__name__} is a subclass, which may compute something else")
    return LAYERS[type(module)].from_float(module, scheme, learn_scales)


def _has_static_scale(scheme: Scheme | None) -> bool:
    quantizers = () if scheme is None else (scheme.lhs, scheme.rhs, scheme.output)
    return any(q is not None and q.scale.is_static for q in quantizers)


def _put(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """The model, with `new` in the place `name`."""
    if not name:
        return new
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, new)
    return model


def _unfuse(model: nn.Module) -> None:
    """Make torch's encoders call their layers: their fused form reads the weights itself."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Layer) for m in module.children()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, Layer) for m in module.modules()):
            module.use_nested_tensor = False


def _said(row: Conversion) -> str:
    if row.scheme is None:
        return f"- {row.reason}"
    named = spelled(row.scheme)
    return f"{named} ({row.reason})" if row.reason else named
