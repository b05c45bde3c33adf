"""A stand-in for a GPU in the process that tries kernels: kernels of products computed on the CPU, and faults of GPUs.

python stand_in_gpu.py FAULTS DESCRIPTOR INDEX PATHS: as cutlass_kernels.trust starts its process, after FAULTS, JSON of
the fault of each kernel, by name. All but the kernels and the device is the real code.
"""

import json
import os
import signal
import sys
import time

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv.pop())  # as the code that starts it does, before anything is imported

import torch
from torch import Tensor

from cutlass_kernels import hopper, plain, trials
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Variant

FAULTS: dict[str, str] = {}


def compiled(variant: Variant):
    """The kernel of a product: what its arguments say, in plain torch, on the CPU."""
    fault = FAULTS.get(variant.name, "")
    if fault == "compiles for ever":
        time.sleep(600)
    if fault == "does not compile":
        raise RuntimeError("no such instruction")

    def kernel(lhs: Tensor, rhs: Tensor, out: Tensor, vectors, bounds, *rest) -> None:
        disturb(fault)
        fused = dict(zip(variant.vectors, vectors or (), strict=True))
        for name in filter(variant.in_blocks, fused):  # scales that groups share come as those of one product
            fused[name] = fused[name][0] if variant.groups and len(fused[name]) == 1 else fused[name]
        rest_of_rows = fused.pop("lhs_rest", None)
        low, high = bounds or (None, None)
        p = Product(lhs, rhs, out.dtype, requantize=variant.requantize, low=low, high=high, **fused)
        if len(rest) > 1:
            p = Product(**vars(p) | {"offs": rest[0]})
        out.copy_(by_sums(p, rest_of_rows) if p.is_integer and not variant.stacked else plain.reference(p))
        spoil(fault, out)

    return kernel


def by_sums(p: Product, rest_of_rows: Tensor | None) -> Tensor:
    """The product from the sums that a kernel is given, since K is filled up with zeros, whatever the zero points."""
    total = (p.lhs.double() @ p.rhs.double()).to(torch.int64)
    if p.lhs_zero is not None:
        total -= p.lhs_zero.reshape(-1, 1).long() * p.rhs_sum.reshape(1, -1)
    if p.rhs_zero is not None:
        total -= rest_of_rows.reshape(-1, 1).long() * p.rhs_zero.reshape(1, -1)
    if p.bias is not None and p.bias.dtype == torch.int32:
        total += p.bias
    return plain.finish(p, total.to(torch.int32))


def disturb(fault: str) -> None:
    """What a kernel does to its process."""
    if fault == "never ends":
        time.sleep(600)
    elif fault == "faults":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "leaves":
        os._exit(0)
    elif fault == "errors":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif fault == "has no memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    elif fault == "babbles":
        os.write(int(sys.argv[1]), b"\x00\xff{]\n")


def spoil(fault: str, out: Tensor) -> None:
    """What a kernel writes besides, or instead."""
    flat = out.view(-1).view(torch.uint8)
    if fault == "one bit is wrong":
        flat[len(flat) // 2] ^= 1
    elif fault == "writes NaN":
        out.view(-1)[-1] = torch.nan
    elif fault == "writes garbage":
        flat.copy_(torch.randint(0, 256, flat.shape).to(torch.uint8))
    elif fault == "writes outside":
        whole = torch.tensor([], dtype=torch.uint8).set_(out.untyped_storage())
        whole[-1] ^= 255


if __name__ == "__main__":
    FAULTS.update(json.loads(sys.argv.pop(1)))
    hopper.compiled = compiled
    trials.gpu = lambda index: torch.device("cpu")
    trials.main()
