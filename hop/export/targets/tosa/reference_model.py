"""Run a .tosa file in TOSA's reference model, a separate program, and read its tensors."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hop.export.targets.tosa.file import decode, encode
from hop.numerics.spelling import JsonObject

PLACE = "HOP_TOSA"
_NAME = "tosa_reference_model"
_INSIDE = ("", _NAME, f"bin/{_NAME}", f"lib/python*/site-packages/bin/{_NAME}")
_DTYPES = {"INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT48": torch.int64, "BOOL": torch.bool}


def tool(caller: str) -> Path:
    """The path of the reference model's program.

    It is in the place that the environment variable HOP_TOSA names (the program, its folder, or a Python environment
    with tosa-tools), or on the PATH. Raises ImportError if it is in neither.
    """
    if place := os.environ.get(PLACE):
        programs = [p for inside in reversed(_INSIDE) for p in (_matching(Path(place), inside)) if p.is_file()]
        if programs:
            return programs[0]
        raise ImportError(
            f"{caller}: {PLACE} is {place}, where there is no {_NAME}; set it to an environment that has it"
        )
    if (name := shutil.which(_NAME)) is not None:
        return Path(name)
    raise ImportError(
        f"{caller} needs TOSA's reference model. Its package pins other versions than ours, so install it in a "
        f"separate environment and set {PLACE} to that: python3 -m venv tosa && tosa/bin/pip install tosa-tools && "
        f"export {PLACE}=$PWD/tosa"
    )


def _matching(place: Path, inside: str) -> list[Path]:
    return sorted(place.glob(inside)) if inside else [place]


class ReferenceModel:
    """A .tosa file that runs in the reference model, with access to all tensors except those of 48 bits.

    Args:
        caller: the function's name, for errors.
        buffer: the bytes of a .tosa file with one block.
        what: the file's name, for errors.

    Raises:
        ImportError: the reference model or ExecuTorch is missing.
        ValueError: the file is not a .tosa file, or has several blocks.
    """

    def __init__(self, caller: str, buffer: bytes, what: str) -> None:
        self.caller, self.tool = caller, tool(caller)
        self.content = decode(caller, buffer, what)
        blocks = [b for region in self.content.get("regions", ()) for b in region.get("blocks", ())]
        if len(blocks) != 1:
            raise ValueError(f"{caller}: {what} has {len(blocks)} blocks, but must have one")
        (self.block,) = blocks
        self.tensors: dict[str, JsonObject] = {t["name"]: t for t in self.block.get("tensors", ())}
        self.inputs: list[str] = self.block.get("inputs", [])
        self.outputs: list[str] = self.block.get("outputs", [])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name]["type"]]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].get("shape", ()))

    def run(self, inputs: Mapping[str, Tensor], shown: Sequence[str] = ()) -> dict[str, Tensor]:
        """Run on inputs by name. Returns the outputs and the tensors in `shown`, by name."""
        import numpy as np

        names = list(dict.fromkeys([*self.outputs, *shown]))
        wanted = [n for n in names if n not in self.inputs]
        self.block["outputs"] = wanted
        try:
            buffer = encode(self.caller, self.content)
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
            log = [line for line in (done.stdout + done.stderr).splitlines() if line and "WARNING" not in line]
            raise RuntimeError(
                f"{self.caller}: the reference model stopped with status {done.returncode}: {' '.join(log[:6])}"
            )
