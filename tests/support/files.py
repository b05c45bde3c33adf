"""Write values and read them back, in a separate folder for each test."""

import io
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram


def reloaded(program: ExportedProgram) -> ExportedProgram:
    """The program after torch.export.save and torch.export.load."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def read_back(value: Any, **options: Any) -> Any:
    """The value after torch.save and torch.load with these options."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


class InFolder(unittest.TestCase):
    """`folder` exists, is empty, and goes with the test."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
