"""A folder of compiled kernels of its own for each test."""

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from cutlass_kernels import cache


class KernelFolder(unittest.TestCase):
    """`folder` is named to the cache, and does not exist yet."""

    def setUp(self):
        parent = tempfile.TemporaryDirectory()
        self.addCleanup(parent.cleanup)
        self.folder = Path(parent.name) / "kernels"
        patched = mock.patch.dict(os.environ, {cache.FOLDER: str(self.folder)})
        patched.start()
        self.addCleanup(patched.stop)
