"""The presets that ExecuTorch's portable kernels support: the table of docs/export_executorch.md."""

from importlib.util import find_spec

import pytest
import torch

from hop import presets
from tests.support import pages

MARKS = [
    pytest.mark.skipif(find_spec("executorch") is None, reason="ExecuTorch is not installed"),
    # What ExecuTorch 1.5 raises inside itself.
    pytest.mark.filterwarnings("ignore:(open_text|read_text|read_binary) is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Mutation on a buffer in the model is detected:UserWarning"),
    pytest.mark.filterwarnings("ignore:This API is experimental and subject to change"),
]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NOTE = {"equal": "equal codes and values", "refused": "TypeError: 8-bit floats"}


def _held(name: str) -> str:
    buffers = presets.PRESETS[name].buffers((256, 256))
    return "refused" if any(dtype in FLOAT8 for _, dtype in buffers.values()) else "equal"


SUPPORT = {name: _held(name) for name, q in presets.PRESETS.items() if not (q.stochastic or q.flat or q.hadamard)}


def table() -> str:
    rows = [("preset", "portable kernels")]
    for verdict in NOTE:
        names = " ".join(f"`{name}`" for name, v in SUPPORT.items() if v == verdict)
        rows.append((names, NOTE[verdict]))
    return pages.table(rows)
