"""Find TOSA's reference model: in HOP_TOSA, or in the environment that `make` set up."""

import os
from pathlib import Path

import pytest

from hop.export.targets.tosa.file import schema
from hop.export.targets.tosa.reference_model import PLACE, tool

_OURS = Path(__file__).parents[2] / ".venv-tosa"
if _OURS.is_dir():
    os.environ.setdefault(PLACE, str(_OURS))


def _missing() -> str | None:
    for find in (schema, tool):
        try:
            find("tests")
        except ImportError as error:
            return str(error)
    return None


MISSING = _missing()
needs_reference_model = pytest.mark.skipif(MISSING is not None, reason=f"needs TOSA's reference model: {MISSING}")
