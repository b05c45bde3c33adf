"""Runs PTX on the CPU, so that kernels of Hopper can be tested without a GPU.

Each instruction does what the PTX ISA says of it. What the hardware leaves open is decided by habits, each of them the
worst in one way: which warp runs next, when a bulk copy reads and lands, when a wgmma runs. They have names, may be
combined, or are drawn by a seed.

    memory = Memory()
    x, y = memory.add(array), memory.add(result)  # numpy arrays -> addresses; stores change them in place
    map = TensorMap(x, item=1, dims=(k, m), strides=(k,), box=(128, 64), swizzle=128)
    report = launch(ptx, None, grid=(2, 1, 4), block=(384,), cluster=(2,), parameters=[map, y], memory=memory,
                    habits=habits("late_stores", "last_ahead"))

A function of the CuTe DSL is called with its own host code, which makes the tensor maps and the launch:

    host = Host(cute.compile(..., options="--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir ..."))
    host(lhs, rhs, out)  # tensors on the CPU

What it cannot see: how fast a kernel is; weak memory order between threads, beyond the fences between proxies; how the
matrix unit rounds sums of floats (here: float64 for each instruction, then float32)."""

from tests.ptx.contraction import contractable
from tests.ptx.habits import HABITS, Habits, habits
from tests.ptx.launch import Report, launch, prepare
from tests.ptx.memory import Deadlock, Fault, Memory
from tests.ptx.tensormap import TensorMap

__all__ = [
    "HABITS",
    "Deadlock",
    "Fault",
    "Habits",
    "Memory",
    "Report",
    "TensorMap",
    "contractable",
    "habits",
    "launch",
    "prepare",
]
