"""What the examples share."""

import os
import shutil
import sys
import warnings

# torch.export raises it about itself, in every copy of an exported program.
_OF_EXPORT = r"`isinstance\(treespec, LeafSpec\)`"


def require(condition: bool, text: str) -> None:
    """End with exit code 1, and say why, unless `condition` holds."""
    if not condition:
        sys.exit(f"FAILED: {text}")


def find_compiler() -> str | None:
    """The C++ compiler that Inductor would call, if there is one."""
    return next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)


def ignore_warnings_of_export() -> None:
    warnings.filterwarnings("ignore", message=_OF_EXPORT, category=FutureWarning)
