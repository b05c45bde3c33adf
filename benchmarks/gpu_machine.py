"""Versions of the GPU's machine, as a group for benchmarks.isolated, and its clocks."""

import importlib.metadata
import shutil
import subprocess
import sys
from typing import Any

import torch

from benchmarks.isolated import Cases
from cutlass_kernels import prebuilt


def describe() -> Cases:
    yield "versions", _versions


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    pack = prebuilt.pack()
    found["kernels"] = "compiled here" if pack is None else f"{len(pack.kernels)} built ahead"
    found |= {} if pack is None else {f"{name}, when they were built": v for name, v in pack.versions.items()}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "device": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "driver": (_asked("driver_version") or ["unknown"])[0],
        }
    return found


CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def clocks() -> dict[str, str]:
    """The first GPU's clocks (MHz), power (W) and temperature (°C) from nvidia-smi; empty without it."""
    return dict(zip(CLOCKS, _asked(*CLOCKS), strict=False))


def _asked(*fields: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return []
    return [word.strip() for word in asked.stdout.split("\n")[0].split(",")] if asked.returncode == 0 else []
