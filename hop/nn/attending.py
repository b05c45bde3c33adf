"""Attention in low precision, of modules that stay what they are: which have a scheme, and what they compute then.

Who knows modules that attend enters a Kind in KINDS; those of other packages are looked for where the package is
imported.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hop.impls.quantize import quantize
from hop.impls.scaled import scaled
from hop.nn.contexts import asks_for_floats
from hop.nn.layer import modules_of
from hop.nn.report import Conversion
from hop.nn.selectors import Selector, check_selector, matches
from hop.numerics import presets
from hop.numerics.attention_schemes import AttentionScheme, named
from hop.numerics.hadamard import SIZES, largest_size
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

aten = torch.ops.aten

_OWN = "hop_attention"  # the attribute of a module
_PACKAGES = {"transformers.modeling_utils": "hop.integrations.attention"}  # whose modules attend; who knows them

Spelled = AttentionScheme | str | None
AttentionRules = Spelled | Mapping[Selector, Spelled] | Sequence[tuple[Selector, Spelled]]


class Kind(NamedTuple):
    """Modules that attend."""

    knows: Callable[[nn.Module], bool]  # whether a module is one
    declines: Callable[[nn.Module], str | None]  # why its attention stays in floats
    install: Callable[[nn.Module, AttentionScheme], None]  # makes it ask for its scheme when it is called


KINDS: list[Kind] = []


def own_scheme(module: nn.Module) -> AttentionScheme | None:
    """In which a module attends; None for floats."""
    return module.__dict__.get(_OWN)


def scheme_of(module: nn.Module) -> AttentionScheme | None:
    """In which a module attends now; None for floats."""
    return None if asks_for_floats() else own_scheme(module)


def forget(module: nn.Module) -> None:
    """Let a module attend in floats."""
    module.__dict__.pop(_OWN, None)


def attend(
    scheme: AttentionScheme | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    rotated: bool | None = None,
) -> Tensor:
    """Attention in a scheme, its result in the dtype of the query.

    Args:
        scheme: None where key and value are quantized: the query is then quantized too, by hop.presets.INT8_ROW beside
            integers, by FP8_ROW beside floats.
        query: (N, H, L, E), float.
        key, value: (N, G, S, E) and (N, G, S, V), of G heads that divide H, float or quantized.
        mask, is_causal, scale: as ATen's.
        rotated: whether a key that comes quantized was rotated before, so that the query is to be; None for as the
            scheme says.
    """
    rotates = (scheme is not None and scheme.rotated) if rotated is None else rotated
    if scheme is None:
        assert isinstance(key, QuantizedTensor)
        quantizers = (presets.INT8_ROW if key.quantizer.format.is_integer else presets.FP8_ROW, None, None)
    else:
        quantizers = (scheme.query, scheme.key, scheme.value)
    each = zip(quantizers, (query, key, value), (rotates, rotates, False), strict=True)
    given = [x if isinstance(x, QuantizedTensor) else prepared(q, x, rotates) for q, x, rotates in each]
    op, grouped = aten.scaled_dot_product_attention.default, query.shape[1] != key.shape[1]
    return scaled(op, query.dtype, *given, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)  # type: ignore[return-value]


def prepared(q: Quantizer | None, x: Tensor, rotated: bool = False) -> Tensor:
    """x (..., width) as attention takes it: by a quantizer, in floats of its dtype where there is none; transformed
    before, in float32, if it is to be rotated.

    Raises:
        ValueError: no transform is of this width.
    """
    if not rotated:
        return x if q is None else quantize(q, x)
    return scaled(torch.ops.hop.hadamard.default, x.dtype if q is None else q, x, rotated_size(x.shape[-1]))


def rotated_size(width: int) -> int:
    """How many elements of a head of `width` are transformed together. Raises ValueError where none are."""
    size = largest_size(width)
    if size is None:
        raise ValueError(
            f"attention: rotated=True transforms {', '.join(map(str, SIZES))} elements of a head together, and none of "
            f"these divides its width, {width}; take a scheme with rotated=False"
        )
    return size


# ---- rules


def checked_attention(rules: AttentionRules) -> list[tuple[Selector, AttentionScheme | None]]:
    """Rules as pairs of a selector and a scheme. Raises TypeError or ValueError for what is none."""
    one = rules is None or isinstance(rules, AttentionScheme | str)
    pairs: Any = [("*", rules)] if one else list(rules.items()) if isinstance(rules, Mapping) else rules
    result: list[tuple[Selector, AttentionScheme | None]] = []
    for pair in pairs if isinstance(pairs, Sequence) else [pairs]:
        if not isinstance(pair, tuple) or len(cast(tuple[Any, ...], pair)) != 2:
            raise TypeError(
                "convert: attention must be a hop.attention_schemes.AttentionScheme, its name, None, or such by "
                f"selectors in a dict or in pairs; got {pair!r}; give one such as 'int8'"
            )
        selector, scheme = cast(tuple[Any, Any], pair)
        check_selector("attention: a selector", selector)
        scheme = named(scheme) if isinstance(scheme, str) else scheme
        if scheme is not None and not isinstance(scheme, AttentionScheme):
            raise TypeError(
                f"convert: attention: the scheme for {selector!r} must be a hop.attention_schemes.AttentionScheme, its "
                f"name or None; got {scheme!r}; give one such as 'int8'"
            )
        result.append((selector, scheme))
    return result


def convert_attention(model: nn.Module, pairs: Sequence[tuple[Selector, AttentionScheme | None]]) -> list[Conversion]:
    """Let modules attend in the schemes of the first rules that match. A row for each module that attends, and for each
    that seems to, by its name, and that nobody here knows.

    Raises:
        ValueError: a scheme is none that attention takes; or a selector matches no module that attends.
    """
    for package, ours in _PACKAGES.items():
        if package in sys.modules:
            importlib.import_module(ours)
    for _, scheme in pairs:
        if scheme is not None:
            _check(scheme)
    modules = [(name, m) for name, m in modules_of(model, every_name=True) if any(kind.knows(m) for kind in KINDS)]
    for selector, scheme in pairs:
        if scheme is not None and selector != "*" and not any(matches(selector, *module) for module in modules):
            known = ", ".join(f"{name or '(model)'} ({type(m).__name__})" for name, m in modules) or "none"
            raise ValueError(
                f"convert: attention: no module that attends matches {selector!r}; those of the model are {known}; "
                "leave the rule out, or mend its selector"
            )
    rows: list[Conversion] = []
    for name, module in modules:
        selector, scheme = next((pair for pair in pairs if matches(pair[0], name, module)), (None, None))
        reason = "" if scheme is not None else f"the rule for {selector!r} leaves it alone" if selector else "no rule"
        if scheme is not None:
            kind = next(kind for kind in KINDS if kind.knows(module))
            if (refusal := kind.declines(module)) is not None:
                scheme, reason = None, refusal
            else:
                kind.install(module, scheme)
        forget(module) if scheme is None else module.__dict__.__setitem__(_OWN, scheme)
        rows.append(Conversion(name, type(module).__name__, scheme, reason))
    return rows + _unknown(model, [module for _, module in modules])


def _unknown(model: nn.Module, known: Sequence[nn.Module]) -> list[Conversion]:
    """Rows for modules whose class is called an attention, and that neither are known ones nor have or are in some."""
    seen = {id(part) for module in known for part in module.modules()}
    rows: list[Conversion] = []
    for name, module in modules_of(model):
        says = "attention" in type(module).__name__.lower()
        if says and not any(id(part) in seen for part in module.modules()):
            seen |= {id(part) for part in module.modules()}
            rows.append(Conversion(name, type(module).__name__, None, "it computes attention itself, in floats"))
    return rows


def _check(scheme: AttentionScheme) -> None:
    """Raise ValueError unless attention takes it."""
    example = torch.zeros(1, 1, 2, 128)
    try:
        attend(scheme, example, example, example)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"convert: attention: {scheme}: {error}") from error
