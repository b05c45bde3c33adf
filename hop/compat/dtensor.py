"""DTensor: placements, local tensors, and its sharding rules for operators."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from typing_extensions import TypeIs

from hop.compat.pytree import Args, Kwargs

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard


class Sharding(NamedTuple):
    """The operand placements that an operator needs, and the placement of its result."""

    inputs: "list[tuple[Placement, ...]]"  # of each DTensor among the leaves of the arguments, in order
    mesh: "DeviceMesh"
    output: "Sequence[Placement]"
    shape: torch.Size
    stride: tuple[int, ...]


def propagate_sharding(op: OpOverload, args: Args, kwargs: Kwargs) -> Sharding | None:
    """Ask DTensor's own sharding strategy for `op`; None if DTensor has none for `op` itself, as for composite
    operators.

    DTensor operands must come from `describe_dtensor`; no data is moved.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    if op in dispatcher._custom_op_handlers:
        return None  # placements are not enough: a convolution of a sharded image communicates with its neighbours
    try:
        dispatcher.sharding_propagator.propagate(info)
    except NotImplementedError:
        return None
    result = info.output_sharding
    spec = None if result is None or result.use_val_from_redistribute_schema else result.output_spec
    if result is None or not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        return None
    schema = result.redistribute_schema if result.needs_redistribute else info.schema
    if schema is None:
        return None
    inputs = [x.placements for x in tree_leaves(schema.args_schema) if isinstance(x, DTensorSpec)]
    meta = spec.tensor_meta
    return Sharding(inputs, spec.mesh, spec.placements, meta.shape, meta.stride)


def fully_sharded(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules whose parameters FSDP2 manages: those given to fully_shard, and all within."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported by this package, since that takes long
    if fsdp is None:
        return set()
    return {inner for m in model.modules() if isinstance(m, fsdp.FSDPModule) for inner in m.modules()}


def describe_dtensor(x: "DTensor", dtype: torch.dtype) -> "DTensor":
    """A DTensor of dtype `dtype` without data, placed as `x`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(x.device_mesh, x.placements, tensor_meta=TensorMeta(x.shape, x.stride(), dtype))
    return DTensor(x._local_tensor.to("meta", dtype), spec, requires_grad=False)


def local_part(x: "DTensor", placements: "Sequence[Placement]") -> torch.Tensor:
    """The part of DTensor `x` on this process after redistributing it to `placements`.

    If `placements` has Partial where `x` is replicated, the first process gets the value and the others zeros:
    DTensor's own redistribution divides by the number of processes, which changes integers.
    """
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    mesh = x.device_mesh
    spread = [type(p) is Partial and q.is_replicate() for p, q in zip(placements, x.placements, strict=True)]
    target = tuple(Replicate() if s else p for p, s in zip(placements, spread, strict=True))
    local = x.to_local()
    if target != tuple(x.placements):
        dtype = local.dtype
        # Gloo cannot send 8-bit floats, but it can send bytes
        if dtype.is_floating_point and dtype.itemsize == 1 and not any(p.is_partial() for p in x.placements):
            local = local.view(torch.uint8)
        meta = TensorMeta(x.shape, x.stride(), local.dtype)
        source, spec = (DTensorSpec(mesh, places, tensor_meta=meta) for places in (x.placements, target))
        local = wait(redistribute_local_tensor(local, source, spec)).view(dtype)
    elsewhere = any(s and mesh.get_local_rank(i) for i, s in enumerate(spread))
    return torch.zeros_like(local) if elsewhere else local


def make_dtensor(local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The DTensor whose local tensor is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, sharding.mesh, sharding.output, run_check=False, shape=sharding.shape, stride=sharding.stride
    )


def is_dtensor(x: object) -> TypeIs["DTensor"]:
    """True for a DTensor; does not import DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def sharded_dim(placement: "Placement") -> int | None:
    """The dimension that a placement shards; None if it shards none."""
    return getattr(placement, "dim", None) if placement.is_shard() else None


def alike(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x as a DTensor placed as `other` if that is a DTensor, otherwise as a plain tensor."""
    if not is_dtensor(x) and not is_dtensor(other):
        return x
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(other):
        if is_dtensor(x):
            return x.redistribute(other.device_mesh, other.placements)
        return distribute_tensor(x, other.device_mesh, other.placements, src_data_rank=None)
    return x.full_tensor() if is_dtensor(x) else x


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a collective."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def own_part(x: object) -> Any:
    """The local tensor of a DTensor, without a copy; any other tensor unchanged."""
    return x._local_tensor if is_dtensor(x) else x


def as_dtensor(x: torch.Tensor, mesh: "DeviceMesh") -> "DTensor":
    """x if it is a DTensor, else x replicated on `mesh`."""
    from torch.distributed.tensor import DTensor

    return x if is_dtensor(x) else DTensor.from_local(x, mesh, [replicate()] * mesh.ndim, run_check=False)


def is_on_mesh(x: "DTensor") -> bool:
    """Whether this process has a part of DTensor `x`."""
    return x.device_mesh.get_coordinate() is not None


def local_range(x: "DTensor") -> tuple[torch.Tensor, tuple[int, ...]]:
    """The local tensor of DTensor `x`, without a copy, and the offset in each dimension at which it begins.

    Raises:
        ValueError: `x` has partial sums, its local tensor has an unexpected shape, or is not a contiguous range.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if any(p.is_partial() for p in x.placements):
        raise ValueError(f"a DTensor of placements {x.placements} contains partial sums; redistribute it first")
    local = x._local_tensor
    shape, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"the local tensor of a DTensor must have shape {tuple(shape)}, got {tuple(local.shape)}")
    for dim, n in enumerate(x.shape):
        along = [(i, p) for i, p in enumerate(x.placements) if isinstance(p, Shard | _StridedShard) and p.dim == dim]
        if all(p.is_shard() for _, p in along):
            continue
        index, mesh = torch.arange(n), x.device_mesh
        for i, p in along:  # strided shards
            pieces, _ = p._split_tensor(index, mesh.size(i), with_padding=False, contiguous=False)
            index = pieces[mesh.get_local_rank(i)]
        if len(index) and index[-1] - index[0] != len(index) - 1:
            raise ValueError(f"the part of a DTensor of placements {x.placements} is no range along dimension {dim}")
    return local, tuple(offsets)


def replicate() -> "Replicate":
    """The placement with the whole tensor on every process."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def sharded(dim: int) -> "Shard":
    """The placement that shards a dimension."""
    from torch.distributed.tensor import Shard

    return Shard(dim)


def partial() -> "Partial":
    """The placement whose local tensors are summands."""
    from torch.distributed.tensor import Partial

    return Partial()


def of_parts(x: torch.Tensor, mesh: "DeviceMesh", placements: "Sequence[Placement]") -> "DTensor":
    """The DTensor with these placements whose local tensor on each process is `x`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, placements, run_check=False)
