"""Collectives, as they stand in graphs and as c10d calls them."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from hop.compat.imports import when_imported

functional: Any = torch.ops._c10d_functional
"""Collectives as functions of tensors."""


def when_functional(callback: Callable[[], None]) -> None:
    """Run `callback` once the operators that torch.distributed's functional collectives register are there."""
    when_imported("torch.distributed._functional_collectives", callback)


def combined_over(x: torch.Tensor, op: str, over: Any, axis: int = 0) -> torch.Tensor:
    """The "max", "min" or "sum" over the processes of a group, or along an axis of a mesh, element by element.

    A "max" of float32 is one of numbers from 0 up and NaN, which count up with their bits: NaN counts most."""
    group = over.get_group(axis) if hasattr(over, "get_group") else over
    ops = functional
    if op == "max" and x.dtype == torch.float32:
        return combined_over(x.contiguous().view(torch.int32), op, over, axis).view(torch.float32)
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), op, group.group_name))


def gather_numbers(n: int, mesh: Any) -> list[int]:
    """The numbers that the processes of a mesh of one dimension give, in the order of their ranks."""
    count, ops = torch.tensor([n], device=mesh.device_type), functional
    return ops.wait_tensor(ops.all_gather_into_tensor(count, mesh.size(), mesh.get_group().group_name)).tolist()


def group_size(group: Any) -> int:
    """The processes of a group that a functional collective is given, by name or itself."""
    return _resolved(group).size()


def group_rank(group: Any) -> int:
    """This process's place in such a group."""
    return _resolved(group).rank()


def _resolved(group: Any) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    kind: Any = torch.distributed.ProcessGroup
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, kind) else kind.unbox(group)


def finished_work(works: Sequence[Any], finish: Callable[[], None], asynchronous: bool) -> Any:
    """What a c10d operator returns: a Work that is done once `works` are and `finish`, called once after them."""
    from torch._C._distributed_c10d import PythonCallbackWork, Work

    pending = [work if isinstance(work, Work) else Work.unbox(work) for work in works]
    left = [finish]

    def wait(timeout: Any) -> bool:
        while left:
            for work in pending:
                work.wait(timeout)
            left.pop()()
        return True

    if not asynchronous:
        for work in pending:
            work.wait()
        left.pop()()
    return PythonCallbackWork(wait).boxed()


def processes(group: Any) -> Any:
    """Collectives over objects that carry an exception of one process to all, as DCP has them; of one process where
    there is no process group."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def gloo_of_one_thread(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of Gloo with one thread; network interfaces are those of GLOO_SOCKET_IFNAME."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = group._Options()
    options._devices = [group.create_device(interface=name) for name in interfaces] or [group.create_default_device()]
    options._threads, options._timeout = 1, timeout
    result = group(store, rank, size, options)
    result._set_sequence_number_for_group()
    return result
