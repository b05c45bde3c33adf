"""A separate folder of compiled kernels for each test."""

import os
from unittest import mock

from cutlass_kernels import cache
from tests.support.contexts import enter
from tests.support.files import InFolder


class KernelFolder(InFolder):
    """`folder` is named to the cache, and does not exist yet."""

    def setUp(self):
        super().setUp()
        self.folder = self.folder / "kernels"
        enter(self, mock.patch.dict(os.environ, {cache.FOLDER: str(self.folder)}))
