"""Collectives, as operators in graphs and as c10d calls them."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hop.compat.imports import when_imported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work
    from torch.distributed.checkpoint.utils import _DistWrapper
    from torch.distributed.tensor import DeviceMesh

Group: TypeAlias = "str | ProcessGroup | torch.ScriptObject"
"""A process group: its name, the object, or the object as an argument of an operator."""
functional = torch.ops._c10d_functional
"""Collectives as functional operators."""


def when_functional(callback: Callable[[], None]) -> None:
    """Run `callback` once torch.distributed has registered its functional collectives."""
    when_imported("torch.distributed._functional_collectives", callback)


def combined_over(x: torch.Tensor, op: str, over: "ProcessGroup | DeviceMesh", axis: int = 0) -> torch.Tensor:
    """The elementwise "max", "min" or "sum" over the processes of a group, or along an axis of a mesh.

    A "max" of float32 compares the bits of non-negative numbers and NaN, so NaN is the largest.
    """
    group = over if isinstance(over, torch.distributed.ProcessGroup) else over.get_group(axis)
    ops = functional
    if op == "max" and x.dtype == torch.float32:
        return combined_over(x.contiguous().view(torch.int32), op, over, axis).view(torch.float32)
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), op, group.group_name))


def gather_numbers(n: int, mesh: "DeviceMesh") -> list[int]:
    """The numbers that the processes of a one-dimensional mesh pass, in the order of their ranks."""
    count, ops = torch.tensor([n], device=mesh.device_type), functional
    return ops.wait_tensor(ops.all_gather_into_tensor(count, mesh.size(), mesh.get_group().group_name)).tolist()


def group_size(group: Group) -> int:
    """The size of a process group, given by name or as an object."""
    return _resolved(group).size()


def group_rank(group: Group) -> int:
    """This process's rank in a group, given by name or as an object."""
    return _resolved(group).rank()


def _resolved(group: Group) -> "ProcessGroup":
    from torch.distributed.distributed_c10d import _resolve_process_group

    kind = torch.distributed.ProcessGroup
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, kind) else kind.unbox(group)


def finished_work(
    works: "Sequence[Work | torch.ScriptObject]", finish: Callable[[], None], asynchronous: bool
) -> torch.ScriptObject:
    """The result of a c10d operator: a Work that waits for `works` and then calls `finish` once."""
    from torch._C._distributed_c10d import PythonCallbackWork, Work

    pending = [work if isinstance(work, Work) else Work.unbox(work) for work in works]
    left = [finish]

    def wait(timeout: timedelta) -> bool:
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


def processes(group: "ProcessGroup | None") -> "_DistWrapper":
    """DCP's collectives over objects, which pass an exception of one process on to all.

    Without a process group, they run on this process only.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def gloo_of_one_thread(store: "Store", rank: int, size: int, timeout: timedelta) -> "ProcessGroup":
    """A Gloo process group with one thread, on the network interfaces in GLOO_SOCKET_IFNAME."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = group._Options()
    options._devices = [group.create_device(interface=name) for name in interfaces] or [group.create_default_device()]
    options._threads, options._timeout = 1, timeout
    result = group(store, rank, size, options)
    result._set_sequence_number_for_group()
    return result
