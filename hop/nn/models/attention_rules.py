"""Rules that give the modules of a model an attention scheme.

Integrations for other packages are imported once the package itself is imported.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hop.nn.attention.attending import KINDS, attend, take
from hop.nn.layers.base import modules_of
from hop.nn.models.report import Conversion
from hop.nn.models.selectors import Selector, check_selector, matches
from hop.numerics.attention_schemes import AttentionScheme, named

# a package with attention modules: our module that registers their Kinds
_PACKAGES = {"transformers.modeling_utils": "hop.integrations.attention"}

Spelled = AttentionScheme | str | None
AttentionRules = Spelled | Mapping[Selector, Spelled] | Sequence[tuple[Selector, Spelled]]


def checked_attention(rules: AttentionRules) -> list[tuple[Selector, AttentionScheme | None]]:
    """Convert rules to pairs of a selector and a scheme. Raises TypeError or ValueError for invalid ones."""
    one = rules is None or isinstance(rules, AttentionScheme | str)
    pairs = [("*", rules)] if one else list(rules.items()) if isinstance(rules, Mapping) else rules
    result: list[tuple[Selector, AttentionScheme | None]] = []
    for pair in pairs if isinstance(pairs, Sequence) else [pairs]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                "convert: attention must be a hop.attention_schemes.AttentionScheme, its name, None, or several by "
                f"selector in a dict or in pairs; got {pair!r}; give one such as 'int8'"
            )
        selector, scheme = pair
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
    """Give modules the attention scheme of the first rule that matches.

    Returns a row for each attention module, and for each module that seems to be one by its name, but is of no known
    Kind.

    Raises:
        ValueError: attention cannot run in a scheme, or a selector matches no attention module.
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
                "leave the rule out, or correct its selector"
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
        take(module, scheme)
        rows.append(Conversion(name, type(module).__name__, scheme, reason))
    return rows + _unknown(model, [module for _, module in modules])


def _unknown(model: nn.Module, known: Sequence[nn.Module]) -> list[Conversion]:
    """Rows for modules that are called attention but are of no known Kind, and are not inside another row's module."""
    seen = {id(part) for module in known for part in module.modules()}
    rows: list[Conversion] = []
    for name, module in modules_of(model):
        says = "attention" in type(module).__name__.lower()
        if says and not any(id(part) in seen for part in module.modules()):
            seen |= {id(part) for part in module.modules()}
            rows.append(Conversion(name, type(module).__name__, None, "it computes attention itself, in floats"))
    return rows


def _check(scheme: AttentionScheme) -> None:
    """Raise ValueError unless attention can run in this scheme."""
    example = torch.zeros(1, 1, 2, 128)
    try:
        attend(scheme, example, example, example)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"convert: attention: {scheme}: {error}") from error
