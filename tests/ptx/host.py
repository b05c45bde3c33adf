"""The host code of a kernel of the CuTe DSL, run on the CPU: its launches go to the emulator.

The code that the DSL compiled works out the grid, the parameters and the tensor maps. It is linked to a stand-in for
the CUDA runtime, and called with tensors that say they are on a GPU, at addresses of the emulator's memory."""

from __future__ import annotations

import copy
import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ptx.habits import Habits
from tests.ptx.launch import Report, launch
from tests.ptx.memory import Memory
from tests.ptx.program import Program
from tests.ptx.syntax import parse

# cudaLaunchConfig_t: grid, block, dynamic shared bytes, stream, attributes and how many; an attribute has 72 bytes.
CONFIG = struct.Struct("<3I3IQQQI")
ATTRIBUTE = struct.Struct("<I4x3I52x")
CLUSTER, PROGRAMMATIC = (
    4,
    6,
)  # attributes: the shape of a cluster; whether it may begin before the kernel before has ended
CUDA = 2  # kDLCUDA
ON_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Host:
    """Called as the compiled function is, with tensors on the CPU; `reports` has one for each launch.

    Args:
        compiled: what cute.compile gives with --enable-tvm-ffi --keep-ptx.
        seed, resident, registers: of `launch`; they and `habits` may be changed between calls.

    `beside` are tensors that a kernel finds by addresses among its data: they keep those that they have.
    """

    habits: Habits | None = None
    beside: Sequence[Tensor] = ()

    def __init__(self, compiled: Any, *, seed: int = 0, resident: int = 1, registers: int | None = None) -> None:
        self.ptx: str = compiled.artifacts.PTX
        self.programs = {name: Program(entry) for name, entry in parse(self.ptx).items()}
        self.seed, self.resident, self.registers = seed, resident, registers
        self.reports: list[Report] = []
        self._function, self._library = link(compiled)
        self._launches: list[dict[str, Any]] = []
        self._callback = ON_LAUNCH(self._record)

    def with_ptx(self, ptx: str) -> Host:
        """The same host code with other kernels of the same names and parameters."""
        other = copy.copy(self)
        other.ptx, other.programs = ptx, {name: Program(entry) for name, entry in parse(ptx).items()}
        other.reports, other._launches = [], []
        other._callback = ON_LAUNCH(other._record)
        return other

    def __call__(self, *arguments: Any) -> None:
        memory, placed = Memory(), {}
        self._launches.clear()
        for x in self.beside:
            on_device(x, memory, placed, is_moved=False)
        self._library.set_launch(self._callback)
        self._function(*[on_device(a, memory, placed) for a in arguments])
        if not self._launches:
            raise RuntimeError("the host code has launched no kernel")
        options = {name: getattr(self, name) for name in ("seed", "habits", "resident", "registers")}
        for each in self._launches:
            self.reports.append(launch(**each, entry=None, memory=memory, **options))

    def _record(self, config: int, kernel: bytes, parameters: Any) -> None:
        *shape, shared, _, attributes, count = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        cluster, programmatic = (1, 1, 1), False
        for i in range(count):
            where = attributes + i * ATTRIBUTE.size
            name, *value = ATTRIBUTE.unpack(ctypes.string_at(where, ATTRIBUTE.size))
            cluster = tuple(value) if name == CLUSTER else cluster
            programmatic = bool(value[0]) if name == PROGRAMMATIC else programmatic
        program = self.programs[kernel.decode()]
        values = [ctypes.string_at(parameters[i], v.size) for i, v in enumerate(program.entry.parameters)]
        shapes = {"grid": shape[:3], "block": shape[3:], "cluster": cluster, "dynamic_shared_bytes": shared}
        self._launches.append({"ptx": program, **shapes, "parameters": values, "programmatic": programmatic})


def link(compiled: Any) -> tuple[Any, ctypes.CDLL]:
    """The host function, and the library that it is in. Needs a C compiler."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    runtime = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder) / "host.o", Path(folder) / "host.so"
        compiled.export_to_c(str(code), function_name="host")
        # Its own functions go before those of the real runtime, which may be loaded.
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            "-Wl,-Bsymbolic",
            "-o",
            library,
            code,
            Path(__file__).with_suffix(".c"),
        ]
        subprocess.run([*command, runtime, f"-Wl,-rpath,{runtime.parent}"], check=True)
        return tvm_ffi.load_module(library).host, ctypes.CDLL(str(library))


def on_device(x: Any, memory: Memory, placed: dict[int, int], is_moved: bool = True) -> Any:
    """Tensors as tensors of a GPU whose storages are in `memory`, at addresses of its own or their own ones; `placed`
    has those that are there already."""
    if isinstance(x, tuple | list):
        return tuple(on_device(i, memory, placed) for i in x)
    if not isinstance(x, Tensor):
        return x
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    storage = x.untyped_storage()
    start = storage.data_ptr()
    if start not in placed:
        data = (ctypes.c_uint8 * storage.nbytes()).from_address(start) if storage.nbytes() else bytearray()
        name, address = f"tensor {tuple(x.shape)} {x.dtype}", None if is_moved else start
        placed[start] = memory.add(np.frombuffer(data, np.uint8), name, address=address)
    return tvm_ffi.from_dlpack(Elsewhere(x, placed[start] + x.data_ptr() - start))


class Elsewhere:
    """A tensor that says it is on a GPU at an address."""

    def __init__(self, x: Tensor, address: int) -> None:
        self.x, self.address = x, address

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        """A DLTensor starts with its address and the kind of its device."""
        capsule = torch.utils.dlpack.to_dlpack(self.x)
        where = _pointer(capsule, b"dltensor")
        ctypes.c_uint64.from_address(where).value = self.address
        ctypes.c_int32.from_address(where + 8).value = CUDA
        return capsule
