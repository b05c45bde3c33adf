"""Helpers shared by the examples."""

import os
import shutil
import sys
import warnings

# torch.export raises this warning about its own code, in every copy of an exported program.
_OF_EXPORT = r"`isinstance\(treespec, LeafSpec\)`"


def require(condition: bool, text: str) -> None:
    """Exit with code 1 and a message unless `condition` is true."""
    if not condition:
        sys.exit(f"FAILED: {text}")


def find_compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    return next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)


def ignore_warnings_of_export() -> None:
    warnings.filterwarnings("ignore", message=_OF_EXPORT, category=FutureWarning)
