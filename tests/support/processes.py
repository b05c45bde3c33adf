"""Checks in several processes: `run` starts them, over Gloo, on a GPU over NCCL, and each calls the function."""

import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from hop.nn.distributed import gloo
from tests.support import forks


def run(check: Callable[[Any, int], None], world: int = 2, device: str = "cpu") -> None:
    """check(mesh, rank), a function of a module, in `world` processes of a mesh of one dimension."""
    start(_worker, (_free_port(), check, world, device), world)


def start(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """function(rank, *args) in `count` processes; raises as torch.multiprocessing does where one fails."""
    mp.start_processes(function, args=args, nprocs=count, join=True, start_method=forks.context.get_start_method())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank: int, port: int, check: Callable[[Any, int], None], world: int, device: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    faulthandler.enable()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else gloo(), rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    # Gloo's threads may still hold tensors, and abort the process if they let go of one while the interpreter shuts
    # down (pytorch #179291): leave without shutting down, and say before what went wrong.
    done = False
    try:
        check(init_device_mesh(device, (world,)), rank)
        dist.barrier()
        dist.destroy_process_group()
        done = True
    finally:
        if not done:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0 if done else 1)
