"""The error for a name that a public module lacks, with the nearest one that it has."""

import difflib
from collections.abc import Callable, Sequence
from typing import NoReturn


def lookup(module: str, names: Sequence[str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module with these public names. Raises AttributeError."""

    def missing(name: str) -> NoReturn:
        message = f"module {module!r} has no attribute {name!r}"
        if name.startswith("_"):  # Python itself looks such names up in every module
            raise AttributeError(message)
        known = {own.lower(): own for own in names}
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise AttributeError(f"{message}; {f'use {known[near[0]]}' if near else f'call dir({module}) for its names'}")

    return missing
