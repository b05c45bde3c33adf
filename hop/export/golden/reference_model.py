"""A .tosa file in TOSA's reference model, a program of its own: every tensor of a run, by files."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.tosa.file import decoded, encoded

PLACE = "HOP_TOSA"
_NAME = "tosa_reference_model"
_INSIDE = ("", _NAME, f"bin/{_NAME}", f"lib/python*/site-packages/bin/{_NAME}")
_DTYPES = {"INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT48": torch.int64, "BOOL": torch.bool}


def tool(caller: str) -> Path:
    """Where the reference model is: what the environment variable HOP_TOSA names, the program, its folder, or an
    environment of Python with tosa-tools; or on the path. Raises ImportError where it is nowhere."""
    if place := os.environ.get(PLACE):
        programs = [p for inside in reversed(_INSIDE) for p in (_matching(Path(place), inside)) if p.is_file()]
        if programs:
            return programs[0]
        raise ImportError(
            f"{caller}: {PLACE} names {place}, where there is no {_NAME}; name an environment that has it"
        )
    if (name := shutil.which(_NAME)) is not None:
        return Path(name)
    raise ImportError(
        f"{caller} needs TOSA's reference model. Its package pins other versions than ours, so give it an environment "
        f"of its own, and name that in {PLACE}: python3 -m venv tosa && tosa/bin/pip install tosa-tools && export "
        f"{PLACE}=$PWD/tosa"
    )


def _matching(place: Path, inside: str) -> list[Path]:
    return sorted(place.glob(inside)) if inside else [place]


class ReferenceModel:
    """A file that runs, all of whose tensors can be read but those of 48 bits.

    Args:
        buffer: the bytes of a .tosa file of one block.
        what: its name, for errors.

    Raises:
        ImportError: there is no reference model, or no ExecuTorch.
        ValueError: no .tosa file, or one of several blocks.
    """

    def __init__(self, caller: str, buffer: bytes, what: str) -> None:
        self.caller, self.tool = caller, tool(caller)
        self.content = decoded(caller, buffer, what)
        blocks = [b for region in self.content.get("regions", ()) for b in region.get("blocks", ())]
        if len(blocks) != 1:
            raise ValueError(f"{caller}: {what} has {len(blocks)} blocks; those of one are run")
        (self.block,) = blocks
        self.tensors: dict[str, dict[str, Any]] = {t["name"]: t for t in self.block.get("tensors", ())}
        self.inputs: list[str] = self.block.get("inputs", [])
        self.outputs: list[str] = self.block.get("outputs", [])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name]["type"]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].get("shape", ()))

    def run(self, inputs: Mapping[str, Tensor], shown: Sequence[str] = ()) -> dict[str, Tensor]:
        """The outputs and the tensors of `shown`, by name, of inputs by name."""
        import numpy as np

        names = list(dict.fromkeys([*self.outputs, *shown]))
        wanted = [n for n in names if n not in self.inputs]
        self.block["outputs"] = wanted
        try:
            buffer = encoded(self.caller, self.content)
        finally:
            self.block["outputs"] = self.outputs
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "model.tosa").write_bytes(buffer)
            for i, name in enumerate(self.inputs):
                np.save(place / f"in{i}.npy", inputs[name].contiguous().numpy())
            self._run(place, wanted)
            outputs = {n: torch.from_numpy(np.load(place / f"out{i}.npy")) for i, n in enumerate(wanted)}
        outputs |= {n: inputs[n] for n in names if n in self.inputs}
        return {n: x.to(self.dtype(n)).reshape(self.shape(n)) for n, x in outputs.items()}

    def _run(self, place: Path, wanted: Sequence[str]) -> None:
        given = {
            "tosa_file": [place / "model.tosa"],
            "flatbuffer_dir": [place],
            "output_dir": [place],
            "ifm_name": self.inputs,
            "ifm_file": [place / f"in{i}.npy" for i in range(len(self.inputs))],
            "ofm_name": wanted,
            "ofm_file": [place / f"out{i}.npy" for i in range(len(wanted))],
        }
        command = [str(self.tool), *(f"--{name}={','.join(map(str, values))}" for name, values in given.items())]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not all((place / f"out{i}.npy").is_file() for i in range(len(wanted))):
            said = [line for line in (done.stdout + done.stderr).splitlines() if line and "WARNING" not in line]
            raise RuntimeError(
                f"{self.caller}: the reference model stopped with status {done.returncode}: {' '.join(said[:6])}"
            )
