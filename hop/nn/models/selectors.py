"""Selectors: which modules a rule applies to."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

Selector = type[nn.Module] | str | Callable[[str, nn.Module], bool]
"""A module type, a pattern for its name such as "decoder.*.proj", or a function (name, module) -> bool."""


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Whether a selector matches the module of this name."""
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    return isinstance(module, selector) if isinstance(selector, type) else bool(selector(name, module))


def check_selector(name: str, selector: object) -> None:
    """Raise TypeError unless `selector` is a Selector."""
    if not isinstance(selector, str) and not callable(selector):
        raise TypeError(
            f"convert: {name} must be a module type, a name pattern or a function (name, module) -> bool; got "
            f"{selector!r}; give '*' for all layers"
        )
